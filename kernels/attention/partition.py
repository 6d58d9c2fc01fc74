"""Walks over blocks on several devices and under `jax.vmap`: how to divide a call that XLA cannot look into.

A Pallas kernel is opaque to XLA, which would gather all of its operands on every device. But rows of the batch
and heads are independent of each other, so that each device can work on those that it holds. What becomes of a
walk depends on where it is traced:

- Explicit mesh axes are in the types of the operands: a `shard_map` over them.
- Shardings along Auto axes are known to the compiler only: `custom_partitioning`, which is asked while it compiles.
- Manual axes (inside `shard_map`) and single devices leave nothing to divide.

Lengths and head_dims are whole on each device, and so are heads where the key heads are not a multiple of the
devices (one key head for all of them is as good). Auto axes beside Manual ones are gathered, as JAX does not tell
their shardings. `jax.export` for several devices cannot keep what the compiler would ask; inside `shard_map` it can.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.custom_batching import custom_vmap
from jax.experimental.custom_partitioning import ArrayMapping, SdyShardingRule, custom_partitioning
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from .call import Array, Gradients, Operands, Saved, Spec
from .differentiable import Kernels, vary_alike

Arrays = tuple[Operands] | tuple[Operands, Saved]
Axes = tuple[str, ...]
Split = Mapping[str, tuple[str, ...]]  # over which axes of a mesh each of "batch", "heads" and "kv_heads" is cut

_QUERIES = ("batch", "q", "heads", "depth")
_KEYS = ("batch", "kv", "kv_heads", "depth")
_VALUES = ("batch", "kv", "kv_heads", "v_depth")
_PAIRS = ("batch", "heads", "q", "kv")
_OUT = ("batch", "q", "heads", "v_depth")
_ROWS = ("batch", "heads", "q")

_AXES: dict[type, tuple[Axes, ...]] = {
    Operands: Operands(
        q=_QUERIES,
        k=_KEYS,
        v=_VALUES,
        bias=_PAIRS,
        mask=_PAIRS,
        sinks=("heads",),
        scale=(),
        q_offset=("batch",),
        q_lengths=("batch",),
        kv_lengths=("batch",),
        q_segments=("batch", "q"),
        kv_segments=("batch", "kv"),
    ),
    Saved: Saved(lse=_ROWS, dout=_OUT, delta=_ROWS),
}
_RESULTS: dict[str, Any] = {
    "forward": (_OUT, _ROWS),
    "backward": Gradients(q=_QUERIES, k=_KEYS, v=_VALUES),
    "bias_gradient": _PAIRS,
}
_WHOLE = frozenset({"q", "kv", "depth", "v_depth"})  # what no device has a part of


@dataclass(frozen=True)
class Partitioned:
    """Kernels that work on each device's part of the batch and of the heads, and batch well."""

    kernels: Kernels

    def forward(self, spec: Spec, operands: Operands) -> tuple[Array, Array]:
        """The forward walk over each device's part."""
        return _run(_Walk(self.kernels, "forward", spec), operands)  # type: ignore[no-any-return]

    def backward(self, spec: Spec, operands: Operands, saved: Saved) -> Gradients:
        """The backward walk over each device's part; gradients of shared key heads are summed."""
        return _run(_Walk(self.kernels, "backward", spec), operands, saved)  # type: ignore[no-any-return]

    def bias_gradient(self, spec: Spec, operands: Operands, saved: Saved) -> Array:
        """The gradient of each device's bias, summed over the devices that share it."""
        return _run(_Walk(self.kernels, "bias_gradient", spec), operands, saved)  # type: ignore[no-any-return]


@dataclass(frozen=True)
class _Walk:
    """One of the three functions of `Kernels`, of the arrays alone."""

    kernels: Kernels
    name: str
    spec: Spec

    def __call__(self, *arrays: Any) -> Any:
        return getattr(self.kernels, self.name)(self.spec, *arrays)


def _run(walk: _Walk, *arrays: Any) -> Any:
    # `custom_partitioning` has no rule for vmap; and a longer batch is better than one more axis.
    batchable = custom_vmap(functools.partial(_place, walk))
    batchable.def_vmap(functools.partial(_run_batched, walk))
    return batchable(*arrays)


def _axes_of(arrays: Arrays) -> Any:
    """What the axes of each array are, in the structure of the arrays."""
    return tuple(
        type(group)(*(None if x is None else names for x, names in zip(group, _AXES[type(group)], strict=True)))
        for group in arrays
    )


