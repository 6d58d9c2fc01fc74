"""Real processes under `jax.distributed`, each with devices of its own; see `distributed_job.py` for what they do."""

from __future__ import annotations

import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tune_jax import Results

JOB = pathlib.Path(__file__).with_name("distributed_job.py")
SOON_S = 120

ANY_NUMBER = [
    "opposite_rankings",
    "failure_on_one",
    "sample",
    "transformed",
    "nested",
    "threads_in_another_order",
    "made_anew",
    "on_a_local_mesh",
    "spanning",
]
ONLY_TWO = [
    "failure_at_the_first_run",
    "every_candidate_fails",
    "unnamed_choices",
    "functions_alike",
    "forgotten",
    "example_error_on_one",
    "interrupt_on_one",
    "another_call",
    "another_function",
    "late_caller",
    "slow_tuner",
    "one_ends",
]

Outcomes = dict[str, list[Any]]


def _run_job(folder: pathlib.Path, port: int, processes: int, devices: int, scenarios: list[str]) -> Outcomes:
    """What each process printed, by scenario."""
    flags = f"--xla_force_host_platform_device_count={devices} --xla_backend_optimization_level=0"
    environment = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
    running = []
    for process in range(processes):
        command = [sys.executable, "-W", "error", str(JOB), str(process), str(processes), str(port), *scenarios]
        with open(folder / f"{process}.out", "w") as out, open(folder / f"{process}.err", "w") as err:
            running.append(subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=out, stderr=err))
    try:
        # Process 0 stays until its standard input is closed, so it is the last to be waited for.
        for each in reversed(running):
            each.communicate(timeout=SOON_S)
    finally:
        for each in running:
            each.kill()
            each.wait()
    codes = [each.returncode for each in running]
    assert codes == [0] * processes, "\n".join((folder / f"{p}.err").read_text()[-3000:] for p in range(processes))
    printed = [(folder / f"{process}.out").read_text().splitlines() for process in range(processes)]
    outcomes: Outcomes = {}
    # Gloo prints lines of its own.
    for line in (line for lines in printed for line in lines if line.startswith("{")):
        for name, outcome in json.loads(line).items():
            outcomes.setdefault(name, []).append(outcome)
    return outcomes


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory, find_port: Callable[[], int]) -> Outcomes:
    """Two processes with a device each."""
    return _run_job(tmp_path_factory.mktemp("two"), find_port(), 2, 1, [*ANY_NUMBER, *ONLY_TWO])


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory, find_port: Callable[[], int]) -> Outcomes:
    """Four processes with two devices each."""
    return _run_job(tmp_path_factory.mktemp("four"), find_port(), 4, 2, ANY_NUMBER)


@pytest.fixture(params=["two", "four"])
def job(request: pytest.FixtureRequest) -> Outcomes:
    """Either job."""
    outcomes: Outcomes = request.getfixturevalue(request.param)
    return outcomes


def _one(outcomes: list[Any]) -> Any:
    """The outcome, which must be the same on all processes."""
    assert all(outcome == outcomes[0] for outcome in outcomes)
    return outcomes[0]


# The same results on all


def test_all_hold_the_winner_of_process_0_though_others_would_rank_otherwise(job):
    outcomes = job["opposite_rankings"]
    _one([outcome["results"] for outcome in outcomes])
    # The loop with 300 steps on process 0 has 100 on the others.
    assert [outcome["best"] for outcome in outcomes] == [{"b": 100}] * len(outcomes)


def test_a_candidate_that_fails_on_one_process_is_out_on_all(job):
    values, stored = _one(job["failure_on_one"])
    results = Results.from_dict(stored)
    assert values == [2.0] * 8
    (failed,) = results.failures
    assert failed.hyperparams == {"b": 1}
    assert failed.failure.stage == "trace"
    assert failed.failure.message == f"on process {len(job['failure_on_one']) - 1}: no room"


def test_a_first_run_that_fails_on_one_process_counts_too(two):
    results = Results.from_dict(_one(two["failure_at_the_first_run"]))
    assert [row.hyperparams for row in results.timed] == [{"b": 2}]
    assert results.failures[0].failure.stage == "run"
    assert "none left" in results.failures[0].failure.message


def test_if_every_candidate_fails_all_get_the_same_error_each_time(two):
    outcome = _one(two["every_candidate_fails"])
    assert outcome["kinds"] == ["NoCandidateError", "NoCandidateError"]
    assert outcome["message"].startswith("No hyperparameters compiled successfully. The errors:\n  2 of 2 at run")
    assert [row["failure"]["stage"] for row in outcome["rows"]["rows"]] == ["run", "run"]


def test_all_try_the_sample_of_process_0_though_their_seeds_differ(job):
    assert len(Results.from_dict(_one(job["sample"]))) == 4


def test_choices_that_no_text_can_hold_are_taken_by_their_place(two):
    is_own, winner = _one(two["unnamed_choices"])
    assert is_own is True
    assert winner in (0, 1)


def test_transformed_calls_are_tuned_together(job):
    values, tunings, looked_up = _one(job["transformed"])
    eager, jitted, batched, placed = values
    assert (eager, jitted, batched, placed) == (12.0, 12.0, [4.0, 4.0, 4.0], 8.0)
    assert sorted(tuning["call"] for tuning in tunings) == ["x: float32[3,4]", "x: float32[3,4]", "x: float32[8]"]
    assert looked_up is True


