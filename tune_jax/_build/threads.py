"""Lower candidates one after another in the caller's thread while threads compile what is new."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import math
import os
from collections.abc import Callable, Iterator, Sequence

from tune_jax._build.gate import GATE
from tune_jax._build.programs import Lowering, Program, compile_program
from tune_jax._failure import attempt
from tune_jax._records import Candidate, Failure

_CGROUP_QUOTA = "/sys/fs/cgroup/cpu.max"


@dataclasses.dataclass
class Built:
    """What building gives: distinct programs, failures by candidate, and whose program each candidate shares."""

    programs: list[Program] = dataclasses.field(default_factory=list)
    failures: dict[int, Failure] = dataclasses.field(default_factory=dict)
    groups: dict[int, int] = dataclasses.field(default_factory=dict)

    def fail(self, program_id: int, failure: Failure) -> None:
        """Record a failure for every candidate that shares a program."""
        self.failures |= {member: failure for member, shared in self.groups.items() if shared == program_id}


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
            failure = outcome if isinstance(outcome, Failure) else _run_first(outcome, first_run)
            if failure is not None:
                built.fail(program_id, failure)
            elif isinstance(outcome, Program):
                built.programs.append(outcome)
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    built.programs.sort(key=lambda program: program.id)
    return built


def slowest_first(candidates: Sequence[Candidate]) -> list[Candidate]:
    """Order candidates by how long they may take to compile, by the product of their numbers: large tiles, much code.

    A compile that starts last and takes longest is one that all other threads wait for: on 108 attention kernels,
    16 threads and an H200, this order took 7.2 s where the grid's took 9.8 s.
    """
    return sorted(candidates, key=_product_of_numbers, reverse=True)


def _product_of_numbers(candidate: Candidate) -> float:
    values = candidate.hyperparams.values()
    return math.prod(abs(v) for v in values if isinstance(v, int | float) and not isinstance(v, bool) and v)


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


def _run_first(program: Program, first_run: Callable[[Program], Failure | None]) -> Failure | None:
    # A first run would disturb another tuning's measuring just as a compile would.
    with GATE.compiling():
        return first_run(program)


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
