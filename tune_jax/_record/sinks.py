"""Where recorded scripts are written: a file each in a folder, or a buffer that they share."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import tempfile
import threading
import weakref
from collections.abc import Hashable
from typing import Any

from tune_jax._errors import OptionError
from tune_jax._failure import attempt
from tune_jax._record.recording import Recording, Sink
from tune_jax._record.script import FUTURE
from tune_jax._record.writer import as_name

_lock = threading.RLock()
_files: dict[str, tuple[Hashable, weakref.ref[Recording]]] = {}
_scripts: weakref.WeakKeyDictionary[Any, dict[int, str]] = weakref.WeakKeyDictionary()
_written: weakref.WeakSet[Recording] = weakref.WeakSet()


def open_sink(target: Any) -> Sink | None:
    """The sink for a folder's path or a buffer; None for None.

    Raises:
      OptionError: it is neither, or a file stands where the folder would be.
    """
    if target is None:
        return None
    if isinstance(target, str | os.PathLike) and isinstance(os.fspath(target), str) and os.fspath(target):
        return Folder(os.path.abspath(os.fspath(target)))
    if callable(getattr(target, "write", None)):
        return Buffer(target)
    raise OptionError(
        f"dir_or_buffer is {target!r} of type {type(target).__name__}; expected the path of a folder, a text or binary "
        "buffer, or None to keep the recording in memory."
    )


class Folder:
    """A file for each recorded function, named after it, and replaced as a whole."""

    def __init__(self, path: str) -> None:
        if os.path.lexists(path) and not os.path.isdir(path):
            raise OptionError(f"dir_or_buffer is {path!r}, which is a file; give a folder, which is made if missing.")
        self._path = path

    def write(self, owner: Recording, script: str) -> None:
        """Write to a temporary file beside the script, and put it in the script's place."""
        _flush_at_exit(owner)
        os.makedirs(self._path, exist_ok=True)
        path = _reserve(self._path, owner)
        handle, temporary = tempfile.mkstemp(prefix=".record-", dir=self._path)
        try:
            with open(handle, "w", encoding="utf-8") as file:
                file.write(f"{FUTURE}\n{script}")
            os.replace(temporary, path)
        finally:
            # Gone already if all went well.
            with contextlib.suppress(FileNotFoundError):
                os.unlink(temporary)

    def finish(self, owner: Recording, script: str) -> None:
        """Write as ever."""
        self.write(owner, script)


class Buffer:
    """A text or binary buffer that holds the scripts of all functions recorded to it, one below the other.

    One that cannot be sought in is written at the end of the process, or when asked to.
    """

    def __init__(self, buffer: Any) -> None:
        self._buffer = buffer
        with _lock:
            self._scripts = _scripts.setdefault(buffer, {})

    def write(self, owner: Recording, script: str) -> None:
        """Put a script in the place of its function's last one."""
        _flush_at_exit(owner)
        with _lock:
            self._scripts[owner.number] = script
            if _can_be_rewritten(self._buffer):
                self._buffer.seek(0)
                self._buffer.truncate()
                self._put()

    def finish(self, owner: Recording, script: str) -> None:
        """Write all scripts where that had to wait."""
        self.write(owner, script)
        if not _can_be_rewritten(self._buffer):
            self._put()

    def _put(self) -> None:
        text = "\n\n".join([FUTURE, *self._scripts.values()])
        try:
            self._buffer.write(text)
        except TypeError:
            self._buffer.write(text.encode())
        if hasattr(self._buffer, "flush"):
            self._buffer.flush()


def _can_be_rewritten(buffer: Any) -> bool:
    """Whether what the buffer holds may be replaced: of a standard stream it is not ours, even where it is a file."""
    standard = (sys.stdout, sys.stderr, sys.__stdout__, sys.__stderr__)
    return all(buffer is not one for one in standard) and hasattr(buffer, "seekable") and buffer.seekable()


def _reserve(folder: str, owner: Recording) -> str:
    """The path of a function's script: another function of its name that is recorded here keeps its own."""
    name, number = as_name(owner.name), 1
    with _lock:
        while True:
            path = os.path.join(folder, f"{name}.py" if number == 1 else f"{name}_{number}.py")
            place, holder = _files.setdefault(path, (owner.place, weakref.ref(owner)))
            if place == owner.place and holder() in (None, owner):
                _files[path] = (place, weakref.ref(owner))
                return path
            number += 1


def _flush_at_exit(owner: Recording) -> None:
    with _lock:
        if not _written:
            atexit.register(_flush_all)
        _written.add(owner)


def _flush_all() -> None:
    for recording in list(_written):
        attempt("run", recording.flush)
