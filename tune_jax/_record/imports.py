"""Where a module, function or class can be imported from in another process."""

from __future__ import annotations

import importlib
import os
import sys
import types
from typing import Any

# Modules under whose names what is defined in private modules of a package is better known.
_PUBLIC = ("jax.numpy", "jax.nn", "jax.lax", "jax.random", "jax")
_MOST_WRAPPERS = 20

# Folders that the interpreter puts on the path by itself.
_SITES = ("site-packages", "dist-packages")


def find_wrapped_path(value: Any) -> tuple[str, str, int] | None:
    """Where another process finds this very object: a module, a qualified name, and how often to take `__wrapped__`."""
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", None)
    name = name or getattr(value, "__name__", None)
    if not isinstance(module, str) or not isinstance(name, str):
        return None
    if module.startswith("jax."):
        module = next((public for public in _PUBLIC if look_up(public, name) is value), module)
    hops = count_hops(look_up(module, name), value)
    return None if hops is None or import_folder(module) is None else (module, name, hops)


def count_hops(found: Any, value: Any) -> int | None:
    """How many times `__wrapped__` leads from one object to another; None if it does not."""
    for hops in range(_MOST_WRAPPERS):
        if found is value:
            return hops
        found = getattr(found, "__wrapped__", None)
    return None


def import_folder(name: str) -> str | None:
    """The folder that must be on the path to import a module; empty if it is there anyway, None if it cannot be."""
    module = sys.modules.get(name)
    if module is None or name == "__main__":
        return None
    if name in sys.builtin_module_names or name.partition(".")[0] in sys.stdlib_module_names:
        return ""
    folder = _folder_above(module, name)
    if os.path.basename(folder or "") in _SITES or (folder is None and _is_found(name.partition(".")[0])):
        return ""
    return folder


def _folder_above(module: types.ModuleType, name: str) -> str | None:
    """The entry of `sys.path` that a module's file lies under as its name says, None if there is none."""
    path = os.path.realpath(getattr(module, "__file__", None) or "")
    parts = name.split(".")
    if os.path.basename(path).startswith("__init__."):
        path = os.path.dirname(path)
    else:
        path = os.path.join(os.path.dirname(path), os.path.basename(path).partition(".")[0])
    for part in reversed(parts):
        if os.path.basename(path) != part:
            return None
        path = os.path.dirname(path)
    return path if path in {os.path.realpath(entry or os.curdir) for entry in sys.path} else None


def _is_found(top: str) -> bool:
    """Whether a finder that every process has, such as that of an editable install, knows the module."""
    finders = [finder for finder in sys.meta_path if type(finder).__module__ != "_pytest.assertion.rewrite"]
    specs = (finder.find_spec(top, None) for finder in finders if finder is not importlib.machinery.PathFinder)
    return any(spec is not None and spec.origin for spec in specs)


def look_up(module: str, name: str) -> Any:
    """What a loaded module has under a dotted name; None if it has nothing."""
    value: Any = sys.modules.get(module)
    for part in name.split("."):
        value = getattr(value, part, None)
    return value
