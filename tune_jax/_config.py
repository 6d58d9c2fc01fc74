"""Settings that hold for the whole process."""

from __future__ import annotations

import dataclasses
import numbers
from typing import Any

from tune_jax._errors import OptionError


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
      find_optimal_layouts_automatically: while tuning, let XLA choose the memory layout of each candidate's inputs, so
        that no candidate is timed with copies that another layout would save. The winner takes its inputs in
        whatever layout the program around it gives them.
      agreement_timeout_s: under `jax.distributed`, seconds to wait for a process that gives no sign of life.
    """

    profiling_samples: int = 3
    max_rounds: int = 30
    max_measure_s: float = 3.0
    separation: float = 3.0
    tie_tolerance: float = 0.005
    allow_fallback_timing: bool = True
    find_optimal_layouts_automatically: bool = False
    agreement_timeout_s: float = 300.0

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _TAKES:
            raise AttributeError(f"CONFIG has no setting {name!r}; it has {', '.join(_TAKES)}.")
        kind, least, expected = _TAKES[name]
        is_flag = isinstance(value, bool)
        if not isinstance(value, kind) or is_flag is not (kind is bool) or not value >= least:
            raise OptionError(
                f"CONFIG.{name} is {value!r} of type {type(value).__name__}; expected {expected}, such as the default, "
                f"{getattr(Config, name)!r}."
            )
        super().__setattr__(name, value)


# What each setting takes: the type, the least value, and the words for both.
_ROUNDS = (numbers.Integral, 1, "a whole number of rounds, at least 1")
_AMOUNT = (numbers.Real, 0, "a number, at least 0")
_FLAG = (bool, 0, "True or False")
_TAKES: dict[str, tuple[Any, int, str]] = {
    "profiling_samples": _ROUNDS,
    "max_rounds": _ROUNDS,
    "max_measure_s": _AMOUNT,
    "separation": _AMOUNT,
    "tie_tolerance": _AMOUNT,
    "allow_fallback_timing": _FLAG,
    "find_optimal_layouts_automatically": _FLAG,
    "agreement_timeout_s": (numbers.Real, 1, "a number of seconds, at least 1"),
}

CONFIG = Config()
