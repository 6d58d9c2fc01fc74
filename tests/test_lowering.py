"""Inside jit a tuned call is what a call of its winner would be: the same text, effects, outputs and types."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import tune_jax

pytestmark = pytest.mark.usefixtures("quick_tuning")

X = np.linspace(-1.0, 2.0, 12, dtype=np.float32).reshape(3, 4)
Y = np.linspace(0.5, 1.0, 4, dtype=np.float32)


def tuned(function: Callable[..., Any]) -> Any:
    return tune_jax.tune(function, hyperparams={"factor": [2, 3]}, progress=False)


def lowered_text(function: Callable[..., Any], *args: Any, **options: Any) -> str:
    def main(*args):
        return function(*args)

    text = jax.jit(main).trace(*args).lower(**options).as_text()
    # The addresses of host callbacks differ from one tracing to the next.
    return re.sub(r"backend_config = \"\d+\"|: \d{9,}", "", re.sub(r"@jit_\w+", "@module", text))


def several(x, y, *, factor):
    return x * factor, (y.sum(), None, {"out": x - y})


def passed_through(x, y, *, factor):
    return x, y * factor, x, y


def python_numbers(x, *, factor):
    return 1, 2.5, True, 1j, x * factor


def weak(x, scale, *, factor):
    return scale * factor, x * scale, x.astype(jnp.bfloat16) * scale


def noise(key, *, factor):
    return jax.random.normal(key, (3,)) * factor, jax.random.split(key)


def inner_jit(x, y, *, factor):
    return jax.jit(lambda z: z * factor)(x) + y


def dead_code(x, y, *, factor):
    return lax.scan(lambda c, row: (c * row * factor, jnp.cos(c)), y, x)[0]


def loops(x, y, *, factor):
    return lax.while_loop(lambda c: c.sum() < 100, lambda c: c + jnp.abs(y) * factor, x)


def constants(x, *, factor):
    return x * jnp.asarray(Y) * factor + np.arange(4)


def calls_back(x, *, factor):
    jax.debug.callback(lambda total: None, x.sum())
    return x * factor


def calls_back_in_order(x, *, factor):
    jax.debug.callback(lambda total: None, x.sum(), ordered=True)
    return x * factor


def named(x, *, factor):
    with jax.named_scope("scope"):
        return x * factor


TEXTS = {
    "several outputs": (several, (X, Y)),
    "inputs passed through": (passed_through, (X, Y)),
    "Python numbers": (python_numbers, (X,)),
    "weak types": (weak, (X, 2.0)),
    "random keys": (noise, (jax.random.key(1),)),
    "an inner jit": (inner_jit, (X, Y)),
    "dead code": (dead_code, (X, Y)),
    "a loop": (loops, (X, Y)),
    "constants": (constants, (X,)),
    "a callback": (calls_back, (X,)),
    "an ordered callback": (calls_back_in_order, (X,)),
    "named scopes": (named, (X,)),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_lowered_text_is_that_of_the_winner(name):
    function, args = TEXTS[name]
    candidate = tuned(function)
    text = lowered_text(candidate, *args)
    assert text == lowered_text(functools.partial(function, **candidate.optimal_hyperparams), *args)


AROUND = {
    "vmap": lambda f: jax.vmap(f, in_axes=(0, None)),
    "grad": lambda f: jax.grad(lambda x, y: f(x, y).sum()),
    "vmap of grad": lambda f: jax.vmap(jax.grad(lambda x, y: f(x, y).sum()), in_axes=(0, None)),
    "two calls": lambda f: lambda x, y: f(f(x, y), y),
    "scan": lambda f: lambda x, y: lax.scan(lambda c, row: (f(row, c), None), y, x)[0],
    "an inner jit": lambda f: lambda x, y: jax.jit(f, inline=True)(x, y) + 1,
}


@pytest.mark.parametrize("name", AROUND)
def test_the_lowered_text_under_a_transformation_is_that_of_the_winner(name):
    def product(x, y, *, factor):
        return jnp.sin(x) * y * factor

    candidate = tuned(product)
    text = lowered_text(AROUND[name](candidate), X, Y)
    assert text == lowered_text(AROUND[name](functools.partial(product, **candidate.optimal_hyperparams)), X, Y)


def test_an_argument_that_the_winner_does_not_read_stays_an_argument():
    # Another candidate might read it, and the winner is known only after JAX has dropped what is not read.
    def ignores(x, y, *, factor):
        return x * factor

    candidate = tuned(ignores)
    winner = functools.partial(ignores, **candidate.tune(X, Y).best.hyperparams)
    assert "%arg1" in lowered_text(candidate, X, Y)
    assert "%arg1" not in lowered_text(winner, X, Y)


# Outputs


OUTPUTS = {
    "several outputs": (several, (X, Y)),
    "inputs passed through": (passed_through, (X, Y)),
    "Python numbers": (python_numbers, (X,)),
    "weak types": (weak, (X, 2.0)),
}


@pytest.mark.parametrize("transform", [lambda f: f, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_have_the_structure_and_types_of_a_jitted_function(name, transform):
    function, args = OUTPUTS[name]
    candidate = tuned(function)
    came = transform(candidate)(*args)
    expected = jax.jit(functools.partial(function, **candidate.optimal_hyperparams))(*args)
    assert jax.tree.structure(came) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(came), jax.tree.leaves(expected), strict=True):
        assert jax.typeof(one) == jax.typeof(other)
        np.testing.assert_array_equal(one, other)


def test_eval_shape_tells_weak_types_as_a_jitted_function_does():
    came = jax.eval_shape(tuned(weak), X, 2.0)
    expected = jax.eval_shape(functools.partial(weak, factor=2), X, 2.0)
    assert [leaf.weak_type for leaf in came] == [leaf.weak_type for leaf in expected]


def test_a_function_of_nothing_but_effects_keeps_them():
    seen = []

    def note(x, *, factor):
        jax.debug.callback(lambda total: seen.append(float(total)), x.sum() * factor)

    candidate = tuned(note)
    assert jax.jit(candidate)(X) is None
    jax.effects_barrier()
    seen.clear()
    jax.jit(candidate)(X)
    jax.effects_barrier()
    assert len(seen) == 1


# Effects: neither dropped nor doubled


EFFECTS = {
    "eager": (lambda f: f, 1),
    "jit": (jax.jit, 1),
    "result not used": (lambda f: jax.jit(lambda x: (f(x), x)[1]), 1),
    "twice": (lambda f: jax.jit(lambda x: f(f(x))), 2),
    "scan": (lambda f: jax.jit(lambda x: lax.scan(lambda c, _: (f(c), None), x, length=3)[0]), 3),
    "cond": (lambda f: jax.jit(lambda x: lax.cond(x.sum() > 0, f, lambda x: x, x)), 1),
    "grad": (lambda f: jax.grad(lambda x: f(x).sum()), 1),
    "jit of grad": (lambda f: jax.jit(jax.grad(lambda x: f(x).sum())), 1),
    "checkpoint": (lambda f: jax.jit(jax.grad(jax.checkpoint(lambda x: f(x).sum()))), 2),
    "vmap": (jax.vmap, 3),
    "jit of vmap": (lambda f: jax.jit(jax.vmap(f)), 3),
    "vmap over something else": (lambda f: lambda x: jax.vmap(lambda row: row + f(Y))(x), 1),
}


# JAX has no ordered effects under vmap.
ORDERS = [*((name, False) for name in EFFECTS), *((name, True) for name in EFFECTS if "vmap" not in name)]


@pytest.mark.parametrize(("name", "ordered"), ORDERS)
def test_effects_happen_as_often_as_untuned(name, ordered):
    transform, times = EFFECTS[name]
    seen = []

    def function(x, *, factor):
        jax.debug.callback(seen.append, x.sum(), ordered=ordered)
        return x * factor

    program = transform(tuned(function))
    jax.block_until_ready(program(X))
    jax.effects_barrier()
    seen.clear()
    jax.block_until_ready(program(X))
    jax.effects_barrier()
    assert len(seen) == times


def test_ordered_effects_keep_their_order():
    seen = []

    def function(x, index, *, factor):
        jax.debug.callback(lambda at: seen.append(int(at)), index, ordered=True)
        return x * factor

    candidate = tuned(function)
    jax.jit(candidate).lower(X, 0)
    seen.clear()

    @jax.jit
    def program(x):
        for index in range(5):
            jax.debug.callback(lambda at: seen.append(int(at)), 10 + index, ordered=True)
            x = candidate(x, index)
        return x

    jax.block_until_ready(program(X))
    jax.effects_barrier()
    assert seen[-10:] == [10, 0, 11, 1, 12, 2, 13, 3, 14, 4]


# Programs for elsewhere


def scaled(x, *, factor):
    return x * factor


FIRST = r"scaled: {}, so the first candidate, \{{'factor': 2\}}, is used"


def test_lowering_for_a_platform_that_is_not_here_takes_the_first_candidate_with_a_warning(count_tunings):
    candidate = tuned(scaled)
    with pytest.warns(UserWarning, match=FIRST.format("no cuda device is here to tune on")):
        text = lowered_text(candidate, X, lowering_platforms=("cuda",))
    assert text == lowered_text(functools.partial(scaled, factor=2), X, lowering_platforms=("cuda",))
    assert count_tunings() == 0


def test_exporting_for_this_platform_holds_the_winner(count_tunings):
    candidate = tuned(scaled)
    exported = jax.export.export(jax.jit(candidate))(X)
    np.testing.assert_array_equal(exported.call(X), X * candidate.optimal_hyperparams["factor"])
    assert count_tunings() == 1


def test_exporting_for_several_platforms_is_tuned_on_the_one_that_is_here(count_tunings):
    exported = jax.export.export(jax.jit(tuned(scaled)), platforms=["cpu", "cuda"])(X)
    assert exported.platforms == ("cpu", "cuda")
    assert count_tunings() == 1


def test_a_tuned_function_itself_is_exported_as_a_jitted_one(count_tunings):
    candidate = tuned(scaled)
    exported = jax.export.export(candidate)(X)
    np.testing.assert_array_equal(exported.call(X), X * candidate.optimal_hyperparams["factor"])
    assert count_tunings() == 1


def test_exporting_for_a_platform_that_is_not_here_takes_the_first_candidate_with_a_warning(count_tunings):
    with pytest.warns(UserWarning, match=FIRST.format("no cuda device is here to tune on")):
        exported = jax.export.export(jax.jit(tuned(scaled)), platforms=["cuda"])(X)
    first = jax.export.export(jax.jit(functools.partial(scaled, factor=2)), platforms=["cuda"])(X)
    assert "dense<2.0" in exported.mlir_module()
    assert exported.mlir_module().count("multiply") == first.mlir_module().count("multiply")
    assert count_tunings() == 0


def test_exporting_with_open_shapes_takes_the_first_candidate_with_a_warning(count_tunings):
    shape = jax.export.symbolic_shape("rows, 4")
    with pytest.warns(UserWarning, match=FIRST.format("its shapes are left open")):
        exported = jax.export.export(jax.jit(tuned(scaled)))(jax.ShapeDtypeStruct(shape, np.float32))
    np.testing.assert_array_equal(exported.call(X), X * 2)
    assert count_tunings() == 0
