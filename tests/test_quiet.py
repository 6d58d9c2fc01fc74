"""What a tuning says and where, and that it takes nobody's output away."""

from __future__ import annotations

import pathlib
import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

BEGIN = """
    import ctypes, logging, os, sys, threading
    import jax, jax.numpy as jnp, numpy as np
    CONFIGURE_BEFORE
    import tune_jax
    import importlib
    importlib.reload(tune_jax)
    CONFIGURE_AFTER
    from tune_jax import CONFIG, tune
    CONFIG.profiling_samples, CONFIG.max_rounds = 2, 2

    def picky(x, *, b):
        if b % 3 == 0:
            raise ValueError(f"no block of {b}")
        return x * b

    grid = {"b": [1, 2, 3, 4, 5, 6]}
"""

TUNE = """
    tuned = tune(picky, grid)
    tuned(jnp.ones(4))
    assert len(tuned.results.failures) == 2
    assert len(tuned.results.timed) == 4
"""

CONFIGURE = "logging.basicConfig(level=logging.INFO, format='%(name)s %(levelname)s')"


def fill(code: str, *, before: str = "", after: str = "") -> str:
    return code.replace("CONFIGURE_BEFORE", before).replace("CONFIGURE_AFTER", after)


def test_a_tuning_with_failures_says_nothing_by_default(run_python: Run) -> None:
    done = run_python(fill(BEGIN + TUNE))
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize("when", ["before", "after"])
def test_one_line_is_logged_once_whenever_logging_is_set_up(when: str, run_python: Run) -> None:
    done = run_python(fill(BEGIN, **{when: CONFIGURE}) + TUNE)
    assert [line for line in done.stderr.splitlines() if "tune_jax" in line] == ["tune_jax INFO"]
    assert "Traceback" not in done.stderr


def test_no_handler_is_added_anywhere(run_python: Run) -> None:
    run_python(
        fill(BEGIN + TUNE)
        + """
    assert logging.getLogger().handlers == []
    assert logging.getLogger("tune_jax").handlers == []
    assert logging.getLogger("tune_jax").level == logging.NOTSET
    """
    )


def test_all_ways_of_writing_arrive_after_an_error_in_a_trace(run_python: Run) -> None:
    done = run_python(
        fill(BEGIN)
        + """
    from tune_jax._measure.profiler import record_trace
    try:
        record_trace(lambda: 1 / 0, platform="cpu", keep=None)
    except ZeroDivisionError:
        pass
    for name, stream in (("out", sys.stdout), ("err", sys.stderr)):
        print(f"print {name}", file=stream, flush=True)
        os.write(stream.fileno(), f"write {name}\\n".encode())
    libc = ctypes.CDLL(None)
    libc.puts(b"puts out")
    libc.fflush(None)
    """
    )
    assert done.stdout.splitlines() == ["print out", "write out", "puts out"]
    assert done.stderr.splitlines() == ["print err", "write err"]


def test_another_threads_prints_all_arrive_while_a_tuning_is_timed(run_python: Run) -> None:
    done = run_python(
        fill(BEGIN)
        + """
    from tune_jax._measure import timers
    record, inside, done = timers.record_trace, threading.Event(), threading.Event()

    def record_and_wait(run, **options):
        def run_and_wait():
            run()
            inside.set()
            assert done.wait(30)
        return record(run_and_wait, **options)

    def talk():
        inside.wait(30)
        for index in range(100):
            print(f"line {index}", flush=True)
            os.write(2, f"line {index}\\n".encode())
        done.set()

    timers.record_trace = record_and_wait
    talker = threading.Thread(target=talk)
    talker.start()
    tune(picky, grid).tune(jnp.ones(4))
    talker.join()
    """
    )
    assert done.stdout.splitlines() == [f"line {index}" for index in range(100)]
    assert done.stderr.splitlines() == [f"line {index}" for index in range(100)]


def test_streams_are_the_same_objects_while_candidates_run() -> None:
    import sys

    import jax
    import jax.numpy as jnp
    import numpy as np

    from tune_jax import CONFIG, tune

    seen: list[tuple[object, object]] = []

    def watch(value: np.ndarray) -> np.ndarray:
        seen.append((sys.stdout, sys.stderr))
        return value

    def watched(x: jax.Array, *, b: int) -> jax.Array:
        return jax.pure_callback(watch, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * b

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CONFIG, "max_rounds", 2)
        tune(watched, {"b": [1, 2]}).tune(jnp.ones(4))
    assert set(seen) == {(sys.stdout, sys.stderr)}


def test_what_candidates_print_arrives(capfd: pytest.CaptureFixture[str]) -> None:
    import jax
    import jax.numpy as jnp

    from tune_jax import CONFIG, tune

    def chatty(x: jax.Array, *, b: int) -> jax.Array:
        jax.debug.print("candidate here")
        return x * b

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(CONFIG, "profiling_samples", 1)
        patched.setattr(CONFIG, "max_rounds", 1)
        tune(chatty, {"b": [1, 2]}).tune(jnp.ones(4))
    jax.effects_barrier()
    # Two first runs, two timed launches, and warm-up.
    assert capfd.readouterr().out.count("candidate here") >= 4


def test_a_tuning_in_ipython_writes_nothing_but_what_cells_show(run_python: Run, tmp_path: pathlib.Path) -> None:
    pytest.importorskip("IPython")
    done = run_python(
        """
        from IPython.core.interactiveshell import InteractiveShell
        shell = InteractiveShell.instance(history_length=0)
        code = '''
        import jax.numpy as jnp
        from tune_jax import CONFIG, tune
        CONFIG.profiling_samples, CONFIG.max_rounds = 1, 1
        tuned = tune(lambda x, *, b: x * b, {"b": [1, 2]})
        _ = tuned(jnp.ones(4))
        print(len(tuned.results.timed))
        '''
        result = shell.run_cell("\\n".join(line.strip() for line in code.strip().splitlines()))
        result.raise_error()
        """,
        IPYTHONDIR=str(tmp_path),
    )
    assert done.stdout.split() == ["2"]
