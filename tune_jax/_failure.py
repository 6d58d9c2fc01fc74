"""Failures: the one place that catches what a user's own code raises, and the words for it."""

from __future__ import annotations

import collections
import re
import traceback
from collections.abc import Callable, Mapping
from typing import TypeVar

from tune_jax._records import Failure, Stage

T = TypeVar("T")

# A frame of a traceback, with the line of source that Python shows below it, if any.
_FRAME = re.compile(r'^  File ".*\n(?:    .*\n)*', re.MULTILINE)


def attempt(stage: Stage, action: Callable[[], T]) -> T | Failure:
    """Return what `action` returns, or the Failure that it ended in; the exception and its frames are let go."""
    try:
        return action()
    except Exception as error:
        # The user's own code may raise anything, and each ends as a Failure.
        if _host_cause(str(error)).startswith("KeyboardInterrupt"):
            # Ctrl-C that reached Python inside a host callback; XLA makes an error of its own of it.
            raise KeyboardInterrupt from error
        return describe_failure(stage, error)


def describe_failure(stage: Stage, error: BaseException) -> Failure:
    """Turn an exception into a Failure; running out of memory, and what a host callback raised, are named first."""
    message = str(error) or type(error).__name__
    cause = _host_cause(message)
    if cause:
        message = f"{cause}\n{message}"
    # XLA uses the same code for a block that does not fit into a core's shared memory, which says its own name.
    exhausted = "RESOURCE_EXHAUSTED" in message and "hared memory" not in message
    if exhausted or isinstance(error, MemoryError) or cause.startswith("MemoryError"):
        message = f"out of memory: {message}"
    return Failure(stage, type(error).__name__, message, "".join(traceback.format_exception(error)))


def _host_cause(message: str) -> str:
    """What a host callback raised: XLA reports it as a traceback inside of an error message."""
    frames = list(_FRAME.finditer(message))
    return message[frames[-1].end() :].strip() if frames and "Traceback (most recent call last)" in message else ""


def summarise(failures: Mapping[int, Failure]) -> str:
    """Say that every candidate failed, with each distinct error and how many candidates it hit."""
    counts = collections.Counter((f.stage, f.error_type, f.first_line) for f in failures.values())
    lines = [
        f"  {count} of {len(failures)} at {stage}: {error_type}: {line}"
        for (stage, error_type, line), count in counts.most_common()
    ]
    return "\n".join(["No hyperparameters compiled successfully. The errors:", *lines])
