"""Building: which programs are compiled, by whom and when, with programs that are no programs."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from typing import Any

import pytest

from tune_jax._build import threads
from tune_jax._build.gate import GATE, Gate
from tune_jax._build.programs import Lowering, Program
from tune_jax._build.threads import Built, build, slowest_first, usable_cores
from tune_jax._records import Candidate, Failure

SOON_S = 30.0


@dataclasses.dataclass
class FakeLowered:
    """Stands for a lowered program: `compile` does what the test wants."""

    compile: Callable[[], Any] = lambda: "executable"


@pytest.fixture(autouse=True)
def gate(monkeypatch: pytest.MonkeyPatch) -> Gate:
    """A gate of the test's own."""
    own = Gate()
    monkeypatch.setattr(threads, "GATE", own)
    return own


def list_candidates(count: int) -> list[Candidate]:
    return [Candidate(index, {"b": index}) for index in range(count)]


def lower_all_apart(candidate: Candidate, compile: Callable[[], Any] = lambda: "executable") -> Lowering:
    return Lowering(candidate, f"m{candidate.id}", f"text {candidate.id}", FakeLowered(compile))


def run_build(
    candidates: Sequence[Candidate],
    lower: Callable[[Candidate], Lowering] = lower_all_apart,
    first_run: Callable[[Program], Failure | None] = lambda program: None,
    max_workers: int = 2,
    on_done: Callable[[], object] = lambda: None,
) -> Built:
    return build(candidates, lower, donated=(), first_run=first_run, max_workers=max_workers, on_done=on_done)


class Crowd:
    """Counts how many are inside at once."""

    def __init__(self) -> None:
        self.most, self._inside, self._lock = 0, 0, threading.Lock()

    def visit(self, seconds: float) -> None:
        with self._lock:
            self._inside += 1
            self.most = max(self.most, self._inside)
        time.sleep(seconds)
        with self._lock:
            self._inside -= 1


def test_every_distinct_program_is_compiled_once() -> None:
    compiled: list[str] = []

    def lower(candidate: Candidate) -> Lowering:
        text = "even" if candidate.id % 2 == 0 else "odd"
        return Lowering(candidate, f"m{candidate.id}", text, FakeLowered(lambda: compiled.append(text)))

    built = run_build(list_candidates(6), lower)
    assert sorted(compiled) == ["even", "odd"]
    even, odd = built.groups[0], built.groups[1]
    assert [program.id for program in built.programs] == sorted({even, odd})
    assert built.groups == {0: even, 1: odd, 2: even, 3: odd, 4: even, 5: odd}


def test_programs_without_a_text_are_never_shared() -> None:
    built = run_build(list_candidates(3), lambda c: Lowering(c, f"m{c.id}", None, FakeLowered()))
    assert [program.id for program in built.programs] == [0, 1, 2]


def test_programs_come_in_the_order_of_candidates_however_long_they_compile() -> None:
    def lower(candidate: Candidate) -> Lowering:
        return lower_all_apart(candidate, lambda: time.sleep(0.1 if candidate.id == 0 else 0))

    assert [program.id for program in run_build(list_candidates(3), lower).programs] == [0, 1, 2]


def test_a_candidate_that_cannot_be_lowered_fails_at_trace() -> None:
    def lower(candidate: Candidate) -> Lowering:
        if candidate.id == 1:
            raise TypeError("no such block")
        return lower_all_apart(candidate)

    built = run_build(list_candidates(3), lower)
    assert [program.id for program in built.programs] == [0, 2]
    assert [(f.stage, f.error_type, f.first_line) for f in built.failures.values()] == [
        ("trace", "TypeError", "no such block")
    ]


def fail_to_compile() -> None:
    raise RuntimeError("ptxas died")


def test_a_program_that_cannot_be_compiled_fails_for_all_its_candidates() -> None:
    built = run_build(list_candidates(3), lambda c: Lowering(c, "m", "text", FakeLowered(fail_to_compile)))
    assert built.programs == []
    assert {key: f.stage for key, f in built.failures.items()} == {0: "compile", 1: "compile", 2: "compile"}


