"""Everything that can be called and tuned: what kind of callable it is makes no difference to its result."""

from __future__ import annotations

import functools
import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax import tune

X = np.arange(1, 5, dtype=np.float32)
SQUARE = np.arange(16, dtype=np.float32).reshape(4, 4)
GRID = {"b": [1, 2]}

pytestmark = pytest.mark.usefixtures("quick_tuning")


class Scaled:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x, *, b=1):
        return x * self.scale * b / b

    def method(self, x, b):
        return x * self.scale * b / b

    @classmethod
    def of_class(cls, x, b):
        return x * len(cls.__name__) * b / b

    @staticmethod
    def static(x, b):
        return x * b / b


@functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
def with_vjp(x, b):
    return jnp.sin(x) * b / b


with_vjp.defvjp(lambda x, b: (with_vjp(x, b), None), lambda b, kept, slope: (slope * 7,))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def with_jvp(x, b):
    return jnp.sin(x) * b / b


with_jvp.defjvp(lambda b, primals, tangents: (with_jvp(primals[0], b), 5 * tangents[0]))


@functools.partial(jax.jit, static_argnames=("mode", "b"))
def jitted(x, mode, *, b):
    return x * len(mode) * b / b


@functools.partial(jax.jit, static_argnums=1)
def tiled(x, n, b):
    return jnp.tile(x, n) * b / b


def many(a, /, c, *rest, k=2.0, b, **more):
    return (a + c + sum(rest)) * k * more["z"] * b / b


CALLS = {
    "jnp.dot": (lambda: tune(jnp.dot)(SQUARE, X), SQUARE @ X),
    "jnp.dot with a grid": (lambda: tune(jnp.dot, {"precision": ["default", "highest"]})(SQUARE, X), SQUARE @ X),
    "ufunc of jax": (lambda: tune(jnp.add)(X, X), 2 * X),
    "reduction": (lambda: tune(jnp.sum, {"keepdims": [False]})(SQUARE, axis=0), SQUARE.sum(0)),
    "builtin": (lambda: tune(abs)(-X), X),
    "builtin of a list": (lambda: tune(sum)([X, X]), 2 * X),
    "operator": (lambda: tune(operator.mul)(X, X), X * X),
    "activation": (lambda: tune(jax.nn.relu)(-X), 0 * X),
    "type": (lambda: tune(jnp.float32)(X), X),
    "object": (lambda: tune(Scaled(3), GRID)(X), 3 * X),
    "bound method": (lambda: tune(Scaled(3).method, GRID)(X), 3 * X),
    "class method": (lambda: tune(Scaled.of_class, GRID)(X), 6 * X),
    "static method": (lambda: tune(Scaled.static, GRID)(X), X),
    "lambda": (lambda: tune(lambda x, b: x * b / b, GRID)(X), X),
    "every kind of parameter": (lambda: tune(many, GRID)(X, X, X, z=3.0), 18 * X),
    "jitted with statics": (lambda: tune(jitted, GRID)(X, "abc"), 3 * X),
    "jitted with numbered statics": (lambda: tune(tiled, GRID)(X, 2), np.tile(X, 2)),
    "partial of a jitted one": (lambda: tune(functools.partial(jitted, mode="ab"), GRID)(X), 2 * X),
    "custom vjp": (lambda: tune(with_vjp, GRID)(X), np.sin(X)),
    "custom jvp": (lambda: tune(with_jvp, GRID)(x=X), np.sin(X)),
    "gradient": (lambda: tune(jax.grad(lambda x, b: (x * x * b / b).sum()), {"b": [1.0, 2.0]})(X), 2 * X),
    "vmap": (lambda: tune(jax.vmap(lambda x: 2 * x))(X), 2 * X),
    "vectorize": (lambda: tune(jnp.vectorize(lambda x: 2 * x))(X), 2 * X),
    "singledispatch": (lambda: tune(functools.singledispatch(lambda x, b=1: x * b / b), GRID)(X), X),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("way", [lambda call: call(), lambda call: jax.jit(call)()], ids=["eager", "jit"])
def test_a_callable_of_any_kind_is_tuned_once(name, way, count_tunings):
    call, expected = CALLS[name]
    np.testing.assert_allclose(way(call), expected, rtol=1e-6)
    assert count_tunings() == 1


@pytest.mark.parametrize(("function", "slope"), [(with_vjp, 7 + 0 * X), (with_jvp, 5 + 0 * X), (Scaled(3), 3 + 0 * X)])
def test_a_callables_own_derivative_is_used(function, slope, count_tunings):
    tuned = tune(function, GRID)
    np.testing.assert_allclose(jax.grad(lambda x: tuned(x).sum())(X), slope)
    np.testing.assert_allclose(jax.jit(jax.grad(lambda x: tuned(x).sum()))(X), slope)
    assert count_tunings() == 1


def test_a_checkpointed_function_is_tuned(count_tunings):
    tuned = tune(jax.checkpoint(lambda x, b: jnp.sin(x) * b / b, static_argnums=1), GRID)
    np.testing.assert_allclose(jax.grad(lambda x: tuned(x).sum())(X), np.cos(X), rtol=1e-6)
    assert count_tunings() == 1


def test_values_needed_in_python_are_not_declared(count_tunings):
    def function(x, n, mode, dtype, activation, flag, *, shape=(2, 2), b):
        y = jnp.tile(x, n).astype(dtype)
        y = activation(y) if flag else y
        return y.reshape(-1, *shape) * len(mode) * b / b

    tuned = tune(function, GRID)
    for transform in (lambda f: f, jax.jit, jax.vmap):
        inputs = X[None] if transform is jax.vmap else X
        out = transform(lambda x: tuned(x, 2, "ab", jnp.float32, jnp.sin, True))(inputs)
        expected = 2 * np.sin(np.tile(X, 2)).reshape(-1, 2, 2)
        np.testing.assert_allclose(out.reshape(expected.shape), expected, rtol=1e-6)
    assert count_tunings() == 2, "one for the batched call"


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (lambda f: f, lambda scale: np.sum(X) * scale),
        (jax.grad, lambda scale: scale + 0 * X),
        (lambda f: jax.vmap(f, in_axes=(0, None, None)), lambda scale: X * scale),
    ],
    ids=["eager", "grad", "vmap"],
)
def test_a_step_counter_and_a_rate_that_are_computed_with_tune_nothing_new(transform, expected, count_tunings):
    tuned = tune(lambda x, step, rate, b: (x * rate / (step + 1)).sum() * b / b, GRID)
    for step in range(5):
        np.testing.assert_allclose(transform(tuned)(X, step, 0.1 * step), expected(0.1 * step / (step + 1)), rtol=1e-5)
    assert count_tunings() == 1


