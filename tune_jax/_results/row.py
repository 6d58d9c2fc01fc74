"""One candidate's outcome: raw samples or a failure, and the statistics derived from the samples."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tune_jax._rank import relative_spread, valid_durations
from tune_jax._records import Clock, Failure, KernelTime, Samples

_NS = 1e-9


@dataclasses.dataclass(frozen=True)
class Row:
    """What became of one candidate; every statistic is None where it failed.

    Statistics leave out durations that cannot be times (not finite, zero, negative); `samples_ns` keeps them.

    Attributes:
      id: place in the full grid.
      hyperparams: name to value.
      samples_ns: device or host time of each launch, in the order taken, nanoseconds.
      spans_ns: last end minus first start of each launch on the device, nanoseconds; may be empty.
      clock: "device" or "host"; None for a failure.
      kernels: the kernels launched, with count and duration summed over all launches.
      slowdown: median over the median of the fastest of the whole tuning, 1.0 for the fastest.
      tied: whether the samples cannot tell this candidate from the fastest, which is itself not tied.
      failure: stage and error, or None.
      shares_with: ids of the other candidates that are the same program; they hold the same samples.
    """

    id: int
    hyperparams: Mapping[str, Any]
    samples_ns: tuple[float, ...] = dataclasses.field(default=(), repr=False)
    spans_ns: tuple[float, ...] = dataclasses.field(default=(), repr=False)
    clock: Clock | None = None
    kernels: tuple[KernelTime, ...] = dataclasses.field(default=(), repr=False)
    slowdown: float | None = None
    tied: bool = False
    failure: Failure | None = None
    shares_with: tuple[int, ...] = ()

    @property
    def median_s(self) -> float | None:
        """Median time of a launch, seconds; what the ranking goes by."""
        return self._reduce_s(np.median)

    @property
    def mean_s(self) -> float | None:
        """Mean time of a launch, seconds; a single slow launch moves it."""
        return self._reduce_s(np.mean)

    @property
    def std_s(self) -> float | None:
        """Standard deviation of the samples taken (divisor n), seconds; 0 for a single one."""
        return self._reduce_s(np.std)

    @functools.cached_property
    def spread(self) -> float | None:
        """Robust standard deviation of one launch over the median, 0.01 for 1 %; None for a single sample."""
        return relative_spread(self._durations_ns)

    @property
    def idle_share(self) -> float | None:
        """The part of a launch's span in which the device was idle, 0 to 1; None where spans are unknown."""
        span_ns = valid_durations(Samples("device", self.spans_ns))
        if self.median_s is None or not span_ns.size:
            return None
        return max(0.0, 1.0 - self.median_s / (float(np.median(span_ns)) * _NS))

    @functools.cached_property
    def _durations_ns(self) -> NDArray[np.float64]:
        return valid_durations(Samples("device", self.samples_ns))

    def _reduce_s(self, reduce: Callable[[NDArray[np.float64]], Any]) -> float | None:
        return float(reduce(self._durations_ns)) * _NS if self._durations_ns.size else None


def make_row(
    *,
    id: int,
    hyperparams: Mapping[str, Any],
    outcome: Samples | Failure,
    slowdown: float | None = None,
    tied: bool = False,
    shares_with: tuple[int, ...] = (),
) -> Row:
    """A row with plain Python numbers, so that it can be stored as JSON."""
    if isinstance(outcome, Failure):
        return Row(id, dict(hyperparams), failure=outcome, shares_with=shares_with)
    return Row(
        id,
        dict(hyperparams),
        samples_ns=tuple(map(float, outcome.durations_ns)),
        spans_ns=tuple(map(float, outcome.spans_ns)),
        clock=outcome.clock,
        kernels=outcome.kernels,
        slowdown=slowdown,
        tied=tied,
        shares_with=shares_with,
    )


@dataclasses.dataclass(frozen=True)
class TimingResult:
    """A timed row under the names that scripts written for tune-jax 0.8 use; times in seconds."""

    row: Row

    @property
    def hyperparams(self) -> dict[str, Any]:
        """Name to value, a copy."""
        return dict(self.row.hyperparams)

    @property
    def t_mean(self) -> float:
        """Mean time of a launch, seconds."""
        assert self.row.mean_s is not None
        return self.row.mean_s

    @property
    def t_std(self) -> float:
        """Standard deviation of the samples taken, seconds."""
        assert self.row.std_s is not None
        return self.row.std_s

    def __repr__(self) -> str:
        return f"TimingResult(hyperparams={self.hyperparams}, t_mean={self.t_mean:.4e}, t_std={self.t_std:.4e})"
