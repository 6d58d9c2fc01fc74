"""Which events belong to which launch: split device events and match them with the known launch order."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple


class Event(NamedTuple):
    """One operation on a device: a kernel, a copy or an op of the CPU runtime."""

    module: str
    name: str
    op_name: str
    labels: tuple[str, ...]
    start_ns: float
    end_ns: float


class Launch(NamedTuple):
    """The events of one launch of one program on one device, by start."""

    module: str
    events: Sequence[Event]


def split_by_order(events: Sequence[Event], order: Sequence[str]) -> list[Launch]:
    """Cut the events of one device, sorted by start, into launches.

    Events of one program in a row are a run. A run is one launch, unless the order asks for the program
    several times in a row; where the runs do not follow the order because launches left no event, a run as
    long as several of the program's shortest is taken for as many launches.
    """
    runs = [Launch(module, tuple(run)) for module, run in itertools.groupby(events, lambda event: event.module)]
    present = {run.module for run in runs}
    groups = [(name, len(list(group))) for name, group in itertools.groupby(filter(present.__contains__, order))]
    if [name for name, _ in groups] == [run.module for run in runs]:
        counts = [count for _, count in groups]
    else:
        counts = _guess_counts(runs)
    return [piece for run, count in zip(runs, counts, strict=True) for piece in split_run(run, count)]


def split_run(run: Launch, count: int) -> list[Launch]:
    """Cut a run into `count` launches, or fewer if it has fewer events.

    Where the kernel names repeat `count` times, cut by the period; otherwise at the largest idle gaps.
    """
    count = min(count, len(run.events))
    if _repeats(run, count):
        size = len(run.events) // count
        cuts = list(range(size, len(run.events), size))
    else:
        cuts = sorted(_find_idle_gaps(run.events)[: count - 1])
    bounds = [0, *cuts, len(run.events)]
    return [Launch(run.module, run.events[begin:end]) for begin, end in itertools.pairwise(bounds)]


def match_launches(launches: Sequence[Launch], order: Sequence[str]) -> list[Launch | None]:
    """For each entry of the order the launch that was seen for it, or None.

    Each launch takes the next entry of its program. Launches can be missing from a trace but not appear in
    another order, and a subsequence is always found whole this way; which of several like launches is
    missing cannot be known, so the first of them are taken as seen.
    """
    matched: list[Launch | None] = [None] * len(order)
    next_place = 0
    for launch in launches:
        rest = range(next_place, len(order))
        place = next((place for place in rest if order[place] == launch.module), None)
        if place is not None:
            matched[place] = launch
            next_place = place + 1
    return matched


def _guess_counts(runs: Sequence[Launch]) -> list[int]:
    shortest: dict[str, int] = {}
    for run in runs:
        shortest[run.module] = min(len(run.events), shortest.get(run.module, len(run.events)))
    counts = [len(run.events) // shortest[run.module] for run in runs]
    return [count if _repeats(run, count) else 1 for run, count in zip(runs, counts, strict=True)]


def _repeats(run: Launch, count: int) -> bool:
    size = len(run.events) // count
    names = [event.name for event in run.events]
    return names == names[:size] * count


def _find_idle_gaps(events: Sequence[Event]) -> list[int]:
    """The places of the events that end an idle gap, largest gap first."""
    ends = list(itertools.accumulate((event.end_ns for event in events), max))
    gaps = {place: events[place].start_ns - ends[place - 1] for place in range(1, len(events))}
    return sorted(gaps, key=lambda place: -gaps[place])
