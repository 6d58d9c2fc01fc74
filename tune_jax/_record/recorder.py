"""`record`: a function that notes its calls, and is otherwise the function that it wraps."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

from tune_jax._errors import OptionError
from tune_jax._function import TunedFunction
from tune_jax._record.imports import look_up
from tune_jax._record.recording import Recording
from tune_jax._record.sinks import open_sink


def record(function: Callable[..., Any] | None = None, dir_or_buffer: Any = None) -> Any:
    """Note each distinct call of a function in a running program, and write a script that tunes it for these calls.

    Two calls are distinct if their shapes, dtypes, shardings, strings, integers or other static values differ. Arrays
    are not kept: scripts make data up, but for integer arrays of up to 1024 elements that have values.

    Example:
      >>> import jax.numpy as jnp
      >>> import tune_jax
      >>> @tune_jax.record
      ... def scale(x, *, factor=2.0):
      ...     return x * factor
      >>> _ = scale(jnp.ones((4, 8)), factor=3.0)
      >>> scale.calls[0].kwargs["factor"]
      '3.0'
      >>> scale.script().count("def call_")
      1

    Args:
      function: what to record: a function, method, partial, jitted or tuned function, or any callable. Left out, a
        decorator is returned.
      dir_or_buffer: where to write the script whenever a new distinct call comes. A folder, made if missing, gets a
        file for each function, replaced as a whole; a text or binary buffer holds the scripts of all functions
        recorded to it, and one without `seek` gets them at the end of the process or from `.flush()`. None keeps the
        recording in memory.

    Returns:
      A `Recorded`, which behaves as the function does.

    Raises:
      OptionError: there is nothing to call, or `dir_or_buffer` is none of these. A ValueError.
    """
    if function is None:
        return functools.partial(record, dir_or_buffer=dir_or_buffer)
    if isinstance(function, classmethod | staticmethod):
        kind = type(function).__name__
        raise OptionError(f"record got a {kind}; put @{kind} outside of @record, that is, on the line above it.")
    if not callable(function):
        raise OptionError(
            f"record got {function!r} of type {type(function).__name__}; expected a function. Give the folder or "
            "buffer as record(function, dir_or_buffer) or @record(dir_or_buffer=...)."
        )
    return Recorded(function, dir_or_buffer)


class Recorded:
    """A function whose calls are recorded; everything else about it is the function's own.

    Attributes:
      calls: the distinct calls so far, a list of `RecordedCall`.
      script: a function that returns the script for them.
      flush: a function that writes the script with how often each call was made by now.
    """

    def __init__(self, function: Callable[..., Any], dir_or_buffer: Any) -> None:
        # What `functools.wraps` does; the attributes of a callable object stay its own.
        updated = ("__dict__",) if isinstance(function, types.FunctionType | TunedFunction) else ()
        functools.update_wrapper(self, function, updated=updated)
        self._recording = Recording(function, _name_of(function), open_sink(dir_or_buffer))
        # In the instance, because `jax.jit` hands on what it finds there.
        self.calls = self._recording.calls
        self.script = self._recording.script
        self.flush = self._recording.flush

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        """Note the call, and make it."""
        self._recording.note(args, kwargs)
        return self.__wrapped__(*args, **kwargs)

    def __set_name__(self, owner: type, name: str) -> None:
        self._recording.owner = (owner, name)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        """Bind as a method; the instance is then the first argument."""
        binds = hasattr(type(self.__wrapped__), "__get__")
        return self if instance is None or not binds else types.MethodType(self, instance)

    def __getattr__(self, name: str) -> Any:
        """What the function has."""
        if name.startswith("__") or name == "_recording":
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(self.__wrapped__, name)

    def __copy__(self) -> Recorded:
        """A recorded function is what it is by identity, as a function is."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Recorded:
        """A recorded function is what it is by identity, as a function is."""
        return self

    def __reduce__(self) -> Any:
        """Pickled by name, as a function is, where it goes by its function's name."""
        found = look_up(self.__module__, self._recording.name)
        return self._recording.name if found is self else (record, (self.__wrapped__,))

    def __repr__(self) -> str:
        return f"<recorded function {self._recording.name}>"


def _name_of(function: Any) -> str:
    while isinstance(function, functools.partial):
        function = function.func
    return str(getattr(function, "__qualname__", None) or getattr(function, "__name__", type(function).__qualname__))
