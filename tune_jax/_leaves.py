"""The leaves of arguments: which are inputs of a program by their type, and what static ones are compared by."""

from __future__ import annotations

import copy
import dataclasses
import enum
import functools
import types
import weakref
from collections.abc import Hashable, Iterator
from typing import Any

import jax
import numpy as np

from tune_jax._content import Content, NotComparableError, are_same, content_of, may_be_made_anew, plain_parts
from tune_jax._errors import ArgumentError
from tune_jax._jax import Tracer
from tune_jax._records import Tunable
from tune_jax._warn import warn_user

# Members of an IntEnum are ints too, but programs ask which member they are.
_STATIC_SCALARS = (bool, str, bytes, enum.Enum)
# What is as it is, and looked at first, because calls with static values come by here each time.
_PLAIN = {bool, int, str, bytes, type(None)}


@dataclasses.dataclass(frozen=True)
class Static:
    """A value that is part of the call; compared by `key`, which tells 1 from True."""

    value: Any = dataclasses.field(compare=False)
    key: Hashable


@dataclasses.dataclass(frozen=True)
class Shown:
    """Stands for a static value that is not kept, with how it looked."""

    text: str

    def __repr__(self) -> str:
        return self.text


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
    """Wrap a static value; containers, partials and what cannot be hashed are compared part by part, else by identity.

    What is taken apart is kept as a copy, so that the value stays what the key says when the user changes theirs.

    Raises:
      ArgumentError: the value is a tracer or an array, which only a dynamic argument can be.
    """
    if type(value) in _PLAIN:
        return Static(value, (type(value), value))
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        raise ArgumentError(
            f"argument {label} is static but came as {describe_aval(value)}; pass a Python value, take its name out of "
            "static_argnames, or register the class that holds it as a pytree."
        )
    if isinstance(value, functools.partial):
        return _static_partial(label, value)
    if isinstance(value, types.FunctionType) and may_be_made_anew(value):
        return _static_function(value)
    equal: Any = type(value).__eq__
    if isinstance(value, slice) or equal in (tuple.__eq__, frozenset.__eq__):
        return _static_by_parts(label, value)
    try:
        hash(value)
    except TypeError:
        return _static_by_parts(label, value)
    return Static(value, (type(value), repr(value) if _is_compared_badly(value) else value))


def _is_compared_badly(value: Any) -> bool:
    """Whether a number is unlike itself, as NaN is, or like another one, as 0.0 is like -0.0."""
    if isinstance(value, complex | np.complexfloating) or (isinstance(value, float | np.floating) and value == 0):
        return True
    return isinstance(value, float | np.generic) and not isinstance(value, np.void) and bool(value != value)


def _static_partial(label: str, value: functools.partial[Any]) -> Static:
    """Partials hash by identity, and one made anew for each call would be tuned for at each call."""
    if any(isinstance(part, jax.Array | np.ndarray) for part in (*value.args, *value.keywords.values())):
        return Static(value, (type(value), value))
    function = make_static(f"{label}.func", value.func)
    args = make_static(f"{label}.args", value.args)
    keywords = make_static(f"{label}.keywords", dict(sorted(value.keywords.items())))
    kept = copy.copy(value)
    kept.__setstate__((function.value, args.value, keywords.value, dict(vars(value))))  # type: ignore[attr-defined]
    return Static(kept, (type(value), function.key, args.key, keywords.key))


@dataclasses.dataclass(frozen=True)
class _FirstLook:
    """What a function was compared by when it first came, None for by identity; `parts` are what it then read."""

    content: Content | None
    parts: tuple[Any, ...] | None


_FIRST_LOOKS: weakref.WeakKeyDictionary[types.FunctionType, _FirstLook] = weakref.WeakKeyDictionary()


def _static_function(value: types.FunctionType) -> Static:
    """A lambda or a function inside another, by its content: it can be made anew for each call.

    One that does not stay what it was when it first came, say because it counts its calls, is compared by identity.
    """
    parts = plain_parts(value)
    first = _FIRST_LOOKS.get(value)
    if first is not None and parts is not None and first.parts is not None and are_same(parts, first.parts):
        return Static(value, first.content)
    try:
        content = content_of(value)
    except NotComparableError:
        content = None
    first = _FIRST_LOOKS.setdefault(value, _FirstLook(content, None if content is None else parts))
    return Static(value, (type(value), value) if content is None or content != first.content else content)


