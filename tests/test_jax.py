"""Each name of the one door to JAX's internals, on the JAX that is installed."""

from __future__ import annotations

import gc
import pathlib
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tune_jax import _jax

X = np.arange(3, dtype=np.float32)


@pytest.fixture
def double() -> Any:
    """A primitive of one argument that returns it and its double, with every rule that the door can register."""
    primitive = _jax.make_primitive("double")
    primitive.def_impl(lambda x, **params: [x, 2 * x])
    primitive.def_abstract_eval(lambda x, **params: [x, x])
    return primitive


def traced(function: Callable[..., Any], *args: Any) -> Any:
    return jax.jit(function).trace(*args).jaxpr


def inside(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Run `function` on an argument in the middle of a traced program, for what it returns in Python."""

    def run(transform: Callable[..., Any], *args: Any) -> Any:
        found = []

        def program(x):
            found.append(function(x))
            return x

        transform(program)(*args)
        return found[0]

    return run


# Primitives


def test_a_primitive_has_several_results(double):
    assert [list(leaf) for leaf in double.bind(X)] == [[0, 1, 2], [0, 2, 4]]


def test_a_batching_rule_gets_the_axis(double):
    def rule(axis, args, dims):
        assert (axis.size, axis.name, axis.spmd_name, dims) == (3, "i", ("s",), (0,))
        return double.bind(*args), [0, 0]

    _jax.register_batching(double, rule)
    came = jax.vmap(lambda x: double.bind(x), axis_name="i", spmd_axis_name="s")(X)
    np.testing.assert_array_equal(came[1], 2 * X)


@pytest.mark.parametrize(("name", "named"), [(None, False), ("i", True)])
def test_an_axis_tells_whether_it_is_named(double, name, named):
    def rule(axis, args, dims):
        assert _jax.is_named(axis) is named
        return double.bind(*args), [0, 0]

    _jax.register_batching(double, rule)
    jax.vmap(lambda x: double.bind(x), axis_name=name)(X)


def test_values_inside_vmap_tell_whether_they_are_mapped():
    found = []
    jax.vmap(lambda x: found.extend([_jax.is_batched(x), _jax.is_batched(jnp.ones(2)), _jax.is_batched(1.0)]) or x)(X)
    assert found == [True, False, False]


def test_a_sum_over_the_axis_is_not_mapped():
    assert inside(lambda x: _jax.is_batched(lax.psum(x, "i")))(lambda f: jax.vmap(f, axis_name="i"), X) is False


def test_a_jvp_rule_gets_symbolic_zeros(double):
    def rule(primals, tangents):
        assert type(tangents[0]) is not _jax.SymbolicZero
        return double.bind(*primals), [_jax.zero_tangent(primals[0]), 5 * tangents[0]]

    _jax.register_jvp(double, rule)
    _, (first, second) = jax.jvp(lambda x: double.bind(x), (X,), (np.ones_like(X),))
    assert list(first) == [0, 0, 0]
    assert list(second) == [5, 5, 5]


@pytest.mark.parametrize(
    "value", [X, np.arange(3), jax.random.key(0), np.complex64(1)], ids=["float", "int", "key", "complex"]
)
def test_the_zero_of_every_kind_has_a_tangents_type(value):
    zero = _jax.zero_tangent(value)
    assert type(zero) is _jax.SymbolicZero
    assert zero.aval.shape == np.shape(value)


@pytest.mark.parametrize(
    ("value", "takes"),
    [(X, True), (np.complex64(1), True), (np.arange(3), False), (np.bool_(True), False), (jax.random.key(0), False)],
    ids=["float", "complex", "int", "bool", "key"],
)
def test_floats_and_complex_numbers_take_cotangents(value, takes):
    assert _jax.takes_cotangent(jax.typeof(value)) is takes


def test_a_transpose_rule_gets_placeholders(double):
    def rule(cotangents, x):
        assert _jax.is_linear_input(x)
        assert not _jax.is_linear_input(X)
        return [_jax.instantiate(cotangents[0]) + 2 * _jax.instantiate(cotangents[1])]

    _jax.register_transpose(double, rule)
    (came,) = jax.linear_transpose(lambda x: double.bind(x)[1], X)(X)
    assert list(came) == [0, 2, 4]


def test_a_lowering_rule_puts_a_function_in_place(double):
    _jax.register_lowering(double, lambda context, x: _jax.lower_inline(context, lambda x: [x, x + x], [x]))
    assert [list(leaf) for leaf in jax.jit(lambda x: double.bind(x))(X)] == [[0, 1, 2], [0, 2, 4]]


def test_what_is_put_in_place_is_without_dead_code(double):
    def function(x):
        jnp.cos(x)
        return [x, x + x]

    _jax.register_lowering(double, lambda context, x: _jax.lower_inline(context, function, [x]))
    assert "cosine" not in jax.jit(lambda x: double.bind(x)).lower(X).as_text()


def test_what_is_put_in_place_keeps_its_effects(double):
    seen = []

    def function(x):
        jax.debug.callback(lambda x: seen.append(float(x)), x.sum(), ordered=True)
        return [x, x]

    effects = traced(function, X).effects
    double.def_effectful_abstract_eval(lambda x: ([x, x], effects))
    _jax.register_lowering(double, lambda context, x: _jax.lower_inline(context, function, [x]))
    jax.block_until_ready(jax.jit(lambda x: double.bind(x))(X))
    jax.effects_barrier()
    assert seen == [3.0]


@pytest.mark.parametrize("platforms", [("cpu",), ("cuda",), ("cpu", "cuda")])
def test_a_lowering_rule_tells_its_platforms(double, platforms):
    found = []

    def rule(context, x):
        found.append(_jax.lowering_platforms(context))
        return [x, x]

    _jax.register_lowering(double, rule)
    jax.jit(lambda x: double.bind(x)).trace(X).lower(lowering_platforms=platforms)
    assert found == [platforms]


def test_a_parameter_held_weakly_is_let_go_by_jaxs_caches(double):
    class Parameter:
        pass

    _jax.hold_weakly(Parameter)
    parameters = [Parameter()]
    alive = weakref.ref(parameters[0])
    jax.make_jaxpr(lambda x: double.bind(x, parameter=parameters[0]))(X)
    parameters.clear()
    gc.collect()
    gc.collect()
    assert alive() is None


# Traces and their context


def test_tracers_are_told_from_arrays():
    assert inside(lambda x: isinstance(x, _jax.Tracer))(jax.jit, X)
    assert not isinstance(jnp.ones(1), _jax.Tracer)


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.eval_shape], ids=["jit", "vmap", "eval_shape"])
def test_the_trace_state_is_clean_outside_of_transformations_only(transform):
    found = []

    def program(x):
        found.append(_jax.trace_state_clean())
        return x

    transform(program, X) if transform is jax.eval_shape else transform(program)(X)
    assert found == [False]
    assert _jax.trace_state_clean()


CONTEXTS = {
    "x64": lambda: jax.enable_x64(True),
    "precision": lambda: jax.default_matmul_precision("highest"),
    "promotion": lambda: jax.numpy_dtype_promotion("strict"),
    "mesh": lambda: jax.set_mesh(jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_the_trace_context_tells_settings_apart(name):
    before = _jax.trace_context()
    with CONTEXTS[name]():
        assert _jax.trace_context() != before
    assert _jax.trace_context() == before


def test_the_trace_context_tells_axis_sizes_apart():
    found = [inside(lambda x: _jax.trace_context())(lambda f: jax.vmap(f, axis_name="i"), X[:n]) for n in (2, 3, 3)]
    assert found[0] != found[1] == found[2]


@pytest.mark.parametrize("transform", [jax.jit, jax.vmap, jax.grad, jax.checkpoint], ids=lambda f: f.__name__)
def test_programs_run_outside_of_the_ambient_trace(transform):
    def program(x):
        with _jax.outside_traces():
            assert _jax.trace_state_clean()
            value = jax.jit(lambda x: x * 2).lower(X).compile()(X)
        np.testing.assert_array_equal(np.asarray(value), 2 * X)
        return x.sum() * 1.0

    transform(program)(X)


def test_axis_names_are_gone_outside_of_traces_and_back_afterwards():
    def program(x):
        before = _jax.axis_names()
        with _jax.outside_traces():
            inside = _jax.axis_names()
        assert (before, inside, _jax.axis_names()) == (("i",), (), ("i",))
        return lax.psum(x, "i")

    jax.vmap(program, axis_name="i")(X)


def test_outside_of_traces_jit_is_on_and_nan_is_allowed():
    with jax.disable_jit(), jax.debug_nans(True), jax.debug_infs(True), _jax.outside_traces():
        assert not jax.config.jax_disable_jit
        assert np.isnan(jax.jit(lambda x: x / x)(jnp.zeros(()))).all()


def test_an_error_outside_of_traces_leaves_the_trace_as_it_was():
    def program(x):
        with pytest.raises(KeyError), _jax.outside_traces():
            raise KeyError
        assert _jax.axis_names() == ("i",)
        return x

    jax.vmap(program, axis_name="i")(X)
    assert _jax.trace_state_clean()


def test_the_default_device_setting():
    assert _jax.default_device_setting() is None
    with jax.default_device(jax.devices()[1]):
        assert _jax.default_device_setting() == jax.devices()[1]


@pytest.mark.parametrize("name", ["x64", "precision", "promotion"])
def test_settings_tell_what_changes_a_program(name):
    before = _jax.settings()
    with CONTEXTS[name]():
        assert _jax.settings() != before
    assert _jax.settings() == before


# Traced programs and abstract values


def test_inputs_that_are_not_read_are_found():
    assert _jax.used_inputs(traced(lambda x, y, z: (x, z + 1), X, X, X)) == (True, False, True)


def test_an_input_read_by_an_effect_is_used():
    def function(x, y):
        jax.debug.callback(lambda y: None, y)
        return x

    assert _jax.used_inputs(traced(function, X, X)) == (True, True)


def test_what_a_program_closes_over_is_told_if_a_tracer_is_among_it():
    found = []

    def program(w):
        found.append(_jax.closed_over(jax.jit(lambda x: x * w).trace(X)))
        assert found[0][0] is w
        return w

    jax.jit(program)(2.0)
    assert len(found[0]) == 1
    assert _jax.closed_over(jax.jit(lambda x: x * X).trace(X)) == ()


def test_a_traced_program_runs_on_values():
    closed = traced(lambda x, y: (x * y + X, jax.jit(jnp.sin)(y)), X, X)
    product, sine = _jax.eval_closed(closed, [X + 1, X + 2])
    np.testing.assert_allclose(product, (X + 1) * (X + 2) + X)
    np.testing.assert_allclose(sine, np.sin(X + 2), rtol=1e-6)


def test_a_program_traced_under_a_mesh_runs_inside_and_outside_of_it():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))
    found = []

    def program(w):
        found.append(jax.jit(lambda x, w: jax.jit(jnp.sin)(x) * w + jax.jit(jnp.multiply)(x, w)).trace(X, w).jaxpr)
        (inside,) = _jax.eval_closed(found[0], [jnp.asarray(X), w])
        (cast,) = _jax.eval_closed(found[0], [jnp.asarray(X), jnp.asarray(X)])
        assert jax.typeof(cast) == jax.typeof(inside)
        return inside

    out = jax.jit(jax.shard_map(program, mesh=mesh, in_specs=P("i"), out_specs=P("i")))(X)
    np.testing.assert_allclose(out, np.sin(X) * X + X * X, rtol=1e-6)
    assert "pvary" in str(found[0])
    assert _jax.says_what_varies(found[0])
    assert not _jax.says_what_varies(traced(jnp.sin, X))
    (alone,) = _jax.eval_closed(found[0], [X, X])
    np.testing.assert_allclose(alone, out, rtol=1e-6)


def test_a_value_is_made_to_vary_over_a_mesh():
    mesh = jax.make_mesh((1,), ("i",), axis_types=(AxisType.Auto,))

    def program(w):
        assert jax.typeof(_jax.vary_as(jax.typeof(w), X)) == jax.typeof(w)
        assert jax.typeof(_jax.vary_over(("i",), X)) == jax.typeof(w)
        assert _jax.vary_over(("i",), w) is w
        return _jax.vary_over(("i",), X)

    np.testing.assert_array_equal(jax.shard_map(program, mesh=mesh, in_specs=P("i"), out_specs=P("i"))(X), X)


def test_dynamic_bounds_of_grids_are_counted_wherever_they_are():
    def copy(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    def launch(x, size):
        kernel = pl.pallas_call(copy, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(size,), interpret=True)
        return jax.jit(kernel)(x)

    assert _jax.dynamic_grid_bounds(traced(launch, X, 1)) == 1
    assert _jax.dynamic_grid_bounds(traced(lambda x: launch(x, 1), X)) == 0
    assert _jax.dynamic_grid_bounds(traced(lambda x: x, X)) == 0


INSIDE = {
    "jit": (lambda x: jax.jit(jnp.sin)(x), 1, 1),
    "scan": (lambda x: lax.scan(lambda c, v: (c + v, None), 0.0, x)[0], 1, 3),
    "while": (lambda x: lax.while_loop(lambda c: c[0] < 5, lambda c: (c[0] + 1, c[1] + 1), (0, x))[1], 2, 1),
    "cond": (lambda x: lax.cond(x[0] > 0, jnp.sin, jnp.cos, x), 2, 1),
    "checkpoint": (lambda x: jax.checkpoint(jnp.sin)(x), 1, 1),
    "nothing": (jnp.sin, 0, 1),
}


@pytest.mark.parametrize("name", INSIDE)
def test_an_equation_tells_the_programs_inside_and_how_often_they_run(name):
    program, count, times = INSIDE[name]
    *_, equation = traced(program, X).jaxpr.eqns
    parts, repeats = _jax.inner_jaxprs(equation)
    assert (len(parts), repeats) == (count, times)
    assert all(part.eqns for part in parts)


def test_an_equation_tells_the_users_frames():
    def program(x):
        return jnp.sin(x)

    (equation,) = traced(program, X).jaxpr.eqns
    path, line, function = _jax.source_frames(equation.source_info)[0]
    assert path == __file__
    assert line == program.__code__.co_firstlineno + 1
    assert function.endswith("program")


def test_the_current_source_is_the_equations_when_it_is_lowered(double):
    found = []

    def rule(context, x):
        found.extend(_jax.source_frames(_jax.current_source())[:1])
        return [x, x]

    def program(x):
        return double.bind(x)

    _jax.register_lowering(double, rule)
    jax.jit(program).lower(X)
    assert [frame[2].rpartition(".")[2] for frame in found] == ["program"]


AROUND = {
    **CONTEXTS,
    "generator": lambda: jax.default_prng_impl("rbg"),
    "device": lambda: jax.default_device(jax.devices()[3]),
    "abstract mesh": lambda: jax.sharding.use_abstract_mesh(
        jax.sharding.AbstractMesh((2,), ("a",), axis_types=(AxisType.Explicit,))
    ),
}


@pytest.mark.parametrize("name", AROUND)
def test_surroundings_are_come_back_to_and_left(name):
    outside = _jax.surroundings()
    with AROUND[name]():
        inside = _jax.surroundings()
    assert isinstance(inside, _jax.Surroundings)
    assert inside != outside == _jax.surroundings()
    with pytest.raises(KeyError), _jax.restored(inside):
        raise KeyError
    with _jax.restored(inside):
        assert _jax.surroundings() == inside
        with _jax.restored(outside):
            assert _jax.surroundings() == outside
    assert _jax.surroundings() == outside


def test_axis_names_are_come_back_to_and_left():
    around = inside(lambda x: _jax.surroundings())(lambda f: jax.vmap(f, axis_name="i"), X)
    with _jax.restored(around):
        assert _jax.axis_names() == ("i",)
    assert _jax.axis_names() == ()


def test_an_abstract_value_keeps_shape_dtype_and_weak_type():
    assert _jax.shaped(jax.typeof(2.0)) == _jax.ShapedArray((), np.dtype(np.float32), weak_type=True)
    assert _jax.shaped(jax.typeof(jax.random.key(0))).dtype == jax.random.key(0).dtype


def test_a_struct_traces_as_its_abstract_value_does():
    for value in (X, 2.0, 1, jax.random.key(0)):
        (aval,) = traced(lambda x: x, _jax.struct_of(jax.typeof(value))).in_avals
        assert aval == jax.typeof(value)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_struct_traces_as_its_abstract_value_does_in_a_mesh(kind):
    mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,))
    found = []

    def program(x):
        aval = jax.typeof(x)
        found.append((traced(lambda x: x + 1, _jax.struct_of(aval)).out_avals[0], jax.typeof(x + 1)))
        return x

    with jax.set_mesh(mesh):
        x = jax.device_put(np.ones(4, np.float32), jax.NamedSharding(mesh, P("a")))
        jax.jit(program)(x)
        jax.jit(jax.shard_map(program, in_specs=P("a"), out_specs=P("a")))(x)
    assert [came for came, _ in found] == [expected for _, expected in found]
    assert found[0][0] != found[1][0]


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg", "unsafe_rbg"])
def test_a_generator_is_known_by_the_name_that_jax_takes(impl):
    key = jax.random.key(0, impl=impl)
    name = _jax.key_impl_name(key.dtype)
    assert jax.random.wrap_key_data(jax.random.key_data(key), impl=name).dtype == key.dtype


# Jitted functions and lowered programs


def _many(a, b, /, *rest, c, d=1, **more):
    return a


def test_jitted_functions_are_told_from_others():
    assert _jax.is_jitted(jax.jit(_many))
    assert not _jax.is_jitted(_many)
    assert not _jax.is_jitted(jax.vmap(_many))


def test_static_parameters_are_named_however_they_were_declared():
    assert _jax.jit_statics(jax.jit(_many, static_argnums=(1,), static_argnames="d")) == {"b", "d"}
    assert _jax.jit_statics(jax.jit(_many)) == frozenset()


def test_donated_parameters_are_named_however_they_were_declared():
    assert _jax.jit_donations(jax.jit(_many, donate_argnums=0)) == {"a"}
    assert _jax.jit_donations(jax.jit(_many, donate_argnames=("c",))) == {"c"}


def test_compiler_options_are_read_back():
    options = {"xla_embed_ir_in_executable": True}
    assert _jax.jit_compiler_options(jax.jit(_many, compiler_options=options)) == options
    assert _jax.jit_compiler_options(jax.jit(_many)) == {}


def test_a_number_among_variadic_arguments_names_nothing():
    assert _jax.jit_statics(jax.jit(lambda *args: args[0], static_argnums=0)) == frozenset()


def test_a_program_that_names_its_devices_is_told_from_others():
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    placed = traced(jax.shard_map(lambda x: x, mesh=mesh, in_specs=P("a"), out_specs=P("a")), X[:2])
    assert _jax.placed_parts(placed) == (placed.jaxpr,)
    assert _jax.placed_parts(traced(jax.jit(jnp.sin), X)) == ()


@pytest.mark.parametrize("index", [0, 1])
def test_a_lowered_program_tells_its_devices(index):
    device = jax.devices()[index]
    assert _jax.lowered_devices(jax.jit(lambda x: x).lower(jax.device_put(X, device))) == (device.id,)


def test_a_lowered_program_tells_whether_it_calls_back():
    def function(x):
        jax.debug.callback(lambda x: None, x)
        return x

    assert _jax.has_host_callbacks(jax.jit(function).lower(X))
    assert not _jax.has_host_callbacks(jax.jit(lambda x: x).lower(X))


# The profiler


def test_a_trace_that_was_not_stopped_is_forgotten(tmp_path):
    jax.profiler.start_trace(str(tmp_path))
    _jax.abandon_trace(str(tmp_path / "of another"))
    with pytest.raises(RuntimeError, match=r"[Oo]nly one profile"):
        jax.profiler.start_trace(str(tmp_path))
    _jax.abandon_trace(str(tmp_path))
    with pytest.raises(RuntimeError, match=r"[Nn]o profile"):
        jax.profiler.stop_trace()


# Meshes and devices


@pytest.fixture
def explicit():
    return jax.make_mesh((2,), ("a",), devices=jax.devices()[2:4], axis_types=(AxisType.Explicit,))


def test_an_abstract_value_keeps_its_explicit_sharding_alone(explicit):
    x = jax.device_put(np.ones(4, np.float32), jax.NamedSharding(explicit, P("a")))
    automatic = jax.NamedSharding(jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,)), P("a"))
    assert _jax.is_explicit(jax.typeof(x))
    assert _jax.shaped(jax.typeof(x)).sharding == jax.typeof(x).sharding
    assert not _jax.is_explicit(jax.typeof(jax.device_put(x, automatic)))
    assert _jax.shaped(jax.typeof(jax.device_put(x, automatic))) == _jax.shaped(jax.typeof(np.ones(4, np.float32)))


def test_the_mesh_that_is_set_is_seen_inside_of_traces(explicit):
    assert _jax.concrete_mesh().empty
    run = inside(lambda x: _jax.concrete_mesh())
    with jax.set_mesh(explicit):
        found = [run(jax.jit, X), run(lambda f: jax.jit(jax.shard_map(f, in_specs=P(), out_specs=P())), X)]
    assert found == [explicit, explicit]


def test_manual_axes_are_left_outside_of_traces_and_others_kept(explicit):
    def program(x):
        with _jax.outside_traces():
            return jax.sharding.get_abstract_mesh().axis_names

    with jax.set_mesh(explicit):
        assert inside(program)(jax.jit, X) == ("a",)
        assert inside(program)(lambda f: jax.jit(jax.shard_map(f, in_specs=P(), out_specs=P())), X) == ()


LOWERED = {
    "default": (lambda f: jax.jit(f), lambda v: v, (0,)),
    "committed": (lambda f: jax.jit(f), lambda v: jax.device_put(v, jax.devices()[5]), (5,)),
    "inner jit": (lambda f: jax.jit(lambda x: jax.jit(f)(x) + 1), lambda v: jax.device_put(v, jax.devices()[4]), (4,)),
    "scan": (
        lambda f: jax.jit(lambda x: lax.scan(lambda c, _: (f(c), None), x, length=2)[0]),
        lambda v: jax.device_put(v, jax.devices()[6]),
        (6,),
    ),
    "in shard_map": (
        lambda f: jax.jit(
            jax.shard_map(
                f,
                mesh=jax.make_mesh((2,), ("a",), devices=jax.devices()[1:3], axis_types=(AxisType.Auto,)),
                in_specs=P(),
                out_specs=P(),
            )
        ),
        lambda v: v,
        (1, 2),
    ),
}


@pytest.mark.parametrize("name", LOWERED)
def test_a_lowering_rule_finds_out_its_devices(name, double):
    transform, place, expected = LOWERED[name]
    found = []

    def rule(context, x, **params):
        found.append(tuple(device.id for device in _jax.lowering_devices(context)))
        return [x, x]

    _jax.register_lowering(double, rule)
    transform(lambda x: double.bind(x)[0])(place(X))
    assert found == [expected]


def test_a_lowering_for_a_mesh_without_devices_has_none(double, explicit):
    found = []

    def rule(context, x, **params):
        found.append(_jax.lowering_devices(context))
        return [x, x]

    _jax.register_lowering(double, rule)
    x = jax.ShapeDtypeStruct((4,), np.float32, sharding=jax.NamedSharding(explicit.abstract_mesh, P("a")))
    jax.jit(lambda x: double.bind(x)[0]).trace(x).lower(lowering_platforms=("cpu",))
    assert found == [()]


# Several processes


def test_a_process_alone_has_no_client():
    assert _jax.distributed_client() is None


def test_a_job_of_one_process_has_no_client_either(run_python, find_port):
    done = run_python(
        f"""
        import jax
        jax.distributed.initialize("localhost:{find_port()}", 1, 0)
        from tune_jax import _jax
        print(_jax.distributed_client())
        """
    )
    assert done.stdout.strip() == "None"


def test_a_job_of_several_processes_has_a_client_that_keeps_texts(run_python, find_port, background):
    port = find_port()
    code = f"""
        import os
        import jax
        from tune_jax import _jax
        own = int(os.environ["PROCESS"])
        jax.distributed.initialize("localhost:{port}", 2, own)
        client, process, processes = _jax.distributed_client()
        client.key_value_set(f"here/{{process}}", "text")
        assert client.blocking_key_value_get(f"here/{{1 - own}}", 60_000) == "text"
        client.wait_at_barrier("heard", 60_000)
        client.key_value_set(f"here/{{process}}", "more", allow_overwrite=True)
        print(process, processes, client.key_value_try_get(f"here/{{process}}"), len(client.key_value_dir_get("here")))
        client.wait_at_barrier("read", 60_000)
        client.key_value_delete(f"here/{{process}}")
        client.wait_at_barrier("deleted", 60_000)
        print(client.key_value_dir_get("here"))
    """
    running = [background.submit(run_python, code, PROCESS=process) for process in "01"]
    assert [each.result().stdout for each in running] == ["0 2 more 2\n[]\n", "1 2 more 2\n[]\n"]


# Importing


def test_importing_the_package_warns_of_nothing_and_loads_no_deprecated_kernels(run_python):
    done = run_python(
        """
        import sys, tune_jax
        print([name for name in sys.modules if name.startswith("jax.experimental.pallas.ops")])
        """
    )
    assert done.stdout.strip() == "[]"


def test_every_name_of_the_door_is_exercised_here():
    text = pathlib.Path(__file__).read_text()
    assert [name for name in _jax.__all__ if f"_jax.{name}" not in text] == []


# For recording


def test_the_dtype_of_keys_is_told_from_others():
    assert _jax.is_key_dtype(jax.random.key(0).dtype)
    assert not _jax.is_key_dtype(np.dtype("uint32"))
    assert not _jax.is_key_dtype(3)


def test_an_array_is_made_weak_and_keeps_its_dtype():
    weak = _jax.as_weak(jnp.ones(3, jnp.float16))
    assert (weak.weak_type, weak.dtype) == (True, jnp.float16)


def test_the_size_of_a_mapped_axis_is_seen():
    assert inside(_jax.batch_size)(jax.vmap, jnp.ones((5, 3))) == 5


def test_what_is_not_mapped_has_no_mapped_axis():
    assert inside(_jax.batch_size)(jax.jit, X) is None
    assert _jax.batch_size(X) is None


def test_the_rules_of_a_custom_derivative_are_found_under_their_names():
    with_vjp = jax.custom_vjp(lambda x: x)
    with_vjp.defvjp(lambda x: (x, None), lambda _, g: (g,))
    with_jvp = jax.custom_jvp(lambda x: x)
    with_jvp.defjvp(lambda primals, tangents: (primals[0], tangents[0]))
    for function in (with_vjp, with_jvp):
        kind, rules = _jax.custom_derivative(function)
        assert getattr(jax, kind) is type(function)
        assert all(callable(getattr(function, rule)) for rule in rules)
    assert _jax.custom_derivative(jnp.sin) is None
