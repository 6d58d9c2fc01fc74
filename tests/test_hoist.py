"""Tuned functions that close over traced values: the right result and gradients, one tuning a key, nothing left."""

from __future__ import annotations

import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tune_jax
from tune_jax._lookup import memory_of

pytestmark = pytest.mark.usefixtures("quick_tuning")

Y = np.linspace(0.5, 1.0, 4, dtype=np.float32)
W = np.float32(2)
ROWS = np.arange(6, dtype=np.float32)

Maker = Callable[[Callable[..., Any]], Callable[..., Any]]


def tuned(function: Callable[..., Any], **options: Any) -> Any:
    """Tune over a factor that does not change what the function computes."""
    return tune_jax.tune(function, hyperparams={"factor": [1, 2]}, progress=False, **options)


def plain(function: Callable[..., Any]) -> Callable[..., Any]:
    return functools.partial(function, factor=1)


def close(came: Any, expected: Any) -> None:
    for one, other in zip(jax.tree.leaves(came), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def check(transform: Callable[..., Any], program: Callable[[Maker], Callable[..., Any]], *args: Any) -> None:
    """Compare a transformed program of a tuned function with that of the untuned one; no tracer may leak."""
    with jax.checking_leaks():
        came = transform(program(tuned))(*args)
    close(came, transform(program(plain))(*args))


# Ways to close over a value


@dataclasses.dataclass(eq=False)
class Layer:
    w: Any

    def apply(self, x, *, factor):
        return jnp.sum(jnp.sin(x * self.w)) * factor / factor


def apply(x, activation, *, factor):
    return jnp.sum(activation(x)) * factor / factor


def weigh(w, x, *, factor):
    return jnp.sum(jnp.sin(x * w)) * factor / factor


def _nested(make: Maker) -> Callable[..., Any]:
    def program(w):
        def outer(x, *, factor):
            inner = make(lambda y, *, factor: jnp.sum(jnp.sin(y * w) * x) * factor / factor)
            return inner(x * w) * factor / factor

        return make(outer)(Y)

    return program


def _helper(make: Maker) -> Callable[..., Any]:
    def program(w):
        def help_out(x):
            return jnp.sin(x * w)

        return make(lambda x, *, factor: jnp.sum(help_out(x)) * factor / factor)(Y)

    return program


PROGRAMS: dict[str, Callable[[Maker], Callable[..., Any]]] = {
    "lambda": lambda make: lambda w: make(lambda x, *, factor: jnp.sum(jnp.sin(x * w)) * factor / factor)(Y),
    "partial": lambda make: lambda w: make(functools.partial(weigh, w))(Y),
    "partial keyword": lambda make: lambda w: make(functools.partial(weigh, w=w))(x=Y),
    "bound method": lambda make: lambda w: make(Layer(w).apply)(Y),
    "default": lambda make: lambda w: make(lambda x, *, factor, w=w: jnp.sum(jnp.sin(x * w)) * factor / factor)(Y),
    "argument that closes over it": lambda make: lambda w: make(apply)(Y, lambda x: jnp.sin(x * w)),
    "partial as argument": lambda make: lambda w: make(apply)(Y, functools.partial(jnp.multiply, w)),
    "nested": _nested,
    "helper": _helper,
    "number beside it": lambda make: lambda w: make(lambda x, n, *, factor: jnp.sum(x * w) * n * factor / factor)(Y, 2),
    "inner jit": lambda make: (
        lambda w: make(lambda x, *, factor: jax.jit(lambda x: jnp.sum(jnp.sin(x * w)))(x) * factor / factor)(Y)
    ),
}

TRANSFORMS: dict[str, Callable[..., Any]] = {
    "jit": jax.jit,
    "grad": jax.grad,
    "jit of grad": lambda f: jax.jit(jax.grad(f)),
    "vmap": lambda f: lambda w: jax.vmap(f)(jnp.stack([w, 2 * w, 3 * w])),
    "vmap of grad": lambda f: lambda w: jax.vmap(jax.grad(f))(jnp.stack([w, 2 * w, 3 * w])),
    "vmap of jit": lambda f: lambda w: jax.vmap(jax.jit(f))(jnp.stack([w, 2 * w, 3 * w])),
    "grad of vmap": lambda f: jax.grad(lambda w: jnp.sum(jax.vmap(f)(jnp.stack([w, 2 * w])))),
    "hessian": jax.hessian,
    "grad of checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
    "grad of scan": lambda f: jax.grad(lambda w: lax.scan(lambda c, _: (c + f(c * w), None), w, None, length=3)[0]),
    "cond": lambda f: jax.jit(lambda w: lax.cond(w > 0, f, lambda w: w, w)),
    "while": lambda f: jax.jit(lambda w: lax.fori_loop(0, 3, lambda _, c: f(c * w), w)),
}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("transform", ["jit", "grad", "vmap"])
def test_what_is_closed_over_is_an_input_however_it_is_held(program, transform):
    check(TRANSFORMS[transform], PROGRAMS[program], W)


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_closure_agrees_under_every_transformation(transform):
    check(TRANSFORMS[transform], PROGRAMS["lambda"], W)


@pytest.mark.filterwarnings("ignore:.*has no __hash__ of its own:UserWarning")
@pytest.mark.parametrize("transform", ["jit", "grad", "vmap of grad"])
def test_a_static_self_that_holds_a_traced_value_agrees(transform):
    check(TRANSFORMS[transform], lambda make: lambda w: make(Layer.apply)(Layer(w), Y), W)


@pytest.mark.parametrize("value", [np.int32(3), np.ones(4, np.complex64), np.array([True, False, True, True])])
@pytest.mark.filterwarnings("ignore:.*the integer argument:UserWarning")
def test_values_of_other_types_are_closed_over(value):
    program = lambda make: lambda w: make(lambda x, *, factor: jnp.where(w, x, 0) * factor / factor)(Y)  # noqa: E731
    check(jax.jit, program, value)


def test_a_closed_over_key_is_an_input():
    def program(make):
        return lambda key: make(lambda x, *, factor: jax.random.normal(key, x.shape) * x * factor / factor)(Y)

    check(jax.jit, program, jax.random.key(3))


def test_a_collective_over_a_batch_axis_sees_what_is_closed_over():
    def program(make):
        return lambda w: make(lambda x, *, factor: lax.psum(w * x, "i") * factor / factor)(Y)

    check(functools.partial(jax.vmap, axis_name="i"), program, np.arange(3, dtype=np.float32))


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_closure_agrees_inside_shard_map(checked, wrap, count_tunings):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    shard = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("i"), out_specs=P("i"), check_vma=checked)

    def program(make):
        return lambda w: make(lambda x, *, factor: jax.jit(jnp.sin)(x * w) * factor / factor)(jnp.ones(3))

    check(lambda f: wrap(shard(f)), program, ROWS)
    check(lambda f: jax.grad(lambda w: jnp.sum(wrap(shard(f))(w) ** 2)), program, ROWS)
    assert count_tunings() == 1


