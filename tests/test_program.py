"""Tuning a whole program: every call is found wherever it is, tuned once, and nothing but winners is left behind."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import gc
import io
import sys
import threading
import warnings
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
from tune_jax import tune, tune_all
from tune_jax._lookup import memory_of
from tune_jax._recording import current_recording

pytestmark = pytest.mark.usefixtures("quick_tuning")

X = np.linspace(-1.0, 2.0, 12, dtype=np.float32).reshape(3, 4)
Y = np.linspace(0.5, 1.0, 4, dtype=np.float32)
STRUCT = jax.ShapeDtypeStruct(X.shape, X.dtype)

WINNER = 2


def marked(x: jax.Array, *, mark: int) -> jax.Array:
    """Value and slope tell the candidate: the first, which stands in while recording, is slow and never wins."""
    rounds = 5000 if mark == 1 else 1
    return x * mark + 0 * lax.fori_loop(0, rounds, lambda _, a: jnp.sin(a), x)


def make(function: Callable[..., Any] = marked, **options: Any) -> Any:
    return tune(function, {"mark": [1, WINNER]}, progress=False, **options)


def tuned_shapes(function: Any) -> list[list[int]]:
    """The shapes of the first input of all that a function was tuned for, in order."""
    return [list(key.avals[0].shape) for key in memory_of(function._tunable).results]


def places(results: tune_jax.ProgramResults) -> list[tuple[str, int]]:
    """In which function each call is made, and how often."""
    return [(call.site.rpartition(" in ")[2], call.count) for call in results]


def summed(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*args).sum()


# Where calls are found. Each program is a transformation of a tuned function; with the winner, its result is what the
# same one of `x * 2` is.


def _inner_jits(f):
    inner = jax.jit(f)
    return lambda x: inner(x) + jax.jit(lambda x: inner(x + 1))(x)


def _scan(f):
    return lambda x: lax.scan(lambda total, row: (total + f(row), None), jnp.zeros(4), x)[0]


def _while(f):
    return lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, f(c[1])), (0, x))[1]


def _while_condition(f):
    return lambda x: lax.while_loop(lambda c: f(c).sum() < 1e3, lambda c: c + 1, x)


def _cond(f):
    return lambda x: lax.cond(x.sum() < 100, f, lambda x: x, x)


def _own_vjp(f):
    @jax.custom_vjp
    def wrapped(x):
        return f(x)

    wrapped.defvjp(lambda x: (f(x), x), lambda kept, slope: (f(kept) * slope,))
    return wrapped


def _own_vjp_that_differentiates(f):
    @jax.custom_vjp
    def wrapped(x):
        return x

    wrapped.defvjp(lambda x: (jax.grad(summed(f))(x), None), lambda _, slope: (jax.grad(summed(f))(slope) + slope,))
    return wrapped


def _own_jvp(f):
    @jax.custom_jvp
    def wrapped(x):
        return f(x)

    wrapped.defjvp(lambda primals, slopes: (f(*primals), jax.jvp(f, primals, slopes)[1] + f(*slopes)))
    return wrapped


def _linear(f):
    return lambda x: jax.linear_transpose(lambda x: f(x), x)(x)[0]


GRAD = lambda f: jax.grad(summed(f))  # noqa: E731
PROGRAMS: dict[str, tuple[Callable[..., Any], list[int]]] = {
    "call": (lambda f: lambda x: f(x), [3, 4]),
    "the function itself": (lambda f: f, [3, 4]),
    "jit": (jax.jit, [3, 4]),
    "inner jits": (_inner_jits, [3, 4]),
    "vmap": (jax.vmap, [3, 4]),
    "vmap of jit": (lambda f: jax.vmap(jax.jit(f)), [3, 4]),
    "vmap of grad": (lambda f: jax.vmap(GRAD(f)), [4]),
    "vmap of grad of jit": (lambda f: jax.vmap(GRAD(jax.jit(f))), [4]),
    "scan": (_scan, [4]),
    "grad of scan": (lambda f: GRAD(_scan(f)), [4]),
    "while": (_while, [3, 4]),
    "while condition": (_while_condition, [3, 4]),
    "cond": (_cond, [3, 4]),
    "grad of cond": (lambda f: GRAD(_cond(f)), [3, 4]),
    "checkpoint": (jax.checkpoint, [3, 4]),
    "grad of checkpoint": (lambda f: GRAD(jax.checkpoint(f)), [3, 4]),
    "grad of scan of checkpoint": (lambda f: GRAD(_scan(jax.checkpoint(f))), [4]),
    "grad": (GRAD, [3, 4]),
    "grad of inner jits": (lambda f: GRAD(_inner_jits(f)), [3, 4]),
    "jit of grad of jit": (lambda f: jax.jit(GRAD(jax.jit(f))), [3, 4]),
    "jvp": (lambda f: lambda x: jax.jvp(f, (x,), (x,)), [3, 4]),
    "jvp of jit": (lambda f: lambda x: jax.jvp(jax.jit(f), (x,), (x,)), [3, 4]),
    "vjp": (lambda f: lambda x: jax.vjp(f, x)[1](x), [3, 4]),
    "linearize": (lambda f: lambda x: jax.linearize(f, x)[1](x), [3, 4]),
    "hessian": (lambda f: lambda x: jax.hessian(summed(f))(x[0]), [4]),
    "inside custom_vjp": (_own_vjp, [3, 4]),
    "grad of custom_vjp": (lambda f: GRAD(_own_vjp(f)), [3, 4]),
    "grad of jit of custom_vjp": (lambda f: GRAD(jax.jit(_own_vjp(f))), [3, 4]),
    "grad inside of custom_vjp": (lambda f: GRAD(jax.jit(_own_vjp_that_differentiates(f))), [3, 4]),
    "jvp of custom_jvp": (lambda f: lambda x: jax.jvp(_own_jvp(f), (x,), (x,)), [3, 4]),
    "jvp of jit of custom_jvp": (lambda f: lambda x: jax.jvp(jax.jit(_own_jvp(f)), (x,), (x,)), [3, 4]),
    "closure convert": (lambda f: lambda x: jax.closure_convert(f, x)[0](x), [3, 4]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_call_is_found_tuned_once_and_its_winner_is_what_runs(name, count_tunings):
    transform, shape = PROGRAMS[name]
    function = make()
    program = transform(function)
    with jax.checking_leaks():
        results = tune_all(program, X)
    assert tuned_shapes(function) == [shape]
    assert {call.results.best.hyperparams["mark"] for call in results} == {WINNER}
    expected = transform(lambda x: x * WINNER)(X)
    jax.tree.map(np.testing.assert_allclose, jax.jit(program)(X), expected)
    jax.tree.map(np.testing.assert_allclose, program(X), expected)
    assert count_tunings() == 1


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_program_that_was_traced_before_runs_winners_only(name, count_tunings):
    # Outputs of inner functions that are older than the recording keep what JAX remembers of them.
    transform, _ = PROGRAMS[name]
    program = transform(make())
    jax.eval_shape(program, X)
    before = count_tunings()
    tune_all(program, X)
    jax.tree.map(np.testing.assert_allclose, jax.jit(program)(X), transform(lambda x: x * WINNER)(X))
    assert before + (count_tunings() - before) == 1
