from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from tune_jax._measure._alignment import Event, Launch, match_launches, split_by_order, split_run


def make_events(text: str) -> list[Event]:
    """`"A.x A.y B.x"`: one event of 10 ns a word, program and kernel, 1 ns apart; `_` is 100 ns idle."""
    events, now = [], 0
    for word in text.split():
        if word == "_":
            now += 100
            continue
        module, _, kernel = word.partition(".")
        events.append(Event(module, kernel, kernel, (kernel,), now, now + 10))
        now += 11
    return events


def show(launches: Sequence[Launch | None]) -> list[str | None]:
    """`["A.xy", "B.x"]`: the program and kernels of each launch."""
    return [
        None if launch is None else launch.module + "." + "".join(event.name for event in launch.events)
        for launch in launches
    ]


def align(text: str, order: str) -> list[str | None]:
    return show(match_launches(split_by_order(make_events(text), order.split()), order.split()))


def test_events_of_one_program_in_a_row_are_one_launch() -> None:
    assert align("A.x A.y B.z A.x A.y", "A B A") == ["A.xy", "B.z", "A.xy"]


def test_a_loop_of_equal_kernels_stays_one_launch() -> None:
    assert align("A.x A.x A.x A.x B.z", "A B") == ["A.xxxx", "B.z"]


def test_equal_neighbours_are_split_where_the_kernel_names_repeat() -> None:
    assert align("A.x A.y A.x A.y A.x A.y B.z", "A A A B") == ["A.xy", "A.xy", "A.xy", "B.z"]


def test_equal_neighbours_are_split_by_period_despite_a_larger_gap_within() -> None:
    assert align("A.x _ A.y A.x _ A.y", "A A") == ["A.xy", "A.xy"]


def test_equal_neighbours_that_do_not_repeat_are_split_at_the_largest_gaps() -> None:
    assert align("A.x A.y _ A.x A.x A.y _ A.z", "A A A") == ["A.xy", "A.xxy", "A.z"]


def test_a_gap_is_measured_from_the_last_end_so_far() -> None:
    events = [
        Event("A", "x", "", (), 0, 500),
        Event("A", "y", "", (), 10, 20),
        Event("A", "z", "", (), 490, 495),
        Event("A", "y", "", (), 520, 530),
    ]
    assert show(split_run(Launch("A", events), 2)) == ["A.xyz", "A.y"]


def test_a_run_with_fewer_events_than_launches_leaves_the_last_without() -> None:
    assert align("A.x B.z", "A A B") == ["A.x", None, "B.z"]


def test_a_program_without_events_is_none_and_shifts_nothing() -> None:
    assert align("A.x B.y B.y A.x", "A N B N A N") == ["A.x", None, "B.yy", None, "A.x", None]


def test_launches_around_a_program_without_events_are_told_apart() -> None:
    assert align("A.x A.y A.x A.y B.z", "A N A B") == ["A.xy", None, "A.xy", "B.z"]


def test_one_missing_launch_shifts_nothing() -> None:
    order = "A B C A B C A B C"
    text = "A.x B.x C.x A.x C.x A.x B.x C.x"
    assert align(text, order) == ["A.x", "B.x", "C.x", "A.x", None, "C.x", "A.x", "B.x", "C.x"]


def test_a_missing_launch_between_equal_ones_keeps_them_apart() -> None:
    text = "A.x A.y A.x A.y C.x A.x A.y B.z C.x"
    assert align(text, "A B A C A B C") == ["A.xy", None, "A.xy", "C.x", "A.xy", "B.z", "C.x"]


def test_missing_first_launches_are_none() -> None:
    assert align("C.x A.x B.x C.x", "A B C A B C") == [None, None, "C.x", "A.x", "B.x", "C.x"]


def test_all_that_was_seen_is_kept_when_several_launches_are_missing() -> None:
    assert align("A.x B.x C.x B.y A.z", "A B C A B C A") == ["A.x", "B.x", "C.x", None, "B.y", None, "A.z"]


def test_of_like_rounds_the_earliest_are_taken_as_seen() -> None:
    assert align("A.x B.x A.x B.x", "A B A B A B") == ["A.x", "B.x", "A.x", "B.x", None, None]


def test_a_launch_that_the_order_does_not_have_is_left_out() -> None:
    assert align("A.x B.x A.x B.x A.x", "A B A B") == ["A.x", "B.x", "A.x", "B.x"]


@pytest.mark.parametrize("seed", range(20))
def test_shuffled_rounds_with_distinct_neighbours_are_recovered(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"P{index}" for index in range(12)]
    order = [name for _ in range(5) for name in ["separator", *rng.sample(names, len(names))]]
    kernels = {name: "xyz"[: 1 + index % 3] for index, name in enumerate([*names, "separator"])}
    text = " ".join(f"{name}.{kernel}" for name in order for kernel in kernels[name])
    assert align(text, " ".join(order)) == [f"{name}.{kernels[name]}" for name in order]


@pytest.mark.parametrize("seed", range(20))
def test_a_lost_launch_among_shuffled_rounds_is_the_one_reported(seed: int) -> None:
    rng = random.Random(seed)
    names = [f"P{index}" for index in range(12)]
    order = [name for _ in range(5) for name in ["separator", *rng.sample(names, len(names))]]
    lost = rng.choice([place for place, name in enumerate(order) if name != "separator"])
    text = " ".join(f"{name}.x" for place, name in enumerate(order) if place != lost)
    expected = [None if place == lost else f"{name}.x" for place, name in enumerate(order)]
    assert align(text, " ".join(order)) == expected