@pytest.mark.parametrize("checked", [True, False])
@pytest.mark.parametrize("with_vjp", [True, False])
@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_closure_with_a_collective_is_tuned_under_the_mesh(checked, with_vjp, wrap, count_tunings):
    mesh = jax.make_mesh((2,), ("i",), axis_types=(AxisType.Auto,))
    shard = functools.partial(jax.shard_map, mesh=mesh, in_specs=P("i"), out_specs=P(), check_vma=checked)

    def program(w):
        grid = {"factor": [1, 2]}
        body = tune_jax.tune(
            lambda x, *, factor: lax.psum(w * x, "i") * factor / factor, grid, with_vjp=with_vjp, progress=False
        )
        return body(jnp.arange(1.0, 4.0))

    rows = np.array([[1, 2, 3], [4, 5, 6]], np.float32)
    np.testing.assert_allclose(wrap(shard(program))(rows), [[5, 14, 27]], rtol=1e-6)
    slope = jax.grad(lambda w: jnp.sum(wrap(shard(program))(w)))(rows)
    np.testing.assert_allclose(slope, [[1, 2, 3], [1, 2, 3]], rtol=1e-6)
    assert count_tunings() == (2 if with_vjp else 1)


# What is tuned


def test_equal_closures_made_anew_are_tuned_once(count_tunings):
    def program(w):
        for _ in range(3):
            w = w + tuned(lambda x, *, factor: jnp.sum(x * w) * factor / factor)(Y)  # noqa: B023
        return w

    for transform in (jax.jit, jax.grad, lambda f: jax.jit(jax.grad(f))):
        transform(program)(W)
    assert count_tunings() == 1


def test_closures_that_compute_something_else_are_tuned_apart(count_tunings):
    def program(w):
        first = tuned(lambda x, *, factor: jnp.sum(x * w) * factor / factor)(Y)
        return first + tuned(lambda x, *, factor: jnp.sum(x + w) * factor / factor)(Y)

    close(jax.jit(program)(W), np.sum(Y * W) + np.sum(Y + W))
    assert count_tunings() == 2


def test_the_batch_of_what_is_closed_over_is_tuned_for(count_tunings):
    function = tuned(apply)
    jax.vmap(lambda w: function(Y, lambda x: x * w))(jnp.arange(3.0))
    (key,) = memory_of(function._tunable).results
    assert [(batch.size, batch.dims) for batch in key.call.batches] == [(3, (None, 0))]
    assert count_tunings() == 1


def test_the_results_show_through_the_function_and_name_what_is_closed_over():
    function = tuned(apply)
    jax.jit(lambda w: function(Y, lambda x: x * w))(W)
    assert function.results.call == "x: float32[4], activation: function, closed-over 1: float32[]"
    assert set(function.timing_results) == {0, 1}
    assert function.optimal_hyperparams["factor"] in (1, 2)


