"""A candidate's row and the statistics derived from its samples."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tune_jax._records import Failure, KernelTime, Samples
from tune_jax._results.row import Row, TimingResult, make_row


def timed(*samples_ns, **fields):
    return Row(0, {"block": 64}, samples_ns=samples_ns, clock="device", **fields)


def failed():
    return Row(0, {"block": 64}, failure=Failure("compile", "ValueError", "too large"))


def test_median_is_in_seconds():
    assert timed(1000.0, 2000.0, 9000.0).median_s == pytest.approx(2e-6)


def test_mean_is_in_seconds():
    assert timed(1000.0, 2000.0, 9000.0).mean_s == pytest.approx(4e-6)


def test_std_is_of_the_samples_taken():
    assert timed(1000.0, 3000.0).std_s == pytest.approx(1e-6)


def test_std_of_one_sample_is_zero():
    assert timed(1000.0).std_s == 0.0


def test_spread_is_relative_to_the_median():
    # Deviations 2, 1, 0, 1, 2 of 100: MAD 1, times 1.4826 and b_5 = 1.206.
    assert timed(98.0, 99.0, 100.0, 101.0, 102.0).spread == pytest.approx(0.01788, rel=1e-3)


def test_spread_of_one_sample_is_unknown():
    assert timed(1000.0).spread is None


def test_one_slow_launch_moves_neither_median_nor_spread():
    calm, hit = timed(98.0, 99.0, 100.0, 101.0, 102.0), timed(98.0, 99.0, 100.0, 101.0, 2000.0)
    assert (hit.median_s, hit.spread) == (calm.median_s, calm.spread)


@pytest.mark.parametrize("name", ["median_s", "mean_s", "std_s", "spread", "slowdown", "clock", "idle_share"])
def test_a_failed_row_has_no_times(name):
    assert getattr(failed(), name) is None


def test_statistics_leave_out_what_is_no_time():
    row = timed(float("nan"), 0.0, 1000.0, float("inf"))
    assert (row.median_s, row.mean_s) == (pytest.approx(1e-6), pytest.approx(1e-6))


def test_raw_samples_stay_as_they_came():
    assert timed(0.0, 1000.0).samples_ns == (0.0, 1000.0)


def test_idle_share_compares_busy_time_with_the_span():
    assert timed(1000.0, 1000.0, spans_ns=(4000.0, 4000.0)).idle_share == pytest.approx(0.75)


def test_idle_share_without_spans_is_unknown():
    assert timed(1000.0).idle_share is None


def test_idle_share_is_never_negative():
    assert timed(1000.0, spans_ns=(999.0,)).idle_share == 0.0


def test_a_row_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        timed(1.0).tied = True


def test_make_row_keeps_everything_of_the_samples():
    kernels = (KernelTime("k", "op", 2, 10.0),)
    samples = Samples("host", (1.0, 2.0), spans_ns=(3.0, 4.0), kernels=kernels)
    row = make_row(id=3, hyperparams={}, outcome=samples, slowdown=1.0)
    assert (row.clock, row.samples_ns, row.spans_ns, row.kernels) == ("host", (1.0, 2.0), (3.0, 4.0), kernels)


def test_make_row_turns_numpy_numbers_into_python_ones():
    row = make_row(id=0, hyperparams={}, outcome=Samples("device", (np.float32(1.5),)))
    assert type(row.samples_ns[0]) is float


def test_make_row_copies_the_hyperparams():
    hyperparams = {"block": 64}
    row = make_row(id=0, hyperparams=hyperparams, outcome=Samples("device", (1.0,)))
    hyperparams["block"] = 1
    assert row.hyperparams == {"block": 64}


def test_make_row_keeps_a_failure():
    failure = Failure("run", "RuntimeError", "out of memory")
    row = make_row(id=1, hyperparams={}, outcome=failure, shares_with=(2,))
    assert (row.failure, row.samples_ns, row.shares_with) == (failure, (), (2,))


def test_timing_result_has_the_names_of_old_scripts():
    timing = TimingResult(timed(1000.0, 3000.0))
    assert timing.hyperparams == {"block": 64}
    assert (timing.t_mean, timing.t_std) == (pytest.approx(2e-6), pytest.approx(1e-6))


def test_timing_result_prints_its_numbers():
    text = repr(TimingResult(timed(1000.0, 3000.0)))
    assert text == "TimingResult(hyperparams={'block': 64}, t_mean=2.0000e-06, t_std=1.0000e-06)"


def test_changing_a_timing_results_hyperparams_changes_no_row():
    row = timed(1000.0)
    TimingResult(row).hyperparams["block"] = 1
    assert row.hyperparams == {"block": 64}
