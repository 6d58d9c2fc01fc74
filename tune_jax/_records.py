"""Frozen records that cross the rooms of the tuner. No jax in here."""

from __future__ import annotations

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, Literal

Clock = Literal["device", "host"]
Stage = Literal["trace", "compile", "check", "run", "timeout", "crash"]

# How the message of a NoCandidateError begins; the errors follow, one a line.
NONE_WORKS = "No hyperparameters compiled successfully"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """One choice of hyperparameters; `id` is its place in the full grid."""

    id: int
    hyperparams: Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a candidate has no timing."""

    stage: Stage
    error_type: str
    message: str
    traceback: str = ""

    @property
    def first_line(self) -> str:
        """The first line of the message that says something: for a tuning inside, its first error."""
        lines = [line.strip() for line in self.message.splitlines() if line.strip()]
        if len(lines) > 1 and NONE_WORKS in lines[0]:
            return lines[1]
        return lines[0] if lines else ""


@dataclasses.dataclass(frozen=True)
class KernelTime:
    """A kernel that a program launched: how often over all launches, and its summed duration."""

    name: str
    op_name: str
    count: int
    total_ns: float


@dataclasses.dataclass(frozen=True)
class LaunchTime:
    """What a trace says of one launch of one program on its slowest device.

    `busy_ns` is the union of the kernels' intervals, `span_ns` last end minus first start.
    """

    program: str
    busy_ns: float
    span_ns: float
    kernels: tuple[KernelTime, ...]


@dataclasses.dataclass(frozen=True)
class Samples:
    """Raw times of one candidate, nanoseconds a launch, in the order they were taken."""

    clock: Clock
    durations_ns: tuple[float, ...]
    spans_ns: tuple[float, ...] = ()
    kernels: tuple[KernelTime, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Tunable:
    """A function to tune with all that its user asked for; equal only to itself.

    `space` is a `_space.Space`, or the user's callable that returns a grid for a call's arguments. `state` is where
    rooms keep what they know of this function, so that it goes when the function goes.
    """

    function: Callable[..., Any]
    name: str
    signature: inspect.Signature
    space: Any
    where: Callable[..., Any] | None = None
    sample_num: int | None = None
    seed: int = 0
    static_names: frozenset[str] = frozenset()
    donated_names: frozenset[str] = frozenset()
    compiler_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    in_shardings: Any = None
    out_shardings: Any = None
    example_args: Any = None
    example_kws: Any = None
    max_workers: int | None = None
    kernel_filter: re.Pattern[str] | None = None
    progress: bool | None = None
    keep_trace: str | None = None
    with_vjp: bool = False
    state: dict[str, Any] = dataclasses.field(default_factory=dict, repr=False)
