"""A call taken out of the program around it, so that it can be run on its own: under which mesh, with which inputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from tune_jax._call import Call
from tune_jax._jax import axis_names, is_explicit, outside_traces
from tune_jax._key import default_device
from tune_jax._outline import can_be_traced, first_can_be_traced
from tune_jax._placement import MeshShape, mesh_devices, move_aval, read_mesh
from tune_jax._records import Failure


@dataclasses.dataclass(frozen=True)
class Alone:
    """A call as it can be run on its own, what its inputs are there, and why it cannot be run if it cannot."""

    call: Call
    avals: tuple[Any, ...]
    obstacle: str | None = None


def stand_alone(call: Call, avals: Sequence[Any], devices: Sequence[jax.Device] = ()) -> Alone:
    """Take a call out of its surroundings; `devices` are those of the program around it where JAX says which.

    A call that collectives or explicit shardings tie to a mesh takes that mesh along: over the program's own devices
    where they are known, else over as many of this process's.
    """
    if not all(isinstance(size, int) for aval in avals for size in aval.shape):
        return Alone(call, tuple(avals), "its shapes are left open")
    is_tied = any(map(is_explicit, avals))
    if not is_tied and not axis_names():
        return Alone(call, tuple(avals))
    mesh = _find_mesh(avals, devices)
    if not is_tied and _needs_no_names(call, avals, mesh):
        return Alone(call, tuple(avals))
    return _on_mesh(call, avals, mesh)


def with_names(alone: Alone, failures: Iterable[Failure], devices: Sequence[jax.Device] = ()) -> Alone:
    """The call with the mesh around it too, if that is what some of its candidates lacked; else the same.

    Whether a call needs its mesh is asked of its first candidate, and others may.
    """
    lacked = any(f.error_type == "NameError" and "unbound axis name" in f.message for f in failures)
    if not lacked or alone.call.mesh is not None or not axis_names():
        return alone
    mesh = _on_mesh(alone.call, alone.avals, _find_mesh(alone.avals, devices))
    return alone if mesh.obstacle else mesh


def _on_mesh(call: Call, avals: Sequence[Any], mesh: MeshShape) -> Alone:
    if not mesh.manual and not any(map(is_explicit, avals)):
        return Alone(call, tuple(avals), _describe_names())
    if len(mesh.devices) < mesh.size:
        return Alone(call, tuple(avals), _describe_shortage(mesh))
    moved = tuple(move_aval(aval, mesh) for aval in avals)
    alone = Alone(dataclasses.replace(call, mesh=mesh), moved)
    if axis_names() and not _can_be_run(alone):
        return Alone(call, tuple(avals), _describe_names())
    return alone


def _needs_no_names(call: Call, avals: Sequence[Any], mesh: MeshShape) -> bool:
    with outside_traces():
        return first_can_be_traced(call, avals) if mesh.manual else can_be_traced(call, avals)


def _can_be_run(alone: Alone) -> bool:
    with outside_traces():
        return can_be_traced(alone.call, alone.avals)


def _find_mesh(avals: Sequence[Any], devices: Sequence[jax.Device]) -> MeshShape:
    explicit = (aval.sharding.mesh for aval in avals if is_explicit(aval))
    mesh = read_mesh(next(explicit, jax.sharding.get_abstract_mesh()))
    return dataclasses.replace(mesh, devices=tuple(_choose_devices(mesh.size, devices)))


def _choose_devices(count: int, devices: Sequence[jax.Device]) -> Sequence[jax.Device]:
    """The program's devices, else those of `jax.set_mesh`, else this process's from the default one on."""
    for known in (devices, mesh_devices()):
        if len(known) == count and all(device.process_index == jax.process_index() for device in known):
            return known
    first = default_device()
    local = jax.local_devices(backend=first.platform)
    place = local.index(first)
    return [*local[place:], *local[:place]][:count]


def _describe_shortage(mesh: MeshShape) -> str:
    return (
        f"it needs the {mesh} around it, and of the {mesh.size} devices that takes only {len(mesh.devices)} are here; "
        "call it in a process that has them, or on a smaller mesh"
    )


def _describe_names() -> str:
    return (
        f"it needs the axis names around it ({', '.join(map(str, axis_names()))}), which are not there while tuning; "
        "take derivatives outside of the vmap that gives a name, or tune the function that has the vmap in it"
    )
