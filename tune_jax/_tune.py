"""`tune`: reads what the user asks for and makes the tuned function."""

from __future__ import annotations

import functools
import inspect
import os
import re
import types
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tune_jax._errors import HyperparamsError, OptionError
from tune_jax._function import TunedFunction, TunedMethod
from tune_jax._jax import is_jitted, jit_compiler_options, jit_donations, jit_statics
from tune_jax._records import Tunable
from tune_jax._space import as_whole, check_names, read_sample_num, read_space, where_parameters


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
    keep_trace: str | os.PathLike[str] | None = None,
    with_vjp: bool = False,
) -> Any:
    """Tune a function's hyperparameters by timing every choice on the device, at its first call for new arguments.

    The function may close over values that JAX is tracing where it is called; they are inputs of what is tuned. It may
    be made anew at each call: an equal function with equal options and an equal grid is tuned once in a process. For
    that, the results of the last 512 distinct calls are kept, their timings and not their functions, arguments or
    objects; another `seed` makes a tuning of its own.

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
        takes those of the call's arguments and defaults that it names, arrays as `jax.ShapeDtypeStruct`, and returns
        either; one whose names are not the function's is called as the function is. A value that is no list,
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
      keep_trace: folder in which to leave the profiler's traces; made if missing.
      with_vjp: where a call is differentiated, time each candidate's forward and backward pass together, on made-up
        cotangents, so that training picks what training needs. A call that is not is tuned as without it. If no
        candidate can be differentiated in reverse, forward passes alone are timed.

    Returns:
      A `TunedFunction`.

    Raises:
      HyperparamsError: the grid, `where` or `sample_num` leaves nothing to try, or makes no sense. A ValueError.
      HyperparamsTypeError: the grid, a name or a value is of the wrong type. A TypeError.
      OptionError: another option has a value that it does not take. A ValueError.
    """
    # Read at once, so that a generator serves every function that a decorator is put on.
    hyperparams = hyperparams if callable(hyperparams) else read_space(hyperparams)
    if function is None:
        given = {name: value for name, value in locals().items() if name != "function"}
        return functools.partial(tune, **given)
    _check_function(function)
    statics, donated = _read_jit(function)
    compiler_options = _read_compiler_options(function)
    function = _open_jitted(function, hyperparams)
    signature = _read_signature(function)
    name = _read_name(function)
    if not callable(hyperparams):
        check_names(hyperparams, signature, name)
    return TunedFunction(
        Tunable(
            function=function,
            name=name,
            signature=signature,
            space=hyperparams,
            where=_read_where(where),
            sample_num=read_sample_num(sample_num),
            seed=_read_seed(seed),
            static_names=statics | _read_static_names(static_argnames, signature, name),
            donated_names=donated,
            compiler_options=compiler_options,
            in_shardings=in_shardings,
            out_shardings=out_shardings,
            example_args=example_args,
            example_kws=example_kws,
            max_workers=_read_workers(max_workers),
            kernel_filter=_read_filter(event_filter_regex),
            progress=_read_progress(progress),
            keep_trace=_read_folder(keep_trace),
            with_vjp=_read_with_vjp(with_vjp),
        )
    )


def _check_function(function: Any) -> None:
    if isinstance(function, classmethod | staticmethod):
        kind = type(function).__name__
        raise OptionError(f"tune got a {kind}; put @{kind} outside of @tune, that is, on the line above it.")
    if not callable(function):
        raise OptionError(
            f"tune got {function!r} of type {type(function).__name__}; expected a function. Give the grid as "
            "tune(function, hyperparams=...) or @tune(hyperparams=...)."
        )
    inside = function.__wrapped__ if is_jitted(function) else function
    if isinstance(inside, TunedFunction | TunedMethod):
        raise OptionError(
            f"{getattr(function, '__name__', function)!r} is tuned already; put all of its hyperparameters into one "
            "tune, or tune the function that it wraps."
        )


def _own_jit(function: Any) -> Any:
    """The jitted function that `function` is, or is a method of; None if it is not jitted."""
    jitted = function.__func__ if isinstance(function, types.MethodType) else function
    return jitted if is_jitted(jitted) else None


def _read_compiler_options(function: Any) -> dict[str, Any]:
    jitted = _own_jit(function)
    return {} if jitted is None else jit_compiler_options(jitted)


def _read_jit(function: Callable[..., Any]) -> tuple[frozenset[str], frozenset[str]]:
    """The names that a jitted function or method has static, and those it donates."""
    jitted = _own_jit(function)
    if jitted is None:
        return frozenset(), frozenset()
    bound = frozenset() if jitted is function else frozenset(list(inspect.signature(jitted).parameters)[:1])
    return jit_statics(jitted) - bound, jit_donations(jitted) - bound