def _flatten_axes(axes: Any) -> list[Axes]:
    return jax.tree.leaves(axes, is_leaf=_is_axes)


def _is_axes(node: Any) -> bool:
    return type(node) is tuple and all(isinstance(name, str) for name in node)


# Batching


def _run_batched(walk: _Walk, count: int, batched: Any, *arrays: Any) -> tuple[Any, Any]:
    """The walk over `count` calls, stacked along the first axes of the arrays that differ."""
    leaves, tree = jax.tree.flatten(arrays)
    members = list(zip(leaves, jax.tree.leaves(batched), _flatten_axes(_axes_of(arrays)), strict=True))
    batch = arrays[0].q.shape[1]
    if all(_merges(walk, batch, *member) for member in members):
        results = _run(walk, *tree.unflatten([_merge(count, batch, *member) for member in members]))
        results = jax.tree.map(lambda x: x.reshape(count, batch, *x.shape[1:]), results)
    else:
        stacked = tree.unflatten([0 if is_batched else None for _, is_batched, _ in members])
        results = jax.vmap(functools.partial(_place_by_types, walk), in_axes=stacked)(*arrays)
    return results, jax.tree.map(lambda _: True, results)


def _merges(walk: _Walk, batch: int, x: Array, is_batched: bool, names: Axes) -> bool:
    """Whether calls can be rows of one batch, as far as this array goes, without copies of anything large."""
    if "batch" not in names:
        return not is_batched
    if is_batched:
        return x.shape[1] == batch
    if names == _PAIRS:
        return x.shape[0] == 1 and walk.name != "bias_gradient"
    return names not in (_QUERIES, _KEYS, _VALUES)


def _merge(count: int, batch: int, x: Array, is_batched: bool, names: Axes) -> Array:
    if is_batched:
        return x.reshape(count * batch, *x.shape[2:])
    if names == _PAIRS or "batch" not in names:
        return x
    return jnp.broadcast_to(x, (count, *x.shape)).reshape(count * batch, *x.shape[1:])


# Cutting


def _place(walk: _Walk, *arrays: Any) -> Any:
    kinds = jax.sharding.get_abstract_mesh().axis_types
    if AxisType.Explicit in kinds or (kinds and AxisType.Auto not in kinds):
        return _place_by_types(walk, *arrays)
    return _cut_by_compiler(walk, _axes_of(arrays), *arrays)


def _place_by_types(walk: _Walk, *arrays: Any) -> Any:
    """The walk over each device's part, as far as the types of the arrays tell what that is."""
    mesh = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit not in mesh.axis_types:
        return walk(*arrays)
    axes = _axes_of(arrays)
    split = _find_split(mesh, arrays, axes, jax.tree.map(lambda x: jax.typeof(x).sharding.spec, arrays))
    specs = jax.tree.map(functools.partial(_spec, split), arrays, axes)
    shapes = _result_shapes(walk, arrays[0])
    explicit = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Explicit}
    return jax.shard_map(
        functools.partial(_run_part, walk, _sums(split, walk, shapes)),
        in_specs=specs,
        out_specs=_map_results(functools.partial(_spec, split), walk, shapes),
        # None means all but those that a vmap maps over, which JAX does not let us name.
        axis_names=explicit if len(explicit) < len(mesh.axis_names) else set(),
        # What varies is known by construction; a shard_map around this one wants to know all the same.
        check_vma=AxisType.Manual in mesh.axis_types,
    )(*jax.tree.map(jax.sharding.reshard, arrays, specs))


def _result_shapes(walk: _Walk, operands: Operands) -> Any:
    if walk.name == "bias_gradient":
        return operands.bias
    sizes = {}
    for x, names in ((operands.q, _QUERIES), (operands.k, _KEYS), (operands.v, _VALUES)):
        sizes.update(zip(names, x.shape, strict=True))
    shapes = [jax.ShapeDtypeStruct([sizes[name] for name in names], jnp.float32) for names in _RESULTS[walk.name]]
    return jax.tree.unflatten(jax.tree.structure(_RESULTS[walk.name], is_leaf=_is_axes), shapes)


