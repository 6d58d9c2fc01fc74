"""The sentences around a table."""

from __future__ import annotations

import pytest

from tune_jax._records import Failure
from tune_jax._results import Results, Row
from tune_jax._results.notes import list_failures, list_notes, summarise_failure, write_caption


def timed(id, median_ns, *, clock="device", tied=False, spans_ns=(), shares_with=()):
    return Row(id, {"block": id}, (median_ns,), spans_ns, clock, slowdown=1.0, tied=tied, shares_with=shares_with)


def failed(id, message="too large", *, stage="compile", error_type="ValueError", hyperparams=None):
    return Row(id, {"block": id} if hyperparams is None else hyperparams, failure=Failure(stage, error_type, message))


def gather(*rows, **fields):
    return Results("attention", rows, **fields)


# Caption


def test_caption_says_what_where_how_many_which_clock_and_how_long():
    results = gather(timed(0, 1.0), failed(1), call="q: f32[8]", device_kind="NVIDIA H200", wall_s=2.13)
    assert write_caption(results) == (
        "attention(q: f32[8]) on NVIDIA H200: 2 candidates, 1 failed, device time, tuned in 2.1 s"
    )


def test_caption_leaves_out_what_is_not_known():
    assert write_caption(gather(timed(0, 1.0))) == "attention: 1 candidate, device time"


def test_caption_names_the_host_clock():
    assert "host time" in write_caption(gather(timed(0, 1.0, clock="host")))


def test_caption_counts_distinct_programs():
    rows = (timed(0, 1.0, shares_with=(1,)), timed(1, 1.0, shares_with=(0,)), timed(2, 2.0))
    assert "3 candidates (2 distinct programs)" in write_caption(gather(*rows))


def test_caption_of_a_single_program():
    rows = (timed(0, 1.0, shares_with=(1,)), timed(1, 1.0, shares_with=(0,)))
    assert "2 candidates (1 distinct program)" in write_caption(gather(*rows))


def test_caption_of_failures_only_has_no_clock():
    assert write_caption(gather(failed(0))) == "attention: 1 candidate, 1 failed"


# Failures


def test_a_failure_names_its_candidate_stage_and_error():
    assert list_failures([failed(3)]) == ["id 3 (block=3): failed at compile: ValueError: too large"]


def test_a_failure_without_hyperparams_names_its_id():
    assert list_failures([failed(0, hyperparams={})]) == ["id 0: failed at compile: ValueError: too large"]


def test_the_same_error_is_one_line_with_every_id():
    rows = [failed(id) for id in (1, 2, 3, 8)]
    assert list_failures(rows) == ["ids 1-3, 8 (4 candidates): failed at compile: ValueError: too large"]


def test_different_errors_are_different_lines():
    rows = [
        failed(0),
        failed(1, "other"),
        failed(2, stage="run"),
        failed(3, error_type="TypeError"),
        failed(4),
    ]
    assert [line.split(":")[0] for line in list_failures(rows)] == [
        "ids 0, 4 (2 candidates)",
        "id 1 (block=1)",
        "id 2 (block=2)",
        "id 3 (block=3)",
    ]


def test_timed_rows_are_no_failures():
    assert list_failures([timed(0, 1.0)]) == []


def test_only_the_first_line_of_an_error_is_shown():
    assert summarise_failure(Failure("run", "ValueError", "\n  first\nsecond")) == "ValueError: first"


def test_the_traceback_is_not_shown():
    failure = Failure("run", "ValueError", "first", traceback="Traceback (most recent call last)")
    assert "Traceback" not in summarise_failure(failure)


def test_an_error_without_a_message_is_its_type():
    assert summarise_failure(Failure("timeout", "TimeoutError", "")) == "TimeoutError"


def test_a_type_that_the_message_begins_with_is_not_said_twice():
    assert summarise_failure(Failure("run", "ValueError", "ValueError: bad")) == "ValueError: bad"


def test_a_very_long_message_is_cut_visibly():
    text = summarise_failure(Failure("run", "ValueError", "x" * 5000))
    assert ("…" in text, len(text) < 250) == (True, True)


# Notes


def test_the_last_note_compares_the_ends():
    assert list_notes(gather(timed(0, 100.0), timed(1, 250.0))) == [
        "The fastest setting runs 2.50 times as fast as the slowest."
    ]


def test_one_setting_has_nothing_to_compare_with():
    assert list_notes(gather(timed(0, 100.0), failed(1)))[-1].startswith("There is one timed setting here")


def test_no_setting_says_so():
    assert list_notes(gather(failed(0))) == ["No setting could be timed."]


def test_the_mark_for_ties_is_explained_where_there_are_any():
    notes = list_notes(gather(timed(0, 100.0), timed(1, 100.0, tied=True)))
    assert notes[0] == "= : not told apart from the fastest by these samples."


def test_the_host_clock_is_announced():
    notes = list_notes(gather(timed(0, 100.0, clock="host")))
    assert notes[0] == "Times are from the host clock, dispatch included, not from the device."


def test_every_warning_is_shown():
    notes = list_notes(gather(timed(0, 1.0), timed(1, 1.0), warnings=("one", "two")))
    assert notes[:2] == ["Warning: one", "Warning: two"]


def test_mostly_idle_launches_are_pointed_out():
    rows = [timed(i, 100.0, spans_ns=(1000.0,)) for i in (1, 2, 3)]
    notes = list_notes(gather(*rows, timed(0, 100.0, spans_ns=(110.0,))))
    assert notes[0] == "The device was idle for most of each launch of 1-3; times are busy time."


@pytest.mark.parametrize("spans_ns", [(), (150.0,)])
def test_short_gaps_are_not_worth_a_note(spans_ns):
    assert len(list_notes(gather(timed(0, 100.0, spans_ns=spans_ns)))) == 1
