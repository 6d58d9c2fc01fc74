"""Keeps compiling and measuring apart: many may compile at a time, or one may measure."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator


class Gate:
    """Let any number of compiles in at once, or one measurement, which waits for them to drain."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._compiling = 0
        self._measuring: threading.Thread | None = None
        self._waiting = 0

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Hold while compiling; waits while someone measures or is about to."""
        with self._changed:
            self._changed.wait_for(lambda: not self._measuring and not self._waiting)
            self._compiling += 1
        try:
            yield
        finally:
            self._leave_compiling()

    def wait_for_measuring(self) -> None:
        """Return once no one measures or is about to, and hold nothing."""
        with self._changed:
            self._changed.wait_for(lambda: not self._measuring and not self._waiting)

    @contextlib.contextmanager
    def measuring(self) -> Iterator[None]:
        """Hold while measuring; waits until no one compiles or measures. Never hold it while tracing."""
        with self._changed:
            self._waiting += 1
            try:
                self._changed.wait_for(lambda: not self._measuring and not self._compiling)
                self._measuring = threading.current_thread()
            finally:
                self._waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            self._leave_measuring()

    def is_held_around_caller(self) -> bool:
        """Whether the caller runs within a measurement: in its thread, or as a host callback in a thread of XLA's.

        To wait for the gate would then be to wait for oneself.
        """
        thread = threading.current_thread()
        # Threads that Python did not start have such names; a callback of another program in one cannot be told apart.
        return self._measuring is not None and (thread is self._measuring or thread.name.startswith("Dummy-"))

    def _leave_compiling(self) -> None:
        with self._changed:
            self._compiling -= 1
            self._changed.notify_all()

    def _leave_measuring(self) -> None:
        with self._changed:
            self._measuring = None
            self._changed.notify_all()


GATE = Gate()
