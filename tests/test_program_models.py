"""Training steps of Flax and Equinox models, with a scan over layers and recomputation: each call tuned once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tune_jax import ProgramResults, tune, tune_all

pytestmark = pytest.mark.usefixtures("quick_tuning")

LAYERS = 3
WIDTH = 16
X = np.linspace(-1.0, 1.0, 8 * WIDTH, dtype=np.float32).reshape(8, WIDTH)

# A layer runs once forward and once more for the derivative.
TIMES = 2 * LAYERS


@pytest.fixture
def project() -> Any:
    """A product of matrices, by one or two parts of the rows."""

    @tune(hyperparams={"parts": [1, 2]}, progress=False)
    def project(x, w, *, parts):
        return jnp.concatenate([part @ w for part in jnp.split(x, parts)])

    return project


@pytest.fixture
def attend() -> Any:
    """Attention of one head."""

    @tune(hyperparams={"unroll": [1, 2]}, progress=False)
    def attend(q, k, v, *, unroll):
        return lax.scan(lambda _, row: (None, jax.nn.softmax(k @ row) @ v), None, q, unroll=unroll)[1]

    return attend


def check(results: ProgramResults, step: Callable[[], Any], count_tunings: Callable[[], int]) -> None:
    """Both calls of a layer are found where they are made, were tuned once, and running the step tunes nothing."""
    assert sorted((call.results.function, call.count) for call in results) == [("attend", TIMES), ("project", TIMES)]
    assert all("test_program_models.py" in call.site and call.site.endswith("Layer.__call__") for call in results)
    assert results.failures == ()
    assert count_tunings() == 2
    first, second = float(step()), float(step())
    assert second < first
    assert count_tunings() == 2


@pytest.mark.parametrize("jitted", [True, False])
def test_a_linen_model(project, attend, jitted, count_tunings):
    nn, optax = pytest.importorskip("flax.linen"), pytest.importorskip("optax")

    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            w = self.param("w", nn.initializers.lecun_normal(), (WIDTH, WIDTH))
            hidden = project(x, w)
            return x + attend(hidden, hidden, hidden), None

    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            layers = nn.scan(nn.remat(Layer), variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            return nn.Dense(4)(layers()(x, None)[0])

    model, optimizer = Model(), optax.sgd(0.01)

    def step(params, state, x):
        loss, slopes = jax.value_and_grad(lambda params: (model.apply(params, x) ** 2).mean())(params)
        updates, state = optimizer.update(slopes, state)
        return optax.apply_updates(params, updates), state, loss

    run = jax.jit(step, donate_argnums=(0, 1))
    shapes = jax.eval_shape(model.init, jax.random.key(0), X)
    results = tune_all(run if jitted else step, shapes, jax.eval_shape(optimizer.init, shapes), X)

    params = model.init(jax.random.key(0), X)
    held = [params, optimizer.init(params)]

    def advance():
        *held[:], loss = run(*held, X)
        return loss

    check(results, advance, count_tunings)


@pytest.mark.parametrize("jitted", [True, False])
def test_an_nnx_model(project, attend, jitted, count_tunings):
    nnx, optax = pytest.importorskip("flax.nnx"), pytest.importorskip("optax")

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jax.random.normal(rngs.params(), (WIDTH, WIDTH)) / WIDTH**0.5)

        def __call__(self, x):
            hidden = project(x, self.w[...])
            return x + attend(hidden, hidden, hidden)

    class Model(nnx.Module):
        def __init__(self, rngs):
            split = nnx.split_rngs(splits=LAYERS)
            self.layers = split(nnx.vmap(Layer, in_axes=(0,), out_axes=0))(rngs)
            self.head = nnx.Linear(WIDTH, 4, rngs=rngs)
            self.calls = nnx.Variable(jnp.array(0))

        def __call__(self, x):
            run = nnx.scan(nnx.remat(lambda x, layer: layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            self.calls[...] += 1
            return self.head(run(x, self.layers))

    def step(model, optimizer, x):
        loss, slopes = nnx.value_and_grad(lambda model: (model(x) ** 2).mean())(model)
        optimizer.update(model, slopes)
        return loss

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.01), wrt=nnx.Param)
    run = nnx.jit(step)
    results = tune_all(run if jitted else step, model, optimizer, X)
    assert int(model.calls[...]) == 0
    check(results, lambda: run(model, optimizer, X), count_tunings)


@pytest.mark.parametrize("jitted", [True, False])
def test_an_equinox_model(project, attend, jitted, count_tunings):
    eqx, optax = pytest.importorskip("equinox"), pytest.importorskip("optax")

    class Layer(eqx.Module):
        w: jax.Array
        act: Callable[..., Any]

        def __call__(self, x):
            hidden = project(x, self.w)
            return x + self.act(attend(hidden, hidden, hidden))

    class Model(eqx.Module):
        layers: Layer
        head: Any

        def __call__(self, x):
            arrays, rest = eqx.partition(self.layers, eqx.is_array)
            run = eqx.filter_checkpoint(lambda x, layer: eqx.combine(layer, rest)(x))
            x, _ = lax.scan(lambda x, layer: (run(x, layer), None), x, arrays)
            return jax.vmap(self.head)(x)

    optimizer = optax.sgd(0.01)

    def step(model, state, x, scale):
        loss, slopes = eqx.filter_value_and_grad(lambda model: (model(x) ** 2).mean() * scale)(model)
        updates, state = optimizer.update(slopes, state)
        return eqx.apply_updates(model, updates), state, loss

    w = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH)) / WIDTH**0.5
    model = Model(Layer(w, jnp.tanh), eqx.nn.Linear(WIDTH, 4, key=jax.random.key(1)))
    held = [model, optimizer.init(eqx.filter(model, eqx.is_array))]
    run = eqx.filter_jit(step)
    results = tune_all(run if jitted else step, *held, X, 2.0)

    def advance():
        *held[:], loss = run(*held, X, 2.0)
        return loss

    check(results, advance, count_tunings)
