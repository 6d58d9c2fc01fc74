"""What is known of one recorded function: its distinct calls, and the script that tunes it for them."""

from __future__ import annotations

import inspect
import itertools
import threading
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from tune_jax._failure import attempt
from tune_jax._record.capture import Capture, Target, capture_call, capture_target, quick_key, read_integers
from tune_jax._record.script import FUTURE, RecordedCall, changed_settings, write_script
from tune_jax._record.writer import Shelf
from tune_jax._records import Failure
from tune_jax._warn import warn_user

# How many calls of one function are kept, and how many characters one may take.
_MOST_CALLS = 100
_LONGEST_CALL = 1 << 20

_numbers = itertools.count()


class Sink(Protocol):
    """Where a script goes."""

    def write(self, owner: Recording, script: str) -> None:
        """Replace the script of one recorded function; `script` lacks the import that goes on top of a file."""

    def finish(self, owner: Recording, script: str) -> None:
        """The same, when asked to or at the end of the process."""


class Recording:
    """The distinct calls of one function, in the order in which they first came.

    `owner` is the class that the function was defined in and its name there, if it is known; `place` says where it
    stands in the program, to tell functions of one name apart.
    """

    def __init__(self, function: Any, name: str, sink: Sink | None) -> None:
        self.name = name
        self.number = next(_numbers)
        code = getattr(inspect.unwrap(function), "__code__", None)
        self.place = (getattr(function, "__module__", None), getattr(code, "co_firstlineno", None))
        self.calls: list[RecordedCall] = []
        self.owner: tuple[type, str] | None = None
        self._function = function
        self._sink = sink
        self._shelf = Shelf()
        self._target: Target | None = None
        self._known: dict[Any, RecordedCall] = {}
        self._quickly_known: dict[Any, RecordedCall] = {}
        self._lock = threading.RLock()
        self._is_stale = False
        self._has_warned = False

    def note(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """Record a call, and write the script if there was none like it; warns once of what cannot be recorded."""
        failure = attempt("run", lambda: self._note(args, kwargs))
        if isinstance(failure, Failure):
            self._warn(f"{failure.error_type}: {failure.first_line}")

    def script(self) -> str:
        """The script that tunes the function for the calls so far."""
        return f"{FUTURE}\n{self._write()}"

    def flush(self) -> None:
        """Write the script once more if calls came since, so that it says how often each was made."""
        if self._sink is not None and self._is_stale:
            self._is_stale = False
            self._sink.finish(self, self._write())

    def _note(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        quick = quick_key(args, kwargs)
        with self._lock:
            self._is_stale = True
            known = self._quickly_known.get(quick) if quick is not None else None
            if known is not None:
                known.count += 1
                return
            if self._target is None:
                self._target = capture_target(self._shelf, self._function, self.owner)
            captured = capture_call(self._shelf, self._function, args, kwargs)
            known = self._known.get(captured.key)
            if known is None and not self._has_room(captured):
                return
            call = known or RecordedCall(captured.args, captured.kwargs, captured.notes, count=0)
            call.count += 1
            self._known[captured.key] = call
            if quick is not None and len(self._quickly_known) < _MOST_CALLS:
                self._quickly_known[quick] = call
            if known is not None:
                return
        # Reading values may wait for the device, and whoever it waits for may make a recorded call: hold no lock.
        call.integers = read_integers(captured)
        call.settings = changed_settings(captured.settings)
        with self._lock:
            self.calls.append(call)
        if self._sink is not None:
            self._sink.write(self, self._write())

    def _has_room(self, captured: Capture) -> bool:
        size = sum(map(len, (*captured.args, *captured.kwargs.values())))
        if len(self._known) < _MOST_CALLS and size <= _LONGEST_CALL:
            return True
        many = f"there are more than {_MOST_CALLS} distinct ones; give a number that changes at each call as an array"
        self._warn(many if size <= _LONGEST_CALL else f"its arguments take {size} characters to write")
        return False

    def _write(self) -> str:
        with self._lock:
            target = self._target or capture_target(self._shelf, self._function, self.owner)
            return write_script(self.name, target, self._shelf, self.calls)

    def _warn(self, why: str) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        words = f"a call of {self.name} was not recorded, and others like it may not be: {why}."
        # Where warnings are errors it must not reach the caller either.
        attempt("run", lambda: warn_user(words))
