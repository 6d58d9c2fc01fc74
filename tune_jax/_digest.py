"""Values in words that are equal in every process of the same program: what they hold, never where they lie."""

from __future__ import annotations

import dataclasses
import functools
import re
import types
from typing import Any

import jax
import numpy as np

from tune_jax._closures import cell_contents

# Memory addresses, and the ids of devices: each process has its own.
_PLACES = re.compile(r" at 0x[0-9a-fA-F]+|(?<=Device\()id=\d+")
_CONTAINERS = (tuple, list, set, frozenset, dict)
_CONTAINER_REPRS = {kind.__repr__ for kind in _CONTAINERS}


def lasting_text(value: Any) -> str:
    """Say what a value is, so that equal programs say the same in every process.

    Functions go by their module, name, code, defaults and what they close over; containers and dataclasses by their
    parts; arrays by shape and dtype alone; anything else by its type and its repr without addresses.

    Example:
      >>> lasting_text((1, True))
      'builtins.tuple(builtins.int(1), builtins.bool(True))'
    """
    return _say(value, ())


def _say(value: Any, above: tuple[int, ...]) -> str:
    if id(value) in above:
        return "what it is part of"
    parts = [_say(part, (*above, id(value))) for part in _parts_of(value)]
    # The order of a set of strings varies between processes.
    parts = sorted(parts) if isinstance(value, set | frozenset) else parts
    own = _own_words(value)
    return f"{_name(type(value))}({', '.join([own, *parts] if own else parts)})"


def _own_words(value: Any) -> str:
    """What a value says of itself, its parts apart."""
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return _name(value)
    if isinstance(value, jax.Array | np.ndarray | jax.ShapeDtypeStruct):
        return f"{value.dtype}[{','.join(map(str, value.shape))}]"
    if isinstance(value, jax.Device):
        return str(value.device_kind)
    if isinstance(value, jax.sharding.Mesh):
        return f"{dict(value.shape)} {value.axis_types}"
    if isinstance(value, types.ModuleType):
        return value.__name__
    return "" if _parts_say_all(value) else _PLACES.sub("", repr(value))


def _parts_say_all(value: Any) -> bool:
    if isinstance(value, functools.partial | types.CodeType | types.MethodType | slice) or _is_data(value):
        return True
    return isinstance(value, _CONTAINERS) and type(value).__repr__ in _CONTAINER_REPRS


def _parts_of(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.items())
    if isinstance(value, _CONTAINERS):
        return list(value)
    if isinstance(value, types.FunctionType | types.MethodType | types.CodeType | functools.partial):
        return _parts_of_code(value)
    if isinstance(value, slice):
        return [value.start, value.stop, value.step]
    if isinstance(value, jax.NamedSharding):
        return [value.mesh, value.spec, value.memory_kind]
    if isinstance(value, jax.sharding.SingleDeviceSharding):
        return [*value.device_set, value.memory_kind]
    if _is_data(value):
        compared = [field.name for field in dataclasses.fields(value) if field.compare]
        return [(name, getattr(value, name, None)) for name in compared]
    if _has_only_values(value):
        return sorted(vars(value).items())
    inside = getattr(value, "__wrapped__", None)
    return [inside] if callable(inside) and not isinstance(value, type) else []


def _parts_of_code(value: Any) -> list[Any]:
    if isinstance(value, functools.partial):
        return [value.func, value.args, value.keywords]
    if isinstance(value, types.MethodType):
        return [value.__func__, value.__self__]
    if isinstance(value, types.CodeType):
        return [value.co_code, value.co_consts, value.co_names, value.co_freevars]
    return [value.__code__, value.__defaults__, value.__kwdefaults__, *cell_contents(value)]


def _is_data(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _has_only_values(value: Any) -> bool:
    """Whether objects like this one are compared by what they hold, which their repr does not show."""
    kind: Any = type(value)
    return kind.__eq__ is not object.__eq__ and kind.__repr__ is object.__repr__ and hasattr(value, "__dict__")


def _name(thing: Any) -> str:
    return f"{thing.__module__}.{thing.__qualname__}"
