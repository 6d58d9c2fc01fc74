"""Meshes and placements: what compares, how it reads, and that it is the same in another process."""

from __future__ import annotations

import pickle

import jax
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, Sharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from tune_jax._placement import MeshShape, Placement, mesh_devices, move_aval, placement_of, plain_spec, read_mesh

SHAPE = MeshShape(("a", "b"), (2, 4), (AxisType.Auto, AxisType.Explicit))


def make_mesh(devices):
    return Mesh(np.array(devices).reshape(2, 4), ("a", "b"), axis_types=(AxisType.Auto, AxisType.Explicit))


def test_a_mesh_is_its_axes():
    mesh = make_mesh(jax.devices()[:8])
    assert read_mesh(mesh) == read_mesh(mesh.abstract_mesh) == SHAPE
    assert hash(read_mesh(mesh)) == hash(SHAPE)
    assert read_mesh(mesh).devices == tuple(jax.devices()[:8])
    assert read_mesh(mesh.abstract_mesh).devices == ()


@pytest.mark.parametrize(
    "other",
    [
        MeshShape(("a", "c"), (2, 4), SHAPE.kinds),
        MeshShape(("a", "b"), (4, 2), SHAPE.kinds),
        MeshShape(("a", "b"), (2, 4), (AxisType.Auto, AxisType.Auto)),
    ],
    ids=["name", "size", "kind"],
)
def test_names_sizes_and_kinds_tell_meshes_apart(other):
    assert other != SHAPE
    assert str(other) != str(SHAPE)


def test_devices_tell_no_meshes_apart():
    forward, backward = (read_mesh(make_mesh(jax.devices()[:8][::step])) for step in (1, -1))
    assert forward == backward
    assert forward.devices != backward.devices


def test_a_mesh_reads_well():
    assert str(SHAPE) == "mesh(a=2 Auto, b=4 Explicit)"
    assert SHAPE.size == 8


def test_a_mesh_is_built_as_it_was():
    mesh = make_mesh(jax.devices()[:8][::-1])
    assert read_mesh(mesh).build() == mesh


def test_manual_axes_are_automatic_outside_of_their_shard_map():
    shape = MeshShape(("a", "b"), (1, 2), (AxisType.Manual, AxisType.Explicit), tuple(jax.devices()[:2]))
    assert shape.manual == {"a"}
    assert shape.build().axis_types == (AxisType.Auto, AxisType.Explicit)
    assert SHAPE.manual == frozenset()


def test_a_single_device_is_no_placement():
    first, last = jax.devices()[0], jax.devices()[-1]
    assert placement_of(SingleDeviceSharding(first), (4,)) is placement_of(SingleDeviceSharding(last), (4,)) is None
    assert placement_of(NamedSharding(Mesh(np.array([last]), ("a",)), P("a")), (4,)) is None


def test_a_placement_is_mesh_and_spec():
    found = placement_of(NamedSharding(make_mesh(jax.devices()[:8]), P("a", None)), (4, 4))
    assert found == Placement(SHAPE, P("a"))
    assert str(found) == "mesh(a=2 Auto, b=4 Explicit) " + str(P("a"))


def test_memory_that_is_not_the_devices_own_is_part_of_a_placement():
    mesh = make_mesh(jax.devices()[:8])
    assert placement_of(NamedSharding(mesh, P(), memory_kind="pinned_host"), (4,)) == Placement(
        SHAPE, P(), "pinned_host"
    )
    alone = placement_of(SingleDeviceSharding(jax.devices()[1], memory_kind="pinned_host"), (4,))
    assert str(alone) == "one device pinned_host"
    assert placement_of(NamedSharding(mesh, P(), memory_kind="device"), (4,)) == Placement(SHAPE, P())


class Halves(Sharding):
    """A sharding of a kind that no one knows."""

    memory_kind = None
    device_set = frozenset(jax.devices()[:2])

    def shard_shape(self, global_shape):
        return (global_shape[0] // 2, *global_shape[1:])


def test_another_kind_of_sharding_is_told_in_words_without_an_address():
    found = placement_of(Halves(), (4, 3))
    assert found == placement_of(Halves(), (4, 3))
    assert str(found) == "Halves of [2, 3] on each of 2 devices"


@pytest.mark.parametrize(
    ("spec", "short"),
    [
        (P(None, None), P()),
        (P("a", None), P("a")),
        (P(("a",), "b"), P("a", "b")),
        (P(("a", "b")), P(("a", "b"))),
        (P(None, "b", ()), P(None, "b")),
        (P("a", unreduced={"b"}), P("a", unreduced={"b"})),
    ],
)
def test_a_spec_is_written_in_one_way(spec, short):
    assert plain_spec(spec) == short
    assert str(plain_spec(spec)) == str(short)


def test_a_placement_is_the_same_in_another_process(run_python):
    placement = placement_of(NamedSharding(make_mesh(jax.devices()[:8]), P("a", ("b",))), (4, 4))
    done = run_python(
        f"""
        import jax, pickle
        came = pickle.loads({pickle.dumps(Placement(SHAPE, P("a", "b")))!r})
        from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec as P
        from tune_jax._placement import placement_of
        import numpy as np
        devices = np.array(jax.devices()).reshape(2, 4)
        mesh = Mesh(devices, ("a", "b"), axis_types=(AxisType.Auto, AxisType.Explicit))
        own = placement_of(NamedSharding(mesh, P("a", ("b",))), (4, 4))
        assert own == came
        print(own)
        """
    )
    assert done.stdout.strip() == str(placement)


def test_an_explicit_sharding_moves_to_another_mesh():
    mesh = Mesh(np.array(jax.devices()[:2]), ("a",), axis_types=(AxisType.Explicit,))
    x = jax.device_put(np.ones(4, np.float32), NamedSharding(mesh, P("a")))
    kinds = (AxisType.Explicit, AxisType.Manual)
    other = MeshShape(("a", "b"), (2, 4), kinds, tuple(jax.devices()[:8]))
    moved = move_aval(jax.typeof(x), other)
    assert moved.sharding == NamedSharding(other.build().abstract_mesh, P("a"))
    assert (moved.shape, moved.dtype) == ((4,), np.float32)
    plain = jax.typeof(np.ones(4))
    assert move_aval(plain, other) is plain


def test_the_devices_of_the_mesh_that_is_set_are_in_its_order():
    assert mesh_devices() == ()
    with jax.set_mesh(Mesh(np.array(jax.devices()[3:1:-1]), ("a",))):
        assert mesh_devices() == (jax.devices()[3], jax.devices()[2])
