"""Scripts written for tune-jax 0.8 run unchanged: each name and behaviour that they rely on, in one place.

Some of it is tested more closely beside the room that does it; here it stands as those scripts use it.
"""

from __future__ import annotations

import functools
import inspect
import io
import logging
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import tune_jax
import tune_jax.experimental.record
from tune_jax import CONFIG, tabulate, to_df, tune

X = jnp.ones((8, 4))

pytestmark = pytest.mark.usefixtures("quick_tuning")


def scale(x, factor=1, power=1):
    return x * factor**power


def partly(x, block=1):
    if block == 3:
        raise ValueError("three does not do")
    return x * block


@pytest.fixture
def tuned():
    return tune(scale, hyperparams={"factor": [2], "power": [1, 2, 3]})


# `tune` and its keywords


def test_the_function_comes_first_and_the_grid_second():
    assert list(inspect.signature(tune).parameters)[:2] == ["function", "hyperparams"]
    assert tune(scale, {"factor": [2]})(X)[0, 0] == 2


def test_a_partial_of_tune_is_a_decorator():
    @functools.partial(tune, hyperparams={"factor": [5]})
    def function(x, factor):
        return x * factor

    assert function(X)[0, 0] == 5


@pytest.mark.parametrize(
    "options",
    [
        {"hyperparams": {"factor": [2, 3]}},
        {"max_workers": 32},
        {"in_shardings": None},
        {"out_shardings": None},
        {"example_args": (2 * X,)},
        {"example_kws": {"x": 2 * X}},
        {"sample_num": 2},
        {"sample_num": 1e9},
        {"event_filter_regex": ".*"},
    ],
    ids=str,
)
def test_every_keyword_is_taken(options):
    tuned = tune(scale, **{"hyperparams": {"factor": [2, 3]}, **options})
    assert tuned(X).shape == (8, 4)
    assert 1 <= len(tuned.timing_results) <= 2


def test_shardings_are_taken_as_jit_takes_them():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = NamedSharding(mesh, PartitionSpec("x"))
    tuned = tune(scale, hyperparams={"factor": [2]}, in_shardings=(rows,), out_shardings=rows)
    assert tuned(X).sharding.is_equivalent_to(rows, 2)


def test_a_sample_of_the_grid_is_as_large_as_asked_for():
    tuned = tune(scale, hyperparams={"factor": [1, 2, 3], "power": [1, 2, 3]}, sample_num=4)
    tuned(X)
    assert len(tuned.timing_results) == 4


@pytest.mark.parametrize("scalar", [2, None, "two", 2.5])
def test_a_scalar_hyperparameter_is_one_choice(scalar):
    def function(x, factor, kind):
        return x * factor

    tuned = tune(function, hyperparams={"factor": [1, 2], "kind": scalar})
    tuned(X)
    assert [result.hyperparams["kind"] for result in tuned.timing_results.values()] == [scalar, scalar]


@pytest.mark.parametrize("options", [{}, {"hyperparams": {}}, {"hyperparams": None}], ids=str)
def test_a_function_without_hyperparameters_is_timed(options):
    timed = tune(scale, **options)
    assert timed(X)[0, 0] == 1
    (result,) = timed.timing_results.values()
    assert result.t_mean > 0
    assert timed.optimal_hyperparams == {}


# What a tuned function shows


def test_results_are_empty_dicts_before_the_first_call(tuned):
    assert tuned.timing_results == {}
    assert tuned.optimal_hyperparams == {}


def test_timing_results_go_from_ids_to_times_in_seconds(tuned):
    tuned(X)
    assert isinstance(tuned.timing_results, dict)
    assert sorted(tuned.timing_results) == [0, 1, 2]
    for result in tuned.timing_results.values():
        assert isinstance(result.hyperparams, dict)
        assert type(result.t_mean) is float
        assert type(result.t_std) is float
        assert 0 < result.t_mean < 1
        assert math.isfinite(result.t_std)


def test_the_fastest_comes_first_and_is_the_optimum(tuned):
    tuned(X)
    first = next(iter(tuned.timing_results.values()))
    assert tuned.optimal_hyperparams == first.hyperparams
    assert set(tuned.optimal_hyperparams) == {"factor", "power"}


def test_a_failed_candidate_leaves_the_others_and_their_times_alone():
    tuned = tune(partly, hyperparams={"block": [1, 3, 2]})
    tuned(X)
    assert sorted(tuned.timing_results) == [0, 2]
    fastest = min(tuned.timing_results.values(), key=lambda result: result.t_mean)
    assert fastest.hyperparams["block"] in (1, 2)
    assert [row.hyperparams["block"] for row in tuned.results.failures] == [3]