# Functions made anew as arguments


def apply(x, activation, b):
    return activation(x) * b / b


def closing_over(value):
    return lambda y: y * value


@pytest.mark.parametrize("way", [lambda f, *a: f(*a), lambda f, x, a: jax.vmap(lambda x: f(x, a))(x)])
def test_equal_functions_made_anew_are_one_tuning_and_others_are_not(way, count_tunings):
    tuned = tune(apply, GRID)
    for value in (2.0, 3.0, 2.0, 3.0):
        np.testing.assert_allclose(way(tuned, X, closing_over(value)), value * X)
        np.testing.assert_allclose(way(tuned, X, functools.partial(closing_over(value))), value * X)
    assert count_tunings() == 4


def test_an_equal_function_made_anew_is_not_traced_again():
    traced = []

    def noted(x, activation, b):
        traced.append(b)
        return apply(x, activation, b)

    tuned = tune(noted, GRID)
    tuned(X, closing_over(2.0))
    before = len(traced)
    for _ in range(3):
        np.testing.assert_allclose(tuned(X, closing_over(2.0)), 2 * X)
    assert len(traced) == before


@pytest.mark.parametrize("first", [[2.0], {"scale": 2.0}], ids=["list", "dict"])
def test_what_a_function_made_anew_closes_over_may_change_in_place(first, count_tunings):
    place = next(iter(first)) if isinstance(first, dict) else 0
    tuned = tune(apply, GRID)
    np.testing.assert_allclose(tuned(X, lambda y: y * first[place]), 2 * X)
    np.testing.assert_allclose(tuned(X, lambda y: y * first[place]), 2 * X)
    first[place] = 3.0
    np.testing.assert_allclose(tuned(X, lambda y: y * first[place]), 3 * X)


def test_a_function_that_changes_what_it_closes_over_is_not_tuned_for_ever(count_tunings):
    calls = 0

    def counted(y):
        nonlocal calls
        calls += 1
        return y * 2

    tuned = tune(apply, GRID)
    for _ in range(5):
        np.testing.assert_allclose(tuned(X, counted), 2 * X)
    assert count_tunings() == 2, "as what it was at first, and then as itself"


def test_a_function_closing_over_a_numpy_array_that_changes_is_another(count_tunings):
    weights = np.ones(4, np.float32)
    tuned = tune(apply, GRID)
    np.testing.assert_allclose(tuned(X, lambda y: y * weights), X)
    weights[:] = 2
    np.testing.assert_allclose(tuned(X, lambda y: y * weights), 2 * X)
    assert count_tunings() == 2
