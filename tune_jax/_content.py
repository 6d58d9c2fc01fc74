"""What a value is compared by where it may be made anew for each call: all that can change what it computes.

Two functions are the same if their code, defaults, attributes, and what they close over and read from their module
are. Nothing here is kept alive by being compared: what can only be told apart by which object it is, is held weakly.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
import sys
import types
import weakref
from collections.abc import Hashable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from tune_jax._closures import attributes, cell_contents, global_names
from tune_jax._jax import Tracer, is_jitted

# Content that is larger is not worth comparing at each call.
_MOST_PARTS = 1000
_LIBRARIES = {"jax", "jaxlib", "numpy", "ml_dtypes", "builtins"}
_PLAIN = {bool, int, float, complex, str, bytes, type(None), types.CodeType}
_EMPTY_CELL = "empty cell"


class NotComparableError(Exception):
    """Raised for a value that may change without a trace in what can be compared."""


class Same:
    """Equal for one and the same object, as long as it lives."""

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        try:
            self._reference = weakref.ref(value)
        except TypeError:
            raise NotComparableError(f"a {type(value).__name__} cannot be held weakly") from None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        value = self._reference()
        return isinstance(other, Same) and value is not None and value is other._reference()

    def __hash__(self) -> int:
        return self._id


@dataclasses.dataclass(frozen=True)
class Content:
    """What a value is compared by."""

    parts: Hashable


def content_of(value: Any) -> Content:
    """Return what a value is compared by.

    Raises:
      NotComparableError: it holds a tracer, a NumPy array, or something else that may change unseen, or too much.
    """
    return Content(_Reader().read(value))


def lasting_content_of(value: Any) -> Content:
    """The same, but of what does not hang on any array or object; functions that a module has for good stay whole.

    Raises:
      NotComparableError: it holds an array, a tracer or a plain object, or too much.
    """
    return Content(_LastingReader().read(value))


class _Reader:
    """Reads one value through; what it meets again, as in a function that calls itself, it only counts."""

    def __init__(self) -> None:
        self._met: dict[int, tuple[int, Any]] = {}
        self._read = 0

    def read(self, value: Any, names: Iterable[str] = ()) -> Hashable:
        """The content of a value that is used by code which reads attributes of these names."""
        self._read += 1
        if self._read > _MOST_PARTS:
            raise NotComparableError(f"it has more than {_MOST_PARTS} parts")
        kind = type(value)
        if value is None or kind in (bool, int, str, bytes, types.CodeType):
            return kind, value
        if kind in (float, complex):
            return kind, repr(value)
        if isinstance(value, np.generic):
            return kind, value.tobytes()
        if id(value) in self._met:
            return "again", self._met[id(value)][0]
        self._met[id(value)] = len(self._met), value
        return kind, self._read_large(value, names)

    def _read_large(self, value: Any, names: Iterable[str]) -> Hashable:
        if isinstance(value, Tracer | np.ndarray):
            raise NotComparableError(f"a {type(value).__name__} may change")
        if _is_library(value):
            return Same(value)
        if isinstance(value, jax.Array):
            return self._identify(value)
        if isinstance(value, types.FunctionType):
            return self._read_function(value)
        if isinstance(value, types.MethodType):
            return self.read(value.__func__), self.read(value.__self__)
        if isinstance(value, types.ModuleType | type):
            found = vars(value)
            return Same(value), self._read_dict({name: found[name] for name in names if name in found})
        if isinstance(value, types.BuiltinFunctionType):
            return value.__name__, self.read(value.__self__, names)
        if isinstance(value, functools.partial | slice):
            return tuple(self.read(part, names) for part in value.__reduce__()[1:])
        return self._read_container(value, names)

    def _identify(self, value: Any) -> Hashable:
        """What an object is compared by of which nothing but its attributes can be."""
        return Same(value)

    def _read_function(self, function: types.FunctionType) -> Hashable:
        names = global_names(function.__code__)
        found = function.__globals__
        module = sys.modules.get(found.get("__name__", ""))
        if module is None or vars(module) is not found:
            raise NotComparableError(f"{function.__name__} is of no module")
        used = self._read_dict({name: found[name] for name in names if name in found}, names)
        parts = (function.__defaults__, function.__kwdefaults__, vars(function))
        cells = tuple(self._read_cell(cell, names) for cell in function.__closure__ or ())
        return function.__code__, found["__name__"], cells, used, *(self.read(part, names) for part in parts)

    def _read_cell(self, cell: types.CellType, names: Iterable[str]) -> Hashable:
        try:
            content = cell.cell_contents
        except ValueError:
            return _EMPTY_CELL
        return self.read(content, names)

    def _read_container(self, value: Any, names: Iterable[str]) -> Hashable:
        if isinstance(value, dict):
            return self._read_dict(value, names)
        if isinstance(value, list | tuple):
            return tuple(self.read(item, names) for item in value)
        if isinstance(value, set | frozenset):
            # Their order varies, and with it what is met again.
            return frozenset(Content(_Reader().read(item, names)) for item in value)
        if _hashes_by_value(value):
            return value  # type: ignore[no-any-return]
        held = self._read_dict(dict(attributes(value)), names)
        by_value = dataclasses.is_dataclass(value) and type(value).__eq__ is not object.__eq__
        return held if by_value else (self._identify(value), held)

    def _read_dict(self, value: Mapping[Any, Any], names: Iterable[str] = ()) -> Hashable:
        return tuple((self.read(name), self.read(entry, names)) for name, entry in value.items())


class _LastingReader(_Reader):
    """Reads only what does not depend on any object that may be made anew."""

    def _identify(self, value: Any) -> Hashable:
        if is_jitted(value):
            return "jitted"
        raise NotComparableError(f"a {type(value).__name__} may be made anew")

    def _read_function(self, function: types.FunctionType) -> Hashable:
        return super()._read_function(function) if may_be_made_anew(function) else Same(function)


def may_be_made_anew(function: types.FunctionType) -> bool:
    """Whether a function is a lambda or inside another function, rather than its module's or a class's own."""
    return "<" in function.__qualname__


def plain_parts(function: types.FunctionType) -> tuple[Any, ...] | None:
    """What a function reads from outside, if all of it is plain: while these are the same, so is its content."""
    if function.__defaults__ or function.__kwdefaults__ or function.__dict__:
        return None
    found = function.__globals__
    used = [found[name] for name in global_names(function.__code__) if name in found]
    parts = (function.__code__, *cell_contents(function), *used)
    return parts if all(type(part) in _PLAIN or _is_library(part) for part in parts) else None


def are_same(parts: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Whether these are the very same objects."""
    return len(parts) == len(others) and all(map(operator.is_, parts, others))


def _is_library(value: Any) -> bool:
    """Whether a function, class, module or object is one of JAX's or NumPy's, which does not change."""
    kind: Any = type(value)
    if isinstance(value, types.ModuleType):
        module = value.__name__
    elif isinstance(value, types.FunctionType | types.BuiltinFunctionType | type) or kind.__hash__ is object.__hash__:
        # What JAX wraps is of the module that it was written in.
        module = getattr(value, "__module__", None) or ""
    else:
        return False
    return module.partition(".")[0] in _LIBRARIES


def _hashes_by_value(value: Any) -> bool:
    kind: Any = type(value)
    if kind.__hash__ in (None, object.__hash__):
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return True
