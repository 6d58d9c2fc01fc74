"""Arrays as expressions: small integers by value, everything else as made-up data of the same kind."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tune_jax._jax import batch_size
from tune_jax._leaves import describe_aval, is_concrete
from tune_jax._record.values import is_low_precision, write_dtype
from tune_jax._record.writer import Kind, Writer

# The largest integer array that is written by value.
MOST_INTEGERS = 1024


def write_integers(value: Any) -> str:
    """The expression that makes a small integer array with its values; reads them from the device."""
    with jax.transfer_guard("allow"):
        numbers = np.asarray(jax.device_get(value)).astype(object).tolist()
    if isinstance(value, np.ndarray):
        return f"np.array({numbers}, np.dtype({value.dtype.name!r}))"
    if value.weak_type and not value.shape:
        return f"jnp.asarray({numbers})"
    return f"jnp.array({numbers}, {str(value.dtype)!r})"


def _is_array(value: Any) -> bool:
    return isinstance(value, jax.Array | jax.ShapeDtypeStruct | np.ndarray)


def _write_array(writer: Writer, value: Any) -> str:
    if isinstance(value, np.ndarray) and value.dtype.kind in "OSUMmV" and not is_low_precision(value.dtype):
        return _write_objects(writer, value)
    aval = jax.typeof(value)
    if not all(isinstance(size, int) for size in aval.shape):
        return writer.todo(f"an array {describe_aval(aval)} with sizes left open")
    _note_batch(writer, value, aval)
    if _has_values(value, aval):
        writer.shelf.use("np" if isinstance(value, np.ndarray) else "jnp")
        if writer.pending is None:
            return write_integers(value)
        writer.pending.append(value)
        return f"integers_{len(writer.pending) - 1}"
    if jnp.issubdtype(aval.dtype, np.integer):
        writer.notes.append(f"{describe_aval(aval)}: its values were not recorded, and integers from 0 to 7 stand in.")
    made = _write_random(writer, value, aval)
    if not isinstance(value, np.ndarray):
        return made
    dtype = "" if value.dtype == aval.dtype else f", {write_dtype(writer, value.dtype)}"
    return f"{writer.shelf.use('np')}.asarray({made}{dtype})"


def _has_values(value: Any, aval: Any) -> bool:
    if not jnp.issubdtype(aval.dtype, np.integer) or not is_concrete(value) or not 0 < aval.size <= MOST_INTEGERS:
        return False
    return isinstance(value, np.ndarray) or bool(value.is_fully_addressable and not value.is_deleted())


def _write_objects(writer: Writer, value: np.ndarray[Any, Any]) -> str:
    if value.dtype.kind not in "SUOMm" or value.size > MOST_INTEGERS:
        return writer.todo(f"a NumPy array of shape {value.shape} and dtype {value.dtype}")
    items = value.tolist() if value.dtype.kind in "SUO" else value.astype(np.int64).tolist()
    array = f"{writer.shelf.use('np')}.array({writer.write(items)}, {writer.write(value.dtype)})"
    return array if value.dtype.kind != "O" else f"{array}.reshape({value.shape})"


def _write_random(writer: Writer, value: Any, aval: Any) -> str:
    options: dict[str, Any] = {"seed": next(writer.seeds)}
    if getattr(aval, "weak_type", False):
        options["weak_type"] = True
    mesh, spec = _layout(value, aval)
    if mesh:
        options |= {"mesh": mesh, "spec": spec}
        writer.notes.append(
            f"{describe_aval(aval)}: laid out as {spec} over a mesh {mesh}, if there are devices enough."
        )
    dtype = _write_dtype(writer, aval.dtype)
    return f"{writer.shelf.use('random_array')}({writer.write(aval.shape)}, {dtype}, {writer.keywords(options)})"


def _write_dtype(writer: Writer, dtype: Any) -> str:
    name = "bool_" if dtype == np.bool_ else str(dtype)
    known = not jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key) and hasattr(jnp, name)
    return f"{writer.shelf.use('jnp')}.{name}" if known else write_dtype(writer, dtype)


def _layout(value: Any, aval: Any) -> tuple[dict[str, int], tuple[Any, ...]]:
    """The axes of the mesh that an array is laid out over, and how; no axes where it lies on one device."""
    own = getattr(value, "sharding", None) if is_concrete(value) or isinstance(value, jax.ShapeDtypeStruct) else None
    sharding = own or getattr(aval, "sharding", None)
    if not isinstance(sharding, jax.sharding.NamedSharding) or not any(map(_is_plain, sharding.spec)):
        return {}, ()
    mesh = {str(name): int(size) for name, size in sharding.mesh.shape.items()}
    return (mesh, tuple(map(_plain_entry, sharding.spec))) if math.prod(mesh.values()) > 1 else ({}, ())


def _is_plain(entry: Any) -> bool:
    return isinstance(entry, str | tuple)


def _plain_entry(entry: Any) -> Any:
    return entry if _is_plain(entry) else None


def _note_batch(writer: Writer, value: Any, aval: Any) -> None:
    size = batch_size(value)
    if size is not None:
        writer.notes.append(f"{describe_aval(aval)}: one of {size} under jax.vmap, which is not part of this call.")


def describe_integers(values: Sequence[Any]) -> tuple[str, ...]:
    """What tells small integer arrays apart apart from their values."""
    return tuple(f"{type(value).__name__} {value.dtype}{list(value.shape)}" for value in values)


KINDS: list[Kind] = [(_is_array, _write_array)]
