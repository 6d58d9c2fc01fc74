"""The recording mode: in it, a thread notes the tuned calls that it meets, and tunes none of them.

A noted call is stood in for by a candidate of which JAX may trace a derivative. JAX keeps traces, so each recording
has a number of its own among the settings that JAX's caches go by: what is traced in it is never found again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import threading
from collections.abc import Hashable, Iterator
from typing import Any

import jax

from tune_jax._call import Call
from tune_jax._jax import Surroundings, current_source, surroundings, trace_context
from tune_jax._records import Candidate

_number = jax.make_user_context(None)
_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Place:
    """A tuned call as a program's text has it: what it calls, for inputs of which shapes and dtypes.

    Equal functions are at one place, as one that is made anew each time the program is traced.
    """

    call: Call
    avals: tuple[Any, ...]


@dataclasses.dataclass(frozen=True)
class Note:
    """A tuned call that was met, as it can be run on its own, its inputs' values, and what stands in for it.

    `obstacle` says why it cannot be tuned, None if it can. `place` is where in a program's text such calls are, and
    `sources` are places in the user's code.
    """

    call: Call
    avals: tuple[Any, ...]
    given: tuple[Any, ...]
    stand_in: Candidate
    obstacle: str | None
    place: Place
    around: Surroundings = dataclasses.field(default_factory=surroundings)
    sources: list[Any] = dataclasses.field(default_factory=lambda: [current_source()])


class Recording:
    """The calls that were met, by what makes two of them the same tuning."""

    def __init__(self) -> None:
        self.notes: dict[Hashable, Note] = {}

    def add(self, key: Hashable, note: Note) -> None:
        """Keep a note of a call, or of another place where it was met."""
        if key in self.notes:
            self.notes[key].sources.extend(note.sources)
        else:
            self.notes[key] = note


class _Active(threading.local):
    recording: Recording | None = None


_ACTIVE = _Active()


@contextlib.contextmanager
def recording() -> Iterator[Recording]:
    """Note the tuned calls that this thread meets inside instead of tuning them."""
    fresh = Recording()
    with _swapped(fresh, next(_numbers)):
        yield fresh


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    """Tune as usual inside, also while this thread records."""
    with _swapped(None, None):
        yield


@contextlib.contextmanager
def _swapped(active: Recording | None, number: int | None) -> Iterator[None]:
    before, _ACTIVE.recording = _ACTIVE.recording, active
    try:
        with _number(number):
            yield
    finally:
        _ACTIVE.recording = before


def current_recording() -> Recording | None:
    """The recording that this thread is in."""
    return _ACTIVE.recording


def lasting_context() -> tuple[Any, ...]:
    """All that JAX's own caches of traces go by besides the arguments, but for which recording this is."""
    with _number(None):
        return trace_context()
