"""`tune`: reads what the user asks for and makes the tuned function."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Sequence
from typing import Any

from tune_jax._errors import HyperparamsError, OptionError
from tune_jax._function import TunedFunction
from tune_jax._jax import is_jitted, jit_donations, jit_statics
from tune_jax._records import Tunable
from tune_jax._space import check_names, read_sample_num, read_space


def tune(
    function: Callable[..., Any] | None = None,
    hyperparams: Any = None,
    *,
    where: Callable[..., Any] | None = None,
    max_workers: int | None = None,
    static_argnames: str | Sequence[str] = (),
    in_shardings: Any = None,
    out_shardings: Any = None,
    example_args: Any = None,
    example_kws: Any = None,
    sample_num: int | float | None = None,
    seed: int = 0,
    event_filter_regex: str | None = None,
    progress: bool | None = None,
    keep_trace: str | None = None,
) -> Any:
    """Tune a function's hyperparameters by timing every choice on the device, at its first call for new arguments.

    Example:
      >>> import jax.numpy as jnp
      >>> import tune_jax
      >>> @tune_jax.tune(hyperparams={"repeats": [1, 40]})
      ... def power(x, *, repeats):
      ...     for _ in range(40):
      ...         x = x @ x / 64 if repeats > 1 else x
      ...     return x * repeats / repeats
      >>> _ = power(jnp.ones((64, 64)))
      >>> power.optimal_hyperparams
      {'repeats': 1}

    Args:
      function: what to tune. Every candidate must return the same structure, shapes and dtypes. Left out, a
        decorator is returned.
      hyperparams: the grid: a dict from parameter names to lists of choices, a list of such dicts, or a callable that
        takes the call's arguments, arrays as `jax.ShapeDtypeStruct`, and returns either. A value that is no list,
        tuple, range, iterator or array is a single choice. Left out, the function is only timed.
      where: predicate over hyperparameters, by name; combinations for which it is false are dropped.
      max_workers: threads that compile; by default as many as this process may use cores.
      static_argnames: parameters whose values are part of the program. Strings, bools, dtypes and callables are so
        anyway, and numbers that the function needs as numbers.
      in_shardings: as in `jax.jit`, for the positional arguments, while tuning and in eager calls.
      out_shardings: as in `jax.jit`.
      example_args: positional arguments to tune with instead of the call's own, or a callable that gets the abstract
        arguments by name and returns them. None stands for the call's own.
      example_kws: the same for keyword arguments, a dict.
      sample_num: how many candidates to draw from the grid; all if left out.
      seed: for the draw, and for the order in which candidates are timed.
      event_filter_regex: count only kernels whose own name or op name this pattern is found in.
      progress: show progress bars; by default where standard error is a terminal, or in a notebook.
      keep_trace: folder in which to leave the profiler's traces.

    Returns:
      A `TunedFunction`.

    Raises:
      HyperparamsError: the grid, `where` or `sample_num` leaves nothing to try, or makes no sense. A ValueError.
      HyperparamsTypeError: the grid, a name or a value is of the wrong type. A TypeError.
      OptionError: another option has a value that it does not take. A ValueError.
    """
    if function is None:
        given = {name: value for name, value in locals().items() if name != "function"}
        return functools.partial(tune, **given)
    _check_function(function)
    statics = jit_statics(function) if is_jitted(function) else frozenset()
    donated = jit_donations(function) if is_jitted(function) else frozenset()
    function = _open_jitted(function, hyperparams)
    signature = _read_signature(function)
    name = getattr(function, "__name__", None) or type(function).__name__
    space = hyperparams if callable(hyperparams) else read_space(hyperparams)
    if not callable(space):
        check_names(space, signature, name)
    return TunedFunction(
        Tunable(
            function=function,
            name=name,
            signature=signature,
            space=space,
            where=where,
            sample_num=read_sample_num(sample_num),
            seed=seed,
            static_names=statics | ({static_argnames} if isinstance(static_argnames, str) else set(static_argnames)),
            donated_names=donated,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            example_args=example_args,
            example_kws=example_kws,
            max_workers=_read_workers(max_workers),
            kernel_filter=_read_filter(event_filter_regex),
            progress=progress,
            keep_trace=keep_trace,
        )
    )


def _check_function(function: Any) -> None:
    if not callable(function):
        raise OptionError(
            f"tune got {function!r} of type {type(function).__name__}; expected a function. Give the grid as "
            "tune(function, hyperparams=...) or @tune(hyperparams=...)."
        )
    if isinstance(function, TunedFunction) or isinstance(getattr(function, "__wrapped__", None), TunedFunction):
        raise OptionError(
            f"{getattr(function, '__name__', function)!r} is tuned already; put all of its hyperparameters into one "
            "tune, or tune the function that it wraps."
        )


def _open_jitted(function: Callable[..., Any], hyperparams: Any) -> Callable[..., Any]:
    """Take a jitted function as it is if its hyperparameters are static there, else the function inside."""
    if not is_jitted(function) or callable(hyperparams):
        return function
    space = read_space(hyperparams)
    lacking = [name for name in space.names if name not in jit_statics(function)]
    if lacking and len({frozenset(name for name, _ in grid) for grid in space.grids}) > 1:
        raise HyperparamsError(
            f"the grids in hyperparams have different names, and the jitted function traces {', '.join(lacking)}; name "
            "them in its static_argnames, or tune the function before jax.jit."
        )
    return inspect.unwrap(function, stop=lambda inner: not is_jitted(inner)) if lacking else function


def _read_signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        return inspect.Signature([inspect.Parameter(n, k) for n, k in zip(("args", "kwargs"), kinds, strict=True)])


def _read_workers(max_workers: Any) -> int | None:
    if max_workers is None:
        return None
    if isinstance(max_workers, bool) or not hasattr(max_workers, "__index__") or int(max_workers) < 1:
        raise OptionError(
            f"max_workers is {max_workers!r}; expected a positive whole number of threads, or None for as many as "
            "this process may use cores."
        )
    return int(max_workers)


def _read_filter(pattern: str | None) -> re.Pattern[str] | None:
    try:
        return None if pattern is None else re.compile(pattern)
    except (re.error, TypeError) as error:
        raise OptionError(
            f"event_filter_regex is {pattern!r}, which is no regular expression: {error}; put re.escape() around a "
            "plain kernel name."
        ) from error