def test_both_are_reached_through_jit_which_may_come_before_the_first_call(tuned):
    jitted = jax.jit(tuned)
    assert jitted.timing_results == {}
    jitted(X)
    assert sorted(jitted.timing_results) == [0, 1, 2]
    assert jitted.optimal_hyperparams == tuned.optimal_hyperparams != {}


def test_a_new_shape_replaces_what_both_show(tuned):
    jitted = jax.jit(tuned)
    jitted(X)
    before = dict(jitted.timing_results)
    jitted(X[:2])
    assert all(jitted.timing_results[key] is not before[key] for key in before)


def test_no_working_candidate_is_an_error_with_the_old_text():
    tuned = tune(partly, hyperparams={"block": [3]})
    with pytest.raises(ValueError, match="No hyperparameters compiled successfully"):
        tuned(X)


# Tables


def test_a_table_is_made_of_the_function_of_its_jit_and_of_its_timing_results(tuned):
    jitted = jax.jit(tuned)
    jitted(X)
    for target in (tuned, jitted, tuned.timing_results, jitted.timing_results):
        table = tabulate(target)
        assert isinstance(table, str)
        assert "power" in table
        assert sum(line.split()[:1] in (["0"], ["1"], ["2"]) for line in table.splitlines()) == 3


def test_a_table_before_the_first_call_says_that_there_is_nothing(tuned):
    assert "Nothing has been tuned yet" in tabulate(tuned)


def test_a_data_frame_has_a_row_for_each_candidate(tuned):
    tuned(X)
    for target in (tuned, tuned.timing_results, jax.jit(tuned)):
        assert len(to_df(target)) == 3


# Logger and settings


def test_both_names_of_the_logger_are_one_logger_that_takes_a_level_by_name():
    assert tune_jax.logger is tune_jax.tune_logger
    assert isinstance(tune_jax.tune_logger, logging.Logger)
    before = tune_jax.tune_logger.level
    tune_jax.tune_logger.setLevel("INFO")
    assert tune_jax.logger.isEnabledFor(logging.INFO)
    tune_jax.tune_logger.setLevel(before)


@pytest.mark.parametrize(
    ("name", "value"),
    [("allow_fallback_timing", False), ("profiling_samples", 5), ("find_optimal_layouts_automatically", True)],
)
def test_a_setting_is_assigned_and_read(name, value, monkeypatch):
    monkeypatch.setattr(CONFIG, name, value)
    assert getattr(CONFIG, name) == value


def test_profiling_samples_is_how_often_each_candidate_is_timed(monkeypatch):
    monkeypatch.setattr(CONFIG, "max_rounds", 4)
    monkeypatch.setattr(CONFIG, "profiling_samples", 4)
    timed = tune(scale)
    timed(X)
    assert len(timed.results.best.samples_ns) == 4


def test_without_fallback_a_profiler_in_use_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(CONFIG, "allow_fallback_timing", False)
    with jax.profiler.trace(str(tmp_path)), pytest.raises(RuntimeError, match="profil"):
        tune(scale)(X)


def test_with_fallback_a_profiler_in_use_means_the_hosts_clock(tmp_path):
    timed = tune(scale)
    with jax.profiler.trace(str(tmp_path)), pytest.warns(UserWarning, match="wall clock"):
        timed(X)
    (result,) = timed.timing_results.values()
    assert result.t_mean > 0


def test_layouts_found_automatically_change_no_result(monkeypatch):
    monkeypatch.setattr(CONFIG, "find_optimal_layouts_automatically", True)
    tuned = tune(lambda x, *, factor: x.T @ x * factor, hyperparams={"factor": [2, 2.0]})
    np.testing.assert_array_equal(tuned(X), np.full((4, 4), 16.0))


# The recorder


def test_the_recorder_is_found_under_its_documented_name():
    assert tune_jax.experimental.record.record is tune_jax.record
    assert list(inspect.signature(tune_jax.record).parameters)[1] == "dir_or_buffer"


@pytest.mark.parametrize("make", [io.StringIO, io.BytesIO])
def test_the_recorder_writes_to_a_text_and_to_a_binary_buffer(make):
    buffer = make()
    tune_jax.experimental.record.record(scale, buffer)(X)
    text = buffer.getvalue() if make is io.StringIO else buffer.getvalue().decode()
    compile(text, "script", "exec")


def test_the_recorder_writes_to_a_folder_that_it_makes(tmp_path):
    tune_jax.experimental.record.record(scale, tmp_path / "new")(X)
    (path,) = (tmp_path / "new").iterdir()
    compile(path.read_text(), "script", "exec")


def test_the_recorder_needs_no_place_to_write_to():
    recorded = tune_jax.experimental.record.record(scale)
    assert recorded(X)[0, 0] == 1
    assert len(recorded.calls) == 1
