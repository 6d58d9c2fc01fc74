"""`Results` as a container, its best, and its way to a dict and back."""

from __future__ import annotations

import dataclasses
import doctest
import json
import pickle

import numpy as np
import pytest

import tune_jax._results.results as results_module
from tune_jax._errors import NoCandidateError, ResultsError
from tune_jax._records import Candidate, Failure, KernelTime, Samples
from tune_jax._results import Opaque, Results, make_results

KERNEL = KernelTime("attention_kernel", "jit(attention)/dot", 6, 540.0)


def build(blocks=(64, 128, 256), *, failed=(), clock="device", groups=None, **fields):
    """Candidate i has block blocks[i] and takes 100 (i + 1) ns a launch."""
    return make_results(
        function="attention",
        call="q: f32[8]",
        candidates=[Candidate(i, {"block": block}) for i, block in enumerate(blocks)],
        samples={
            i: Samples(clock, (100.0 * (i + 1),) * 3, spans_ns=(150.0 * (i + 1),) * 3, kernels=(KERNEL,))
            for i in range(len(blocks))
            if i not in {*failed, *(groups or {})}
        },
        failures={i: Failure("compile", "ValueError", f"block {blocks[i]} is too large") for i in failed},
        groups=groups or {},
        device_kind="cpu",
        wall_s=1.5,
        separation=3.0,
        **fields,
    )


def pass_through_json(results):
    return Results.from_dict(json.loads(json.dumps(results.to_dict(), allow_nan=False)))


# Rows


def test_rows_are_fastest_first_then_failures_by_id():
    assert [row.id for row in build((1, 2, 3, 4), failed=(2, 0))] == [1, 3, 0, 2]


def test_best_is_the_fastest():
    assert build().best.hyperparams == {"block": 64}


def test_timed_and_failures_make_up_the_rows():
    results = build(failed=(1,))
    assert results.timed + results.failures == results.rows


def test_best_of_failures_is_an_error_with_each_distinct_error_and_its_count():
    with pytest.raises(NoCandidateError) as caught:
        _ = build((8, 8, 9), failed=(0, 1, 2)).best
    assert str(caught.value) == (
        "No hyperparameters compiled successfully for attention:\n"
        "ids 0, 1 (2 candidates): failed at compile: ValueError: block 8 is too large\n"
        "id 2 (block=9): failed at compile: ValueError: block 9 is too large"
    )


def test_best_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="there are no candidates"):
        _ = build(()).best


@pytest.mark.parametrize("clock", ["device", "host"])
def test_clock_is_that_of_the_samples(clock):
    assert build(clock=clock).clock == clock


def test_clock_is_unknown_if_all_failed():
    assert build((1,), failed=(0,)).clock is None


def test_keeps_what_it_was_told():
    results = build(warnings=["careful"])
    assert (results.function, results.call, results.device_kind) == ("attention", "q: f32[8]", "cpu")
    assert (results.wall_s, results.warnings) == (1.5, ("careful",))


def test_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        build().rows = ()


def test_pickles():
    results = build(failed=(1,))
    assert pickle.loads(pickle.dumps(results)) == results


def test_its_example_runs():
    assert doctest.testmod(results_module).failed == 0


# Container


def test_length_counts_failures_too():
    assert len(build(failed=(1,))) == 3


def test_index_gives_a_row():
    assert (build()[0].id, build()[-1].id) == (0, 2)


def test_numpy_integer_is_an_index():
    assert build()[np.int64(1)].id == 1


def test_index_past_the_end_is_an_index_error():
    with pytest.raises(IndexError):
        build()[3]


def test_iterates_over_rows():
    assert [row.id for row in build()] == [0, 1, 2]


def test_slice_is_results_of_those_rows():
    part = build()[1:]
    assert (type(part), [row.id for row in part], part.function) == (Results, [1, 2], "attention")


def test_slice_keeps_the_slowdown_against_the_whole():
    assert [row.slowdown for row in build()[1:]] == [2.0, 3.0]


