from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tune_jax._measure._intervals import credit_last_started, measure_durations, merge_intervals, union_ns

small_intervals = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), max_size=8)


@pytest.mark.parametrize(
    ("intervals", "expected"),
    [
        ([(0, 10), (5, 15), (20, 30), (20, 20), (22, 25)], 25),
        ([(6, 12), (16, 20), (3, 7), (2, 7), (6, 12), (20, 23)], 17),
        ([], 0),
        ([(7, 7)], 0),
        ([(0, 1), (1, 2)], 2),
        ([(0, 10)] * 3, 10),
    ],
)
def test_union_counts_overlaps_once_and_gaps_never(intervals: list[tuple[int, int]], expected: int) -> None:
    assert union_ns(intervals) == expected


def test_union_equals_a_count_of_integers_for_random_sets() -> None:
    rng = random.Random(16)
    for _ in range(20_000):
        starts = [rng.randrange(25) for _ in range(rng.randint(1, 6))]
        intervals = [(start, start + rng.randrange(7)) for start in starts]
        covered = {instant for start, end in intervals for instant in range(start, end)}
        assert union_ns(intervals) == len(covered), intervals


def test_merge_gives_disjoint_intervals_in_order() -> None:
    assert merge_intervals([(5, 9), (0, 2), (2, 3), (8, 12)]) == [(0, 3), (5, 12)]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_union_leaves_out_intervals_that_are_not_finite(bad: float) -> None:
    assert union_ns([(0, bad), (bad, 5), (bad, bad), (1, 3)]) == 2


def test_union_leaves_out_reversed_intervals() -> None:
    assert union_ns([(5, 1), (2, 3)]) == 1


def test_durations_count_overlaps_for_each() -> None:
    assert measure_durations([(0, 10), (5, 15), (3, 3), (4, 1)]) == [10, 10, 0, 0]


def test_credit_of_an_outer_interval_is_what_the_inner_ones_leave() -> None:
    assert credit_last_started([(0, 10), (2, 5), (6, 7)]) == [6, 3, 1]


def test_credit_goes_to_the_innermost_of_three_levels() -> None:
    assert credit_last_started([(0, 10), (1, 9), (2, 8)]) == [2, 2, 6]


def test_credit_of_equal_starts_goes_to_the_shorter() -> None:
    assert credit_last_started([(0, 4), (0, 10)]) == [4, 6]


def test_credit_of_overlapping_threads_moves_to_the_later_start() -> None:
    assert credit_last_started([(0, 10), (5, 15)]) == [5, 10]


def test_credit_skips_gaps() -> None:
    assert credit_last_started([(0, 1), (100, 101)]) == [1, 1]


def test_credit_of_improper_intervals_is_zero() -> None:
    assert credit_last_started([(0, 3), (2, 2), (9, 1), (math.nan, 5), (0, math.inf)]) == [3, 0, 0, 0, 0]


def test_credit_of_nothing_is_empty() -> None:
    assert credit_last_started([]) == []


@given(small_intervals)
def test_credits_add_up_to_the_union(intervals: list[tuple[int, int]]) -> None:
    assert sum(credit_last_started(intervals)) == union_ns(intervals)


@given(small_intervals)
def test_credit_never_exceeds_the_duration(intervals: list[tuple[int, int]]) -> None:
    credits, durations = credit_last_started(intervals), measure_durations(intervals)
    assert all(0 <= credit <= duration for credit, duration in zip(credits, durations, strict=True))
