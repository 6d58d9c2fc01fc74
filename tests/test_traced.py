"""Candidates as programs: what runs, what is found again, and what their digest tells apart."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax._failure import FailedBeforeError, attempt
from tune_jax._records import Failure
from tune_jax._traced import Place, TracedCall, choice_key, digest_of, read_traced

X = np.arange(3, dtype=np.float32)
ROWS = np.array([3, 5, 7])


def traced(function, *inputs):
    return read_traced(jax.jit(function).trace(*inputs), {})


def test_a_candidate_runs_with_its_own_inputs_and_what_it_closed_over():
    found = []

    def program(w):
        trace = jax.jit(lambda x: {"out": x * w + ROWS}).trace(X)
        found.append(read_traced(trace, {id(w): 0}))
        return w

    jax.jit(program)(2.0)
    (candidate,) = found
    assert Place(0) in candidate.constants
    out = candidate.run([X], [jnp.float32(10)])
    np.testing.assert_array_equal(out["out"], 10 * X + ROWS)


def test_the_candidate_of_the_hyperparameters_runs():
    outcomes = {choice_key({"b": b}): traced(lambda x, b=b: x * b, X) for b in (1, 2)}
    call = TracedCall(outcomes, ())
    np.testing.assert_array_equal(call.run({"b": 2}, [X]), 2 * X)


def test_a_candidate_that_failed_fails_again_as_the_same_failure():
    failure = Failure("trace", "KeyError", "'no'")
    call = TracedCall({choice_key({"b": 1}): failure}, ())
    with pytest.raises(FailedBeforeError, match="no"):
        call.run({"b": 1}, [X])
    assert attempt("compile", lambda: call.run({"b": 1}, [X])) is failure


def test_choices_are_found_by_value_and_type_in_any_order():
    assert choice_key({"a": 1, "b": [2]}) == choice_key({"b": [2], "a": 1})
    assert choice_key({"a": 1}) != choice_key({"a": True})


@pytest.mark.parametrize(
    "other",
    [
        lambda x: x + 2,
        lambda x: x * 3,
        lambda x: x * 2 + ROWS[::-1],
        lambda x: x * 2 + ROWS.astype(np.float32),
    ],
)
def test_digests_tell_programs_and_small_constants_apart(other):
    one = traced(lambda x: x * 2 + ROWS, X)
    assert digest_of([one]) == digest_of([traced(lambda x: x * 2 + ROWS.copy(), X)])
    assert digest_of([one]) != digest_of([traced(other, X)])


def test_digests_tell_large_constants_apart_by_shape_and_keys_by_type_alone():
    def adding(value):
        return digest_of([traced(lambda x: x[0] + value, X)])

    assert adding(np.ones(5000, np.float32)) == adding(np.zeros(5000, np.float32))
    assert adding(np.ones(5000, np.float32)) != adding(np.ones(5001, np.float32))

    def keyed(seed):
        key = jax.random.key(seed)
        return digest_of([traced(lambda x: x + jax.random.normal(key, ()), X)])

    assert keyed(0) == keyed(1)


def test_digests_do_not_hang_on_addresses():
    def calling():
        return lambda x: jax.pure_callback(lambda v: v, x, x)

    assert digest_of([traced(calling(), X)]) == digest_of([traced(calling(), X)])


def test_failures_are_part_of_the_digest():
    failure = Failure("trace", "KeyError", "'no'")
    assert digest_of([failure]) != digest_of([Failure("trace", "KeyError", "'yes'")])
