"""Ctrl-C: it stops a tuning promptly wherever it comes, and the process goes on as if it had not begun."""

from __future__ import annotations

import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

BEGIN = """
    import os, signal, tempfile, threading, time
    import jax, jax.numpy as jnp, numpy as np
    from tune_jax import CONFIG, tune
    from tune_jax._build import threads
    CONFIG.profiling_samples, CONFIG.max_rounds = 3, 6
    x = jnp.ones((8, 8))
    calls = []

    def interrupt():
        os.kill(os.getpid(), signal.SIGINT)

    def call_back(callback, x):
        return jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x)
"""

# What must hold after any interrupt: it came through soon, and everything works as before.
END = """
    began = time.perf_counter()
    try:
        tuned(x)
    except KeyboardInterrupt:
        print("interrupted")
    stop = True
    assert time.perf_counter() - began < 10, time.perf_counter() - began
    assert tuned.results is None
    assert os.listdir(tempfile.gettempdir()) == []
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        jax.profiler.stop_trace()
    other = tune(lambda x, *, b: x + b, {"b": [1, 2]})
    other(x)
    assert {row.clock for row in other.results.rows} == {"device"}, other.results.rows
    tuned(x)
    assert {row.clock for row in tuned.results.timed} == {"device"}
    assert len(tuned.results.rows) == 3
    print("usable")
"""

LOWERING = """
    stop = False

    @tune(hyperparams={"b": [1, 2, 3]})
    def tuned(x, *, b):
        calls.append(b)
        if calls.count(2) == 1 and not stop:
            interrupt()
            time.sleep(0.01)
        return x * b
"""

COMPILING = """
    stop = False
    compile_program, released = threads.compile_program, threading.Event()

    def compile_slowly(lowering, donated):
        if not stop:
            threading.Timer(0.2, interrupt).start()
            released.wait(30)
        return compile_program(lowering, donated)

    threads.compile_program = compile_slowly
    tuned = tune(lambda x, *, b: x * b, {"b": [1, 2, 3]}, max_workers=1)
"""

# The compile that was running when Ctrl-C came ends by itself, later.
RELEASE = """
    stop = True
    released.set()
"""

FIRST_RUN = """
    stop = False

    def callback(value):
        if not stop:
            interrupt()
            time.sleep(0.01)
        return value

    tuned = tune(lambda x, *, b: call_back(callback, x) * b, {"b": [1, 2, 3]})
"""

TIMING = """
    stop = False

    def callback(value):
        calls.append(None)
        if len(calls) == 9 and not stop:
            interrupt()
            time.sleep(0.01)
        return value

    tuned = tune(lambda x, *, b: call_back(callback, x) * b, {"b": [1, 2, 3]})
"""

# Here the signal comes while Python itself runs, between two launches.
BETWEEN_LAUNCHES = """
    stop = False
    from tune_jax._build.programs import Program
    launch = Program.launch

    def launch_and_count(self, inputs):
        launch(self, inputs)
        calls.append(None)
        if len(calls) == 9 and not stop:
            interrupt()

    Program.launch = launch_and_count
    tuned = tune(lambda x, *, b: x * b, {"b": [1, 2, 3]})
"""

STOPPING = """
    stop = False
    stop_trace = jax.profiler.stop_trace

    def stop_and_interrupt():
        if not stop:
            interrupt()
        stop_trace()

    jax.profiler.stop_trace = stop_and_interrupt
    tuned = tune(lambda x, *, b: x * b, {"b": [1, 2, 3]})
"""


@pytest.mark.parametrize(
    "stage",
    [LOWERING, FIRST_RUN, TIMING, BETWEEN_LAUNCHES, STOPPING],
    ids=["lowering", "first run", "timing", "between launches", "stopping the trace"],
)
def test_ctrl_c_stops_a_tuning_and_leaves_the_process_usable(stage: str, run_python: Run, tmp_path: object) -> None:
    done = run_python(BEGIN + stage + END, TMPDIR=str(tmp_path))
    assert done.stdout.split() == ["interrupted", "usable"]


def test_ctrl_c_while_compiles_are_waited_for_stops_at_once(run_python: Run, tmp_path: object) -> None:
    after = END.replace("    stop = True\n", RELEASE)
    done = run_python(BEGIN + COMPILING + after, TMPDIR=str(tmp_path))
    assert done.stdout.split() == ["interrupted", "usable"]


# The main thread waits for a tuning of the same key that another thread has begun.
WAITING = """
    from tune_jax import _lookup
    began, go_on = threading.Event(), threading.Event()
    run_session = _lookup.run_session

    def slow_session(*args):
        began.set()
        go_on.wait(30)
        return run_session(*args)

    _lookup.run_session = slow_session
    tuned = tune(lambda x, *, b: x * b, {"b": [1, 2]})
    other = threading.Thread(target=tuned.tune, args=(x,))
    other.start()
    began.wait(30)
    threading.Timer(0.2, interrupt).start()
    try:
        tuned.tune(x)
    except KeyboardInterrupt:
        print("interrupted")
    go_on.set()
    other.join()
    print(len(tuned.results.timed))
"""


def test_ctrl_c_while_another_threads_tuning_is_waited_for(run_python: Run) -> None:
    assert run_python(BEGIN + WAITING).stdout.split() == ["interrupted", "2"]
