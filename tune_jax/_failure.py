"""Failures: the one place that catches what a user's own code raises, and the words for it."""

from __future__ import annotations

import collections
import traceback
from collections.abc import Callable, Mapping
from typing import TypeVar

from tune_jax._records import Failure, Stage

T = TypeVar("T")


def attempt(stage: Stage, action: Callable[[], T]) -> T | Failure:
    """Return what `action` returns, or the Failure that it ended in; the exception and its frames are let go."""
    try:
        return action()
    except Exception as error:  # noqa: BLE001 - the user's own code may raise anything, and each ends as a Failure
        return describe_failure(stage, error)


def describe_failure(stage: Stage, error: BaseException) -> Failure:
    """Turn an exception into a Failure; running out of memory is named first."""
    message = str(error) or type(error).__name__
    if "RESOURCE_EXHAUSTED" in message or isinstance(error, MemoryError):
        message = f"out of memory: {message}"
    return Failure(stage, type(error).__name__, message, "".join(traceback.format_exception(error)))


def summarise(failures: Mapping[int, Failure]) -> str:
    """Say that every candidate failed, with each distinct error and how many candidates it hit."""
    counts = collections.Counter((f.stage, f.error_type, f.first_line) for f in failures.values())
    lines = [
        f"  {count} of {len(failures)} at {stage}: {error_type}: {line}"
        for (stage, error_type, line), count in counts.most_common()
    ]
    return "\n".join(["No hyperparameters compiled successfully. The errors:", *lines])
