"""Tuned functions that are equal share their results; those that differ in anything that counts do not."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import gc
import weakref
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax import tune
from tune_jax._lookup import SHARED, Shared, memory_of
from tune_jax._sharing import Kin

pytestmark = pytest.mark.usefixtures("quick_tuning")

X = np.arange(4, dtype=np.float32)
GRID = {"b": [1, 2]}


def same(x, b):
    return x * b / b


def activate(x, activation, b):
    return activation(x) * b / b


def scaled(scale):
    return tune(lambda x, b: x * scale * b / b, GRID, progress=False)


def step(x):
    return tune(lambda x, b: jnp.sin(x) * b / b, GRID, progress=False)(x)


# Made anew


def test_a_tuned_function_made_anew_at_each_call_is_tuned_once(count_tunings):
    for _ in range(5):
        np.testing.assert_allclose(step(X), np.sin(X), rtol=1e-6)
    for _ in range(3):
        np.testing.assert_allclose(jax.jit(lambda x: step(x))(X), np.sin(X), rtol=1e-6)
    np.testing.assert_allclose(jax.grad(lambda x: step(x).sum())(X), np.cos(X), rtol=1e-6)
    assert count_tunings() == 1


def test_a_partial_tuned_at_each_call_is_tuned_once(count_tunings):
    for _ in range(3):
        tune(functools.partial(activate, activation=jax.nn.relu), GRID)(X)
    assert count_tunings() == 1
    tune(functools.partial(activate, activation=jax.nn.gelu), GRID)(X)
    assert count_tunings() == 2


def test_a_function_of_a_module_tuned_again_with_the_same_options_is_known(count_tunings):
    first, second = tune(same, GRID), tune(same, GRID)
    first(X)
    assert second.results is None
    assert second.timing_results == {}
    second(X)
    assert count_tunings() == 1
    assert second.results is first.results
    assert second.timing_results == first.timing_results


def test_each_tuned_function_shows_its_own_latest_tuning():
    first, second = tune(same, GRID), tune(same, GRID)
    first(X), second(X[:2])
    assert first.results.call == "x: float32[4]"
    assert second.results.call == "x: float32[2]"
    assert second.results_for(X) is first.results


def test_threads_that_each_make_it_anew_tune_once(count_tunings, background):
    futures = [background.submit(step, X) for _ in range(8)]
    concurrent.futures.wait(futures)
    for future in futures:
        np.testing.assert_allclose(future.result(), np.sin(X), rtol=1e-6)
    assert count_tunings() == 1


class Net:
    def __init__(self, w):
        self.w = w

    def __call__(self, x):
        return tune(lambda x, b: x * self.w * b / b, GRID, progress=False)(x)


@pytest.fixture
def module():
    """A model of equinox that tunes in its call."""
    equinox = pytest.importorskip("equinox")

    class Module(equinox.Module):
        w: Any

        def __call__(self, x):
            return tune(lambda x, b: x * self.w * b / b, GRID, progress=False)(x)

    return Module


@pytest.mark.parametrize("kind", ["plain", "equinox"])
def test_a_function_tuned_inside_a_models_call_is_tuned_once(kind, count_tunings, request):
    make = Net if kind == "plain" else request.getfixturevalue("module")
    for scale in (1.0, 3.0, 5.0):
        model = make(jnp.full(4, scale))
        np.testing.assert_allclose(model(X), X * scale)
        np.testing.assert_allclose(model(X), X * scale)
    # Which small arrays are closed over counts, since they may say how much work there is.
    assert count_tunings() == 3


def test_a_function_tuned_inside_an_equinox_model_trains(module, count_tunings):
    equinox = pytest.importorskip("equinox")
    model = module(jnp.full(4, 3.0))
    for _ in range(3):
        grads = equinox.filter_jit(equinox.filter_grad(lambda model: model(X).sum()))(model)
        np.testing.assert_allclose(grads.w, X)
    np.testing.assert_allclose(equinox.filter_grad(lambda model: model(X).sum())(model).w, X)
    assert count_tunings() == 1


def test_a_function_tuned_inside_a_flax_module_trains(count_tunings):
    linen = pytest.importorskip("flax.linen")

    class Linen(linen.Module):
        @linen.compact
        def __call__(self, x):
            w = self.param("w", lambda key: jnp.full(4, 3.0))
            return tune(lambda x, b: x * w * b / b, GRID, progress=False)(x)

    params = Linen().init(jax.random.key(0), X)
    tuned_at_init = count_tunings()
    loss = lambda params: Linen().apply(params, X).sum()  # noqa: E731
    with jax.checking_leaks():
        grads = jax.jit(jax.grad(loss))(params)
    np.testing.assert_allclose(grads["params"]["w"], X)
    np.testing.assert_allclose(jax.grad(loss)(params)["params"]["w"], X)
    assert count_tunings() == tuned_at_init + 1


# Kept apart


@pytest.mark.parametrize(
    "options",
    [
        {"hyperparams": {"b": [1, 2, 4]}},
        {"where": lambda b: b > 0},
        {"sample_num": 1},
        {"seed": 1},
        {"example_args": lambda x: (np.ones(4, np.float32),)},
        {"example_args": (np.ones(4, np.float32),)},
        {"event_filter_regex": "."},
        {"static_argnames": "b"},
    ],
    ids=["grid", "where", "sample_num", "seed", "examples made", "examples", "filter", "statics"],
)
def test_other_options_are_another_tuning(options, count_tunings):
    tune(same, GRID)(X)
    tune(same, **{"hyperparams": GRID, **options})(X)
    assert count_tunings() == 2


@pytest.mark.parametrize("scales", [(1.0, 2.0), (1, 1.0), (1, True), (np.ones(4), np.zeros(4))])
def test_functions_that_close_over_other_values_are_tuned_apart(scales, count_tunings):
    for scale in (*scales, *scales):
        np.testing.assert_allclose(scaled(scale)(X), X * scale)
    assert count_tunings() == 2


def test_functions_of_other_code_are_tuned_apart(count_tunings):
    tune(lambda x, b: x * b / b, GRID)(X)
    tune(lambda x, b: (x + 1) * b / b, GRID)(X)
    assert count_tunings() == 2


def test_only_results_are_shared_and_each_function_computes_what_it_closes_over_now(count_tunings):
    cell = [2.0]
    first = tune(lambda x, b: x * cell[0] * b / b, GRID)
    first(X)
    np.testing.assert_allclose(first(X), 2 * X)
    cell[0] = 3.0
    second = tune(lambda x, b: x * cell[0] * b / b, GRID)
    np.testing.assert_allclose(second(X), 3 * X)
    assert count_tunings() == 2


@dataclasses.dataclass(eq=False)
class Opaque:
    scale: float


@pytest.mark.filterwarnings("ignore:.*has no __hash__ of its own:UserWarning")
def test_static_objects_told_apart_by_identity_are_not_shared(count_tunings):
    function = lambda x, what, b: x * what.scale * b / b  # noqa: E731
    for _ in range(2):
        tune(function, GRID)(X, Opaque(2.0))
    assert count_tunings() == 2


def test_a_tuning_that_failed_is_not_shared():
    def broken(x, b):
        raise KeyError(b)

    for _ in range(2):
        with pytest.raises(ValueError, match="KeyError"):
            tune(broken, GRID)(X)
    assert len(SHARED) == 0


# What is kept


def test_what_is_shared_keeps_no_function_argument_or_object_alive():
    def closing_over(net):
        return lambda x, what, b: net(x) * what.scale * b / b

    net, value = Net(jnp.ones(4)), jax.device_put(X)
    function = closing_over(net)
    alive = [weakref.ref(thing) for thing in (net, net.w, function, value)]
    tune(function, GRID)(value, dataclasses.make_dataclass("Named", ["scale"], frozen=True)(1.0))
    assert len(SHARED) == 2
    del net, function, value
    jax.clear_caches()
    gc.collect()
    gc.collect()
    assert [reference() for reference in alive] == [None] * 4


def test_the_results_used_last_are_kept():
    results = tune(same, GRID).tune(X)
    ((key, _),) = memory_of_last(results)
    shared = Shared(most=2)
    keys = [dataclasses.replace(key, device=f"device {index}") for index in range(3)]
    for each in keys[:2]:
        shared.keep(each, results)
    assert shared.get(keys[0]) is results
    shared.keep(keys[2], results)
    assert [shared.get(each) is results for each in keys] == [True, False, True]
    shared.clear()
    assert len(shared) == 0


def memory_of_last(results: Any) -> list[tuple[Any, Any]]:
    function = tune(same, GRID)
    assert function.tune(X) is results
    return list(memory_of(function._tunable).results.items())


def test_kin_are_equal_by_name_and_content():
    assert Kin("f", 1) == Kin("f", 1)
    assert Kin("f", 1) != Kin("f", 2)
    assert repr(Kin("f", 1)) == "Kin(name='f')"


def test_functions_that_call_other_tuned_functions_of_one_name_are_tuned_apart(count_tunings):
    def call(function):
        inner = tune(function, GRID, progress=False)
        return tune(lambda x, b: inner(x) * b / b, GRID, progress=False)(X)

    np.testing.assert_allclose(call(lambda x, b: jnp.sin(x) * b / b), np.sin(X), rtol=1e-6)
    np.testing.assert_allclose(call(lambda x, b: jnp.cos(x) * b / b), np.cos(X), rtol=1e-6)
    assert count_tunings() == 4
