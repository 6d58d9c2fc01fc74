"""What a value holds that cannot be seen in its type: whether a traced value hides in a function or an object."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from tune_jax._jax import Tracer

# A look that finds nothing among so many parts is given up: what traces then still tells.
_MOST_PARTS = 1000

_PLAIN = (bool, int, float, complex, str, bytes, type(None), type, types.ModuleType, np.ndarray, np.generic, np.dtype)


def holds_tracer(values: Iterable[Any]) -> bool:
    """Whether a tracer is among these values or what they close over, bind, or have as attributes or items."""
    waiting = list(values)
    seen: set[int] = set()
    while waiting and len(seen) < _MOST_PARTS:
        value = waiting.pop()
        if isinstance(value, Tracer):
            return True
        if id(value) not in seen and not isinstance(value, _PLAIN) and not isinstance(value, jax.Array):
            seen.add(id(value))
            waiting.extend(_parts(value))
    return False


@functools.lru_cache(maxsize=4096)
def global_names(code: types.CodeType) -> tuple[str, ...]:
    """The names that a function's code, and the functions inside of it, may read from its module."""
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    return tuple({name: None for part in (code.co_names, *map(global_names, inner)) for name in part})


def cell_contents(function: types.FunctionType) -> list[Any]:
    """The values that a function closes over; cells that have none yet are left out."""
    return [content for cell in function.__closure__ or () for content in _content(cell)]


def _content(cell: types.CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:
        return []


def _parts(value: Any) -> Iterator[Any]:
    if isinstance(value, types.FunctionType):
        yield from _function_parts(value)
    elif isinstance(value, types.MethodType):
        yield from (value.__func__, value.__self__)
    elif isinstance(value, functools.partial):
        yield from (value.func, value.args, value.keywords)
    elif isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | set | frozenset):
        yield from value
    else:
        yield from (attribute for _, attribute in attributes(value))


def _function_parts(function: types.FunctionType) -> Iterator[Any]:
    yield from (function.__defaults__, function.__kwdefaults__, function.__dict__)
    yield from cell_contents(function)
    for name in global_names(function.__code__):
        held = function.__globals__.get(name)
        if not isinstance(held, types.FunctionType):
            yield held


def attributes(value: Any) -> Iterator[tuple[str, Any]]:
    """The names and values of an object's own attributes; of a wrapper only the function in it."""
    own = getattr(value, "__dict__", {})
    if "__wrapped__" in own:
        # What a wrapper knows besides is its own affair, and can be a lot.
        yield "__wrapped__", own["__wrapped__"]
        return
    yield from own.items()
    for base in type(value).__mro__:
        slots = base.__dict__.get("__slots__", ())
        for name in [slots] if isinstance(slots, str) else slots:
            if isinstance(base.__dict__.get(name), types.MemberDescriptorType) and hasattr(value, name):
                yield name, getattr(value, name)