def _static_by_parts(label: str, value: Any) -> Static:
    """What can be taken apart, by its parts; anything else by identity."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return _static_dataclass(label, value)
    if isinstance(value, list | tuple):
        items = [make_static(f"{label}[{index}]", item) for index, item in enumerate(value)]
        return Static(_with_items(value, [item.value for item in items]), (type(value), *(item.key for item in items)))
    if isinstance(value, set | frozenset):
        members = [make_static(label, member) for member in value]
        kept = value if isinstance(value, frozenset) else copy.copy(value)
        return Static(kept, (type(value), frozenset(member.key for member in members)))
    if isinstance(value, slice):
        return Static(value, (slice, *(make_static(label, part).key for part in (value.start, value.stop, value.step))))
    if isinstance(value, dict):
        return _static_dict(label, value)
    return Static(value, Identity(type(value), id(value)))


def _static_dataclass(label: str, value: Any) -> Static:
    names = [field.name for field in dataclasses.fields(value)]
    fields = {name: make_static(f"{label}.{name}", getattr(value, name)) for name in names}
    kept = copy.copy(value)
    for name, field in fields.items():
        object.__setattr__(kept, name, field.value)  # works for frozen ones too
    return Static(kept, (type(value), *((name, field.key) for name, field in fields.items())))


def _static_dict(label: str, value: dict[Any, Any]) -> Static:
    entries = {name: make_static(f"{label}[{name!r}]", entry) for name, entry in value.items()}
    kept = copy.copy(value)
    dict.update(kept, {name: entry.value for name, entry in entries.items()})  # a Counter's own would add
    return Static(kept, (type(value), *((make_static(label, name).key, entry.key) for name, entry in entries.items())))


def _with_items(value: Any, items: list[Any]) -> Any:
    """A copy of a list or tuple with other items; a tuple whose items are the same is itself."""
    if not isinstance(value, tuple):
        kept = copy.copy(value)
        kept[:] = items
        return kept
    same = all(item is own for item, own in zip(items, value, strict=True))
    return value if same else tuple.__new__(type(value), items)


def keep_static(tunable: Tunable, label: str, value: Any) -> Static:
    """`make_static`, with one warning for an argument that is told apart by identity and may change."""
    static = make_static(label, value)
    warned = tunable.state.setdefault("warned", set())
    for kind, reason in _find_identities(static.key):
        if (label, kind) in warned:
            continue
        warned.add((label, kind))
        warn_user(
            f"argument {label} of type {kind.__name__} {reason}, so calls are told apart by which object it is: "
            "changing it in place is not noticed. Give its type __hash__ and __eq__, as a frozen dataclass has them, "
            "or register it as a pytree."
        )
    return static


def _find_identities(key: Hashable) -> Iterator[tuple[type, str]]:
    """The types in a key that are compared by identity although their objects may change, and why."""
    if isinstance(key, Identity):
        yield key.type, "cannot be hashed"
    elif isinstance(key, tuple | frozenset):
        for part in key:
            yield from _find_identities(part)
    elif _may_change_unseen(key):
        yield type(key), "has no __hash__ of its own"


def _may_change_unseen(value: Any) -> bool:
    """Whether a value hashes by identity and has attributes; functions and what wraps them are left alone."""
    kind: Any = type(value)
    if kind.__hash__ is not object.__hash__ or isinstance(value, type | types.FunctionType | types.ModuleType):
        return False
    if hasattr(value, "__wrapped__") or kind.__module__.partition(".")[0] in ("jax", "jaxlib", "numpy"):
        return False
    if getattr(getattr(kind, "__dataclass_params__", None), "frozen", False):
        return False
    return bool(getattr(value, "__dict__", None)) or any(getattr(base, "__slots__", ()) for base in kind.__mro__)
