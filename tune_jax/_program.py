"""Tuning a whole program: find the tuned calls that it makes, tune them, and look again until none is new."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeGuard

from tune_jax._alone import Alone
from tune_jax._errors import ExampleError, NoCandidateError
from tune_jax._jax import restored
from tune_jax._key import describe_arguments
from tune_jax._lookup import memory_of, tune_alone
from tune_jax._progress import covering_bar
from tune_jax._recording import Note
from tune_jax._results import ProgramResults, Results, TunedCall
from tune_jax._survey import FoundCall, Program, survey
from tune_jax._warn import warn_user


def tune_all(function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> ProgramResults:
    """Tune every tuned call that a program makes, each distinct one once, those with most work first.

    The program is traced and lowered, and never run: its arguments are asked for their shapes only, and nothing is
    donated. Calls are found wherever they are: in inner jits, loops, conditions, derivatives, `jax.checkpoint`, and in
    the candidates of other tuned functions. `jax.jit(function)` of such arguments tunes nothing afterwards, nor does
    the function itself if it is jitted already.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from tune_jax import tune, tune_all
      >>> @tune(hyperparams={"unroll": [1, 4]})
      ... def smooth(x, *, unroll):
      ...     return jax.lax.scan(lambda a, _: ((a + jnp.roll(a, 1)) / 2, None), x, length=16, unroll=unroll)[0]
      >>> def loss(params, x):
      ...     return smooth(smooth(x * params)).sum()
      >>> results = tune_all(jax.value_and_grad(loss), jnp.ones(8), jax.ShapeDtypeStruct((8,), jnp.float32))
      >>> [(call.results.function, call.count) for call in results]
      [('smooth', 2)]
      >>> results[0].results.call
      'x: float32[8]'

    Args:
      function: the program, jitted or not. What it has besides arrays and numbers in its arguments (strings,
        callables) is taken as it is.
      *args: its positional arguments; `jax.ShapeDtypeStruct`s do for arrays.
      **kwargs: its keyword arguments.

    Returns:
      A `ProgramResults` with the `Results` of each call by where it is made. One of which every candidate fails, or
      that cannot be timed on its own, is in it without a winner, and a warning says so.

    Raises what tracing the program raises.
    """
    program = Program(function, args, kwargs)
    results: dict[Any, Results] = {}
    with covering_bar(f"tuning {program.name}") as show_steps:
        while new := _list_new(found := survey(program), results):
            count = len(results) + len(new)
            for key in new:
                show_steps(len(results), count)
                results[key] = _tune(found[key].note)
            show_steps(count, count)
    came = ProgramResults(program.name, _list_calls(found, results))
    _warn_of_failures(came)
    return came


def _list_new(found: Mapping[Any, FoundCall], results: Mapping[Any, Results]) -> list[Any]:
    return sorted((key for key in found if key not in results), key=lambda key: found[key].total_work, reverse=True)


def _tune(note: Note) -> Results:
    """Tune as if the call were met now where it was met; what fails has results too."""
    if note.obstacle is not None:
        return _without_rows(note, f"{note.obstacle}, so the first candidate is used.")
    try:
        with restored(note.around):
            results = tune_alone(Alone(note.call, note.avals), note.given)
    except NoCandidateError as error:
        latest = memory_of(note.call.tunable).latest
        return latest if _is_failure_of(latest, note) else _without_rows(note, str(error))
    except ExampleError as error:
        return _without_rows(note, str(error))
    if results is None:
        return _without_rows(note, "it cannot be tuned from within its own tuning, or from a host callback.")
    return results


def _is_failure_of(latest: Results | None, note: Note) -> TypeGuard[Results]:
    """Whether these results are those of the tuning that has just failed, and not another thread's of later."""
    return latest is not None and not latest.timed and latest.call == describe_arguments(note.call, note.avals)


def _without_rows(note: Note, reason: str) -> Results:
    call = note.call
    return Results(call.tunable.name, (), describe_arguments(call, note.avals), warnings=(reason,))


def _list_calls(found: Mapping[Any, FoundCall], results: Mapping[Any, Results]) -> tuple[TunedCall, ...]:
    calls = [
        (call.work * count, TunedCall(site, count, results[key]))
        for key, call in found.items()
        for site, count in call.sites.items()
    ]
    return tuple(call for _, call in sorted(calls, key=lambda pair: pair[0], reverse=True))


def _warn_of_failures(came: ProgramResults) -> None:
    if came.failures:
        warn_user("\n".join([f"{came.program} has calls without a winner.", *came.problems]))