def test_candidates_may_close_over_different_values(count_tunings):
    seen = []

    @jax.jit
    def program(v, w):
        chosen = tune_jax.tune(lambda x, *, b: jnp.sum(x * (v if b == 1 else w)), {"b": [1, 2]}, progress=False)
        out = chosen(Y)
        seen.append(chosen)
        return out

    out = program(W, W)
    close(out, 2 * np.sum(Y))
    assert count_tunings() == 1
    assert seen[0].results.call == "x: float32[4], closed-over 1: float32[], closed-over 2: float32[]"


def test_a_candidate_that_cannot_be_traced_stays_a_row():
    seen = []

    @jax.jit
    def program(w):
        def picky(x, *, b):
            if b == 2:
                raise KeyError("no two")
            return jnp.sum(x * w)

        chosen = tune_jax.tune(picky, {"b": [1, 2]}, progress=False)
        seen.append(chosen)
        return chosen(Y)

    close(program(W), 2 * np.sum(Y))
    (row,) = seen[0].results.failures
    assert (row.failure.stage, row.failure.error_type, row.failure.first_line) == ("trace", "KeyError", "'no two'")


def test_a_value_may_become_traced_later_and_concrete_again(count_tunings):
    layer = Layer(W)
    function = tuned(layer.apply)

    def program(w):
        layer.w = w
        out = function(Y)
        layer.w = W
        return out

    expected = np.sum(np.sin(Y * W))
    close(jax.jit(lambda x: function(x))(Y), expected)
    with jax.checking_leaks():
        close(jax.jit(program)(W), expected)
        close(jax.grad(program)(W), np.sum(Y * np.cos(Y * W)))
    close(jax.jit(lambda x: function(x) + 0)(Y), expected)
    assert count_tunings() == 2


def test_a_function_that_closes_over_no_tracer_is_traced_once_for_many_binds():
    traced = []

    def body(x, *, factor):
        traced.append(factor)
        return jnp.sin(x) * factor / factor

    function = tuned(body)
    jax.vmap(function)(np.ones((3, 4), np.float32))
    before = len(traced)
    for _ in range(3):
        jax.vmap(function)(np.ones((3, 4), np.float32))
    assert len(traced) == before


def test_examples_are_for_arguments_and_not_for_what_is_closed_over():
    asked = []

    def examples(**abstract):
        asked.append(sorted(abstract))
        return (np.ones(4, np.float32),)

    function = tuned(apply, example_args=examples)
    jax.jit(lambda w: function(Y, lambda x: x * w))(W)
    assert asked == [["activation", "x"]]


def test_donated_and_placed_arguments_keep_their_places():
    @jax.jit
    def program(w):
        step = jax.jit(lambda x, *, factor: x * w * factor / factor, donate_argnums=0, static_argnames="factor")
        sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        return tuned(step, in_shardings=sharding)(Y)

    close(program(W), 2 * Y)


# What is called besides


def test_eval_shape_trace_and_lower_work_inside_a_transformation(count_tunings):
    @jax.jit
    def program(w):
        function = tuned(lambda x, *, factor: x * w * factor / factor)
        assert function.eval_shape(Y).shape == (4,)
        assert function.trace(Y).out_info.shape == (4,)
        return w

    with jax.checking_leaks():
        program(W)
    assert count_tunings() == 0


def test_tune_and_results_for_work_inside_a_transformation(count_tunings):
    @jax.jit
    def program(w):
        function = tuned(lambda x, *, factor: x * w * factor / factor)
        assert function.results_for(Y) is None
        results = function.tune(Y)
        assert function.results_for(Y) is results
        return function(Y)

    close(program(W), 2 * Y)
    assert count_tunings() == 1


# What is left behind


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap", "vmap of jit", "grad of checkpoint", "grad of scan"])
@pytest.mark.parametrize("program", ["lambda", "argument that closes over it", "bound method", "number beside it"])
def test_no_cache_keeps_a_tracer_alive(transform, program):
    alive: list[weakref.ref[Any]] = []

    def noted(w):
        alive.append(weakref.ref(w))
        return PROGRAMS[program](tuned)(w)

    TRANSFORMS[transform](noted)(W)
    gc.collect()
    gc.collect()
    assert alive
    assert all(reference() is None for reference in alive)


def test_a_lasting_function_keeps_no_tracer_of_its_calls_alive():
    function = tuned(lambda x, n, activation, *, factor: jnp.sum(activation(x)) * n * factor / factor)
    alive: list[weakref.ref[Any]] = []

    def program(w):
        alive.append(weakref.ref(w))
        return function(Y, 3, lambda x: x * w)

    close(jax.grad(program)(W), 3 * np.sum(Y))
    gc.collect()
    assert [reference() for reference in alive] == [None]
