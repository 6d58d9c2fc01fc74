"""Exceptions of the user's code -> failures, and the words for many of them."""

from __future__ import annotations

import contextlib
import gc
import weakref

import numpy as np
import pytest

from tune_jax import _failure as failure_room
from tune_jax._errors import NoCandidateError
from tune_jax._failure import FailedBeforeError, attempt, describe_failure, own_frames, pick_own, summarise
from tune_jax._records import NONE_WORKS, Failure


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


def test_errors_beyond_the_tenth_are_counted_only():
    failures = {i: Failure("trace", "ValueError", f"odd {i}") for i in range(13)}
    lines = summarise(failures).splitlines()
    assert lines[10:] == ["  1 of 13 at trace: ValueError: odd 9", "  and 3 more"]


def test_a_summary_ends_with_where_the_first_listed_error_came_from():
    failures = {
        0: Failure("trace", "ValueError", "odd", frames_of("/home/me/rare.py")),
        1: Failure("trace", "TypeError", "even", frames_of("/home/me/first.py")),
        2: Failure("trace", "TypeError", "even", frames_of("/home/me/second.py")),
    }
    assert summarise(failures).splitlines()[3:] == [
        "The first of these came from:",
        '    File "/home/me/first.py", line 7, in work',
        "      raise it",
    ]


def frames_of(*paths):
    frames = [f'  File "{path}", line 7, in work\n    raise it\n    ^^^^^^^^\n' for path in paths]
    return f"Traceback (most recent call last):\n{''.join(frames)}ValueError: odd\n"


@pytest.mark.parametrize(
    ("paths", "expected"),
    [
        (["/home/me/a.py", "/v/lib/python3.11/site-packages/jax/_src/core.py"], ["/home/me/a.py"]),
        (["/home/me/a.py", "/v/lib/python3.11/site-packages/flax/b.py"], ["/home/me/a.py"]),
        ([failure_room.__file__, "/v/lib/python3.11/site-packages/flax/b.py"], ["/flax/b.py"]),
        ([failure_room.__file__, contextlib.__file__, "<frozen runpy>"], []),
        (["/v/lib/python3.11/site-packages/jaxlib/a.py", "/v/dist-packages/jaxtyping/b.py"], ["/jaxtyping/b.py"]),
        ([f"/home/me/{i}.py" for i in range(8)], [f"/home/me/{i}.py" for i in range(3, 8)]),
    ],
    ids=["jax", "packages", "packages alone", "nothing", "jaxlib", "many"],
)
def test_the_frames_shown_are_the_users_last_ones(paths, expected):
    shown = [line for line in own_frames(frames_of(*paths)).splitlines() if "File" in line]
    assert len(shown) == len(expected)
    assert all(f'{path}", line 7' in line for path, line in zip(expected, shown, strict=True))


def test_frames_that_are_the_users_own_are_picked_in_their_order():
    package, jax_file = "/v/site-packages/flax/a.py", "/v/site-packages/jax/_src/b.py"
    assert pick_own([("/home/b.py", 1), (package, 2), (jax_file, 3), ("/home/a.py", 4)]) == [
        ("/home/b.py", 1),
        ("/home/a.py", 4),
    ]
    assert pick_own([(package, 2), (jax_file, 3)]) == [(package, 2)]
    assert pick_own([(jax_file, 3)]) == []


def test_the_frames_of_a_summary_inside_of_a_traceback_are_shown_after_its_own():
    inner = summarise({0: Failure("trace", "ValueError", "odd", frames_of("/home/me/inner.py"))})
    shown = own_frames(f"{frames_of('/home/me/outer.py')}{inner}\n")
    assert [line.strip() for line in shown.splitlines() if "File" in line] == [
        'File "/home/me/outer.py", line 7, in work',
        'File "/home/me/inner.py", line 7, in work',
    ]


def test_a_frame_whose_source_is_not_known_is_shown_without():
    assert own_frames('Trace:\n  File "/home/me/a.py", line 7, in work\nValueError: odd\n') == (
        '    File "/home/me/a.py", line 7, in work'
    )


def test_the_first_line_of_a_tuning_inside_is_its_first_error():
    inner = NoCandidateError(summarise({0: Failure("trace", "ValueError", "odd")}))
    assert describe_failure("trace", inner).first_line == "1 of 1 at trace: ValueError: odd"
    assert describe_failure("trace", NoCandidateError(NONE_WORKS)).first_line == NONE_WORKS


def test_an_exception_that_cannot_say_its_message_is_a_failure_like_others():
    class Mute(Exception):
        def __str__(self):
            raise LookupError("no words")

    failure = attempt("run", lambda: raise_(Mute()))
    assert (failure.error_type, failure.message) == ("Mute", "its message cannot be read: __str__ raised LookupError")
    assert "in raise_" in failure.traceback


def test_what_failed_before_is_the_failure_that_it_was():
    failure = attempt("trace", lambda: {}["missing"])
    assert isinstance(failure, Failure)

    def again():
        raise FailedBeforeError(failure)

    assert attempt("compile", again) is failure
