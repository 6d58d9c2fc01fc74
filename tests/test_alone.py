"""A call taken out of the program around it: what it takes along, and what keeps it from standing alone."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tune_jax import tune
from tune_jax._alone import Alone, stand_alone, with_names
from tune_jax._binding import make_call
from tune_jax._jax import ShapedArray, shaped
from tune_jax._outline import outline
from tune_jax._records import Failure

X = np.ones((4, 8), np.float32)
PLAIN = tune(lambda x, *, b: x * b, {"b": [1, 2]})
COLLECTIVE = tune(lambda x, *, b: lax.psum(x, "a") * b, {"b": [1, 2]})
LACKED = Failure("trace", "NameError", "Found an unbound axis name: a. To fix this, ...")


def alone_of(function: Any, x: Any, devices: Any = ()) -> Alone:
    call, inputs = make_call(function._tunable, (x,), {})
    return stand_alone(call, [shaped(jax.typeof(value)) for value in inputs], devices)


def inside(mesh: Mesh, look: Any, **options: Any) -> Any:
    """What `look` finds for an argument in a `shard_map` over a mesh."""
    found = []

    def program(x):
        found.append(look(x))
        return x

    jax.jit(jax.shard_map(program, mesh=mesh, in_specs=P("a"), out_specs=P("a"), **options)).trace(X)
    return found[0]


@pytest.fixture
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[2:4]), ("a",), axis_types=(AxisType.Auto,))


def test_a_call_outside_of_everything_is_as_it_was():
    alone = alone_of(PLAIN, X)
    assert (alone.call.mesh, alone.obstacle) == (None, None)
    assert alone.avals == (ShapedArray((4, 8), np.dtype(np.float32)),)


def test_a_call_that_needs_no_names_takes_no_mesh_along(mesh):
    alone = inside(mesh, lambda x: alone_of(PLAIN, x))
    assert (alone.call.mesh, alone.obstacle) == (None, None)
    assert alone.avals[0].shape == (2, 8)


def test_a_call_that_needs_names_takes_their_mesh_along(mesh):
    alone = inside(mesh, lambda x: alone_of(COLLECTIVE, x))
    assert str(alone.call.mesh) == "mesh(a=2 Manual)"
    assert alone.obstacle is None


def test_a_call_that_stands_alone_can_be_traced_anywhere(mesh):
    alone = inside(mesh, lambda x: alone_of(COLLECTIVE, x))
    assert outline(alone.call, alone.avals).avals[0].shape == (2, 8)


def test_the_devices_of_the_program_are_taken(mesh):
    assert inside(mesh, lambda x: alone_of(COLLECTIVE, x, jax.devices()[5:7])).call.mesh.devices == tuple(
        jax.devices()[5:7]
    )


def test_devices_of_another_count_are_not_taken(mesh):
    assert inside(mesh, lambda x: alone_of(COLLECTIVE, x, jax.devices()[5:6])).call.mesh.devices == tuple(
        jax.devices()[:2]
    )


def test_the_devices_of_a_mesh_that_is_set_are_taken(mesh):
    with jax.set_mesh(mesh):
        assert inside(mesh, lambda x: alone_of(COLLECTIVE, x)).call.mesh.devices == tuple(jax.devices()[2:4])


def test_where_no_devices_are_known_those_from_the_default_one_on_are_taken(mesh):
    with jax.default_device(jax.devices()[-1]):
        taken = inside(mesh, lambda x: alone_of(COLLECTIVE, x)).call.mesh.devices
    assert taken == (jax.devices()[-1], jax.devices()[0])


def test_an_explicit_sharding_takes_its_mesh_along():
    mesh = Mesh(np.array(jax.devices()[:2]), ("a",), axis_types=(AxisType.Explicit,))
    alone = alone_of(PLAIN, jax.device_put(X, NamedSharding(mesh, P("a"))))
    assert str(alone.call.mesh) == "mesh(a=2 Explicit)"
    assert alone.avals[0].sharding.spec == P("a", None)


def test_shapes_that_are_left_open_are_an_obstacle():
    open_shape = jax.export.symbolic_shape("n, 8")
    call, _ = make_call(PLAIN._tunable, (X,), {})
    assert stand_alone(call, [ShapedArray(open_shape, np.dtype(np.float32))]).obstacle == "its shapes are left open"


def test_a_name_of_no_mesh_is_an_obstacle():
    found = []
    function = tune(lambda x, *, b: lax.psum(x, "i") * b, {"b": [1, 2]})
    jax.vmap(lambda x: found.append(alone_of(function, jnp.ones(3))), axis_name="i")(X)
    assert found[0].obstacle.startswith("it needs the axis names around it (i), which are not there while tuning;")
    assert found[0].call.mesh is None


@pytest.mark.parametrize(
    ("failures", "expected"),
    [
        ([], None),
        ([Failure("trace", "NameError", "name 'jnp' is not defined")], None),
        ([LACKED], "mesh(a=2 Manual)"),
    ],
    ids=["none", "another name", "axis name"],
)
def test_a_mesh_is_taken_along_later_if_candidates_lacked_its_names(failures, expected, mesh):
    again = inside(mesh, lambda x: with_names(alone_of(PLAIN, x), failures))
    assert (again.call.mesh and str(again.call.mesh)) == expected


def test_no_mesh_is_taken_along_where_there_is_none():
    alone = alone_of(PLAIN, X)
    assert with_names(alone, [LACKED]) is alone