def test_best_of_a_slice_is_the_fastest_in_it():
    assert build()[1:].best.id == 1


def test_a_slice_with_a_step_works():
    assert [row.id for row in build()[::2]] == [0, 2]


# The shape of tune-jax 0.8


def test_timing_results_are_by_id_fastest_first():
    timings = build((1, 2, 3), failed=(0,)).timing_results()
    assert list(timings) == [1, 2]


def test_timing_results_are_in_seconds():
    timing = build().timing_results()[1]
    assert (timing.hyperparams, timing.t_mean, timing.t_std) == ({"block": 128}, pytest.approx(2e-7), 0.0)


def test_timing_results_of_failures_are_empty():
    assert build((1,), failed=(0,)).timing_results() == {}


# JSON


def test_results_come_back_equal():
    results = build(failed=(1,), groups={2: 0}, warnings=["careful"])
    assert pass_through_json(results) == results


def test_raw_samples_come_back():
    row = pass_through_json(build())[0]
    assert (row.samples_ns, row.spans_ns, row.kernels) == ((100.0,) * 3, (150.0,) * 3, (KERNEL,))


def test_a_sample_that_json_cannot_hold_comes_back():
    results = make_results(
        function="f",
        call="",
        candidates=[Candidate(0, {})],
        samples={0: Samples("device", (float("inf"), 5.0))},
        failures={},
        device_kind=None,
        wall_s=None,
        separation=3.0,
    )
    assert pass_through_json(results).best.samples_ns == (float("inf"), 5.0)


def test_the_traceback_of_a_failure_comes_back():
    failure = Failure("run", "RuntimeError", "no", traceback="Traceback ...\nRuntimeError: no")
    results = dataclasses.replace(build(failed=(0,)))
    row = dataclasses.replace(results.failures[0], failure=failure)
    assert pass_through_json(dataclasses.replace(results, rows=(row,)))[0].failure == failure


def test_hyperparams_come_back_with_their_types():
    values = (None, True, 1, 1.0, "1", (1, 2), np.dtype("bfloat16"))
    back = {row.id: row.hyperparams["block"] for row in pass_through_json(build(values))}
    assert [type(back[i]) for i in range(7)] == [type(value) for value in values]


def test_an_unknown_hyperparam_comes_back_as_its_repr():
    assert pass_through_json(build((len,))).best.hyperparams == {"block": Opaque("<built-in function len>")}


def test_storing_again_changes_nothing():
    stored = build((len, None)).to_dict()
    assert Results.from_dict(stored).to_dict() == stored


@pytest.mark.parametrize("stored", [{}, {"format": 2}, None, [], "text"], ids=repr)
def test_another_format_is_an_error_that_says_which(stored):
    with pytest.raises(ResultsError, match="expected 1; tune again"):
        Results.from_dict(stored)


@pytest.mark.parametrize("name", ["function", "call", "rows", "wall_s", "device_kind", "warnings"])
def test_a_missing_field_is_an_error_that_names_it(name):
    stored = build().to_dict()
    del stored[name]
    with pytest.raises(ResultsError, match=rf"damaged \(KeyError: '{name}'\)"):
        Results.from_dict(stored)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("samples_ns", ["x"]),
        ("samples_ns", None),
        ("hyperparams", []),
        ("hyperparams", {"block": {"type": "tuple"}}),
        ("failure", {"stage": "run"}),
        ("kernels", [{"name": "k"}]),
        ("id", "x"),
    ],
)
def test_a_damaged_row_is_an_error(name, value):
    stored = build().to_dict()
    stored["rows"][0][name] = value
    with pytest.raises(ResultsError, match="damaged"):
        Results.from_dict(stored)


def test_a_stored_value_of_no_known_form_is_an_error():
    stored = build().to_dict()
    stored["rows"][0]["hyperparams"]["block"] = {"type": "pickle"}
    with pytest.raises(ResultsError, match="no known form"):
        Results.from_dict(stored)