def test_a_tuned_function_inside_another_is_tuned_together(job):
    inner, outer = map(Results.from_dict, _one(job["nested"]))
    assert {row.hyperparams["b"] for row in inner.timed} == {2, 4}
    assert {row.hyperparams["c"] for row in outer.timed} == {1, 3}


def test_threads_that_tune_in_another_order_do_not_mix_up(job):
    first, second = map(Results.from_dict, _one(job["threads_in_another_order"]))
    assert {row.hyperparams["b"] for row in first} == {1, 21}
    assert {row.hyperparams["b"] for row in second} == {2, 22}


def test_functions_that_are_made_anew_are_tuned_together_once(job):
    calls, value, slopes = _one(job["made_anew"])
    assert [sorted(row["hyperparams"]["b"] for row in call["rows"]) for call in calls] == [[2, 4], [2, 4]]
    assert sorted(call["call"] for call in calls) == ["y: float32[8]", "y: float32[8], closed-over 1: float32[]"]
    assert value == 8 * 8 + 8
    assert slopes == [8 + 8 + 1.0] * 8


def test_collectives_over_the_devices_of_each_process_are_tuned_together(job):
    difference, results = _one(job["on_a_local_mesh"])
    assert difference == 0.0
    assert {row.hyperparams["b"] for row in Results.from_dict(results).timed} == {2, 4}


def test_equal_functions_are_tuned_once(two):
    first, second = _one(two["functions_alike"])
    assert {row.hyperparams["b"] for row in Results.from_dict(first)} == {5, 6}
    assert first == second


def test_a_process_that_has_forgotten_gets_the_results_alone(two):
    first, equal = _one(two["forgotten"])
    assert {row.hyperparams["b"] for row in Results.from_dict(first)} == {7, 8}
    assert equal == first


# Arrays on devices of several processes


def test_an_array_of_several_processes_takes_the_first_candidate_and_says_why(job):
    for outcome in job["spanning"]:
        assert len(outcome["warnings"]) == 1
        assert outcome["warnings"][0].startswith("scale: devices of several processes hold x, and programs that all")
        assert "give the call its hyperparameters" in outcome["warnings"][0]
        assert outcome["warnings"][0].endswith("the first candidate, {'b': 3}, is used.")
        assert {value for shard in outcome["values"] for value in shard} == {3.0}


@pytest.mark.parametrize("how", ["tune", "asked"])
def test_tuning_for_an_array_of_several_processes_is_an_error(job, how):
    kind, message = _one([outcome[how] for outcome in job["spanning"]])
    assert kind == "ArgumentError"
    assert message.startswith("scale: devices of several processes hold x")


def test_under_jit_an_array_of_several_processes_is_tuned_by_its_shape(job):
    results = Results.from_dict(_one([outcome["under jit"] for outcome in job["spanning"]]))
    assert results.call == "x: float32[16]"
    assert len(results.timed) == 2
    assert all(outcome["same"] for outcome in job["spanning"])


# Errors, and no hanging


def test_an_error_on_one_process_is_told_to_the_other(two):
    (told, next_0), (own, next_1) = two["example_error_on_one"]
    assert own[0] == "ExampleError"
    assert told[0] == "AgreementError"
    assert told[1].startswith("process 1 could not tune [scale(x: float32[8]); cpu; ")
    assert told[1].endswith(f"]: ExampleError: {own[1]}")
    assert (next_0, next_1) == (2, 2)


def test_an_interrupt_on_one_process_is_told_to_the_other(two):
    told, own = two["interrupt_on_one"]
    assert own == ["KeyboardInterrupt", ""]
    assert told[0] == "AgreementError"
    assert told[1].endswith("]: KeyboardInterrupt")


def test_processes_at_different_calls_get_an_error_that_names_both(two):
    for process, (kind, message) in enumerate(two["another_call"]):
        assert kind == "AgreementError"
        assert f"process {process} waited 1 s for process {1 - process} to tune together" in message
        assert f"[scale(x: float32[{20 + process}]); cpu" in message
        assert f"It came to another call: [scale(x: float32[{21 - process}]); cpu" in message


def test_processes_with_different_functions_get_an_error_that_says_so(two):
    for kind, message in two["another_function"]:
        assert kind == "AgreementError"
        assert "It came to a call that reads the same, but whose function, grid or static values differ." in message


def test_a_process_that_comes_too_late_is_told_at_once_and_can_try_again(two):
    early, late = two["late_caller"]
    assert early["error"] == late["error"]
    assert early["error"][0] == "AgreementError"
    assert "process 0 waited 1 s for process 1 to tune together" in early["error"][1]
    assert "It came to no tuned call" in early["error"][1]
    assert early["s"] >= 1
    assert late["s"] < 1
    assert (early["again"], late["again"]) == (2, 2)


def test_a_process_that_takes_long_is_waited_for(two):
    assert two["slow_tuner"] == [None, None]


def test_a_process_that_ends_while_it_tunes_is_an_error_on_the_other(two):
    ((kind, message),) = two["one_ends"]
    assert kind == "AgreementError"
    assert "process 0 waited 1 s for process 1 to tune together [ending(x: float32[8]); cpu" in message
    assert "It came, but gives no more signs of life: it has ended, or hangs." in message
