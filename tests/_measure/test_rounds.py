"""Rounds of launches, with a timer that makes times up: plain numbers in."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence

import pytest

from tune_jax._errors import ProfileError
from tune_jax._measure.rounds import Effort, draw_order, measure, to_samples
from tune_jax._measure.timers import Launchable, Timer
from tune_jax._records import Clock, KernelTime, LaunchTime, Samples

NAN = float("nan")


def make_programs(count: int) -> list[Launchable]:
    return [Launchable(index, f"m{index}", lambda: None) for index in range(count)]


class FakeTimer:
    """Gives each program's launches the times that `time_ns(id, n)` says for its n-th launch, and keeps the orders."""

    def __init__(self, time_ns: Callable[[int, int], float | None], clock: Clock = "device") -> None:
        self.clock: Clock = clock
        self.orders: list[list[int]] = []
        self._time_ns, self._counts = time_ns, collections.Counter[int]()

    def time(self, order: Sequence[Launchable]) -> list[LaunchTime | None]:
        self.orders.append([program.id for program in order])
        return [self._launch(program) for program in order]

    def _launch(self, program: Launchable) -> LaunchTime | None:
        time_ns = self._time_ns(program.id, self._counts[program.id])
        self._counts[program.id] += 1
        return None if time_ns is None else LaunchTime(program.module, time_ns, time_ns + 1, ())


def run_measure(
    timer: Timer,
    count: int,
    first_rounds: int = 5,
    max_rounds: int = 20,
    max_seconds: float = 100.0,
    seed: int = 0,
    on_round: Callable[[int], object] = lambda done: None,
    now: Callable[[], float] = lambda: 0.0,
) -> dict[int, Samples]:
    effort = Effort(first_rounds, max_rounds, max_seconds, separation=3.0, tie_tolerance=0.005)
    return measure(make_programs(count), timer, effort, seed=seed, on_round=on_round, now=now)


def noisy(*medians_ns: float) -> Callable[[int, int], float]:
    """Times that swing by 4 % around a median."""
    return lambda program, launch: medians_ns[program] * (1 + 0.02 * (launch % 5 - 2))


def test_every_program_is_launched_once_a_round() -> None:
    timer = FakeTimer(lambda program, launch: 100.0 * (program + 1))
    run_measure(timer, 4, first_rounds=3)
    rounds = [timer.orders[0][start : start + 4] for start in (0, 4, 8)]
    assert all(sorted(each) == [0, 1, 2, 3] for each in rounds)


def test_rounds_come_in_another_order_each_time() -> None:
    timer = FakeTimer(lambda program, launch: 100.0 * (program + 1))
    run_measure(timer, 8, first_rounds=4)
    rounds = [tuple(timer.orders[0][start : start + 8]) for start in range(0, 32, 8)]
    assert len(set(rounds)) > 1


def test_the_same_seed_gives_the_same_order() -> None:
    timers = [FakeTimer(noisy(100, 101, 300)) for _ in range(3)]
    for timer, seed in zip(timers, (7, 7, 8), strict=True):
        run_measure(timer, 3, seed=seed)
    assert timers[0].orders == timers[1].orders != timers[2].orders


@pytest.mark.parametrize("count", [2, 3, 5])
def test_no_program_follows_itself(count: int) -> None:
    for seed in range(50):
        order = [p.id for p in draw_order(make_programs(count), 6, random.Random(seed))]
        assert all(left != right for left, right in itertools.pairwise(order))


def test_a_single_program_follows_itself() -> None:
    assert [p.id for p in draw_order(make_programs(1), 3, random.Random(0))] == [0, 0, 0]


def test_a_clear_winner_ends_the_race_after_the_first_rounds() -> None:
    timer = FakeTimer(noisy(100, 200, 300))
    samples = run_measure(timer, 3)
    assert len(timer.orders) == 1
    assert [len(samples[key].durations_ns) for key in range(3)] == [5, 5, 5]


def test_only_contenders_go_on() -> None:
    timer = FakeTimer(noisy(100, 101, 300))
    samples = run_measure(timer, 3)
    assert {key for order in timer.orders[1:] for key in order} == {0, 1}
    assert len(samples[2].durations_ns) == 5
    assert len(samples[0].durations_ns) == len(samples[1].durations_ns) > 5


def test_a_contender_that_is_told_apart_later_ends_the_race() -> None:
    timer = FakeTimer(noisy(100, 105))
    run_measure(timer, 2, max_rounds=100)
    assert 1 < len(timer.orders) < 20


def test_programs_that_are_equal_without_noise_are_tied_at_once() -> None:
    timer = FakeTimer(lambda program, launch: 1e6)
    run_measure(timer, 3, max_rounds=1000)
    assert len(timer.orders) <= 3


def test_rounds_are_bounded() -> None:
    timer = FakeTimer(lambda program, launch: 100.0 + 50 * random.Random(7 * launch + program).random())
    samples = run_measure(timer, 2, first_rounds=5, max_rounds=12)
    assert [len(samples[key].durations_ns) for key in (0, 1)] == [12, 12]
    assert [len(order) for order in timer.orders] == [10, 10, 4]


def test_fewer_rounds_at_most_than_first_ones_is_the_bound() -> None:
    timer = FakeTimer(noisy(100, 200))
    samples = run_measure(timer, 2, first_rounds=5, max_rounds=3)
    assert len(samples[0].durations_ns) == 3


def test_no_round_starts_after_the_deadline() -> None:
    timer = FakeTimer(noisy(100, 101))
    times = iter([0.0, 5.0, 11.0, 99.0])
    run_measure(timer, 2, max_seconds=10.0, now=lambda: next(times))
    assert len(timer.orders) == 2


