"""The two clocks: device time read from traces, and the host's wall clock."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Callable, Sequence
from typing import Protocol

from tune_jax._measure.profiler import record_trace
from tune_jax._measure.xplane import read_launches
from tune_jax._records import Clock, LaunchTime

WARM_UP = 3


@dataclasses.dataclass(frozen=True)
class Launchable:
    """A program as timers see it: an id, the name of its module, and a launch that waits for the end.

    `has_failed` says whether a launch went wrong, after which the program is out of the race. `first_run_ns` is what
    its first run took by the host's clock, 0 if that is not known.
    """

    id: int
    module: str
    launch: Callable[[], None]
    has_failed: Callable[[], bool] = lambda: False
    first_run_ns: float = 0.0


class Timer(Protocol):
    """Times launches, in order; None for a launch of which the clock saw nothing."""

    @property
    def clock(self) -> Clock:
        """What the times are taken with."""

    def time(self, order: Sequence[Launchable]) -> list[LaunchTime | None]:
        """Launch each program in turn, waiting for its end, and return the times."""


@dataclasses.dataclass(frozen=True)
class DeviceTimer:
    """Device time from profiler traces, one trace a call."""

    platform: str
    kernel_filter: re.Pattern[str] | None = None
    keep: str | None = None
    clock: Clock = "device"

    def time(self, order: Sequence[Launchable]) -> list[LaunchTime | None]:
        """Launch each program in turn under a trace. A few launches before, out of the result, wake the device up.

        Raises:
          ProfileError: no trace could be recorded, or it shows none of the programs.
        """
        launches = [*_warm_up(order), *order]
        trace = record_trace(lambda: launch_all(launches), platform=self.platform, keep=self.keep)
        names = [program.module for program in launches]
        return read_launches(trace, names, kernel_filter=self.kernel_filter)[len(launches) - len(order) :]


@dataclasses.dataclass(frozen=True)
class HostTimer:
    """Wall time from before a launch until its outputs are ready, dispatch included."""

    clock: Clock = "host"

    def time(self, order: Sequence[Launchable]) -> list[LaunchTime | None]:
        """Launch each program in turn between two readings of the host's clock."""
        launch_all(order[:WARM_UP])
        return [_time_on_host(program) for program in order]


def _warm_up(order: Sequence[Launchable]) -> Sequence[Launchable]:
    """The first few, but not ending with the program that is timed first: its launches would not be told apart."""
    few = order[:WARM_UP]
    return few[:-1] if len(few) > 2 and few[-1].id == order[0].id != few[-2].id else few


def launch_all(order: Sequence[Launchable]) -> None:
    """Launch programs one after another."""
    for program in order:
        program.launch()


def _time_on_host(program: Launchable) -> LaunchTime:
    started = time.perf_counter_ns()
    program.launch()
    elapsed = float(time.perf_counter_ns() - started)
    return LaunchTime(program.module, elapsed, elapsed, ())