def _open_jitted(function: Callable[..., Any], space: Any) -> Callable[..., Any]:
    """Take a jitted function as it is if its hyperparameters are known to be static there, else the function inside.

    One with compiler options is opened too, because XLA takes these at the top level only: they move there.
    """
    if isinstance(function, types.MethodType):
        return types.MethodType(_open_jitted(function.__func__, space), function.__self__)
    if not is_jitted(function):
        return function
    if callable(space) or jit_compiler_options(function):
        return _inside_jit(function)
    lacking = [name for name in space.names if name not in jit_statics(function)]
    if lacking and len({frozenset(name for name, _ in grid) for grid in space.grids}) > 1:
        raise HyperparamsError(
            f"the grids in hyperparams have different names, and the jitted function traces {', '.join(lacking)}; name "
            "them in its static_argnames, or tune the function before jax.jit."
        )
    return _inside_jit(function) if lacking else function


def _inside_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    inside: Callable[..., Any] = inspect.unwrap(function, stop=lambda inner: not is_jitted(inner))
    return inside


def _read_name(function: Callable[..., Any]) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__name__", type(function).__name__))


def _read_signature(function: Callable[..., Any]) -> inspect.Signature:
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        kinds = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
        return inspect.Signature([inspect.Parameter(n, k) for n, k in zip(("args", "kwargs"), kinds, strict=True)])


def _read_where(where: Any) -> Callable[..., Any] | None:
    if where is not None and not callable(where):
        raise OptionError(
            f"where is {where!r} of type {type(where).__name__}; expected a function of hyperparameters, such as "
            "lambda block_q, block_k: block_q >= block_k."
        )
    if where is not None:
        where_parameters(where)
    return where  # type: ignore[no-any-return]


def _read_seed(seed: Any) -> int:
    number = as_whole(seed)
    if number is None:
        raise OptionError(f"seed is {seed!r}; expected a whole number, so that every process draws the same.")
    return number


def _read_static_names(names: Any, signature: inspect.Signature, function_name: str) -> frozenset[str]:
    listed = [names] if isinstance(names, str) else list(names) if isinstance(names, Iterable) else [names]
    if not all(isinstance(name, str) for name in listed):
        raise OptionError(f"static_argnames is {names!r}; expected a parameter's name or several.")
    parameters = signature.parameters
    if not any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        for name in listed:
            if name not in parameters:
                raise OptionError(
                    f"static_argnames names {name!r}, which {function_name} does not take; it takes "
                    f"{', '.join(parameters) or 'nothing'}."
                )
    return frozenset(listed)


def _read_workers(max_workers: Any) -> int | None:
    if max_workers is None:
        return None
    number = as_whole(max_workers)
    if number is None or number < 1:
        raise OptionError(
            f"max_workers is {max_workers!r}; expected a positive whole number of threads, or None for as many as "
            "this process may use cores."
        )
    return number


def _read_filter(pattern: str | None) -> re.Pattern[str] | None:
    if pattern is None:
        return None
    try:
        compiled = re.compile(pattern)
        compiled.search("")  # a pattern of bytes compiles, and fails here
    except (re.error, TypeError) as error:
        raise OptionError(
            f"event_filter_regex is {pattern!r}, which is no regular expression: {error}; put re.escape() around a "
            "plain kernel name."
        ) from error
    return compiled


def _read_progress(progress: Any) -> bool | None:
    if progress is None or isinstance(progress, bool):
        return progress
    raise OptionError(
        f"progress is {progress!r} of type {type(progress).__name__}; expected True, False, or None for bars where "
        "someone looks."
    )


def _read_with_vjp(with_vjp: Any) -> bool:
    if isinstance(with_vjp, bool):
        return with_vjp
    raise OptionError(
        f"with_vjp is {with_vjp!r} of type {type(with_vjp).__name__}; expected True, to time forward and backward "
        "together where a call is differentiated, or False."
    )


def _read_folder(keep_trace: Any) -> str | None:
    """Check that traces can be left there; makes no folder, since most tuned functions are never called."""
    if keep_trace is None:
        return None
    folder = os.fspath(keep_trace) if isinstance(keep_trace, str | os.PathLike) else None
    if not isinstance(folder, str) or not folder:
        raise OptionError(
            f"keep_trace is {keep_trace!r} of type {type(keep_trace).__name__}; expected the path of a folder, such as "
            "'/tmp/traces', or None to keep no traces."
        )
    there = os.path.abspath(folder)
    while not os.path.lexists(there):
        there = os.path.dirname(there)
    if not os.path.isdir(there) or not os.access(there, os.W_OK | os.X_OK):
        why = "may not be written to" if os.path.isdir(there) else "is no folder"
        raise OptionError(f"keep_trace is {folder!r}, but {there} {why}; give a folder that can be made or written to.")
    return folder
