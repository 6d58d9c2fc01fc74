"""What a value is compared by where it may be made anew for each call: all that can change what it computes.

Two functions are the same if their code, defaults, attributes, and what they close over and read from their module
are. Nothing here is kept alive by being compared: what can only be told apart by which object it is, is held weakly.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import operator
import sys
import types
import weakref
from collections.abc import Hashable, Mapping
from typing import Any

import jax
import numpy as np

from tune_jax._closures import attributes, cell_contents, global_names
from tune_jax._jax import Tracer, is_jitted
from tune_jax._visible import (
    hashes_by_value,
    hides_what_it_reads,
    is_library,
    is_standard,
    shows_its_state,
    special_names,
)

# Content that is larger is not worth comparing at each call.
_MOST_PARTS = 1000
_PLAIN = {bool, int, float, complex, str, bytes, type(None), types.CodeType}
_EMPTY_CELL = "empty cell"
_CONTAINERS = {dict, list, tuple, set, frozenset, collections.OrderedDict, collections.Counter}
_TUPLE_FIELD = type(collections.namedtuple("_TUPLE_FIELD", "item").item)  # type: ignore[attr-defined]
_SLOTS = (
    types.MemberDescriptorType,
    types.GetSetDescriptorType,
    types.WrapperDescriptorType,
    types.MethodDescriptorType,
    types.ClassMethodDescriptorType,
)

# Values of JAX whose types do not show that they are compared by value.
_BY_VALUE = (jax.sharding.PartitionSpec, jax.sharding.Sharding, jax.sharding.Mesh)

# Whose objects, where they wrap a function, add nothing to it that changes.
_WRITES_WRAPPERS = {"jax", "jaxlib", "tune_jax"}


class NotComparableError(Exception):
    """Raised for a value that may change without a trace in what can be compared."""


class Same:
    """Equal for one and the same object, as long as it lives."""

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        try:
            self._reference: Any = weakref.ref(value)
        except TypeError:
            raise NotComparableError(f"a {type(value).__name__} cannot be held weakly") from None

    def __eq__(self, other: object) -> bool:
        if self is other:
            return True
        value = self._reference()
        return isinstance(other, Same) and value is not None and value is other._reference()

    def __hash__(self) -> int:
        return self._id


class Kept(Same):
    """The same, for a library's own object, which may be kept."""

    def __init__(self, value: Any) -> None:
        self._id = id(value)
        self._reference = lambda: value


@dataclasses.dataclass(frozen=True)
class Content:
    """What a value is compared by."""

    parts: Hashable


def content_of(value: Any) -> Content:
    """Return what a value is compared by.

    Raises:
      NotComparableError: it holds a tracer, a NumPy array, or something else that may change unseen, or too much.
    """
    return Content(_Reader().read_through(value))


def lasting_content_of(value: Any) -> Content:
    """The same, but of what does not hang on any array or object; functions that a module has for good stay whole.

    Raises:
      NotComparableError: it holds an array, a tracer or a plain object, or too much.
    """
    return Content(_LastingReader().read_through(value))


