"""The recording mode: this thread's calls are noted, and what is traced meanwhile is never found again."""

from __future__ import annotations

import gc
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax import tune
from tune_jax._recording import current_recording, lasting_context, recording, unrecorded

X = np.ones((2, 3), np.float32)


@pytest.fixture
def double():
    return tune(lambda x, *, mark: x * mark, {"mark": [5, 7]}, progress=False)


def test_there_is_no_recording_but_inside_one():
    assert current_recording() is None
    with recording() as outer:
        assert current_recording() is outer
        with recording() as inner:
            assert current_recording() is inner is not outer
        with pytest.raises(KeyError), recording():
            raise KeyError
        assert current_recording() is outer
    assert current_recording() is None


def test_a_recording_is_of_one_thread(background):
    with recording():
        assert background.submit(current_recording).result() is None


def test_a_lowered_call_is_noted_and_stood_in_for(double, count_tunings):
    with recording() as record:
        text = jax.jit(double).lower(X).as_text()
    (note,) = record.notes.values()
    assert "5.000000e+00" in text
    assert [aval.shape for aval in note.avals] == [(2, 3)]
    assert (note.stand_in.hyperparams, note.obstacle) == ({"mark": 5}, None)
    assert count_tunings() == 0


def test_a_differentiated_call_is_noted_when_it_is_traced(double, count_tunings):
    with recording() as record:
        jax.jit(jax.grad(lambda x: double(x).sum())).trace(X)
    assert len(record.notes) == 1
    assert count_tunings() == 0


def test_a_call_is_noted_once_with_every_place_that_it_was_met_at(double):
    with recording() as record:
        jax.grad(lambda x: double(x).sum())(X)
        jax.grad(lambda x: double(x).sum())(X)
    (note,) = record.notes.values()
    assert len(note.sources) == 2


def test_a_known_winner_stands_in_for_itself(double):
    winner = double.tune(X).best.hyperparams
    with recording() as record:
        jax.jit(double).lower(X)
    (note,) = record.notes.values()
    assert note.stand_in.hyperparams == winner


def test_a_part_of_a_recording_can_be_left_out(double, count_tunings):
    with recording() as record:
        with unrecorded():
            assert current_recording() is None
            jax.jit(double)(X)
        assert current_recording() is record
    assert record.notes == {}
    assert count_tunings() == 1


def test_a_tuning_is_no_part_of_a_recording(double, count_tunings):
    outer = tune(lambda x, *, mark: double(x) * mark, {"mark": [5, 7]}, progress=False)
    with recording() as record:
        outer.tune(X)
    assert record.notes == {}
    assert count_tunings() == 2


def test_what_is_traced_in_a_recording_is_traced_again_outside_and_in_the_next():
    traces = []

    @jax.jit
    def program(x):
        traces.append(x)
        return x

    for count in (1, 2):
        with recording():
            jax.eval_shape(program, X)
            jax.eval_shape(program, X)
        assert len(traces) == count
    jax.eval_shape(program, X)
    with recording():
        jax.eval_shape(program, X)
    jax.eval_shape(program, X)
    assert len(traces) == 4


def test_what_lasts_does_not_depend_on_the_recording():
    before = lasting_context()
    with recording():
        assert lasting_context() == before
        with jax.enable_x64(True):
            assert lasting_context() != before


def test_a_recording_does_not_grow_what_a_function_remembers(double):
    for _ in range(3):
        with recording():
            jax.eval_shape(jax.vmap(double), X)
    state = double._tunable.state
    assert (len(state["outlines"]), len(state["mapped"])) == (2, 1)


def test_values_that_a_recording_met_are_let_go_with_it(double):
    values = [jnp.ones((2, 3))]
    alive = weakref.ref(values[0])
    with recording() as record:
        jax.jit(lambda: double(values[0])).lower()
    assert [note.given[0] is values[0] for note in record.notes.values()] == [True]
    values.clear()
    del record
    jax.clear_caches()
    gc.collect()
    assert alive() is None
