"""The leaves of arguments: which are inputs of a program by their type, and what static ones are compared by."""

from __future__ import annotations

import dataclasses
import enum
import functools
import warnings
from collections.abc import Hashable, Iterator
from typing import Any

import jax
import numpy as np

from tune_jax._errors import ArgumentError
from tune_jax._jax import Tracer
from tune_jax._records import Tunable

# Members of an IntEnum are ints too, but programs ask which member they are.
_STATIC_SCALARS = (bool, str, bytes, enum.Enum)


@dataclasses.dataclass(frozen=True)
class Static:
    """A value that is part of the call; compared by `key`, which tells 1 from True."""

    value: Any = dataclasses.field(compare=False)
    key: Hashable


@dataclasses.dataclass(frozen=True)
class Identity:
    """Stands in a key for an object of which nothing can be compared but which one it is."""

    type: type
    id: int


def is_dynamic(leaf: Any) -> bool:
    """Whether a leaf of the arguments is an input of the program by its type."""
    if isinstance(leaf, _STATIC_SCALARS):
        return False
    if isinstance(leaf, int | float | complex | jax.Array | jax.ShapeDtypeStruct):
        return True
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind not in "OSUMm"
    return hasattr(leaf, "__jax_array__")


def is_number(leaf: Any) -> bool:
    """Whether a leaf is a number of Python or NumPy, which may turn out to be static."""
    return isinstance(leaf, int | float | complex | np.number | np.bool_) and not isinstance(leaf, _STATIC_SCALARS)


def is_concrete(value: Any) -> bool:
    """Whether a dynamic leaf has a value now, rather than only a shape."""
    return not isinstance(value, Tracer | jax.ShapeDtypeStruct)


def describe_aval(value: Any) -> str:
    """The shape and dtype of an array or abstract value in words: `float32[128,64]`."""
    return f"{value.dtype}[{','.join(map(str, value.shape))}]"


def make_static(label: str, value: Any) -> Static:
    """Wrap a static value; what cannot be hashed is told apart by its fields or else by identity.

    Raises:
      ArgumentError: the value is a tracer or an array, which only a dynamic argument can be.
    """
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise ArgumentError(
            f"argument {label} is static but came as {describe_aval(value)}; pass a Python value, take its name out of "
            "static_argnames, or register the class that holds it as a pytree."
        )
    if isinstance(value, functools.partial):
        return Static(value, _key_of_partial(label, value))
    try:
        hash(value)
    except TypeError:
        return Static(value, _key_without_hash(label, value))
    return Static(value, (type(value), value))


def _key_of_partial(label: str, value: functools.partial[Any]) -> Hashable:
    """Partials hash by identity, and one made anew for each call would be tuned for at each call."""
    parts: dict[Any, Any] = {"func": value.func, **dict(enumerate(value.args)), **value.keywords}
    if any(isinstance(part, jax.Array | np.ndarray) for part in parts.values()):
        return (type(value), value)
    return (type(value), *((name, make_static(f"{label}.{name}", part).key) for name, part in parts.items()))


def _key_without_hash(label: str, value: Any) -> Hashable:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [(f.name, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return (type(value), *((name, make_static(f"{label}.{name}", field).key) for name, field in fields))
    if isinstance(value, list | tuple):
        return (type(value), *(make_static(f"{label}[{i}]", item).key for i, item in enumerate(value)))
    if isinstance(value, set):
        return (type(value), frozenset(make_static(label, item).key for item in value))
    if isinstance(value, slice):
        return (slice, *(make_static(label, part).key for part in (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return (type(value), *((k, make_static(f"{label}[{k!r}]", v).key) for k, v in value.items()))
    return Identity(type(value), id(value))


def keep_static(tunable: Tunable, label: str, value: Any) -> Static:
    """`make_static`, with one warning for an argument that is told apart by identity."""
    static = make_static(label, value)
    warned = tunable.state.setdefault("warned", set())
    for identity in _find_identities(static.key):
        if (label, identity.type) in warned:
            continue
        warned.add((label, identity.type))
        warnings.warn(
            f"argument {label} of type {identity.type.__name__} cannot be hashed, so calls are told apart by which "
            "object it is: changing it in place is not noticed. Give its type __hash__ and __eq__, or register it as "
            "a pytree.",
            stacklevel=2,
        )
    return static


def _find_identities(key: Hashable) -> Iterator[Identity]:
    if isinstance(key, Identity):
        yield key
    elif isinstance(key, tuple):
        for part in key:
            yield from _find_identities(part)
