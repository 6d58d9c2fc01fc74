"""What the tuning of a whole program found, as it is printed and looked up."""

from __future__ import annotations

import os

import pytest

from tune_jax import ProgramResults, Results, TunedCall, TuneError
from tune_jax._errors import CallSiteError
from tune_jax._records import Candidate, Failure, Samples
from tune_jax._results import make_results

HERE = os.path.join("models", "block.py")


def tuned(function: str, *times_ns: float | None) -> Results:
    """Candidate i takes times_ns[i] a launch, or failed where that is None."""
    return make_results(
        function=function,
        call="x: f32[8]",
        candidates=[Candidate(i, {"block": 64 * (i + 1)}) for i in range(len(times_ns))],
        samples={i: Samples("device", (t, t)) for i, t in enumerate(times_ns) if t is not None},
        failures={i: Failure("run", "ValueError", "too <large>") for i, t in enumerate(times_ns) if t is None},
        device_kind="cpu",
        wall_s=1.5,
        separation=3.0,
    )


PROJECT, ATTEND, BROKEN = tuned("project", 3e3, 2e3), tuned("attend", 1e6), tuned("broken", None, None)
UNTIMED = Results("collect", (), "x: f32[4]", warnings=("it needs the axis names around it.",))
CALLS = ProgramResults(
    "step",
    (
        TunedCall(f"{HERE}:12 in Layer.__call__", 24, ATTEND),
        TunedCall(f"{HERE}:10 in Layer.__call__", 48, PROJECT),
        TunedCall("train.py:7 in loss", 1, PROJECT),
    ),
)
FAULTY = ProgramResults(
    "step", (*CALLS, TunedCall("train.py:8 in loss", 1, BROKEN), TunedCall("train.py:8 in loss", 2, UNTIMED))
)


def test_printing_shows_a_line_a_call():
    assert str(CALLS).splitlines() == [
        "step: 2 distinct calls at 3 places",
        "",
        "    call site                             function    arguments      count  fastest      median [s]",
        "--  ------------------------------------  ----------  -----------  -------  ---------  ------------",
        " 0  models/block.py:12 in Layer.__call__  attend      x: f32[8]         24  block=64     1.0000e-03",
        " 1  models/block.py:10 in Layer.__call__  project     x: f32[8]         48  block=128    2.0000e-06",
        " 2  train.py:7 in loss                    project     x: f32[8]          1  block=128    2.0000e-06",
    ]


def test_printing_shows_why_a_call_has_no_winner():
    lines = str(FAULTY).splitlines()
    assert lines[0] == "step: 4 distinct calls at 5 places, 2 without a winner"
    assert lines[-5].split() == ["3", "train.py:8", "in", "loss", "broken", "x:", "f32[8]", "1", "none"]
    assert lines[-2:] == [
        "call 3, train.py:8 in loss: all candidates failed, the first with ValueError: too <large>",
        "call 4, train.py:8 in loss: it needs the axis names around it.",
    ]


def test_a_notebook_shows_a_table():
    page = FAULTY._repr_html_()
    assert page.count("<tr>") == 6
    assert "<caption>step: 4 distinct calls at 5 places, 2 without a winner</caption>" in page
    assert "too &lt;large&gt;" in page


def test_a_program_without_calls_says_so():
    nothing = ProgramResults("step", ())
    assert str(nothing) == "step makes no call that can be tuned."
    assert "<p>step makes no call that can be tuned.</p>" in nothing._repr_html_()


def test_one_call_is_one_call():
    assert str(CALLS[:1]).startswith("step: 1 distinct call at 1 place\n")


def test_calls_are_found_by_index_and_slice():
    assert len(CALLS) == 3
    assert CALLS[0].results is ATTEND
    assert CALLS[-1].site == "train.py:7 in loss"
    assert CALLS[1:] == ProgramResults("step", CALLS.calls[1:])
    assert list(CALLS) == list(CALLS.calls)


@pytest.mark.parametrize("site", [f"{HERE}:12 in Layer.__call__", f"{HERE}:12", "block.py:12"])
def test_calls_are_found_by_call_site(site):
    assert CALLS[site].results is ATTEND


@pytest.mark.parametrize("site", ["block.py", "lock.py:12", "block.py:1", "Layer.__call__", ""])
def test_a_site_without_a_call_is_an_error_that_lists_those_with_one(site):
    with pytest.raises(CallSiteError, match=r"no tuned call is made at .*'train.py:7 in loss'") as caught:
        CALLS[site]
    assert isinstance(caught.value, TuneError | LookupError)


def test_a_site_with_several_calls_is_an_error_that_says_which():
    with pytest.raises(CallSiteError, match=r"'train.py:8' is where the calls \[3, 4\] are made; take one .* index"):
        FAULTY["train.py:8"]


def test_a_site_in_a_program_without_calls_is_an_error():
    with pytest.raises(CallSiteError, match="the call sites are: none"):
        ProgramResults("step", ())["a.py:1"]


def test_failures_are_the_calls_without_a_winner():
    assert CALLS.failures == ()
    assert [call.results for call in FAULTY.failures] == [BROKEN, UNTIMED]
    assert CALLS.problems == ()


def test_long_cells_are_cut():
    long = tuned("long", 1e3)
    long = Results(long.function, long.rows, "x: " + "f32[8]" * 50)
    assert max(map(len, str(ProgramResults("step", (TunedCall("a.py:1 in f", 1, long),))).splitlines())) < 140
