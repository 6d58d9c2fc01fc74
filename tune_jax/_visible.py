"""How much can be seen of a value: what Python code reads by name, and whether an object shows all of its state."""

from __future__ import annotations

import dataclasses
import dis
import enum
import functools
import logging
import sys
import types
import weakref
from typing import Any

_LIBRARIES = {"jax", "jaxlib", "numpy", "ml_dtypes", "builtins"}
_CODE = (types.FunctionType, property, staticmethod, classmethod)

# Compared by what they refer to, whatever happens to that.
_REFERS = (weakref.ref, types.MethodWrapperType)

# What code uses to read by names that it does not spell out.
_MAKES_NAMES_UP = {
    "getattr",
    "vars",
    "globals",
    "locals",
    "eval",
    "exec",
    "__import__",
    "import_module",
    "__dict__",
    "__getattribute__",
}

# What Python asks a class for where objects are made, shown or copied.
_BESIDE = {"__new__", "__repr__", "__str__", "__format__", "__init_subclass__"}
_BESIDE |= {"__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"}


@functools.lru_cache(maxsize=4096)
def hides_what_it_reads(code: types.CodeType) -> bool:
    """Whether a function's code, or that of a function inside of it, may read what its names do not tell."""
    imported = [each.argval for each in dis.get_instructions(code) if each.opname == "IMPORT_NAME"]
    inner = (const for const in code.co_consts if isinstance(const, types.CodeType))
    foreign = any(_root(name) not in _LIBRARIES for name in imported)
    return foreign or not _MAKES_NAMES_UP.isdisjoint(code.co_names) or any(map(hides_what_it_reads, inner))


def special_names(place: Any) -> set[str]:
    """Names of a class or module that Python itself asks for: `__call__`, `__mul__`, `__getattr__`."""
    found = vars(place).items()
    return {name for name, entry in found if name.startswith("__") and isinstance(entry, _CODE)} - _BESIDE


def shows_its_state(value: Any) -> bool:
    """Whether an object has no state but its attributes and items; what Python would not copy by these has more."""
    if dataclasses.is_dataclass(value) or isinstance(value, enum.Enum | types.SimpleNamespace):
        return True
    kind: Any = type(value)
    own = (kind.__reduce__, kind.__reduce_ex__, kind.__getstate__)
    if own != (object.__reduce__, object.__reduce_ex__, object.__getstate__):
        return False
    try:
        value.__reduce_ex__(2)
    except TypeError:
        return False
    return True


def is_library(value: Any) -> bool:
    """Whether a value does not change: a function or class of an installed package, or an object of JAX or NumPy."""
    kind: Any = type(value)
    if isinstance(value, types.ModuleType):
        return _root(value.__name__) in _LIBRARIES
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | type):
        root = _root(getattr(value, "__module__", None) or "")
        return root in _LIBRARIES or ("<" not in value.__qualname__ and _is_installed(root))
    # What JAX wraps is of the module that it was written in.
    own = kind.__eq__ is object.__eq__ and _root(getattr(value, "__module__", None) or "") in _LIBRARIES
    return own or isinstance(value, logging.Logger)


@functools.lru_cache(maxsize=4096)
def _is_installed(root: str) -> bool:
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return any(folder in file for folder in ("site-packages", "dist-packages"))


def _root(module: str) -> str:
    return module.partition(".")[0]


def is_standard(kind: type) -> bool:
    """Whether a class is of Python's own library."""
    return _root(kind.__module__) in sys.stdlib_module_names


def hashes_by_value(value: Any) -> bool:
    """Whether an object says itself by what it is compared."""
    kind: Any = type(value)
    if kind.__eq__ is object.__eq__ or isinstance(value, _REFERS):
        return False
    try:
        hash(value)
    except TypeError:
        return False
    return True