def test_a_program_that_cannot_run_fails_for_all_its_candidates() -> None:
    failure = Failure("run", "RuntimeError", "no memory")
    built = run_build(list_candidates(2), lambda c: Lowering(c, "m", "text", FakeLowered()), lambda _: failure)
    assert built.programs == []
    assert built.failures == {0: failure, 1: failure}


def test_an_interrupt_while_lowering_is_not_a_failure() -> None:
    def lower(candidate: Candidate) -> Lowering:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_build(list_candidates(2), lower)


def test_an_interrupt_in_a_first_run_leaves_queued_programs_uncompiled() -> None:
    compiled: list[int] = []

    def lower(candidate: Candidate) -> Lowering:
        def compile() -> None:
            compiled.append(candidate.id)
            time.sleep(0.05)

        return lower_all_apart(candidate, compile)

    def interrupt(program: Program) -> Failure | None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_build(list_candidates(50), lower, interrupt, max_workers=1)
    time.sleep(0.2)
    assert len(compiled) < 50


@pytest.mark.parametrize("max_workers", [1, 2, 3])
def test_no_more_compiles_at_once_than_workers(max_workers: int) -> None:
    crowd = Crowd()
    built = run_build(
        list_candidates(8), lambda c: lower_all_apart(c, lambda: crowd.visit(0.01)), max_workers=max_workers
    )
    assert crowd.most <= max_workers
    assert len(built.programs) == 8


def test_workers_compile_at_the_same_time() -> None:
    together = threading.Barrier(3, timeout=SOON_S)
    built = run_build(list_candidates(3), lambda c: lower_all_apart(c, together.wait), max_workers=3)
    assert len(built.programs) == 3


def test_compiling_starts_while_others_are_still_lowered() -> None:
    lowered, first_compiles = [], threading.Event()

    def lower(candidate: Candidate) -> Lowering:
        assert not lowered or first_compiles.wait(SOON_S)
        lowered.append(candidate)
        return lower_all_apart(candidate, first_compiles.set)

    assert len(run_build(list_candidates(2), lower).programs) == 2


@pytest.mark.parametrize(
    ("choices", "order"),
    [
        ([{"m": 16, "n": 16}, {"m": 64, "n": 64}, {"m": 32, "n": 64}], [1, 2, 0]),
        ([{"m": 16}, {"m": 16}, {"m": 16}], [0, 1, 2]),
        ([{"m": None, "k": "a"}, {"m": 32, "k": "b"}, {"m": True, "k": "c"}], [1, 0, 2]),
        ([{"m": 16, "warps": 8}, {"m": 64, "warps": 2}], [1, 0]),
        ([{"m": 0, "n": 9}, {"m": -300, "n": 2}], [0, 1]),
        ([{}, {"f": print}], [0, 1]),
    ],
)
def test_large_tiles_are_lowered_first(choices: list[dict[str, Any]], order: list[int]) -> None:
    candidates = [Candidate(index, choice) for index, choice in enumerate(choices)]
    assert [candidate.id for candidate in slowest_first(candidates)] == order


def test_lowering_and_first_runs_stay_in_the_callers_thread() -> None:
    seen: set[threading.Thread] = set()

    def lower(candidate: Candidate) -> Lowering:
        seen.add(threading.current_thread())
        return lower_all_apart(candidate)

    run_build(list_candidates(3), lower, lambda program: seen.add(threading.current_thread()))
    assert seen == {threading.current_thread()}


def test_programs_run_first_one_at_a_time() -> None:
    crowd = Crowd()
    run_build(list_candidates(5), first_run=lambda program: crowd.visit(0.01), max_workers=5)
    assert crowd.most == 1


def test_a_first_run_waits_while_another_tuning_measures(gate: Gate, background: Executor) -> None:
    compiling, go_on, ran = threading.Event(), threading.Event(), threading.Event()

    def compile() -> None:
        compiling.set()
        assert go_on.wait(SOON_S)

    building = background.submit(
        run_build, list_candidates(1), lambda c: lower_all_apart(c, compile), lambda program: ran.set()
    )
    assert compiling.wait(SOON_S)
    # A measuring that waits goes before everything that begins after it.
    measuring = background.submit(measure_until, gate, ran)
    deadline = time.monotonic() + SOON_S
    while not gate._waiting and time.monotonic() < deadline:
        time.sleep(0.001)
    go_on.set()
    assert not measuring.result(SOON_S)
    assert len(building.result(SOON_S).programs) == 1


