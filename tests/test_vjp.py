"""`with_vjp`: where a call is differentiated, its forward and backward pass are tuned together."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tune_jax
from tune_jax._errors import OptionError
from tune_jax._lookup import memory_of

X = np.linspace(-1.0, 1.0, 64 * 64, dtype=np.float32).reshape(64, 64)
ROW = np.linspace(0.5, 1.0, 64, dtype=np.float32)


def burn(x, rounds):
    """Return x after a number of matrix products that change nothing."""
    spent = lax.fori_loop(0, rounds, lambda _, a: jnp.sin(a @ a), x)
    return x + 0 * spent


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def costly(x, forward, backward):
    return burn(x, forward) * 3


costly.defvjp(
    lambda x, forward, backward: (costly(x, forward, backward), None),
    lambda forward, backward, _, slope: (burn(slope, backward) * 3,),
)

# The first is quick forward and slow backward, the second the other way round, and quicker in all.
ROUNDS = {"eager": (1, 600), "lazy": (200, 1)}


def tuned(function: Any, **options: Any) -> Any:
    grid = {"factor": [1, 2]}
    return tune_jax.tune(function, hyperparams=grid, progress=False, with_vjp=True, **options)


def scaled(x, row, *, factor):
    return jnp.sin(x * row) * factor / factor


def moving_of(function: Any) -> list[tuple[int, ...]]:
    return [key.call.moving for key in memory_of(function._tunable).results]


def tuned_by_kind(**options: Any) -> Any:
    @tune_jax.tune(hyperparams={"kind": list(ROUNDS)}, progress=False, **options)
    def function(x, *, kind):
        return costly(x, *ROUNDS[kind])

    return function


@pytest.mark.usefixtures("quick_rounds")
@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_training_picks_what_training_needs_and_inference_what_it_needs(around):
    function = tuned_by_kind(with_vjp=True)
    np.testing.assert_allclose(around(function)(X), 3 * X, rtol=1e-6)
    assert function.optimal_hyperparams == {"kind": "eager"}
    slope = around(jax.grad(lambda x: function(x).sum()))(X)
    np.testing.assert_allclose(slope, np.full_like(X, 3), rtol=1e-6)
    assert function.optimal_hyperparams == {"kind": "lazy"}
    assert function.results_for(X).best.hyperparams == {"kind": "eager"}


@pytest.mark.usefixtures("quick_rounds")
def test_without_it_a_differentiated_call_goes_by_the_forward_pass():
    function = tuned_by_kind()
    jax.grad(lambda x: function(x).sum())(X)
    assert function.optimal_hyperparams == {"kind": "eager"}
    assert moving_of(function) == [()]


@pytest.mark.parametrize(
    ("argnums", "moving"), [(0, (0,)), (1, (1,)), ((0, 1), (0, 1))], ids=["first", "second", "both"]
)
def test_what_is_differentiated_by_is_part_of_the_key(argnums, moving, count_tunings):
    function = tuned(scaled)
    loss = jax.grad(lambda x, row: function(x, row).sum(), argnums=argnums)
    for _ in range(2):
        jax.jit(loss)(X, ROW)
        loss(X, ROW)
    assert moving_of(function) == [moving]
    assert count_tunings() == 1


def test_a_call_that_is_not_differentiated_is_another_key(count_tunings):
    function = tuned(scaled)
    function(X, ROW)
    jax.value_and_grad(lambda x: function(x, ROW).sum())(X)
    jax.jit(function)(X, ROW)
    assert moving_of(function) == [(), (0,)]
    assert count_tunings() == 2


@pytest.mark.parametrize(
    "transform",
    [
        jax.grad,
        lambda f: jax.jit(jax.grad(f)),
        lambda f: jax.grad(jax.jit(f)),
        lambda f: jax.grad(jax.checkpoint(f)),
        jax.hessian,
        lambda f: lambda x: jax.jvp(f, (x,), (x,)),
        lambda f: jax.grad(lambda x: jax.vmap(f)(x[None]).sum()),
        lambda f: lambda x: jax.vmap(jax.grad(f))(x[None]),
        lambda f: lambda x: lax.scan(lambda c, _: (c - jax.grad(f)(c), f(c)), x, None, 3),
    ],
    ids=["grad", "jit grad", "grad jit", "grad remat", "hessian", "jvp", "grad vmap", "vmap grad", "scan"],
)
@pytest.mark.usefixtures("quick_tuning")
def test_derivatives_are_those_of_the_untuned_function(transform):
    function = tuned(lambda row, *, factor: jnp.sum(jnp.sin(row)) * factor / factor)
    with jax.checking_leaks():
        came = transform(function)(ROW)
    expected = transform(lambda row: jnp.sum(jnp.sin(row)))(ROW)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), came, expected)


@pytest.mark.usefixtures("quick_tuning")
def test_results_of_every_kind_get_the_cotangents_that_they_take():
    def mixed(x, count, *, factor):
        return {"wave": x * 1j * factor, "none": None, "count": count + 1, "half": x.astype(jnp.bfloat16), "key": key}

    key = jax.random.key(0)
    function = tuned(mixed)
    slope = jax.grad(lambda x: function(x, 1)["half"].sum().astype(jnp.float32))(ROW)
    np.testing.assert_allclose(slope, np.ones_like(ROW))
    assert [row.failure for row in function.results.rows] == [None, None]


@pytest.mark.usefixtures("quick_tuning")
def test_a_candidate_without_a_backward_pass_is_a_failed_row_in_training_only():
    @tune_jax.tune(hyperparams={"loop": ["while", "scan"]}, progress=False, with_vjp=True)
    def power(x, *, loop):
        if loop == "scan":
            return lax.scan(lambda c, _: (c * 2, None), x, None, 3)[0]
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2), (0, x))[1]

    assert len([row for row in tune_results(power, ROW).rows if row.failure is None]) == 2
    np.testing.assert_allclose(jax.grad(lambda x: power(x).sum())(ROW), np.full_like(ROW, 8))
    failed = {row.hyperparams["loop"]: row.failure for row in power.results.rows}
    assert failed["scan"] is None
    assert (failed["while"].stage, failed["while"].error_type) == ("trace", "ValueError")
    assert "Reverse-mode" in failed["while"].message


def tune_results(function: Any, *args: Any) -> Any:
    function(*args)
    return function.results


@pytest.mark.usefixtures("quick_tuning")
def test_where_no_candidate_goes_backward_the_forward_pass_is_tuned_and_jvp_works():
    def power(x, *, factor):
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] * 2 * factor / factor), (0, x))[1]

    function = tuned(power)
    np.testing.assert_allclose(jax.jvp(function, (ROW,), (ROW,))[1], 8 * ROW, rtol=1e-6)
    assert moving_of(function) == [()]
    assert not function.results.failures
    with pytest.raises(ValueError, match="Reverse-mode differentiation does not work"):
        jax.grad(lambda x: function(x).sum())(ROW)


def test_batches_inside_are_part_of_what_is_differentiated(count_tunings):
    function = tuned(scaled)
    jax.grad(lambda x: jax.vmap(function, in_axes=(0, None))(x, ROW).sum())(X)
    (key,) = memory_of(function._tunable).results
    assert (key.call.moving, key.call.batches[0].size, key.call.batches[0].dims) == ((0,), 64, (0, None))
    assert count_tunings() == 1


@pytest.mark.usefixtures("quick_tuning")
def test_out_shardings_speak_of_the_result_and_not_of_the_gradients():
    device = jax.devices()[1]
    place = jax.sharding.SingleDeviceSharding(device)
    function = tuned(scaled, out_shardings=place)
    x = jax.device_put(X, device)
    row = jax.device_put(ROW, device)
    slope = jax.grad(lambda x: function(x, row).sum())(x)
    assert slope.devices() == {device}
    assert not function.results.failures


def test_the_table_and_the_key_say_by_what_it_is_differentiated(count_tunings):
    function = tuned(scaled)
    jax.grad(lambda x, row: function(x, row).sum(), argnums=(0, 1))(X, ROW)
    words = "x: float32[64,64], row: float32[64], with its vjp by x and row"
    assert words in str(function.results)
    (key,) = memory_of(function._tunable).results
    assert words in str(key)


def test_another_value_than_a_flag_is_an_error_that_names_it():
    with pytest.raises(OptionError, match=r"with_vjp is 'yes' of type str; expected True, to time .*, or False"):
        tune_jax.tune(scaled, {"factor": [1]}, with_vjp="yes")
