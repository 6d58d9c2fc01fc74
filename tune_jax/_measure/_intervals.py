"""Arithmetic on time intervals. Plain numbers, no jax."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """The disjoint intervals that cover the same instants, in order.

    Empty, reversed and non-finite intervals cover nothing and are dropped.
    """
    merged: list[Interval] = []
    for start, end in sorted(filter(_is_proper, intervals)):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def union_ns(intervals: Iterable[Interval]) -> float:
    """How long at least one of the intervals lasts: overlaps count once, gaps not at all."""
    return math.fsum(end - start for start, end in merge_intervals(intervals))


def measure_durations(intervals: Sequence[Interval]) -> list[float]:
    """Each interval's own length; overlaps count once for each interval."""
    return [end - start if _is_proper((start, end)) else 0.0 for start, end in intervals]


def credit_last_started(intervals: Sequence[Interval]) -> list[float]:
    """Give every instant to the interval that started last among those that hold it.

    For nested intervals this is self time: a loop gets what its body leaves over. The credits always add
    up to the union, also when threads overlap. One sweep with a stack, as profilers compute self time.
    """
    proper = [index for index, interval in enumerate(intervals) if _is_proper(interval)]
    credits = [0.0] * len(intervals)
    running: list[int] = []
    now = -math.inf
    for index in sorted(proper, key=lambda index: (intervals[index][0], -intervals[index][1])):
        _credit_until(intervals[index][0], now, running, intervals, credits)
        now = intervals[index][0]
        running.append(index)
    _credit_until(math.inf, now, running, intervals, credits)
    return credits


def _credit_until(
    limit: float, now: float, running: list[int], intervals: Sequence[Interval], credits: list[float]
) -> None:
    while running and now < limit:
        end = intervals[running[-1]][1]
        if end > now:
            credits[running[-1]] += min(end, limit) - now
            now = min(end, limit)
        if end <= limit:
            running.pop()


def _is_proper(interval: Interval) -> bool:
    return -math.inf < interval[0] < interval[1] < math.inf
