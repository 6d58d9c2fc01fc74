"""Failures: the one place that catches what a user's own code raises, and the words for it."""

from __future__ import annotations

import collections
import os
import re
import textwrap
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from tune_jax._records import NONE_WORKS, Failure, Stage

T = TypeVar("T")
Frame = TypeVar("Frame", bound=tuple[str, *tuple[Any, ...]])

# A frame of a traceback, with the line of source that Python shows below it, if any.
_FRAME = re.compile(r'^  File ".*\n(?:    .*\n)*', re.MULTILINE)

# The same in a summary inside of a message, or in a traceback: where the frame is, and its first line of source.
_PLACE = re.compile(r'^( +)(File "(.+)", line .*)\n(?:\1  (.*)\n)?', re.MULTILINE)
_PACKAGE = os.path.dirname(os.path.abspath(__file__)) + os.sep
_STANDARD_LIBRARY = os.path.dirname(os.path.abspath(os.__file__)) + os.sep
_INSTALLED = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
_JAX = re.compile(_INSTALLED.pattern + r"jax(?:lib)?[/\\]")

_MOST_ERRORS = 10
_MOST_FRAMES = 5


class FailedBeforeError(Exception):
    """Raised in place of an error that has been made a Failure before."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


def attempt(stage: Stage, action: Callable[[], T]) -> T | Failure:
    """Return what `action` returns, or the Failure that it ended in; the exception and its frames are let go."""
    try:
        return action()
    except Exception as error:
        # The user's own code may raise anything, and each ends as a Failure.
        if _host_cause(_message_of(error)).startswith("KeyboardInterrupt"):
            # Ctrl-C that reached Python inside a host callback; XLA makes an error of its own of it.
            raise KeyboardInterrupt from error
        return describe_failure(stage, error)


def describe_failure(stage: Stage, error: BaseException) -> Failure:
    """Turn an exception into a Failure; running out of memory, and what a host callback raised, are named first."""
    if isinstance(error, FailedBeforeError):
        return error.failure
    message = _message_of(error) or type(error).__name__
    cause = _host_cause(message)
    if cause:
        message = f"{cause}\n{message}"
    # XLA uses the same code for a block that does not fit into a core's shared memory, which says its own name.
    exhausted = "RESOURCE_EXHAUSTED" in message and "hared memory" not in message
    if exhausted or isinstance(error, MemoryError) or cause.startswith("MemoryError"):
        message = f"out of memory: {message}"
    return Failure(stage, type(error).__name__, message, "".join(traceback.format_exception(error)))


def _message_of(error: BaseException) -> str:
    try:
        return str(error)
    except Exception as fault:  # noqa: BLE001
        # The user's own exception class may be wrong too.
        return f"its message cannot be read: __str__ raised {type(fault).__name__}"


def _host_cause(message: str) -> str:
    """What a host callback raised: XLA reports it as a traceback inside of an error message."""
    frames = list(_FRAME.finditer(message))
    return message[frames[-1].end() :].strip() if frames and "Traceback (most recent call last)" in message else ""


def summarise(failures: Mapping[int, Failure]) -> str:
    """Say that every candidate failed: each distinct error, how many candidates it hit, where the first came from."""
    counts = collections.Counter(map(_kind_of, failures.values())).most_common()
    lines = [
        f"  {count} of {len(failures)} at {stage}: {error_type}: {line}"
        for (stage, error_type, line), count in counts[:_MOST_ERRORS]
    ]
    if len(counts) > _MOST_ERRORS:
        lines.append(f"  and {len(counts) - _MOST_ERRORS} more")
    first = next((failure for failure in failures.values() if _kind_of(failure) == counts[0][0]), None)
    frames = own_frames(first.traceback) if first else ""
    origin = ["The first of these came from:", frames] if frames else []
    return "\n".join([f"{NONE_WORKS}. The errors:", *lines, *origin])


def own_frames(trace: str) -> str:
    """The last frames of a traceback that are the user's own, or else other packages' but JAX's, as text."""
    frames = [(match[3], match[2], match[4]) for match in _PLACE.finditer(trace)]
    own = pick_own(frames)
    words = [f"{place}\n  {source}" if source else place for _, place, source in own[-_MOST_FRAMES:]]
    return textwrap.indent("\n".join(words), "    ")


def pick_own(frames: Sequence[Frame]) -> list[Frame]:
    """Those frames, tuples with the file first, that are the user's own, or else other packages' but JAX's."""
    foreign = [frame for frame in frames if not _is_below_the_user(frame[0])]
    return [frame for frame in foreign if not _INSTALLED.search(frame[0])] or foreign


def _is_below_the_user(path: str) -> bool:
    is_standard = path.startswith(_STANDARD_LIBRARY) and not _INSTALLED.search(path)
    return path.startswith((_PACKAGE, "<frozen ")) or is_standard or _JAX.search(path) is not None


def _kind_of(failure: Failure) -> tuple[str, str, str]:
    return failure.stage, failure.error_type, failure.first_line
