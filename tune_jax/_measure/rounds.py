"""Rounds of launches: all programs first, then only those that may still be the fastest."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from tune_jax._measure.timers import Launchable, Timer
from tune_jax._rank import contenders, is_usable
from tune_jax._records import KernelTime, LaunchTime, Samples

_OUT_OF_REACH = 10


@dataclasses.dataclass(frozen=True)
class Effort:
    """How much to measure: rounds for all, rounds at most, seconds, and when two programs count as told apart."""

    first_rounds: int
    max_rounds: int
    max_seconds: float
    separation: float
    tie_tolerance: float


def measure(
    programs: Sequence[Launchable],
    timer: Timer,
    effort: Effort,
    *,
    seed: int,
    on_round: Callable[[int], object],
    now: Callable[[], float] = time.monotonic,
) -> dict[int, Samples]:
    """Time every program in `first_rounds` rounds, then the contenders until the winner is settled or a bound is met.

    Each round launches its programs once, in a new random order drawn with `seed`. A program that is out of reach, ten
    times as slow as the fastest both in its first run and in the first round, gets that one round only. Rounds come in
    stretches, a trace each; `on_round(n)` is told of the n programs of each stretch that has been timed.

    Raises:
      ProfileError: the timer's clock cannot be had.
    """
    shuffle = random.Random(seed)
    deadline = now() + effort.max_seconds
    launches: dict[int, list[LaunchTime | None]] = {program.id: [] for program in programs}
    racing, rounds = list(programs), 0
    stretch = 1 if _are_far_apart(programs) or _may_be_long(programs, effort) else effort.first_rounds
    while racing and rounds < effort.max_rounds:
        stretch = min(stretch, effort.max_rounds - rounds)
        order = draw_order(racing, stretch, shuffle)
        for program, launch in zip(order, timer.time(order), strict=True):
            launches[program.id].append(launch)
        rounds += stretch
        on_round(len(racing))
        seconds_left = deadline - now()
        if seconds_left <= 0:
            break
        missing = effort.first_rounds - rounds
        racing = _within_reach(racing, launches) if missing > 0 else _still_racing(programs, launches, timer, effort)
        # As many rounds again as there were, for each stretch has its price.
        stretch = _limit_rounds(missing if missing > 0 else rounds, [launches[p.id] for p in racing], seconds_left)
    return {key: to_samples(timer, times) for key, times in launches.items()}


def draw_order(programs: Sequence[Launchable], rounds: int, shuffle: random.Random) -> list[Launchable]:
    """Draw the order of some rounds; no program follows itself, unless there is only one."""
    order: list[Launchable] = []
    for _ in range(rounds):
        drawn = shuffle.sample(programs, len(programs))
        if order and len(drawn) > 1 and drawn[0].id == order[-1].id:
            drawn.append(drawn.pop(0))
        order += drawn
    return order


def to_samples(timer: Timer, times: Sequence[LaunchTime | None]) -> Samples:
    """Gather the launches of one program; a launch that the clock did not see is not a number."""
    missing = float("nan")
    return Samples(
        timer.clock,
        tuple(missing if launch is None else launch.busy_ns for launch in times),
        tuple(missing if launch is None else launch.span_ns for launch in times),
        _sum_kernels([kernel for launch in times if launch is not None for kernel in launch.kernels]),
    )


def _are_far_apart(programs: Sequence[Launchable]) -> bool:
    first_runs = [program.first_run_ns for program in programs if program.first_run_ns]
    return len(first_runs) > 1 and max(first_runs) > _OUT_OF_REACH * min(first_runs)


def _may_be_long(programs: Sequence[Launchable], effort: Effort) -> bool:
    round_s = sum(program.first_run_ns for program in programs) * 1e-9
    return effort.first_rounds * round_s > effort.max_seconds


def _within_reach(
    programs: Sequence[Launchable], launches: Mapping[int, Sequence[LaunchTime | None]]
) -> list[Launchable]:
    """Leave out what took many times as long as the fastest twice, in its first run and in its first round.

    Once alone does not count: on a CPU one launch in twenty may take twenty times as long. What has failed, which can
    be quick, sets no limit.
    """
    sound = [program for program in programs if not program.has_failed()]
    seen = {p.id: min((launch.busy_ns for launch in launches[p.id] if launch), default=0.0) for p in sound}
    limit_ns = _OUT_OF_REACH * min((time_ns for time_ns in seen.values() if time_ns > 0), default=0.0)
    return [program for program in sound if min(seen[program.id], program.first_run_ns) <= limit_ns]


def _limit_rounds(wanted: int, racing: Sequence[Sequence[LaunchTime | None]], seconds_left: float) -> int:
    """As many of the wanted rounds as time is left for, at least one."""
    seen = [[launch.busy_ns for launch in times if launch is not None] for times in racing]
    round_s = sum(statistics.median(times) for times in seen if times) * 1e-9
    return max(1, min(wanted, int(seconds_left / round_s))) if round_s else wanted


def _still_racing(
    programs: Sequence[Launchable],
    launches: Mapping[int, Sequence[LaunchTime | None]],
    timer: Timer,
    effort: Effort,
) -> list[Launchable]:
    samples = {program.id: to_samples(timer, launches[program.id]) for program in programs if not program.has_failed()}
    usable = {key: sample for key, sample in samples.items() if is_usable(sample)}
    if len(usable) < 2:
        return []
    decision = contenders(usable, separation=effort.separation, tie_tolerance=effort.tie_tolerance)
    return [] if decision.settled else [program for program in programs if program.id in decision.ids]


def _sum_kernels(kernels: Sequence[KernelTime]) -> tuple[KernelTime, ...]:
    summed: dict[tuple[str, str], KernelTime] = {}
    for kernel in kernels:
        key = (kernel.name, kernel.op_name)
        before = summed.get(key, KernelTime(kernel.name, kernel.op_name, 0, 0.0))
        summed[key] = dataclasses.replace(
            before, count=before.count + kernel.count, total_ns=before.total_ns + kernel.total_ns
        )
    return tuple(summed.values())
