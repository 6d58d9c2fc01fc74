"""Exceptions of the user's code -> failures, and the words for many of them."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import pytest

from tune_jax._failure import attempt, describe_failure, summarise
from tune_jax._records import Failure


def raise_(error):
    raise error


def test_what_works_is_handed_back():
    assert attempt("run", lambda: 3) == 3


def test_what_raises_becomes_a_failure_with_stage_type_message_and_traceback():
    failure = attempt("compile", lambda: raise_(ValueError("block too large")))
    assert isinstance(failure, Failure)
    assert (failure.stage, failure.error_type, failure.message) == ("compile", "ValueError", "block too large")
    assert "in raise_" in failure.traceback
    assert failure.traceback.rstrip().endswith("ValueError: block too large")


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit])
def test_what_ends_the_program_is_not_caught(error):
    with pytest.raises(error):
        attempt("run", lambda: raise_(error()))


def test_an_error_without_a_message_is_known_by_its_type():
    assert describe_failure("run", AssertionError()).message == "AssertionError"


def test_the_first_line_is_the_first_that_says_something():
    assert describe_failure("run", ValueError("\n\n  block too large\nmore")).first_line == "block too large"


@pytest.mark.parametrize(
    "error", [RuntimeError("RESOURCE_EXHAUSTED: tried to allocate 9 GB"), MemoryError("no room"), MemoryError()]
)
def test_running_out_of_memory_is_named_first(error):
    assert describe_failure("run", error).first_line.startswith("out of memory: ")


def test_running_out_of_shared_memory_is_not_called_out_of_memory():
    error = RuntimeError("RESOURCE_EXHAUSTED: Shared memory size limit exceeded: requested 270336, available: 232448")
    assert describe_failure("compile", error).first_line.startswith("RESOURCE_EXHAUSTED: Shared memory")


def test_the_chain_of_causes_is_in_the_traceback():
    def fail():
        try:
            raise_(KeyError("inner"))
        except KeyError as error:
            raise ValueError("outer") from error

    failure = attempt("trace", fail)
    assert "KeyError: 'inner'" in failure.traceback
    assert failure.message == "outer"


def test_a_failure_lets_go_of_what_the_frames_held():
    kept = []

    def fail():
        array = np.zeros(8)
        kept.append(weakref.ref(array))
        raise ValueError

    failure = attempt("run", fail)
    gc.collect()
    assert failure.error_type == "ValueError"
    assert kept[0]() is None


def test_a_summary_counts_each_distinct_error_most_frequent_first():
    failures = {
        0: Failure("trace", "ValueError", "odd\nmore"),
        1: Failure("compile", "RuntimeError", "too large"),
        2: Failure("trace", "ValueError", "odd\nother"),
    }
    assert summarise(failures).splitlines() == [
        "No hyperparameters compiled successfully. The errors:",
        "  2 of 3 at trace: ValueError: odd",
        "  1 of 3 at compile: RuntimeError: too large",
    ]


def test_errors_at_different_stages_are_counted_apart():
    failures = {0: Failure("trace", "ValueError", "odd"), 1: Failure("run", "ValueError", "odd")}
    assert len(summarise(failures).splitlines()) == 3
