"""Tuned functions on meshes of eight devices: collectives, shardings, and which devices a tuning touches."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tune_jax
from tune_jax import _lookup as lookup
from tune_jax._build.programs import Program
from tune_jax._errors import OptionError
from tune_jax._lookup import memory_of

pytestmark = pytest.mark.usefixtures("quick_tuning")

X = np.linspace(-1.0, 2.0, 32, dtype=np.float32).reshape(4, 8)
WIDE = np.linspace(-1.0, 2.0, 64, dtype=np.float32).reshape(8, 8)


def tuned(function: Callable[..., Any], **options: Any) -> Any:
    """Tune over a factor that does not change what the function computes."""
    return tune_jax.tune(function, {"factor": [1, 2]}, progress=False, **options)


def make_mesh(shape: dict[str, int], kind: AxisType = AxisType.Auto, *, first: int = 0) -> Mesh:
    count = int(np.prod(list(shape.values())))
    devices = np.array(jax.devices()[first : first + count]).reshape(list(shape.values()))
    return Mesh(devices, tuple(shape), axis_types=(kind,) * len(shape))


@pytest.fixture
def mesh() -> Mesh:
    return make_mesh({"a": 2, "b": 4})


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """The ids of the devices of each launch of a candidate."""
    seen: list[tuple[int, ...]] = []
    launch = Program.launch

    def note(self: Program, inputs: Sequence[Any]) -> None:
        leaves = jax.tree.leaves(self.compiled.output_shardings)
        seen.append(tuple(sorted(device.id for device in leaves[0].device_set)))
        launch(self, inputs)

    monkeypatch.setattr(Program, "launch", note)
    return seen


def keys_of(function: Any) -> list[Any]:
    return list(memory_of(function._tunable).results)


def same(came: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(came), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)
        assert one.sharding.is_equivalent_to(other.sharding, one.ndim)


def agree(transform: Callable[..., Any], function: Callable[..., Any], *args: Any) -> list[Any]:
    """Check that a program gives the same with a function and with the tuned one, whose keys are returned."""
    candidate = tuned(function)
    same(transform(candidate)(*args), transform(function)(*args))
    assert all(len(results.timed) == 2 for results in memory_of(candidate._tunable).results.values())
    return keys_of(candidate)


def over(mesh: Mesh | None, *, specs: Any = None, **options: Any) -> Callable[..., Any]:
    """A transformation: `shard_map` over a mesh, under jit; by default the first dimension is split over `a`."""
    where = {} if mesh is None else {"mesh": mesh}
    specs = P("a") if specs is None else specs

    def transform(function: Callable[..., Any]) -> Callable[..., Any]:
        return jax.jit(jax.shard_map(function, in_specs=specs, out_specs=specs, **where, **options))

    return transform


# Collectives

COLLECTIVES = {
    "psum": lambda x: lax.psum(x, "a") + x,
    "pmax": lambda x: lax.pmax(x, "a") * x,
    "psum over two axes": lambda x: lax.psum(x, ("a", "b")) + x,
    "all_gather": lambda x: lax.all_gather(x, "a").sum(0) + x,
    "all_gather tiled": lambda x: lax.all_gather(x, "a", tiled=True)[: x.shape[0]] + x,
    "ppermute": lambda x: lax.ppermute(x, "a", [(0, 1), (1, 0)]),
    "axis_index": lambda x: x + lax.axis_index("a"),
    "axis_size": lambda x: x + lax.axis_size("b"),
    "psum_scatter": lambda x: lax.psum_scatter(x, "b", scatter_dimension=0, tiled=True).sum() + x,
    "all_to_all": lambda x: lax.all_to_all(x, "a", 0, 0, tiled=True),
    "scan with a carry that varies": lambda x: lax.scan(lambda c, row: (c + lax.psum(row, "a"), c), x[0], x)[1],
    "loop": lambda x: lax.fori_loop(0, 3, lambda i, v: lax.ppermute(v, "a", [(0, 1), (1, 0)]) * 0.5, x),
    "no input": lambda x: jnp.sin(x) + lax.axis_index(("a", "b")).astype(x.dtype),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_tuned_over_the_mesh(name, check_vma, mesh, launches):
    def function(x, *, factor=1):
        return COLLECTIVES[name](x) * factor / factor

    (key,) = agree(over(mesh, specs=P("a", "b"), check_vma=check_vma), function, WIDE)
    assert [aval.shape for aval in key.avals] == [(4, 2)]
    assert str(key.call.mesh) == "mesh(a=2 Manual, b=4 Manual)"
    assert set(launches) == {tuple(range(8))}


def ring(x, *, factor=1):
    return (lax.psum(jnp.sin(x), "a") + x) * factor / factor


def plain(x, *, factor=1):
    return jnp.sin(x) * factor / factor


def test_what_needs_no_mesh_is_timed_on_one_device(mesh, launches):
    (key,) = agree(over(mesh), plain, X)
    assert key.call.mesh is None
    assert set(launches) == {(0,)}


def test_what_needs_no_mesh_is_timed_on_all_devices_of_a_mesh_that_is_set(mesh, launches):
    with jax.set_mesh(mesh):
        (key,) = agree(over(None), plain, X)
    assert key.call.mesh is None
    assert set(launches) == {tuple(range(8))}


def test_a_mesh_that_is_set_is_the_one_that_is_used(launches):
    with jax.set_mesh(make_mesh({"a": 2}, first=3)):
        agree(over(None), ring, X)
    assert set(launches) == {(3, 4)}


def test_a_mesh_that_is_given_is_the_one_that_is_used(launches):
    agree(over(make_mesh({"a": 2}, first=5)), ring, X)
    assert set(launches) == {(5, 6)}


def test_an_abstract_mesh_takes_the_devices_of_the_program(launches):
    mesh = make_mesh({"a": 2}, first=2)
    x = jax.device_put(X, NamedSharding(mesh, P("a")))
    agree(over(mesh.abstract_mesh), ring, x)
    assert set(launches) == {(2, 3)}


def test_an_eager_shard_map_is_tuned_over_its_mesh(mesh, launches):
    (key,) = agree(lambda f: jax.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P("a")), ring, X)
    assert key.avals[0].shape == (2, 8)
    assert set(launches) == {tuple(range(8))}


def test_no_tracer_is_kept_from_a_mesh(mesh):
    with jax.checking_leaks():
        over(mesh)(tuned(ring))(X)
        over(mesh)(TRANSFORMED["vmap inside"](tuned(ring)))(X)
        over(mesh, check_vma=False)(TRANSFORMED["grad inside"](tuned(ring)))(X)


def test_a_collective_over_an_axis_of_its_own_and_one_of_the_mesh(mesh):
    def function(x, *, factor=1):
        return jax.vmap(lambda row: lax.psum(row, ("a", "i")) + row, axis_name="i")(x) * factor / factor

    # JAX itself refuses names of its own under check_vma.
    (key,) = agree(over(mesh, check_vma=False), function, X)
    assert key.call.mesh.names == ("a", "b")


TRANSFORMED = {
    "grad inside": lambda f: lambda x: jax.grad(lambda x: f(x).sum())(x),
    "vmap inside": lambda f: lambda x: jax.vmap(f)(x),
    "vmap inside with a name": lambda f: lambda x: jax.vmap(f, axis_name="i")(x),
    "scan inside": lambda f: lambda x: lax.scan(lambda c, row: (c + f(row), c), x[0] * 0, x)[1],
    "checkpoint inside": lambda f: lambda x: jax.checkpoint(f)(x),
    "jvp inside": lambda f: lambda x: jax.jvp(f, (x,), (x,))[1],
    "jit inside": lambda f: lambda x: jax.jit(f)(x) + f(x),
    "grad of a checkpoint inside": lambda f: lambda x: jax.grad(lambda x: jax.checkpoint(f)(x).sum())(x),
    "twice": lambda f: lambda x: f(f(x)),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", TRANSFORMED)
def test_a_transformed_collective_is_tuned_over_the_mesh(name, check_vma, mesh, launches):
    keys = agree(lambda f: over(mesh, check_vma=check_vma)(TRANSFORMED[name](f)), ring, X)
    assert {str(key.call.mesh) for key in keys} == {"mesh(a=2 Manual, b=4 Manual)"}
    assert len(keys) == 1


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_collective_is_tuned_with_its_backward_pass_on_the_mesh(check_vma, mesh, launches):
    def program(f):
        return over(mesh, check_vma=check_vma)(lambda x: jax.grad(lambda x: f(x).sum())(x))

    function = tuned(ring, with_vjp=True)
    same(program(function)(X), program(ring)(X))
    (key,) = keys_of(function)
    assert (key.call.moving, str(key.call.mesh)) == ((0,), "mesh(a=2 Manual, b=4 Manual)")
    assert len(function.results.timed) == 2
    assert set(launches) == {tuple(range(8))}


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit])
def test_an_explicit_sharding_is_tuned_with_its_backward_pass(transform, launches):
    mesh = make_mesh({"a": 2}, AxisType.Explicit, first=2)
    x = jax.device_put(X, NamedSharding(mesh, P("a")))
    function = tuned(plain, with_vjp=True)
    same(*(transform(lambda x, f=f: jax.vjp(f, x)[1](x)[0])(x) for f in (function, plain)))
    # Where a derivative is taken inside a jit, the devices are not known yet.
    assert set(launches) == {(0, 1) if transform is jax.jit else (2, 3)}
    (key,) = keys_of(function)
    assert key.call.moving == (0,)
    assert [place.spec for place in key.placement] == [P("a")]
    assert len(function.results.timed) == 2


AROUND = {
    "grad": lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
    "eager grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "vmap": lambda f: jax.jit(jax.vmap(f)),
    "vmap with a name": lambda f: jax.jit(jax.vmap(f, axis_name="i")),
    "vmap over a mesh axis": lambda f: jax.jit(jax.vmap(f, spmd_axis_name="b")),
    "jvp": lambda f: jax.jit(lambda x: jax.jvp(f, (x,), (x,))[1]),
    "checkpoint": lambda f: jax.jit(jax.grad(lambda x: jax.checkpoint(f)(x).sum())),
    "scan": lambda f: jax.jit(lambda x: lax.scan(lambda c, _: (f(c), None), x, None, length=2)[0]),
}


@pytest.mark.parametrize("name", AROUND)
def test_a_shard_map_inside_a_transformation_is_tuned_over_its_mesh(name, mesh):
    x = np.stack([X, X + 1, X - 1, X]) if "vmap" in name else X
    keys = agree(lambda f: AROUND[name](jax.shard_map(f, mesh=mesh, in_specs=P("a"), out_specs=P("a"))), ring, x)
    assert {str(key.call.mesh) for key in keys} == {"mesh(a=2 Manual, b=4 Manual)"}
    assert len(keys) == 1


def test_a_collective_over_a_vmap_and_a_mesh_axis(mesh):
    def both(x, *, factor=1):
        return (lax.psum(lax.psum(x, "i"), "a") + x) * factor / factor

    (key,) = agree(lambda f: over(mesh, check_vma=False)(lambda x: jax.vmap(f, axis_name="i")(x)), both, X)
    assert [(batch.size, batch.dims) for batch in key.call.batches] == [(2, (0,))]
    assert key.call.mesh.names == ("a", "b")


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("is_set", [True, False])
def test_a_mesh_may_be_manual_in_part(kind, is_set, launches):
    mesh = make_mesh({"a": 2, "b": 4}, kind)
    x = jax.device_put(X, NamedSharding(mesh, P("a", "b")))
    with jax.set_mesh(mesh):
        (key,) = agree(over(None if is_set else mesh, axis_names={"a"}), ring, x)
    assert str(key.call.mesh) == f"mesh(a=2 Manual, b=4 {kind.name})"
    assert set(launches) == {tuple(range(8))}
    split = None if kind is AxisType.Auto else P(None, "b")
    assert (key.placement[0].spec if key.placement else None) == (P() if split is None else split)


def test_a_shard_map_inside_a_shard_map(mesh):
    def both(x, *, factor=1):
        return (lax.psum(x, ("a", "b")) + x) * factor / factor

    def nested(f):
        inner = jax.shard_map(f, in_specs=P(None, "b"), out_specs=P(None, "b"), axis_names={"b"})
        return jax.jit(jax.shard_map(inner, mesh=mesh, in_specs=P("a"), out_specs=P("a"), axis_names={"a"}))

    (key,) = agree(nested, both, X)
    assert key.avals[0].shape == (2, 2)
    assert str(key.call.mesh) == "mesh(a=2 Manual, b=4 Manual)"


def test_several_inputs_and_outputs_and_numbers(mesh):
    def function(x, scale, table, *, factor=1):
        total = lax.psum(x * scale, "a") * factor / factor
        return {"total": total + x, "rows": (table["w"] * x * lax.axis_index("a"), None)}

    table = {"w": np.ones(8, np.float32)}
    (key,) = agree(lambda f: over(mesh)(lambda x: f(x, 2, table)), function, X)
    assert {aval.shape for aval in key.avals} == {(2, 8), (), (8,)}


def test_a_function_without_inputs_is_tuned_over_the_mesh(mesh, launches):
    def function(*, factor=1):
        return jnp.ones((2, 8)) * lax.axis_index("a") * factor / factor

    agree(lambda f: over(mesh)(lambda x: x + f()), function, X)
    assert set(launches) == {tuple(range(8))}


def test_a_tuned_collective_inside_a_tuned_collective(mesh):
    inner = tuned(ring)

    def outer(x, *, factor=1):
        return (inner(x) + lax.psum(x, "b")) * factor / factor

    came = over(mesh)(tuned(outer))(X)
    same(came, over(mesh)(lambda x: ring(x) + lax.psum(x, "b"))(X))
    assert len(keys_of(inner)) == 1


def test_a_tuned_function_may_hold_the_shard_map(mesh):
    def function(x, *, factor=1):
        return jax.shard_map(ring, mesh=mesh, in_specs=P("a"), out_specs=P("a"))(x) * factor / factor

    (key,) = agree(jax.jit, function, X)
    assert key.call.mesh is None


# Keys


def test_each_mesh_and_none_has_its_own_key(count_tunings):
    function = tuned(lambda x, *, factor: jnp.sin(x) * factor / factor)
    collective = tuned(ring)
    for shape in ({"a": 2}, {"a": 4}, {"a": 2, "b": 4}, {"a": 2, "c": 4}):
        x = np.ones((2 * shape["a"], 8), np.float32)
        for _ in range(2):
            over(make_mesh(shape))(collective)(x)
            over(make_mesh(shape))(function)(x)
    function(np.ones((2, 8), np.float32))
    assert len(keys_of(collective)) == 4
    assert len({str(key) for key in keys_of(collective)}) == 4
    assert len(keys_of(function)) == 1
    assert count_tunings() == 5


def test_the_same_mesh_over_other_devices_shares_the_tuning(count_tunings):
    function = tuned(ring)
    for first in (0, 2, 4):
        over(make_mesh({"a": 2}, first=first))(function)(X)
    assert count_tunings() == 1


def test_a_key_says_its_mesh(mesh):
    (key,) = agree(over(mesh), ring, X)
    assert str(key).startswith("ring(x: float32[2,8]); mesh(a=2 Manual, b=4 Manual); ")


# What cannot be run here


def test_a_mesh_that_does_not_fit_takes_the_first_candidate_and_says_what_to_do(monkeypatch):
    monkeypatch.setattr(lookup.jax, "local_devices", lambda **_: jax.devices()[:1])
    function = tuned(ring)
    traced = over(make_mesh({"a": 2}).abstract_mesh)(function).trace(jax.ShapeDtypeStruct(X.shape, X.dtype))
    with pytest.warns(UserWarning, match=r"needs the mesh\(a=2 Manual\).*only 1 are here; call it in a process"):
        traced.lower(lowering_platforms=("cpu",))
    assert keys_of(function) == []


def test_a_name_that_cannot_be_seen_takes_the_first_candidate_and_says_what_to_do():
    function = tuned(lambda x, *, factor: lax.psum(jnp.sin(x), "i") * factor / factor)
    with pytest.warns(UserWarning, match=r"axis names around it \(i\), .*; take derivatives outside of the vmap"):
        jax.vmap(jax.grad(lambda x: function(x).sum()), axis_name="i")(X)


# Shardings


@pytest.fixture
def explicit() -> Mesh:
    return make_mesh({"a": 2, "b": 4}, AxisType.Explicit)


def specs_of(key: Any) -> list[Any]:
    return [place and place.spec for place in key.placement]


def matmul(x, y, *, factor=1):
    return jnp.sin(x @ y) * factor / factor


@pytest.mark.parametrize("is_set", [True, False])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, lambda f: jax.jit(lambda x, y: f(x, y) + 1)])
def test_explicit_shardings_are_tuned_with_and_in_the_key(transform, is_set, explicit, launches):
    x, y = (jax.device_put(v, NamedSharding(explicit, spec)) for v, spec in ((X, P("a")), (X.T, P(None, "b"))))
    with jax.set_mesh(explicit if is_set else Mesh((), ())) if is_set else contextlib.nullcontext():
        (key,) = agree(transform, matmul, x, y)
    assert specs_of(key) == [P("a"), P(None, "b")]
    assert set(launches) == {tuple(range(8))}


def test_explicit_shardings_share_a_key_eager_and_under_jit(explicit, count_tunings):
    x = jax.device_put(X, NamedSharding(explicit, P("a")))
    function = tuned(plain)
    jax.jit(lambda x: function(x) + 1)(x)
    function(x)
    function.tune(x)
    assert function.results_for(x) is not None
    assert count_tunings() == 1


def test_each_explicit_sharding_has_its_own_key(explicit, count_tunings):
    function = tuned(plain)
    program = jax.jit(lambda x: function(x) + 1)
    for spec in (P("a"), P("b"), P(None, "a"), P(("a", "b")), P(), P("a")):
        program(jax.device_put(np.ones((8, 8), np.float32), NamedSharding(explicit, spec)))
    program(np.ones((8, 8), np.float32))
    assert count_tunings() == 6
    assert len({str(key) for key in keys_of(function)}) == 6


def test_a_function_may_speak_of_explicit_axes(explicit):
    def function(x, *, factor=1):
        assert jax.typeof(x).sharding.spec == P("a", None)
        return jax.sharding.reshard(x * factor / factor, P(None, "b"))

    x = jax.device_put(X, NamedSharding(explicit, P("a", None)))
    with jax.set_mesh(explicit):
        for transform in (lambda f: f, jax.jit, lambda f: jax.jit(lambda x: f(x) * 2)):
            (key,) = agree(transform, function, x)
            assert specs_of(key) == [P("a")]


def test_explicit_shardings_under_grad_and_vmap(explicit):
    x = jax.device_put(X, NamedSharding(explicit, P("a")))
    with jax.set_mesh(explicit):
        (key,) = agree(lambda f: jax.jit(jax.grad(lambda x: f(x).sum())), plain, x)
        assert specs_of(key) == [P("a")]
        (key,) = agree(lambda f: jax.jit(jax.vmap(f)), plain, x)
        assert specs_of(key) == [P("a")]


def test_explicit_shardings_of_devices_that_are_not_the_first(launches):
    mesh = make_mesh({"a": 2}, AxisType.Explicit, first=4)
    x = jax.device_put(X, NamedSharding(mesh, P("a")))
    agree(lambda f: jax.jit(lambda x: f(x) + 1), plain, x)
    assert set(launches) == {(4, 5)}


@pytest.mark.parametrize("value", ["numpy", "uncommitted", "sharded"])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, lambda f: jax.jit(lambda x: f(x) + 1), jax.vmap, jax.grad])
def test_an_automatic_mesh_simply_works(transform, value, mesh):
    x = {
        "numpy": X,
        "uncommitted": jnp.asarray(X),
        "sharded": jax.device_put(X, NamedSharding(mesh, P("a"))),
    }[value]
    function = (lambda x, *, factor=1: jnp.sin(x).sum() * factor / factor) if transform is jax.grad else plain
    with jax.set_mesh(mesh):
        (key,) = agree(transform, function, x)
    is_seen = value == "sharded" and (transform is not jax.jit)
    assert key.call.mesh is None
    assert is_seen or value == "sharded" or key.placement == ()


def test_shardings_on_automatic_axes_are_in_the_key_where_they_are_seen(mesh, count_tunings):
    function = tuned(plain)
    x = jax.device_put(X, NamedSharding(mesh, P("a")))
    function(x)
    function(X)
    jax.jit(lambda x: function(x) + 1)(x)
    assert [specs_of(key) for key in keys_of(function)] == [[P("a")], []]
    assert count_tunings() == 2


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_specs_take_the_mesh_that_is_set_at_each_call(kind):
    function = tuned(plain, in_shardings=P("a"), out_shardings=P(None, "a"))
    for mesh in (make_mesh({"a": 2}, kind), make_mesh({"a": 4}, kind), make_mesh({"a": 2}, kind, first=6)):
        with jax.set_mesh(mesh):
            out = function(X)
        np.testing.assert_allclose(out, np.sin(X), rtol=2e-5)
        assert out.sharding.is_equivalent_to(NamedSharding(mesh, P(None, "a")), 2)
    assert [str(key.placement[0]) for key in keys_of(function)] == [
        f"mesh(a=2 {kind.name}) P('a',)",
        f"mesh(a=4 {kind.name}) P('a',)",
    ]


def test_specs_without_a_mesh_are_an_error_that_says_what_to_do():
    with pytest.raises(RuntimeError, match=r"You can define a context mesh via `jax.set_mesh\(mesh\)`"):
        tuned(plain, in_shardings=P("a"))(X)
    with pytest.raises(OptionError, match=r"no mesh is set; make the call under jax.set_mesh"):
        jax.jit(tuned(plain, in_shardings=P("a")))(X)


def test_specs_hold_where_a_derivative_is_taken_under_jit(mesh):
    function = tuned(plain, in_shardings=P("a"))
    with jax.set_mesh(mesh):
        came = jax.jit(jax.grad(lambda x: function(x).sum()))(X)
    np.testing.assert_allclose(came, np.cos(X), rtol=2e-5)
    assert [specs_of(key) for key in keys_of(function)] == [[P("a")]]


def test_shardings_asked_for_are_those_that_are_timed_under_jit(mesh, launches):
    function = tuned(plain, in_shardings=NamedSharding(mesh, P("a", "b")))
    came = jax.jit(lambda x: function(x) + 1)(X)
    np.testing.assert_allclose(came, np.sin(X) + 1, rtol=2e-5)
    assert set(launches) == {tuple(range(8))}
    assert [specs_of(key) for key in keys_of(function)] == [[P("a", "b")]]


@pytest.mark.parametrize("transform", [jax.vmap, lambda f: jax.jit(jax.vmap(f)), lambda f: jax.vmap(jax.jit(f))])
def test_shardings_asked_for_hold_for_each_of_a_batch(transform, mesh, launches):
    function = tuned(plain, in_shardings=NamedSharding(mesh, P("a", "b")), out_shardings=NamedSharding(mesh, P("a")))
    x = np.stack([X, X + 1, X + 2])
    np.testing.assert_allclose(transform(function)(x), np.sin(x), rtol=2e-5, atol=1e-6)
    assert set(launches) == {tuple(range(8))}
    assert [specs_of(key) for key in keys_of(function)] == [[P(None, "a", "b")]]


def test_shardings_asked_for_say_nothing_inside_a_shard_map(mesh):
    function = tuned(ring, in_shardings=NamedSharding(mesh, P("a")), out_shardings=NamedSharding(mesh, P("a")))
    same(over(mesh)(function)(X), over(mesh)(ring)(X))
    assert [len(results.timed) for results in memory_of(function._tunable).results.values()] == [2]


def test_examples_have_their_own_shardings(mesh, launches):
    example = jax.device_put(X, NamedSharding(mesh, P("b")))
    function = tuned(plain, example_args=(example,))
    np.testing.assert_allclose(jax.jit(lambda x: function(x) + 1)(X), np.sin(X) + 1, rtol=2e-5)
    function(jax.device_put(X, NamedSharding(mesh, P("a"))))
    assert [specs_of(key) for key in keys_of(function)] == [[P("b")]]
    assert set(launches) == {tuple(range(8))}


def test_shardings_inside_a_tuned_function_are_its_results(mesh):
    def function(x, *, factor=1):
        return lax.with_sharding_constraint(x * factor / factor, NamedSharding(mesh, P("a", "b")))

    for transform in (
        jax.jit,
        lambda f: jax.jit(lambda x: f(x) + 1),
        lambda f: jax.jit(jax.grad(lambda x: f(x).sum())),
    ):
        agree(transform, function, X)
    agree(lambda f: jax.jit(jax.vmap(f)), function, np.stack([X, X]))
    assert tuned(function)(X).sharding.is_equivalent_to(NamedSharding(mesh, P("a", "b")), 2)


def test_a_callback_inside_a_tuned_function_runs_for_each_device(mesh):
    def function(x, *, factor=1):
        shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
        return jax.pure_callback(np.sin, shape, x, vmap_method="expand_dims") * factor / factor

    agree(lambda f: jax.jit(lambda x: f(x)), function, jax.device_put(X, NamedSharding(mesh, P())))


def test_programs_over_two_meshes_of_the_same_devices(mesh):
    other = make_mesh({"c": 8})
    x = jax.device_put(WIDE, NamedSharding(mesh, P("a", "b")))
    y = jax.device_put(WIDE, NamedSharding(other, P("c")))
    agree(lambda f: jax.jit(lambda x, y: f(x, y) + 1), matmul, x, y)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_struct_with_a_sharding_stands_for_an_array_that_has_it(kind, count_tunings):
    sharding = NamedSharding(make_mesh({"a": 2, "b": 4}, kind), P("a"))
    struct, function = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding), tuned(plain)
    function.tune(struct)
    function.lower(struct)
    function(jax.device_put(X, sharding))
    assert function.results_for(struct) is not None
    assert [specs_of(key) for key in keys_of(function)] == [[P("a")]]
    assert count_tunings() == 1


def test_a_struct_on_a_mesh_without_devices_is_tuned_on_one_of_that_shape(explicit, launches):
    sharding = NamedSharding(explicit.abstract_mesh, P("a"))
    tuned(plain).tune(jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding))
    assert set(launches) == {tuple(range(8))}


def test_lowering_for_a_mesh_without_devices_tunes_on_one_of_that_shape(explicit, launches):
    struct = jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=NamedSharding(explicit.abstract_mesh, P("a")))
    text = jax.jit(tuned(plain)).trace(struct).lower(lowering_platforms=("cpu",)).as_text()
    assert "sine" in text
    assert set(launches) == {tuple(range(8))}


# Devices


def devices_with_arrays() -> set[int]:
    return {device.id for array in jax.live_arrays() for device in array.devices()}


CONTEXTS = {
    "committed": (lambda: contextlib.nullcontext(), True),
    "default device": (lambda: jax.default_device(jax.devices()[3]), False),
    "mesh that is set": (lambda: jax.set_mesh(Mesh(np.array([jax.devices()[3]]), ("a",))), False),
    "committed, another default": (lambda: jax.default_device(jax.devices()[5]), True),
}
PROGRAMS = {
    "eager": lambda f: f,
    "jit": lambda f: jax.jit(lambda x: f(x) + 1),
    "jit of jit": lambda f: jax.jit(jax.jit(f)),
    "grad": lambda f: jax.grad(lambda x: f(x).sum()),
    "vmap": jax.vmap,
    "jit of vmap": lambda f: jax.jit(jax.vmap(f)),
    "scan": lambda f: jax.jit(lambda x: lax.scan(lambda c, row: (c, f(row)), 0, x)[1]),
    "tune": lambda f: lambda x: (getattr(f, "tune", lambda _: None)(x), f(x))[1],
    "lower": lambda f: lambda x: jax.jit(f).lower(x).compile()(x),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("context", CONTEXTS)
def test_all_is_done_on_the_device_of_the_call(context, program, launches, monkeypatch):
    where, is_committed = CONTEXTS[context]
    there = jax.devices()[3]
    placed: list[Any] = []
    device_put = jax.device_put

    def note(value, *args, **options):
        out = device_put(value, *args, **options)
        placed.extend(out.devices())
        return out

    with where():
        x = jax.device_put(X, there) if is_committed else X
        monkeypatch.setattr(jax, "device_put", note)
        out = PROGRAMS[program](tuned(plain))(x)
    assert out.devices() == {there}
    assert set(launches) == {(3,)}
    assert set(placed) <= {there}


@pytest.mark.parametrize("context", ["default device", "mesh that is set"])
@pytest.mark.parametrize("program", [lambda f: f, jax.jit, lambda f: jax.jit(lambda: f() + 1)])
def test_a_function_without_arguments_is_tuned_on_the_device_of_the_context(context, program, launches):
    with CONTEXTS[context][0]():
        assert program(tuned(lambda *, factor: jnp.arange(8.0) * factor / factor))().devices() == {jax.devices()[3]}
    assert set(launches) == {(3,)}


def test_inputs_of_which_one_is_committed_are_tuned_where_it_is(launches):
    function = tuned(matmul)
    there = jax.devices()[2]
    assert function(jax.device_put(X, there), X.T).devices() == {there}
    assert jax.jit(lambda x, y: function(x, y) + 1)(X, jax.device_put(X.T, there)).devices() == {there}
    assert set(launches) == {(2,)}


def test_made_up_data_goes_nowhere_but_to_its_device(launches):
    there = make_mesh({"a": 2}, first=6)
    function = tuned(plain, in_shardings=NamedSharding(there, P("a")))
    before = devices_with_arrays()
    seen: set[int] = set()
    launch = Program.launch
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Program, "launch", lambda s, i: (seen.update(devices_with_arrays()), launch(s, i))[1])
        function.tune(jax.ShapeDtypeStruct((4, 8), np.float32))
    assert seen - before <= {6, 7}
    assert set(launches) <= {(6, 7)}


def test_the_callers_default_device_is_as_it_was():
    with jax.default_device(jax.devices()[2]):
        tuned(plain)(jax.device_put(X, jax.devices()[1]))
        assert jnp.zeros(1).devices() == {jax.devices()[2]}
    assert jnp.zeros(1).devices() == {jax.devices()[0]}


# Candidates that differ in what they need


def test_candidates_of_which_only_some_need_the_mesh_are_all_timed_on_it(mesh, count_tunings):
    def function(x, *, factor):
        return lax.psum(jnp.sin(x), "a") / 2 if factor == 2 else jnp.sin(x)

    candidate = tuned(function)
    x = np.concatenate([X[:2], X[:2]])
    for _ in range(2):
        np.testing.assert_allclose(over(mesh, check_vma=False)(candidate)(x), np.sin(x), rtol=2e-5)
    alone, together = (results for results in memory_of(candidate._tunable).results.values())
    assert (len(alone.timed), len(together.timed)) == (1, 2)
    assert count_tunings() == 2


# Two GPUs

two_gpus = pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")


@pytest.mark.gpu
@two_gpus
def test_a_collective_is_timed_by_the_clocks_of_two_gpus(launches):
    (key,) = agree(over(make_mesh({"a": 2})), ring, X)
    assert set(launches) == {(0, 1)}
    assert "a=2 Manual" in str(key)


def spin(counts, x, *, factor=1):
    def step(_, y):
        return jnp.tanh(y @ x)

    return lax.fori_loop(0, counts[0] * factor, step, x)


@pytest.mark.gpu
@two_gpus
def test_the_slowest_of_two_gpus_counts():
    mesh = make_mesh({"a": 2})
    x = jax.device_put(jnp.ones((512, 512)), NamedSharding(mesh, P()))
    medians = {}
    for pair in ((1, 200), (200, 1), (1, 1)):
        counts = jax.device_put(jnp.array(pair), NamedSharding(mesh, P("a")))
        function = tune_jax.tune(
            jax.shard_map(spin, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a")), {}, progress=False
        )
        (row,) = function.tune(counts, x).timed
        assert row.clock == "device"
        medians[pair] = row.median_s
    assert min(medians[1, 200], medians[200, 1]) > 10 * medians[1, 1]
    assert 0.5 < medians[1, 200] / medians[200, 1] < 2


@pytest.mark.gpu
@two_gpus
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, lambda f: jax.jit(lambda x: f(x) + 1)])
def test_a_tuning_on_the_second_gpu_leaves_the_first_alone(transform, launches):
    first, second = jax.devices()[:2]
    x = jax.device_put(np.ones((1024, 1024), np.float32), second)
    jax.device_put(np.ones(1), first).block_until_ready()
    before = first.memory_stats()
    function = tuned(plain)
    assert transform(function)(x).devices() == {second}
    assert set(launches) == {(1,)}
    assert {row.clock for row in function.results.timed} == {"device"}
    after = first.memory_stats()
    assert {name: after[name] for name in ("bytes_in_use", "num_allocs", "peak_bytes_in_use")} == {
        name: before[name] for name in ("bytes_in_use", "num_allocs", "peak_bytes_in_use")
    }