class _Reader:
    """Reads one value through; what it meets again, as in a function that calls itself, it only counts.

    Any code that is read may ask any class or module that is read for any name in it, so that these are read last.
    """

    def __init__(self) -> None:
        self._met: dict[int, tuple[int, Any]] = {}
        self._read = 0
        self._names: set[str] = set()
        self._open: dict[int, tuple[Any, set[str]]] = {}

    def read_through(self, value: Any) -> Hashable:
        """The content of a value with all that its code may read of classes and modules."""
        parts = [self.read(value)]
        while found := self._take_unread():
            parts += [(self._met[id(place)][0], name, self.read(entry)) for place, name, entry in found]
        return tuple(parts)

    def read(self, value: Any) -> Hashable:
        """The content of a value, but for what classes and modules hold."""
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
        return kind, self._read_large(value)

    def _take_unread(self) -> list[tuple[Any, str, Any]]:
        found = []
        for place, done in list(self._open.values()):
            fresh = sorted((self._names | special_names(place)) & vars(place).keys() - done)
            done.update(fresh)
            found += [(place, name, vars(place)[name]) for name in fresh]
        return found

    def _read_large(self, value: Any) -> Hashable:
        if isinstance(value, Tracer | np.ndarray | np.random.Generator | np.random.RandomState):
            raise NotComparableError(f"a {type(value).__name__} may change")
        if isinstance(value, _BY_VALUE):
            return value
        if is_library(value):
            return Same(value) if type(value).__weakrefoffset__ else Kept(value)
        if isinstance(value, jax.Array):
            return self._identify(value)
        if isinstance(value, types.FunctionType):
            return self._read_function(value)
        if isinstance(value, types.MethodType):
            return self.read(value.__func__), self.read(value.__self__)
        if isinstance(value, types.ModuleType | type):
            return self._read_namespace(value)
        if isinstance(value, types.BuiltinFunctionType):
            return value.__name__, self.read(value.__self__)
        if isinstance(value, functools.partial | slice):
            return tuple(map(self.read, value.__reduce__()[1:]))
        if isinstance(value, property):
            return tuple(map(self.read, (value.fget, value.fset, value.fdel)))
        if isinstance(value, staticmethod | classmethod):
            return self.read(value.__func__)
        if isinstance(value, _SLOTS):
            return value.__name__
        if isinstance(value, _TUPLE_FIELD):
            which_item: tuple[Any, ...] = value.__reduce__()[1]
            return which_item
        return self._read_container(value)

    def _identify(self, value: Any) -> Hashable:
        """What an object is compared by of which nothing but its attributes can be."""
        return Same(value)

    def _read_namespace(self, place: Any) -> Hashable:
        """A class or module itself; what is in it is read when all names are known."""
        if isinstance(place, type) and is_standard(place):
            return Same(place)
        self._open[id(place)] = place, set()
        if isinstance(place, types.ModuleType):
            return Same(place)
        return Same(place), self.read(type(place)), *(self.read(base) for base in place.__bases__)

    def _read_function(self, function: types.FunctionType) -> Hashable:
        if hides_what_it_reads(function.__code__):
            raise NotComparableError(f"{function.__name__} imports, or reads names that it makes up")
        names = global_names(function.__code__)
        self._names.update(names)
        found = function.__globals__
        module = sys.modules.get(found.get("__name__", ""))
        if module is None or vars(module) is not found:
            raise NotComparableError(f"{function.__name__} is of no module")
        used = self._read_dict({name: found[name] for name in names if name in found})
        parts = (function.__defaults__, function.__kwdefaults__, vars(function))
        cells = tuple(map(self._read_cell, function.__closure__ or ()))
        return function.__code__, found["__name__"], cells, used, *map(self.read, parts)

    def _read_cell(self, cell: types.CellType) -> Hashable:
        try:
            content = cell.cell_contents
        except ValueError:
            return _EMPTY_CELL
        return self.read(content)

    def _read_container(self, value: Any) -> Hashable:
        kind = type(value)
        if isinstance(value, set | frozenset):
            # Their order varies, and with it what is met again.
            items: Hashable = frozenset(Content(_fresh(self).read_through(item)) for item in value)
        elif isinstance(value, dict):
            items = self._read_dict(value)
        else:
            items = tuple(map(self.read, value)) if isinstance(value, list | tuple) else ()
        return items if kind in _CONTAINERS else (items, self._read_object(value))

    def _read_object(self, value: Any) -> Hashable:
        kind: Any = type(value)
        is_theirs = kind.__module__.partition(".")[0] in _WRITES_WRAPPERS
        if is_theirs and hashes_by_value(value):
            return value  # type: ignore[no-any-return]
        if is_theirs or is_jitted(value):
            return self._identify(value), self.read(getattr(value, "__wrapped__", None))
        if not shows_its_state(value):
            if hashes_by_value(value):
                return value  # type: ignore[no-any-return]
            raise NotComparableError(f"a {kind.__name__} may change")
        held = self._read_dict(dict(attributes(value)))
        by_value = kind.__hash__ is not object.__hash__
        return (held, self.read(kind)) if by_value else (self._identify(value), held, self.read(kind))

    def _read_dict(self, value: Mapping[Any, Any]) -> Hashable:
        return tuple((self.read(name), self.read(entry)) for name, entry in value.items())


class _LastingReader(_Reader):
    """Reads only what does not depend on any object that may be made anew."""

    def _identify(self, value: Any) -> Hashable:
        raise NotComparableError(f"a {type(value).__name__} may be made anew")


def _fresh(reader: _Reader) -> _Reader:
    return type(reader)()


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
    return parts if all(type(part) in _PLAIN or is_library(part) for part in parts) else None


def are_same(parts: tuple[Any, ...], others: tuple[Any, ...]) -> bool:
    """Whether these are the very same objects."""
    return len(parts) == len(others) and all(map(operator.is_, parts, others))