def test_the_first_rounds_happen_whatever_the_deadline() -> None:
    samples = run_measure(FakeTimer(noisy(100, 101)), 2, max_seconds=0.0)
    assert len(samples[0].durations_ns) == 5


def test_a_program_without_times_is_not_in_the_race() -> None:
    timer = FakeTimer(lambda program, launch: None if program == 0 else noisy(0, 100, 101)(program, launch))
    samples = run_measure(timer, 3)
    assert 0 not in {key for order in timer.orders[1:] for key in order}
    assert str(samples[0].durations_ns) == str((NAN,) * 5)


@pytest.mark.parametrize("nonsense", [0.0, NAN, float("inf"), -5.0])
def test_a_program_with_impossible_times_does_not_win_the_race(nonsense: float) -> None:
    timer = FakeTimer(lambda program, launch: nonsense if program == 0 else noisy(0, 100, 101)(program, launch))
    run_measure(timer, 3)
    assert {key for order in timer.orders[1:] for key in order} == {1, 2}


def test_a_program_that_has_failed_is_not_in_the_race() -> None:
    timer = FakeTimer(noisy(1, 100, 101))
    failed, *others = make_programs(3)
    failed = dataclasses.replace(failed, has_failed=lambda: True)
    effort = Effort(5, 20, 100.0, separation=3.0, tie_tolerance=0.005)
    measure([failed, *others], timer, effort, seed=0, on_round=lambda done: None)
    assert {key for order in timer.orders[1:] for key in order} == {1, 2}


def with_first_runs(*first_runs_ns: float) -> list[Launchable]:
    programs = make_programs(len(first_runs_ns))
    return [dataclasses.replace(p, first_run_ns=ns) for p, ns in zip(programs, first_runs_ns, strict=True)]


def count_launches(programs: list[Launchable], timer: Timer) -> list[int]:
    effort = Effort(5, 5, 100.0, separation=3.0, tie_tolerance=0.005)
    samples = measure(programs, timer, effort, seed=0, on_round=lambda done: None)
    return [len(samples[program.id].durations_ns) for program in programs]


def test_a_program_out_of_reach_twice_gets_one_round() -> None:
    assert count_launches(with_first_runs(1e3, 1e3, 2e4), FakeTimer(noisy(1e3, 2e3, 2e4))) == [5, 5, 1]


def test_a_program_that_was_slow_in_its_first_run_only_gets_all_rounds() -> None:
    assert count_launches(with_first_runs(1e3, 1e6), FakeTimer(noisy(1e3, 2e3))) == [5, 5]


def test_a_program_that_was_slow_in_the_first_round_only_gets_all_rounds() -> None:
    timer = FakeTimer(lambda program, launch: 1e6 if (program, launch) == (1, 0) else 1e3)
    assert count_launches(with_first_runs(1e3, 1e3, 5e4), timer) == [5, 5, 5]


def test_a_failed_program_puts_no_other_out_of_reach() -> None:
    failed, *others = with_first_runs(1e3, 5e4, 5e4)
    failed = dataclasses.replace(failed, has_failed=lambda: True)
    assert count_launches([failed, *others], FakeTimer(noisy(1.0, 5e4, 5e4)))[1:] == [5, 5]


def test_programs_of_which_the_clock_saw_nothing_are_not_out_of_reach() -> None:
    timer = FakeTimer(lambda program, launch: None if launch == 0 else 1e3)
    assert count_launches(with_first_runs(1e3, 1e6), timer) == [5, 5]


def test_a_launch_that_was_not_seen_is_not_a_number_among_the_others() -> None:
    timer = FakeTimer(lambda program, launch: None if launch == 1 else 100.0)
    samples = run_measure(timer, 1, first_rounds=3, max_rounds=3)
    assert str(samples[0].durations_ns) == str((100.0, NAN, 100.0))
    assert str(samples[0].spans_ns) == str((101.0, NAN, 101.0))


def test_one_program_needs_no_further_rounds() -> None:
    timer = FakeTimer(noisy(100))
    run_measure(timer, 1)
    assert len(timer.orders) == 1


def test_no_programs_need_no_launch() -> None:
    timer = FakeTimer(noisy())
    assert run_measure(timer, 0) == {}
    assert timer.orders == []


def test_progress_is_told_how_many_programs_each_stretch_timed() -> None:
    told: list[int] = []
    timer = FakeTimer(noisy(100, 101, 300))
    run_measure(timer, 3, max_rounds=10, on_round=told.append)
    assert told == [3, 2]


def test_samples_carry_the_timers_clock() -> None:
    samples = run_measure(FakeTimer(noisy(100, 200), clock="host"), 2)
    assert {sample.clock for sample in samples.values()} == {"host"}


def test_kernels_are_summed_over_launches() -> None:
    launches = [
        LaunchTime("m", 3.0, 3.0, (KernelTime("a", "op", 1, 1.0), KernelTime("b", "op", 2, 2.0))),
        None,
        LaunchTime("m", 4.0, 4.0, (KernelTime("a", "op", 1, 4.0),)),
    ]
    samples = to_samples(FakeTimer(noisy()), launches)
    assert samples.kernels == (KernelTime("a", "op", 2, 5.0), KernelTime("b", "op", 2, 2.0))


def test_a_clock_that_fails_ends_the_measuring() -> None:
    class Broken(FakeTimer):
        def time(self, order: Sequence[Launchable]) -> list[LaunchTime | None]:
            raise ProfileError("no trace")

    with pytest.raises(ProfileError, match="no trace"):
        run_measure(Broken(noisy(1)), 1)
