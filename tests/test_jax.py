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
        assert not _jax.jit_is_disabled()
        assert np.isnan(jax.jit(lambda x: x / x)(jnp.zeros(()))).all()


def test_an_error_outside_of_traces_leaves_the_trace_as_it_was():
    def program(x):
        with pytest.raises(KeyError), _jax.outside_traces():
            raise KeyError
        assert _jax.axis_names() == ("i",)
        return x

    jax.vmap(program, axis_name="i")(X)
    assert _jax.trace_state_clean()


def test_whether_jit_is_disabled():
    assert not _jax.jit_is_disabled()
    with jax.disable_jit():
        assert _jax.jit_is_disabled()


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
    (alone,) = _jax.eval_closed(found[0], [X, X])
    np.testing.assert_allclose(alone, out, rtol=1e-6)


def test_dynamic_bounds_of_grids_are_counted_wherever_they_are():
    def copy(x_ref, out_ref):
        out_ref[...] = x_ref[...]

    def launch(x, size):
        kernel = pl.pallas_call(copy, out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(size,), interpret=True)
        return jax.jit(kernel)(x)

    assert _jax.dynamic_grid_bounds(traced(launch, X, 1)) == 1
    assert _jax.dynamic_grid_bounds(traced(lambda x: launch(x, 1), X)) == 0
    assert _jax.dynamic_grid_bounds(traced(lambda x: x, X)) == 0


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
    door = {name for name, value in vars(_jax).items() if getattr(value, "__module__", None) == _jax.__name__}
    own = {name for name in door if not name.startswith("_")}
    text = pathlib.Path(__file__).read_text()
    assert {name for name in own if f"_jax.{name}" not in text} == set()
