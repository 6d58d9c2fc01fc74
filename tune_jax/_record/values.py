"""Plain values, containers and objects as expressions."""

from __future__ import annotations

import copyreg
import dataclasses
import enum
import math
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tune_jax._failure import attempt
from tune_jax._jax import is_key_dtype, key_impl_name
from tune_jax._record.imports import find_wrapped_path, import_folder
from tune_jax._record.replay import Todo
from tune_jax._record.writer import Kind, Writer, is_name

_PLACES = (jax.Device, jax.sharding.Sharding, jax.sharding.Mesh)
_NO_PYTREES = ("builtins", "collections")
_LITERALS = (type(None), bool, int, str, bytes, type(...))


def _is_literal(value: Any) -> bool:
    return type(value) in _LITERALS


def _write_literal(writer: Writer, value: Any) -> str:
    return repr(value)


def _is_float(value: Any) -> bool:
    return type(value) in (float, complex)


def _write_float(writer: Writer, value: Any) -> str:
    if isinstance(value, complex):
        return f"complex({_write_float(writer, value.real)}, {_write_float(writer, value.imag)})"
    return repr(value) if math.isfinite(value) else f"float({str(value)!r})"


def _is_member(value: Any) -> bool:
    return isinstance(value, enum.Enum)


def _write_member(writer: Writer, value: enum.Enum) -> str:
    kind = writer.write(type(value))
    if is_name(value.name) and getattr(type(value), value.name, None) is value:
        return f"{kind}.{value.name}"
    return f"{kind}({writer.write(value.value)})"


def _is_scalar(value: Any) -> bool:
    return isinstance(value, np.generic) and (value.dtype.kind not in "VOMm" or is_low_precision(value.dtype))


def _write_scalar(writer: Writer, value: np.generic) -> str:
    plain = value.item()
    inner = writer.write(plain if _is_literal(plain) or _is_float(plain) else float(value))
    return f"{write_dtype(writer, value.dtype)}.type({inner})"


def is_low_precision(dtype: np.dtype[Any]) -> bool:
    """Whether a dtype is one of those that JAX adds to NumPy's, which NumPy takes for raw bytes."""
    return dtype.kind == "V" and dtype.names is None and hasattr(jnp, dtype.name)


def _is_dtype(value: Any) -> bool:
    return isinstance(value, np.dtype) or is_key_dtype(value)


def write_dtype(writer: Writer, dtype: Any) -> str:
    """A dtype, that of PRNG keys and of records included."""
    if is_key_dtype(dtype):
        return f"{writer.shelf.use('jax')}.random.key(0, impl={key_impl_name(dtype)!r}).dtype"
    name = dtype.descr if dtype.names else dtype.str if dtype.kind in "SUMm" else dtype.name
    return f"{writer.shelf.use('np')}.dtype({name!r})"


def _is_module(value: Any) -> bool:
    return isinstance(value, types.ModuleType)


def _write_module(writer: Writer, module: types.ModuleType) -> str:
    name = module.__name__
    folder = import_folder(name)
    if folder is None:
        return writer.todo(f"the module {name}")
    wanted = writer.name_for(module, name.rpartition(".")[2])
    return writer.shelf.add_import(wanted, f"import {name} as {{}}", folder)


def _is_range(value: Any) -> bool:
    return type(value) in (slice, range)


def _write_range(writer: Writer, value: Any) -> str:
    return f"{type(value).__name__}({writer.items([value.start, value.stop, value.step])})"


def _is_container(value: Any) -> bool:
    return type(value) in (tuple, list, dict, set, frozenset)


def _write_container(writer: Writer, value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{writer.write(k)}: {writer.write(v)}" for k, v in value.items()) + "}"
    if isinstance(value, set | frozenset):
        # The order of a set varies between processes, and its text must not.
        return f"{type(value).__name__}([{', '.join(sorted(map(writer.write, value)))}])"
    items = writer.items(value)
    return f"[{items}]" if isinstance(value, list) else f"({items}{',' if len(value) == 1 else ''})"


def _is_named_tuple(value: Any) -> bool:
    return isinstance(value, tuple) and hasattr(type(value), "_fields")


def _write_named_tuple(writer: Writer, value: Any) -> str:
    # `_make`, because a class of the user's may have a `__new__` of its own.
    return f"{writer.write(type(value))}._make([{writer.items(value)}])"