def _find_split(mesh: Any, arrays: Arrays, axes: Any, specs: Any) -> Split:
    """How the arrays are cut along batch and heads: as the first one is that is, where that cuts evenly."""
    cuts: dict[str, tuple[str, ...]] = {}
    flat_specs = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, P))
    for names, spec in zip(_flatten_axes(axes), flat_specs, strict=True):
        for name, over in zip(names, spec, strict=False):
            if over is not None:
                cuts.setdefault(name, over if isinstance(over, tuple) else (over,))
    batch = cuts.get("batch", ())
    heads = tuple(axis for axis in cuts.get("heads", cuts.get("kv_heads", ())) if axis not in batch)
    q, k = arrays[0].q, arrays[0].k
    if q.shape[0] % math.prod(mesh.shape[axis] for axis in batch):
        batch = ()
    # One key head for all: each device has it whole.
    if (q if k.shape[2] == 1 else k).shape[2] % math.prod(mesh.shape[axis] for axis in heads):
        heads = ()
    return {"batch": batch, "heads": heads, "kv_heads": heads}


def _spec(split: Split, x: Any, names: Axes) -> P:
    # An axis of size 1 is one along which the array is broadcast.
    return P(*(split.get(name) or None if size > 1 else None for name, size in zip(names, x.shape, strict=True)))


def _map_results(function: Any, walk: _Walk, results: Any) -> Any:
    return jax.tree.map(function, results, _RESULTS[walk.name])


def _sums(split: Split, walk: _Walk, results: Any) -> Any:
    """Over which axes of the mesh each result is to be summed: those that cut the call but not the result."""
    cutting = split["batch"] + split["heads"]

    def missing(x: Any, names: Axes) -> tuple[str, ...]:
        return tuple(set(cutting).difference(*(over for over in _spec(split, x, names) if over)))

    return _map_results(missing, walk, results)


def _run_part(walk: _Walk, sums: Any, *arrays: Any) -> Any:
    results = walk(*vary_alike(arrays))
    return jax.tree.map(lambda x, over: lax.psum(x, over) if over else x, results, sums)


# Cutting by the compiler


@functools.partial(custom_partitioning, static_argnums=(0, 1))
def _cut_by_compiler(walk: _Walk, axes: Any, *arrays: Any) -> Any:
    return walk(*arrays)


def _split_given(mesh: Any, axes: Any, arrays: Arrays) -> Split:
    specs = jax.tree.map(lambda x: x.sharding.spec if isinstance(x.sharding, NamedSharding) else P(), arrays)
    return _find_split(mesh, arrays, axes, specs)


def _place_results(walk: _Walk, axes: Any, mesh: Any, arrays: Arrays, results: Any) -> Any:
    split = _split_given(mesh, axes, arrays)
    return _map_results(lambda x, names: NamedSharding(mesh, _spec(split, x, names)), walk, results)


def _partition(walk: _Walk, axes: Any, mesh: Any, arrays: Arrays, results: Any) -> tuple[Any, Any, Any, Any]:
    split = _split_given(mesh, axes, arrays)
    run = functools.partial(_run_part, walk, _sums(split, walk, results))
    places = jax.tree.map(lambda x, names: NamedSharding(mesh, _spec(split, x, names)), arrays, axes)
    return mesh, run, _place_results(walk, axes, mesh, arrays, results), places


def _sharding_rule(walk: _Walk, axes: Any, mesh: Any, operands: list[Any], results: list[Any]) -> SdyShardingRule:
    """How Shardy carries shardings from array to array: along the batch, and along heads as keys have them."""
    names = _flatten_axes(axes)
    shapes = dict(zip(names, (operand.shape for operand in operands), strict=True))
    factor = functools.partial(_factor, shapes[_QUERIES][2] == shapes[_KEYS][2])
    inputs, outputs = (
        tuple(ArrayMapping(*map(factor, *member)) for member in zip(all_names, (x.shape for x in arrays), strict=True))
        for all_names, arrays in ((names, operands), (_flatten_axes(_RESULTS[walk.name]), results))
    )
    factors = dict.fromkeys(factor for mapping in inputs for factor in mapping)
    whole = tuple(factor for factor in factors if factor in _WHOLE)
    return SdyShardingRule(inputs, outputs, need_replication_factors=whole)


def _factor(one_to_one: bool, name: str, size: int) -> str:
    if size == 1:
        return f"{name}_1"
    # Heads that share key heads stay apart from those: as key heads times group, Shardy would cut an axis of the
    # mesh that is too large for the key heads in two, which JAX cannot read.
    return "heads" if name == "kv_heads" and one_to_one else name


_cut_by_compiler.def_partition(
    partition=_partition, infer_sharding_from_operands=_place_results, sharding_rule=_sharding_rule
)
