"""Settings that hold for the whole process."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass
class Config:
    """Settings of the tuner; assign to the attributes of `tune_jax.CONFIG`.

    Attributes:
      profiling_samples: timed rounds that every candidate gets, at least 1. One that is ten times as slow as the
        fastest gets a single round.
      max_rounds: timed rounds that a contender gets at most.
      max_measure_s: seconds after which no further rounds start; the first one always runs.
      separation: how many standard errors apart two medians must lie to count as different.
      tie_tolerance: relative difference under which the search for a single winner stops.
      allow_fallback_timing: use the host clock where device time cannot be had; if False, that is an error.
    """

    profiling_samples: int = 3
    max_rounds: int = 30
    max_measure_s: float = 10.0
    separation: float = 3.0
    tie_tolerance: float = 0.005
    allow_fallback_timing: bool = True


CONFIG = Config()