def _is_spec(value: Any) -> bool:
    return isinstance(value, jax.sharding.PartitionSpec)


def _write_spec(writer: Writer, value: Any) -> str:
    return f"{writer.shelf.use('jax')}.sharding.PartitionSpec({writer.items(value)})"


def _is_plain_dataclass(value: Any) -> bool:
    """Whether a dataclass is made again by giving its constructor its fields."""
    kind = type(value)
    if not dataclasses.is_dataclass(kind) or hasattr(kind, "__post_init__"):
        return False
    code = getattr(kind.__init__, "__code__", None)
    is_generated = code is not None and code.co_filename == "<string>"
    return is_generated and all(field.init and hasattr(value, field.name) for field in dataclasses.fields(kind))


def _write_dataclass(writer: Writer, value: Any) -> str:
    fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return f"{_write_registered(writer, value)}({writer.keywords(fields)})"


def _is_anything(value: Any) -> bool:
    return True


def _write_object(writer: Writer, value: Any) -> str:
    """By what pickling would store of it: a callable, its arguments, attributes and items."""
    if isinstance(value, Todo):
        return writer.todo(value._what)
    reduced = None if isinstance(value, _PLACES) else attempt("run", lambda: _reduce(value))
    attributes = _attributes((*reduced, None)[2]) if isinstance(reduced, tuple) else None
    if not isinstance(reduced, tuple) or attributes is None:
        return writer.todo(f"a {type(value).__module__}.{type(value).__qualname__}")
    _write_registered(writer, value)
    make, args, _, items, entries = (*reduced, None, None, None)[:5]
    made = _write_made(writer, make, args)
    parts = {"attributes": attributes, "items": list(items or ()), "entries": dict(entries or ())}
    parts = {name: part for name, part in parts.items() if part}
    return f"{writer.shelf.use('rebuild')}({made}, {writer.keywords(parts)})" if parts else made


def _reduce(value: Any) -> Any:
    registered = copyreg.dispatch_table.get(type(value))
    return registered(value) if registered else value.__reduce_ex__(2)


def _write_registered(writer: Writer, value: Any) -> str:
    """A value's class, made a pytree if it is one here, for the program may do that outside of the class."""
    kind = writer.write(type(value))
    if type(value).__module__ in _NO_PYTREES or find_wrapped_path(type(value)) or jax.tree_util.all_leaves([value]):
        return kind
    parts, _ = jax.tree_util.tree_flatten_with_path(value, is_leaf=lambda part: part is not value)
    keys = [path[0] for path, _ in parts]
    if dataclasses.is_dataclass(value) and all(isinstance(key, jax.tree_util.GetAttrKey) for key in keys):
        data = [key.name for key in keys]
        meta = [field.name for field in dataclasses.fields(value) if field.init and field.name not in data]
        ensure = f"{writer.shelf.use('ensure_pytree')}({kind}, {data}, {meta})"
        writer.shelf.define(f"ensure_pytree({kind})", lambda _: ensure)
    elif not hasattr(value, "tree_flatten"):
        writer.notes.append(f"{kind} must be registered as a pytree above, as the program does.")
    return kind


def _write_made(writer: Writer, make: Any, args: Any) -> str:
    if make is not copyreg.__newobj__:  # type: ignore[attr-defined]
        return f"{writer.write(make)}({writer.items(args)})"
    kind = writer.write(args[0])
    return f"{kind}.__new__({', '.join([kind, *map(writer.write, args[1:])])})"


def _attributes(state: Any) -> dict[str, Any] | None:
    """The attributes in what pickling stores as an object's state; None where that is something else."""
    if state is None:
        return {}
    if isinstance(state, tuple) and len(state) == 2 and all(isinstance(part, dict | None) for part in state):
        return {**(state[0] or {}), **(state[1] or {})}
    return dict(state) if isinstance(state, dict) and all(isinstance(name, str) for name in state) else None


FIRST: list[Kind] = [
    (_is_literal, _write_literal),
    (_is_float, _write_float),
    (_is_member, _write_member),
    (_is_scalar, _write_scalar),
]
LAST: list[Kind] = [
    (_is_dtype, write_dtype),
    (_is_module, _write_module),
    (_is_range, _write_range),
    (_is_container, _write_container),
    (_is_named_tuple, _write_named_tuple),
    (_is_spec, _write_spec),
    (_is_plain_dataclass, _write_dataclass),
    (_is_anything, _write_object),
]
