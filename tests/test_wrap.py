"""A candidate and a call -> a function of the inputs alone."""

from __future__ import annotations

import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax import tune
from tune_jax._binding import make_call
from tune_jax._call import Batch, with_batch
from tune_jax._wrap import bind, wrap, wrap_flat

X = np.arange(4, dtype=np.float32)


def call_of(function, *args, hyperparams=("b",), **kwargs):
    return make_call(tune(function, {name: [1, 2] for name in hyperparams})._tunable, args, kwargs)


def test_the_wrapped_function_takes_inputs_alone_and_returns_the_same():
    call, inputs = call_of(lambda x, mode, y, b: {"out": x * y * b, "mode": len(mode)}, X, "relu", 2.0)
    out = wrap(call, {"b": 3}, name="probe")(*inputs)
    np.testing.assert_array_equal(out["out"], 6 * X)
    assert out["mode"] == 4


def test_the_name_is_the_functions_and_the_modules():
    call, inputs = call_of(lambda x, b: x * b, X)
    wrapped = wrap(call, {"b": 3}, name="tune0_probe_3")
    assert wrapped.__name__ == "tune0_probe_3"
    assert "module @jit_tune0_probe_3" in jax.jit(wrapped).lower(*inputs).as_text()


def test_flat_results_are_the_leaves():
    call, inputs = call_of(lambda x, b: {"b": x * b, "a": (x, None)}, X)
    out = wrap_flat(call, {"b": 3}, name="probe")(*inputs)
    assert isinstance(out, list)
    np.testing.assert_array_equal(out, [X, 3 * X])


def test_hyperparameters_go_where_the_signature_takes_them():
    call, inputs = call_of(lambda x, b, y: (x, b, y), X, y=2.0)
    assert bind(call, call.arguments(inputs), {"b": 3}).args[1:] == (3, 2.0)


def test_extra_hyperparameters_join_the_extra_keywords():
    call, inputs = call_of(lambda x, **options: options, X, scale=2.0)
    assert wrap(call, {"b": 3}, name="probe")(*inputs) == {"b": 3, "scale": 2.0}


def test_every_kind_of_parameter_is_bound():
    def function(first, /, second, *rest, b, named, **options):
        return first, second, rest, b, named, options

    call, inputs = call_of(function, 1.0, 2.0, 3.0, 4.0, named=5.0, extra=6.0)
    out = wrap(call, {"b": 7}, name="probe")(*inputs)
    assert out == (1.0, 2.0, (3.0, 4.0), 7, 5.0, {"extra": 6.0})


def test_the_functions_own_defaults_are_used():
    call, inputs = call_of(lambda x, scale=4.0, b=1: x * scale * b, X)
    np.testing.assert_array_equal(wrap(call, {"b": 2}, name="probe")(*inputs), 8 * X)


@pytest.mark.parametrize(
    ("result", "words"),
    [
        ("done", "type str,"),
        ({"a": (1.0, "done")}, "type str at ['a'][1],"),
        ((each for each in ()), "type generator,"),
        (np.array(["done"]), "type ndarray of dtype <U4,"),
        (len, "type builtin_function_or_method,"),
    ],
    ids=["str", "inside", "generator", "array", "function"],
)
def test_a_result_that_jax_cannot_return_is_an_error_with_the_functions_name(result, words):
    def odd(x, b):
        return result

    call, inputs = call_of(odd, X)
    with pytest.raises(TypeError) as caught:
        wrap(call, {"b": 3}, name="probe")(*inputs)
    expected = f"odd returned a value of {words} expected arrays, numbers, None, or pytrees of these"
    assert str(caught.value) == expected


def test_a_coroutine_is_refused_without_a_warning():
    async def later(x, b):
        return x

    call, inputs = call_of(later, X)
    with pytest.raises(TypeError, match="later returned a value of type coroutine"):
        jax.jit(wrap(call, {"b": 3}, name="probe"))(*inputs)
    gc.collect()


@pytest.mark.parametrize("result", [None, 1, 1.5, 2j, True, np.float32(1), np.ones(2), (), {"a": [jnp.ones(2), None]}])
def test_every_result_that_jax_can_return_is_let_through(result):
    call, inputs = call_of(lambda x, b: result, X)
    assert wrap(call, {"b": 3}, name="probe")(*inputs) is result
    jax.jit(wrap(call, {"b": 3}, name="probe"))(*inputs)


def test_a_vmap_around_a_call_is_put_back():
    call, _ = call_of(lambda x, y, b: x @ y * b, X, X)
    batched = with_batch(call, Batch((0, None), 3, None, None))
    xs = jnp.stack([X, X + 1, X + 2])
    out = wrap(batched, {"b": 2}, name="probe")(xs, X)
    np.testing.assert_allclose(out, 2 * (xs @ X))


def test_vmaps_are_put_back_from_the_inside_out():
    call, _ = call_of(lambda x, b: x * b, 1.0 * X)
    batched = with_batch(with_batch(call, Batch((0,), 2, None, None)), Batch((2,), 3, None, None))
    xs = jnp.arange(24.0).reshape(2, 4, 3)
    assert wrap(batched, {"b": 2}, name="probe")(xs).shape == (3, 2, 4)


def test_a_vmap_with_an_axis_name_is_put_back_with_it():
    call, _ = call_of(lambda x, b: jax.lax.psum(x, "batch") if b == 1 else x, X)
    batched = with_batch(call, Batch((0,), 3, "batch", None))
    np.testing.assert_array_equal(wrap(batched, {"b": 1}, name="probe")(jnp.ones((3, 4))), 3 * jnp.ones((3, 4)))
