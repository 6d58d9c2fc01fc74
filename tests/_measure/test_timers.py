"""The two clocks, with launches that only sleep and traces that nobody recorded."""

from __future__ import annotations

import itertools
import re
import time
from collections.abc import Callable

import pytest
from jax.profiler import ProfileData

from tune_jax._errors import ProfileError
from tune_jax._measure import timers
from tune_jax._measure.timers import DeviceTimer, HostTimer, Launchable


def make_program(id: int, log: list[int], seconds: float = 0.0) -> Launchable:
    def launch() -> None:
        log.append(id)
        time.sleep(seconds)

    return Launchable(id, f"jit_m{id}", launch)


def write_gpu_trace(modules: list[int], *, step_ns: int = 1000) -> bytes:
    """A trace in which each launch is one kernel; the n-th takes n * 100 ns."""
    names = sorted(set(modules))
    events = "".join(
        f"events {{ metadata_id: {names.index(m) + 1} offset_ps: {i * step_ns * 1000} duration_ps: {i * 100_000} "
        f'stats {{ metadata_id: 1 str_value: "jit_m{m}" }} }} '
        for i, m in enumerate(modules)
    )
    kinds = "".join(
        f'event_metadata {{ key: {i} value {{ id: {i} name: "kernel_{m}" }} }} ' for i, m in enumerate(names, 1)
    )
    text = (
        f'planes {{ name: "/device:GPU:0" lines {{ name: "Stream #1(Compute)" {events} }} {kinds} '
        'stat_metadata { key: 1 value { id: 1 name: "hlo_module" } } }'
    )
    return bytes(ProfileData.text_proto_to_serialized_xspace(text))


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Replace the profiler by one that writes a kernel for each launch in the list, which launches fill."""
    log: list[int] = []

    def record_trace(run: Callable[[], None], *, platform: str, keep: str | None) -> bytes:
        run()
        return write_gpu_trace(log)

    monkeypatch.setattr(timers, "record_trace", record_trace)
    return log


def test_host_time_is_that_of_the_launch() -> None:
    log: list[int] = []
    times = HostTimer().time([make_program(0, log, 0.02), make_program(1, log, 0.06)])
    assert times[0] is not None
    assert times[1] is not None
    assert times[0].busy_ns >= 0.02e9
    assert times[1].busy_ns >= 0.06e9
    assert times[0].program == "jit_m0"


def test_host_time_is_waited_for_in_order() -> None:
    log: list[int] = []
    programs = [make_program(index, log) for index in range(5)]
    HostTimer().time(programs)
    assert log[-5:] == [0, 1, 2, 3, 4]


def test_warm_up_launches_are_not_in_the_host_times() -> None:
    log: list[int] = []
    times = HostTimer().time([make_program(index, log) for index in range(5)])
    assert len(times) == 5
    assert 5 < len(log) <= 5 + timers.WARM_UP


def test_the_clocks_say_which_they_are() -> None:
    assert (DeviceTimer("gpu").clock, HostTimer().clock) == ("device", "host")


def test_device_times_are_those_of_the_trace_without_the_warm_up(traced: list[int]) -> None:
    order = [make_program(index, traced) for index in (2, 0, 1, 0, 2, 1)]
    times = DeviceTimer("gpu").time(order)
    warm = len(traced) - len(order)
    assert [t and t.busy_ns for t in times] == [(warm + place) * 100.0 for place in range(len(order))]
    assert [t and t.program for t in times] == ["jit_m2", "jit_m0", "jit_m1", "jit_m0", "jit_m2", "jit_m1"]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_warm_up_never_ends_with_the_program_that_is_timed_first(count: int, traced: list[int]) -> None:
    order = [make_program(index % count, traced) for index in range(4 * count)]
    DeviceTimer("gpu").time(order)
    assert all(left != right for left, right in itertools.pairwise(traced))


def test_one_program_alone_is_timed_in_every_launch(traced: list[int]) -> None:
    times = DeviceTimer("gpu").time([make_program(0, traced) for _ in range(3)])
    assert [t is not None for t in times] == [True, True, True]


def test_the_kernel_filter_reaches_the_reading_of_the_trace(traced: list[int]) -> None:
    order = [make_program(index, traced) for index in (0, 1, 0, 1)]
    times = DeviceTimer("gpu", re.compile("kernel_1")).time(order)
    assert [t is not None and t.busy_ns > 0 for t in times] == [False, True, False, True]


def test_a_program_that_leaves_no_event_has_no_time(traced: list[int]) -> None:
    order = [make_program(0, traced), Launchable(1, "jit_m1", lambda: None), make_program(2, traced)]
    assert [t is not None for t in DeviceTimer("gpu").time(order)] == [True, False, True]


@pytest.mark.parametrize(
    ("trace", "reason"),
    [
        (b"", "empty"),
        (b"\xff\x01broken", "cannot be parsed"),
        (ProfileData.text_proto_to_serialized_xspace('planes { name: "Task Environment" }'), "no device plane"),
        (write_gpu_trace([7]), "no event of the launched programs"),
    ],
)
def test_a_trace_that_says_nothing_is_an_error_with_the_reason(
    trace: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timers, "record_trace", lambda run, **_: trace)
    with pytest.raises(ProfileError, match=reason):
        DeviceTimer("gpu").time([make_program(0, [])])


def test_an_error_in_a_launch_is_not_hidden() -> None:
    def launch() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        HostTimer().time([Launchable(0, "m", launch)])
