"""The shardings a user asks for, and those that arrays have, as one sharding an input."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax.experimental.layout import Format, Layout

from tune_jax._call import Call
from tune_jax._config import CONFIG
from tune_jax._errors import OptionError
from tune_jax._jax import concrete_mesh, is_explicit


def asked_shardings(call: Call) -> list[Any]:
    """The `in_shardings` of the tuned function for each input of an unbatched `call`; None where it says nothing.

    Raises:
      OptionError: `in_shardings` has more entries than the call has arguments, or does not fit their structure.
    """
    asked = call.tunable.in_shardings
    if asked is None:
        return [None] * len(call.dynamic_indices)
    parts = call.tree.children()
    prefixes = _by_parameter(call, asked, len(parts))
    if call.traced is not None:
        prefixes[-1] = None  # what is closed over is no argument
    leaves = [leaf for prefix, part in zip(prefixes, parts, strict=True) for leaf in _spread(prefix, part)]
    return [leaves[index] for index in call.dynamic_indices]


def input_shardings(call: Call) -> list[Any]:
    """The same on the mesh in force, and with the dimensions that the vmaps around `call` put in.

    Raises:
      OptionError: `in_shardings` does not fit the call, or has a PartitionSpec where no mesh is set.
    """
    resolved = map(_resolve, asked_shardings(call))
    return [functools.reduce(_batched, _dims(call, place), sharding) for place, sharding in enumerate(resolved)]


def output_shardings(call: Call) -> Any:
    """The `out_shardings` of the call's program, a prefix tree of its result; gradients are not spoken of.

    There are none inside of a vmap or a `shard_map`, where the results are not the function's own.
    """
    is_inside = call.batches or (call.mesh is not None and call.mesh.manual)
    asked = None if is_inside else call.tunable.out_shardings
    return (asked, None) if call.moving and asked is not None else asked


def trial_shardings(call: Call, avals: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Where each input lies while candidates are timed; None for wherever new arrays go.

    Inside a `shard_map` that is everywhere; else what `in_shardings` says, then where a known value is committed, then
    what an explicit axis of a mesh says.
    """
    told = mesh_shardings(call, avals)
    if call.mesh is not None and call.mesh.manual:
        return told
    asked = input_shardings(call)
    found = zip(asked, map(_committed_sharding, values), told, strict=True)
    return [next((sharding for sharding in choices if sharding is not None), None) for choices in found]


def mesh_shardings(call: Call, avals: Sequence[Any]) -> list[Any]:
    """Where values lie on the call's mesh: everywhere, but for explicit axes; None where it says nothing of them."""
    return [_mesh_sharding(call, aval) for aval in avals]


def _mesh_sharding(call: Call, aval: Any) -> Any:
    if call.mesh is None or not (call.mesh.manual or is_explicit(aval)):
        return None
    return jax.sharding.NamedSharding(call.mesh.build(), aval.sharding.spec)


def committed_devices(values: Sequence[Any]) -> tuple[jax.Device, ...]:
    """The devices that the first committed one of some values lies on, in its mesh's order; empty if none is."""
    sharding = next((found for found in map(_committed_sharding, values) if found is not None), None)
    if isinstance(sharding, jax.sharding.NamedSharding):
        return tuple(sharding.mesh.devices.flat)
    return tuple(sharding.device_set) if sharding is not None else ()


def placed_inputs(avals: Sequence[Any], inputs: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Abstract values with the shardings of those inputs that are committed to their devices."""
    return [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type, sharding=_committed_sharding(value))
        for a, value in zip(avals, inputs, strict=True)
    ]


def layout_options(avals: Sequence[Any], donated: Sequence[bool]) -> dict[str, Any]:
    """The options of `jax.jit` that leave inputs' layouts to XLA, if the user asks for that.

    PRNG keys, packed numbers, and donated inputs, whose memory results reuse, stay as they are.
    """
    if not CONFIG.find_optimal_layouts_automatically:
        return {}
    return {"in_shardings": tuple(_free_format(a, gives) for a, gives in zip(avals, donated, strict=True))}


def _free_format(aval: Any, donated: bool) -> Any:
    is_key = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)
    stays = donated or is_key or jax.dtypes.itemsize_bits(aval.dtype) < 8
    return None if stays else Format(Layout.AUTO)


def _dims(call: Call, place: int) -> list[tuple[int | None, Any]]:
    """Where the vmaps around a call put their axis into an input, and the mesh axes that it goes over."""
    return [(batch.dims[place], batch.spmd_axis_name) for batch in call.batches]


def _batched(sharding: Any, batch: tuple[int | None, Any]) -> Any:
    """A sharding with a batched dimension put in, as `jax.vmap` does to that of a jitted function."""
    dim, spmd_axis_name = batch
    if dim is None or not isinstance(sharding, jax.sharding.NamedSharding):
        return sharding
    parts = list(sharding.spec.partitions)
    parts += [None] * (dim - len(parts))
    spec = sharding.spec.update(partitions=(*parts[:dim], spmd_axis_name, *parts[dim:]))
    return jax.sharding.NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)


def spanning_arguments(call: Call, avals: Sequence[Any], values: Sequence[Any]) -> list[str]:
    """The inputs, by name, and the options that lie on devices of several processes."""
    given = map(_committed_sharding, values)
    places = zip(call.input_names, trial_shardings(call, avals, values), given, strict=True)
    found = [name for name, *shardings in places if any(map(_spans, shardings))]
    return found + ["out_shardings"] * any(map(_spans, jax.tree.leaves(output_shardings(call))))


def _spans(sharding: Any) -> bool:
    return isinstance(sharding, jax.sharding.Sharding) and not sharding.is_fully_addressable


def _committed_sharding(value: Any) -> Any:
    if isinstance(value, jax.ShapeDtypeStruct):
        is_abstract = isinstance(getattr(value.sharding, "mesh", None), jax.sharding.AbstractMesh)
        return None if is_abstract else value.sharding
    return value.sharding if isinstance(value, jax.Array) and value.committed else None


def _by_parameter(call: Call, asked: Any, count: int) -> list[Any]:
    if not isinstance(asked, tuple | list):
        return [asked] * count
    if len(asked) > count:
        raise OptionError(
            f"in_shardings has {len(asked)} entries, but the call passes {count} arguments: {', '.join(call.names)}; "
            "give one entry an argument, or a single sharding for all."
        )
    return [*asked, *[None] * (count - len(asked))]


def _spread(prefix: Any, part: Any) -> list[Any]:
    whole = jax.tree.unflatten(part, range(part.num_leaves))
    try:
        spread = jax.tree.broadcast(prefix, whole, is_leaf=lambda leaf: leaf is None)
    except ValueError as error:
        raise OptionError(f"in_shardings does not fit the arguments: {error}") from error
    return jax.tree.leaves(spread, is_leaf=lambda leaf: leaf is None)


def _resolve(sharding: Any) -> Any:
    if not isinstance(sharding, jax.sharding.PartitionSpec):
        return sharding
    mesh = concrete_mesh()
    if mesh.empty:
        raise OptionError(
            f"in_shardings has {sharding}, but no mesh is set; make the call under jax.set_mesh(mesh), or give a "
            "jax.NamedSharding(mesh, spec)."
        )
    return jax.sharding.NamedSharding(mesh, sharding)
