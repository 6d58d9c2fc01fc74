"""What a person hands to a report -> the results to report on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tune_jax._errors import ArgumentError
from tune_jax._results import Results, TimingResult

# Through `jax.jit(tuned)` only what sits in the function's `__dict__` is seen, so either may be missing.
_HOLDERS = ("results", "timing_results")


def find_results(target: Any) -> Results | None:
    """What a tuned function, `Results` or a dict of timing results holds; None before the first tuning.

    Raises ArgumentError for anything else.
    """
    held = _get_held(target)
    if held is None or isinstance(held, Results):
        return held
    if isinstance(held, Mapping):
        return _wrap_timings(held)
    raise ArgumentError(
        f"got {type(target).__name__} {target!r}, expected a tuned function, its results or its "
        "timing_results; decorate the function with tune(...) and pass that"
    )


def _get_held(target: Any) -> Any:
    if target is None or isinstance(target, Results | Mapping):
        return target
    return next((getattr(target, name) for name in _HOLDERS if hasattr(target, name)), target)


def name_target(target: Any) -> str:
    """What to call a function that has no results yet."""
    return str(getattr(target, "__name__", "the function"))


def _wrap_timings(timings: Mapping[Any, Any]) -> Results | None:
    strangers = sorted({type(value).__name__ for value in timings.values() if not isinstance(value, TimingResult)})
    if strangers:
        raise ArgumentError(
            f"got a dict with values of type {', '.join(strangers)}, expected the TimingResult values of "
            "a tuned function's timing_results"
        )
    rows = tuple(timing.row for timing in timings.values())
    return Results(function="timing results", rows=rows) if rows else None