def measure_until(gate: Gate, ran: threading.Event) -> bool:
    """Measure for a moment; returns whether something ran meanwhile."""
    with gate.measuring():
        return ran.wait(0.1)


def test_a_first_run_may_measure_itself(gate: Gate) -> None:
    def first_run(program: Program) -> Failure | None:
        with gate.measuring():
            return None

    assert len(run_build(list_candidates(2), first_run=first_run).programs) == 2


def test_progress_is_told_of_every_candidate_once() -> None:
    done: list[None] = []

    def lower(candidate: Candidate) -> Lowering:
        if candidate.id == 0:
            raise ValueError
        compile = fail_to_compile if candidate.id == 1 else lambda: None
        return Lowering(candidate, "m", str(candidate.id % 3), FakeLowered(compile))

    run_build(list_candidates(7), lower, on_done=lambda: done.append(None))
    assert len(done) == 7


def test_compile_threads_end_with_the_build() -> None:
    run_build(list_candidates(4), max_workers=4)
    deadline = time.monotonic() + SOON_S
    while any(t.name.startswith("tune-jax") for t in threading.enumerate()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not any(t.name.startswith("tune-jax") for t in threading.enumerate())


def test_compile_seconds_are_those_of_the_program() -> None:
    (program,) = run_build(list_candidates(1), lambda c: lower_all_apart(c, lambda: time.sleep(0.05))).programs
    assert program.compile_s >= 0.05


def test_sessions_of_this_process_share_one_gate() -> None:
    from tune_jax import _session

    assert _session.GATE is GATE


# Cores


def test_usable_cores_follow_the_affinity(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(threads, "_CGROUP_QUOTA", str(tmp_path / "none"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3}, raising=False)
    assert usable_cores() == 1


@pytest.mark.parametrize(
    ("text", "cores"),
    [
        ("max 100000\n", 16),
        ("400000 100000\n", 4),
        ("150000 100000\n", 1),
        ("50000 100000\n", 1),
        ("6400000 100000\n", 16),
        ("", 16),
        ("nonsense\n", 16),
        ("many 100000\n", 16),
        ("100000 0\n", 16),
    ],
)
def test_usable_cores_follow_the_control_groups_quota(
    text: str, cores: int, monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    (tmp_path / "cpu.max").write_text(text)
    monkeypatch.setattr(threads, "_CGROUP_QUOTA", str(tmp_path / "cpu.max"))
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)), raising=False)
    assert usable_cores() == cores


def test_usable_cores_where_no_affinity_can_be_asked(monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path) -> None:
    monkeypatch.setattr(threads, "_CGROUP_QUOTA", str(tmp_path / "none"))
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: 5)
    assert usable_cores() == 5


# Failures from elsewhere


def test_a_candidate_that_failed_elsewhere_goes_with_all_that_share_its_program() -> None:
    def lower_in_pairs(candidate: Candidate) -> Lowering:
        return dataclasses.replace(lower_all_apart(candidate), text=f"text {candidate.id // 2}")

    built = run_build(list_candidates(6), lower_in_pairs)
    failure = Failure("run", "MemoryError", "on process 1: full")
    built.drop({next(id for id, shared in built.groups.items() if id != shared and id < 2): failure})
    assert built.failures == {0: failure, 1: failure}
    assert {program.id // 2 for program in built.programs} == {1, 2}


def test_a_candidates_own_failure_stays_where_it_failed_elsewhere_too() -> None:
    def lower(candidate: Candidate) -> Lowering:
        if candidate.id == 1:
            raise ValueError("own")
        return lower_all_apart(candidate)

    built = run_build(list_candidates(3), lower)
    built.drop({0: Failure("run", "OSError", "foreign"), 1: Failure("run", "OSError", "foreign")})
    assert {key: failure.message for key, failure in built.failures.items()} == {0: "foreign", 1: "own"}
    assert [program.id for program in built.programs] == [2]
