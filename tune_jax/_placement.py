"""Where values lie, said so that it compares, reads well, and is the same in another process: no devices count."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from tune_jax._jax import ShapedArray, concrete_mesh, is_explicit


@dataclasses.dataclass(frozen=True)
class MeshShape:
    """A mesh as its axes: names, sizes and kinds. `devices`, in the mesh's order, tell no two apart."""

    names: tuple[Hashable, ...]
    sizes: tuple[int, ...]
    kinds: tuple[AxisType, ...]
    devices: tuple[jax.Device, ...] = dataclasses.field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        axes = zip(self.names, self.sizes, self.kinds, strict=True)
        return f"mesh({', '.join(f'{name}={size} {kind.name}' for name, size, kind in axes)})"

    @property
    def size(self) -> int:
        """How many devices the mesh has."""
        return math.prod(self.sizes)

    @property
    def manual(self) -> frozenset[Hashable]:
        """The axes that a `shard_map` around has taken, whose names collectives can use."""
        return frozenset(n for n, kind in zip(self.names, self.kinds, strict=True) if kind is AxisType.Manual)

    def build(self) -> Mesh:
        """The mesh over its devices, as it is outside of the `shard_map` that made axes manual."""
        kinds = tuple(AxisType.Auto if kind is AxisType.Manual else kind for kind in self.kinds)
        return Mesh(np.reshape(np.array(self.devices, object), self.sizes), self.names, axis_types=kinds)


@dataclasses.dataclass(frozen=True)
class Placement:
    """How a value is laid out: over which mesh and how, and in what memory if not the device's default one.

    Without a mesh, `spec` says it in words.
    """

    mesh: MeshShape | None
    spec: PartitionSpec | str
    memory: str | None = None

    def __str__(self) -> str:
        return " ".join(str(part) for part in (self.mesh, self.spec, self.memory) if part is not None)


def move_aval(aval: Any, mesh: MeshShape) -> Any:
    """An abstract value with its explicit sharding, if it has one, on a mesh with the axes of its own."""
    if not is_explicit(aval):
        return aval
    sharding = NamedSharding(mesh.build().abstract_mesh, aval.sharding.spec)
    return ShapedArray(aval.shape, aval.dtype, weak_type=aval.weak_type, sharding=sharding)


def mesh_devices() -> tuple[jax.Device, ...]:
    """The devices of the mesh of `jax.set_mesh`, in its order."""
    mesh = concrete_mesh()
    return () if mesh.empty else tuple(mesh.devices.flat)


def read_mesh(mesh: Mesh | AbstractMesh) -> MeshShape:
    """The shape of a mesh, with its devices if it has any."""
    devices = tuple(mesh.devices.flat) if isinstance(mesh, Mesh) else ()
    return MeshShape(tuple(mesh.axis_names), tuple(mesh.axis_sizes), tuple(mesh.axis_types), devices)


def placement_of(sharding: Sharding, shape: Sequence[int]) -> Placement | None:
    """The placement of a value of this shape; None for the default memory of a single device."""
    memory = _special_memory(sharding)
    if len(sharding.device_set) == 1:
        return None if memory is None else Placement(None, "one device", memory)
    if isinstance(sharding, NamedSharding):
        return Placement(read_mesh(sharding.mesh), plain_spec(sharding.spec), memory)
    count, local = len(sharding.device_set), list(sharding.shard_shape(tuple(shape)))
    return Placement(None, f"{type(sharding).__name__} of {local} on each of {count} devices", memory)


def plain_spec(spec: PartitionSpec) -> PartitionSpec:
    """The shortest way to write a spec: without trailing None, and with a name instead of a tuple of one."""
    parts = [_plain_part(part) for part in spec.partitions]
    while parts and parts[-1] is None:
        parts.pop()
    plain: PartitionSpec = spec.update(partitions=tuple(parts))
    return plain


def _plain_part(part: Any) -> Any:
    if not isinstance(part, tuple):
        return part
    return part if len(part) > 1 else next(iter(part), None)


def _special_memory(sharding: Sharding) -> str | None:
    kind = sharding.memory_kind
    device: Any = next(iter(sharding.device_set))
    return None if kind is None or kind == device.default_memory().kind else kind
