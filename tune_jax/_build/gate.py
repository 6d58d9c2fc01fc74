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
        self._measuring = False
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
                self._measuring = True
            finally:
                self._waiting -= 1
                self._changed.notify_all()
        try:
            yield
        finally:
            self._leave_measuring()

    def _leave_compiling(self) -> None:
        with self._changed:
            self._compiling -= 1
            self._changed.notify_all()

    def _leave_measuring(self) -> None:
        with self._changed:
            self._measuring = False
            self._changed.notify_all()


GATE = Gate()
