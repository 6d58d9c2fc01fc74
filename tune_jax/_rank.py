"""Samples to an order, a noise and ties. Pure arithmetic on numbers that others measured.

Statistics, all relative to a candidate's median, so that fast and slow candidates compare:
- Centre: the median. On a CPU one launch in twenty may take twenty times as long; a mean would follow it.
- Noise of one launch: 1.4826 times the median absolute deviation (MAD), which estimates the standard
  deviation of normal samples, times the small-sample factors b_n of Croux and Rousseeuw, "Time-efficient
  algorithms for two highly robust estimators of scale", COMPSTAT 1992, p. 414, eq. 4.
- Three to five samples give a poor MAD, often near zero by luck, so the median noise of all candidates is a
  floor for each. In a simulation of equal candidates with five normal samples each, this floor cuts how often
  one is wrongly told apart from the best of 100 at three standard errors from 17 % to 4 %.
- Standard error of the median: sqrt(pi / 2) = 1.2533 times noise / sqrt(n), the large-sample value for normal
  samples (van der Vaart, "Asymptotic Statistics", corollary 21.5); for few samples the true value is smaller,
  so the error is on the careful side.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from tune_jax._errors import ResultsError
from tune_jax._records import Samples

_MAD_TO_DEVIATION = 1.4826
_MEDIAN_ERROR = math.sqrt(math.pi / 2)
# Index n: the factor for n samples. One sample has no deviation, so its factor never matters.
_SMALL_SAMPLE = np.array([1.0, 1.0, 1.196, 1.495, 1.363, 1.206, 1.200, 1.140, 1.129, 1.107])
# Identical samples come from a coarse clock, not from a noiseless device: a 300 us kernel on an H200 varies
# by 0.1 to 1 %.
_LEAST_NOISE = 0.001
# What to believe of the noise while no candidate has a second sample.
_UNKNOWN_NOISE = 0.05


@dataclasses.dataclass(frozen=True)
class Ranking:
    """Candidate ids, fastest median first, and those that cannot be told apart from the first.

    `median_ns` is each candidate's median, `error_ns` that median's standard error.
    """

    order: tuple[int, ...]
    ties: frozenset[int]
    median_ns: Mapping[int, float]
    error_ns: Mapping[int, float]


@dataclasses.dataclass(frozen=True)
class Decision:
    """Ids still in the race, the current best included, and whether more samples would change nothing."""

    ids: frozenset[int]
    settled: bool


@dataclasses.dataclass(frozen=True)
class _Summary:
    """One entry a candidate, fastest median first, then by id."""

    ids: NDArray[np.int64]
    median_ns: NDArray[np.float64]
    error_ns: NDArray[np.float64]


def rank(samples: Mapping[int, Samples], *, separation: float) -> Ranking:
    """Order candidates by median and name those within `separation` standard errors of the winner.

    Raises ResultsError for an empty mapping, samples without a usable duration, or two clocks.
    """
    summary = _summarise(samples)
    ids = summary.ids.tolist()
    close = _close_to_best(summary, separation)
    return Ranking(
        order=tuple(ids),
        ties=frozenset(tie for tie, near in zip(ids[1:], close[1:], strict=True) if near),
        median_ns=dict(zip(ids, summary.median_ns.tolist(), strict=True)),
        error_ns=dict(zip(ids, summary.error_ns.tolist(), strict=True)),
    )


def contenders(samples: Mapping[int, Samples], *, separation: float, tie_tolerance: float) -> Decision:
    """Say who may still be the fastest, and whether that is settled.

    It is settled when one is left, or when a difference of `tie_tolerance` between the best and any other
    contender would have been seen: they are then tied. Raises like `rank`.
    """
    summary = _summarise(samples)
    close = _close_to_best(summary, separation)
    resolution_ns = separation * _errors_of_difference(summary)[close]
    # The first entry is the best against itself.
    settled = bool(np.all(resolution_ns[1:] <= tie_tolerance * summary.median_ns[0]))
    return Decision(frozenset(summary.ids[close].tolist()), settled)


def valid_durations(samples: Samples) -> NDArray[np.float64]:
    """The durations that can be times: finite and above zero, in the order they were taken."""
    durations_ns = np.asarray(samples.durations_ns, dtype=np.float64)
    return durations_ns[np.isfinite(durations_ns) & (durations_ns > 0)]


def is_usable(samples: Samples) -> bool:
    """Whether at least one duration can be a time."""
    return bool(valid_durations(samples).size)


def relative_spread(durations_ns: NDArray[np.float64]) -> float | None:
    """The noise of one launch over the median, 0.01 for 1 %; None for fewer than two durations."""
    if durations_ns.size < 2:
        return None
    table, counts = _tabulate_padded([durations_ns])
    return float(_relative_noise(table, counts, _row_medians(table, counts))[0])


def check_clocks(samples: Mapping[int, Samples]) -> None:
    """Raise ResultsError if the samples come from more than one clock."""
    by_clock: dict[str, list[int]] = {}
    for candidate_id in sorted(samples):
        by_clock.setdefault(samples[candidate_id].clock, []).append(candidate_id)
    if len(by_clock) > 1:
        found = "; ".join(f"{clock}: candidates {ids}" for clock, ids in sorted(by_clock.items()))
        raise ResultsError(
            f"samples come from two clocks ({found}), expected one; host and device times do not compare, "
            "so time all candidates with the same clock"
        )


def _check_usable(samples: Mapping[int, Samples]) -> None:
    if not samples:
        raise ResultsError("got no samples, expected at least one candidate's; there is nothing to rank")
    unusable = [key for key in sorted(samples) if not is_usable(samples[key])]
    if unusable:
        raise ResultsError(
            f"candidates {unusable} have no finite duration above zero, expected at least one each; "
            "make them failures before ranking"
        )


def _summarise(samples: Mapping[int, Samples]) -> _Summary:
    _check_usable(samples)
    check_clocks(samples)
    ids = np.array(sorted(samples), dtype=np.int64)
    table, counts = _tabulate_padded([valid_durations(samples[key]) for key in ids.tolist()])
    median_ns = _row_medians(table, counts)
    noise = _pool_noise(_relative_noise(table, counts, median_ns), counts)
    error_ns = _MEDIAN_ERROR * noise * median_ns / np.sqrt(counts)
    # A stable sort of sorted ids breaks equal medians by id.
    order = np.argsort(median_ns, kind="stable")
    return _Summary(ids[order], median_ns[order], error_ns[order])


def _tabulate_padded(
    durations_ns: Sequence[NDArray[np.float64]],
) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """One row a candidate, padded with infinity to the longest; and how many entries of a row are real."""
    counts = np.array([row.size for row in durations_ns], dtype=np.int64)
    table = np.full((counts.size, counts.max()), np.inf)
    table[np.arange(counts.max()) < counts[:, None]] = np.concatenate(durations_ns)
    return table, counts


def _row_medians(table: NDArray[np.float64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    # Infinite padding sorts last, so the middle of the real entries is found from their count.
    ordered, rows = np.sort(table, axis=1), np.arange(counts.size)
    middle: NDArray[np.float64] = (ordered[rows, (counts - 1) // 2] + ordered[rows, counts // 2]) / 2
    return middle


def _relative_noise(
    table: NDArray[np.float64], counts: NDArray[np.int64], median_ns: NDArray[np.float64]
) -> NDArray[np.float64]:
    deviation_ns = _row_medians(np.abs(table - median_ns[:, None]), counts)
    noise: NDArray[np.float64] = _MAD_TO_DEVIATION * _small_sample_factors(counts) * deviation_ns / median_ns
    return noise


def _small_sample_factors(counts: NDArray[np.int64]) -> NDArray[np.float64]:
    few = _SMALL_SAMPLE[np.minimum(counts, _SMALL_SAMPLE.size - 1)]
    factors: NDArray[np.float64] = np.where(counts < _SMALL_SAMPLE.size, few, counts / (counts - 0.8))
    return factors


def _pool_noise(noise: NDArray[np.float64], counts: NDArray[np.int64]) -> NDArray[np.float64]:
    """Each candidate's noise, at least the median noise of those with two samples or more."""
    known = noise[counts >= 2]
    floor = max(_LEAST_NOISE, float(np.median(known))) if known.size else _UNKNOWN_NOISE
    return np.maximum(noise, floor)


def _errors_of_difference(summary: _Summary) -> NDArray[np.float64]:
    """The standard error of each median's distance from the best one, in nanoseconds."""
    error_ns: NDArray[np.float64] = np.hypot(summary.error_ns, summary.error_ns[0])
    return error_ns


def _close_to_best(summary: _Summary, separation: float) -> NDArray[np.bool_]:
    gap_ns = summary.median_ns - summary.median_ns[0]
    close: NDArray[np.bool_] = gap_ns <= separation * _errors_of_difference(summary)
    return close
