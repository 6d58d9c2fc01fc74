"""What a call returns, found without compiling; and which candidates it chooses among."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl

from tune_jax import tune
from tune_jax._binding import make_call
from tune_jax._errors import HyperparamsError, NoCandidateError
from tune_jax._outline import abstract_inputs, candidates_of, outline

X = np.arange(4, dtype=np.float32)
AVAL = jax.core.ShapedArray((4,), np.float32)


def call_of(function, *args, hyperparams=None, **options):
    tunable = tune(function, hyperparams or {"b": [1, 2]}, **options)._tunable
    call, inputs = make_call(tunable, args, {})
    return call, [jax.typeof(value) for value in inputs]


def test_the_outline_says_what_comes_back_without_running_or_compiling():
    ran = []
    call, avals = call_of(lambda x, b: {"y": jax.pure_callback(lambda v: ran.append(v), x, x), "n": (x[:b],)}, X)
    found = outline(call, avals)
    assert found.tree == jax.tree.structure({"y": 0, "n": (0,)})
    assert [(aval.shape, aval.dtype) for aval in found.avals] == [((1,), np.float32), ((4,), np.float32)]
    assert ran == []


def test_the_first_candidate_that_traces_decides():
    def function(x, b):
        if b == 1:
            raise ValueError("not this one")
        return x[:b]

    call, avals = call_of(function, X, hyperparams={"b": [1, 3, 2]})
    assert outline(call, avals).first.hyperparams == {"b": 3}
    assert outline(call, avals).avals[0].shape == (3,)


def test_a_call_that_no_candidate_can_trace_is_an_error_with_the_reasons():
    def function(x, b):
        raise KeyError(f"no {b}")

    call, avals = call_of(function, X)
    with pytest.raises(
        NoCandidateError, match=r"1 of 2 at trace: KeyError: 'no 1'\n(.|\n)*1 of 2 at trace: KeyError: 'no 2'"
    ):
        outline(call, avals)


def test_the_outline_is_traced_once():
    traced = []
    call, avals = call_of(lambda x, b: traced.append(b) or x, X)
    outline(call, avals), outline(call, avals)
    assert traced == [1]


def test_inputs_that_the_result_does_not_depend_on_are_told():
    call, avals = call_of(lambda x, y, b: x * b, X, X)
    assert outline(call, avals).used == (True, False)


def test_an_input_that_only_an_effect_depends_on_is_used():
    def function(x, y, b):
        jax.debug.print("{y}", y=y)
        return x

    call, avals = call_of(function, X, X)
    assert outline(call, avals).used == (True, True)


def test_an_exit_of_the_interpreter_is_no_failure_of_a_candidate():
    def function(x, b):
        raise KeyboardInterrupt

    call, avals = call_of(function, X)
    with pytest.raises(KeyboardInterrupt):
        outline(call, avals)


def test_weak_types_are_kept():
    call, avals = call_of(lambda x, s, b: s * 2, X, 1.0)
    assert outline(call, avals).avals[0].weak_type
    assert abstract_inputs(avals)[1].weak_type


def test_a_number_that_computes_a_kernel_grid_is_static():
    def kernel(x_ref, o_ref):
        o_ref[...] = x_ref[...] * 2

    def function(x, n, b):
        return pl.pallas_call(
            kernel,
            out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
            grid=(n,),
            in_specs=[pl.BlockSpec((4,), lambda i: (i,))],
            out_specs=pl.BlockSpec((4,), lambda i: (i,)),
            interpret=True,
        )(x)

    call, _ = call_of(function, jnp.zeros(8), 2)
    assert [static.value for _, static in call.statics] == [2]


def test_a_number_used_only_by_a_later_candidate_is_part_of_the_program():
    call, _ = call_of(lambda x, n, b: x * n if b == 2 else x, X, 3)
    assert [static.value for _, static in call.statics] == [3]


def test_candidates_are_those_of_the_grid_where_and_the_draw():
    call, _ = call_of(
        lambda x, a, b: x, X, hyperparams={"a": [1, 2, 3], "b": [1, 2, 3]}, where=lambda a, b: a <= b, sample_num=4
    )
    assert len(candidates_of(call)) == 4
    assert all(c.hyperparams["a"] <= c.hyperparams["b"] for c in candidates_of(call))
    assert candidates_of(call) == candidates_of(call)


def test_no_candidates_are_an_error():
    call, _ = call_of(lambda x, b: x, X, where=lambda b: False)
    with pytest.raises(HyperparamsError, match="where is false"):
        candidates_of(call)
