"""Results as a pandas DataFrame."""

from __future__ import annotations

import sys

import numpy as np
import pytest

from tune_jax._errors import ArgumentError
from tune_jax._records import Candidate, Failure, Samples
from tune_jax._report import to_df
from tune_jax._results import make_results


def build(hyperparams, *, failed=(), groups=None):
    """Candidate i has hyperparams[i] and takes 100 (i + 1) ns a launch."""
    count = range(len(hyperparams))
    return make_results(
        function="f",
        call="",
        candidates=[Candidate(i, hyperparams[i]) for i in count],
        samples={i: Samples("device", (100.0 * (i + 1),) * 3) for i in count if i not in {*failed, *(groups or {})}},
        failures={i: Failure("run", "ValueError", "bad\nworse") for i in failed},
        groups=groups or {},
        device_kind="cpu",
        wall_s=1.0,
        separation=3.0,
    )


def test_has_a_line_a_row_fastest_first_then_failures():
    pytest.importorskip("pandas")
    assert to_df(build([{}, {}, {}], failed=(0,)))["id"].tolist() == [1, 2, 0]


def test_columns_are_in_reading_order():
    pytest.importorskip("pandas")
    assert list(to_df(build([{"block": 1}])).columns) == [
        "id",
        "block",
        "median_s",
        "mean_s",
        "std_s",
        "spread",
        "slowdown",
        "tied",
        "samples",
        "clock",
        "shares_with",
        "stage",
        "error",
    ]


def test_times_are_seconds():
    pytest.importorskip("pandas")
    frame = to_df(build([{}, {}]))
    assert frame["median_s"].tolist() == pytest.approx([1e-7, 2e-7])
    assert frame["slowdown"].tolist() == [1.0, 2.0]


def test_hyperparams_keep_their_types():
    pytest.importorskip("pandas")
    frame = to_df(build([{"b": 64}, {"b": None}, {"b": True}]))
    assert [type(value) for value in frame["b"]] == [int, type(None), bool]


def test_a_missing_hyperparam_is_none():
    pytest.importorskip("pandas")
    assert to_df(build([{"a": 1}, {"b": 2}]))["b"].tolist() == [None, 2]


def test_a_failure_has_no_times_but_a_stage_and_an_error():
    pytest.importorskip("pandas")
    line = to_df(build([{}, {}], failed=(1,))).iloc[1]
    assert np.isnan(line["median_s"])
    assert (line["stage"], line["error"]) == ("run", "ValueError: bad")


def test_a_timed_row_has_no_error():
    pytest.importorskip("pandas")
    line = to_df(build([{}])).iloc[0]
    assert (line["stage"], line["error"]) == (None, None)


def test_shared_programs_are_named():
    pytest.importorskip("pandas")
    frame = to_df(build([{}, {}, {}], groups={2: 0}))
    assert frame["shares_with"].tolist() == [(2,), (0,), ()]


def test_a_hyperparam_named_like_a_column_stays_apart():
    pytest.importorskip("pandas")
    frame = to_df(build([{"id": 9, "clock": "x"}]))
    assert (frame["id"].tolist(), frame["hyperparams.id"].tolist()) == ([0], [9])
    assert frame["hyperparams.clock"].tolist() == ["x"]


def test_results_and_timing_results_do_as_well():
    pytest.importorskip("pandas")
    results = build([{"b": 1}, {"b": 2}])
    assert to_df(results.timing_results()).equals(results.to_df())


def test_nothing_tuned_yet_is_an_empty_frame():
    pytest.importorskip("pandas")
    assert len(to_df({})) == 0


def test_all_failed_is_a_frame():
    pytest.importorskip("pandas")
    assert to_df(build([{}], failed=(0,)))["stage"].tolist() == ["run"]


def test_anything_else_is_an_error():
    with pytest.raises(ArgumentError, match="got int 3"):
        to_df(3)


def test_without_pandas_it_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match='the extra "pandas"'):
        to_df(build([{}]))
