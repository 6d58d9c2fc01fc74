"""The gate between compiling and measuring, with threads that do neither."""

from __future__ import annotations

import contextlib
import threading
import time
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from tune_jax._build.gate import Gate

SOON_S = 30.0
# Long enough for a thread that may go on to do so, on a loaded machine as a rule; too short only hides a fault.
MOMENT_S = 0.1


class Visit:
    """A thread that enters a side of the gate, says so, and stays inside until it is told to leave."""

    def __init__(self, pool: Executor, side: contextlib.AbstractContextManager[Any]) -> None:
        self.inside, self.leave = threading.Event(), threading.Event()
        self._side = side
        self.done: Future[None] = pool.submit(self._stay)

    def _stay(self) -> None:
        with self._side:
            self.inside.set()
            assert self.leave.wait(SOON_S)

    def enters(self) -> bool:
        return self.inside.wait(SOON_S)

    def stays_outside(self) -> bool:
        return not self.inside.wait(MOMENT_S)

    def end(self) -> None:
        self.leave.set()
        self.done.result(SOON_S)


def test_many_may_compile_at_a_time(background: Executor) -> None:
    gate = Gate()
    visits = [Visit(background, gate.compiling()) for _ in range(4)]
    assert all(visit.enters() for visit in visits)
    for visit in visits:
        visit.end()


def test_only_one_measures_at_a_time(background: Executor) -> None:
    gate = Gate()
    first = Visit(background, gate.measuring())
    assert first.enters()
    second = Visit(background, gate.measuring())
    assert second.stays_outside()
    first.end()
    assert second.enters()
    second.end()


def test_measuring_waits_until_every_compile_is_done(background: Executor) -> None:
    gate = Gate()
    compiles = [Visit(background, gate.compiling()) for _ in range(2)]
    assert all(visit.enters() for visit in compiles)
    measurement = Visit(background, gate.measuring())
    compiles[0].end()
    assert measurement.stays_outside()
    compiles[1].end()
    assert measurement.enters()
    measurement.end()


def test_compiling_waits_while_someone_measures(background: Executor) -> None:
    gate = Gate()
    measurement = Visit(background, gate.measuring())
    assert measurement.enters()
    compiling = Visit(background, gate.compiling())
    assert compiling.stays_outside()
    measurement.end()
    assert compiling.enters()
    compiling.end()


def test_a_waiting_measurement_goes_before_new_compiles(background: Executor) -> None:
    gate = Gate()
    running = Visit(background, gate.compiling())
    assert running.enters()
    measurement = Visit(background, gate.measuring())
    assert measurement.stays_outside()
    late = Visit(background, gate.compiling())
    assert late.stays_outside()
    running.end()
    assert measurement.enters()
    assert late.stays_outside()
    measurement.end()
    assert late.enters()
    late.end()


def test_waiting_for_measuring_ends_with_it_and_holds_nothing(background: Executor) -> None:
    gate = Gate()
    measurement = Visit(background, gate.measuring())
    assert measurement.enters()
    waiting = background.submit(gate.wait_for_measuring)
    time.sleep(MOMENT_S)
    assert not waiting.done()
    measurement.end()
    waiting.result(SOON_S)
    following = Visit(background, gate.measuring())
    assert following.enters()
    following.end()


def test_an_error_while_compiling_lets_a_measurement_in(background: Executor) -> None:
    gate = Gate()
    with pytest.raises(RuntimeError), gate.compiling():
        raise RuntimeError
    measurement = Visit(background, gate.measuring())
    assert measurement.enters()
    measurement.end()


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_error_while_measuring_lets_others_in(background: Executor, error: type[BaseException]) -> None:
    gate = Gate()
    with pytest.raises(error), gate.measuring():
        raise error
    for side in (gate.compiling(), gate.measuring()):
        visit = Visit(background, side)
        assert visit.enters()
        visit.end()


def test_an_interrupt_while_waiting_to_measure_lets_compiles_in(
    background: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()

    def interrupt(predicate: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(gate._changed, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt), gate.measuring():
            pytest.fail("the gate let a measurement in that was interrupted")
    visit = Visit(background, gate.compiling())
    assert visit.enters()
    visit.end()


def test_an_interrupt_while_waiting_to_measure_leaves_a_running_compile_counted(
    background: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate()
    compiling = Visit(background, gate.compiling())
    assert compiling.enters()

    def interrupt(predicate: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(gate._changed, "wait_for", interrupt)
        with pytest.raises(KeyboardInterrupt), gate.measuring():
            pytest.fail("the gate let a measurement in that was interrupted")
    measurement = Visit(background, gate.measuring())
    assert measurement.stays_outside()
    compiling.end()
    assert measurement.enters()
    measurement.end()
