"""Lower candidates one after another in the caller's thread while threads compile what is new."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from tune_jax._build.gate import GATE
from tune_jax._build.programs import Lowering, Program, compile_program
from tune_jax._failure import attempt
from tune_jax._records import Candidate, Failure

_SMALLEST_TILE = 16
_CGROUP_QUOTA = "/sys/fs/cgroup/cpu.max"


@dataclasses.dataclass
class Built:
    """What building gives: distinct programs, failures by candidate, and whose program each candidate shares.

    `first_run_ns` is what each program's first run took by the host's clock.
    """

    programs: list[Program] = dataclasses.field(default_factory=list)
    failures: dict[int, Failure] = dataclasses.field(default_factory=dict)
    groups: dict[int, int] = dataclasses.field(default_factory=dict)
    first_run_ns: dict[int, int] = dataclasses.field(default_factory=dict)

    def fail(self, program_id: int, failure: Failure) -> None:
        """Record a failure for every candidate that shares a program."""
        self.failures |= {member: failure for member, shared in self.groups.items() if shared == program_id}

    def drop(self, failures: Mapping[int, Failure]) -> None:
        """Take out candidates that failed elsewhere, with all that share their programs."""
        for candidate_id, failure in failures.items():
            if candidate_id not in self.failures:
                self.fail(self.groups[candidate_id], failure)
        self.programs = [program for program in self.programs if program.id not in self.failures]


def build(
    candidates: Sequence[Candidate],
    lower: Callable[[Candidate], Lowering],
    *,
    donated: tuple[bool, ...],
    first_run: Callable[[Program], Failure | None],
    max_workers: int,
    on_done: Callable[[], object],
) -> Built:
    """Lower all candidates, compile each distinct program once, and run each once as soon as it is there.

    Lowering and first runs happen in the caller's thread, compiling in up to `max_workers` others. `on_done` is
    told of each candidate whose lowering has failed or whose program is compiled.
    """
    built = Built()
    pool = concurrent.futures.ThreadPoolExecutor(max_workers, thread_name_prefix="tune-jax-compile")
    try:
        pending = list(_submit_distinct(pool, slowest_first(candidates), lower, built, donated, on_done))
        for future in concurrent.futures.as_completed(pending):
            program_id, outcome = future.result()
            failure = outcome if isinstance(outcome, Failure) else _run_first(outcome, first_run, built)
            if failure is not None:
                built.fail(program_id, failure)
            elif isinstance(outcome, Program):
                built.programs.append(outcome)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    built.programs.sort(key=lambda program: program.id)
    return built


def slowest_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Order candidates by how long they may take to compile: those with the largest tiles first.

    All threads wait for a slow compile that starts last. A number of 16 or more counts as the size of a tile; smaller
    ones, such as warps and stages, say little of how much code there is.
    """
    return sorted(candidates, key=_tile_size, reverse=True)


def _tile_size(candidate: Candidate) -> float:
    values = candidate.hyperparams.values()
    return math.prod(v for v in values if isinstance(v, int | float) and v >= _SMALLEST_TILE)


def _submit_distinct(
    pool: concurrent.futures.Executor,
    candidates: Sequence[Candidate],
    lower: Callable[[Candidate], Lowering],
    built: Built,
    donated: tuple[bool, ...],
    on_done: Callable[[], object],
) -> Iterator[concurrent.futures.Future[tuple[int, Program | Failure]]]:
    seen: dict[str, int] = {}
    for candidate in candidates:
        lowering = attempt("trace", functools.partial(lower, candidate))
        if isinstance(lowering, Failure):
            built.failures[candidate.id] = lowering
            on_done()
            continue
        shared = seen.setdefault(lowering.text, candidate.id) if lowering.text is not None else candidate.id
        built.groups[candidate.id] = shared
        if shared != candidate.id:
            on_done()
            continue
        future = pool.submit(_compile, lowering, donated)
        future.add_done_callback(lambda _: on_done())
        yield future


def _run_first(program: Program, first_run: Callable[[Program], Failure | None], built: Built) -> Failure | None:
    # A first run would disturb another tuning's measuring, as a compile would. It holds up none that begins
    # meanwhile, because a host callback in it may call a tuned function and wait for that one's.
    GATE.wait_for_measuring()
    started = time.perf_counter_ns()
    failure = first_run(program)
    built.first_run_ns[program.id] = time.perf_counter_ns() - started
    return failure


def _compile(lowering: Lowering, donated: tuple[bool, ...]) -> tuple[int, Program | Failure]:
    with GATE.compiling():
        return lowering.candidate.id, attempt("compile", lambda: compile_program(lowering, donated))


def usable_cores() -> int:
    """Cores that this process may use, by its affinity and its control group's quota."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(affinity, _quota_cores(_CGROUP_QUOTA) or affinity))


def _quota_cores(path: str) -> int | None:
    try:
        with open(path) as file:
            quota, period = map(int, file.read().split()[:2])
            return max(1, quota // period)
    except (OSError, ValueError, ZeroDivisionError):
        # No such file, `max`, or nothing that can be read: no limit is known.
        return None
