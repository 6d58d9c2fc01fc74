"""What a tuning leaves behind in its process: nothing; and what it needs of the temporary folder."""

from __future__ import annotations

import os
import pathlib
import subprocess
from collections.abc import Callable

import pytest

Run = Callable[..., "subprocess.CompletedProcess[str]"]

needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts by what Linux shows in /proc")

MANY = """
    import gc, os, tempfile, threading, time
    import jax, jax.numpy as jnp
    from tune_jax import CONFIG, tune
    CONFIG.profiling_samples, CONFIG.max_rounds = 1, 1
    tuned = tune(lambda x, *, b: x * b, {"b": [2, 3]})

    def count_children():
        return len(open(f"/proc/self/task/{os.getpid()}/children").read().split())

    def count():
        jax.clear_caches()
        gc.collect()
        deadline = time.monotonic() + 10
        while any(t.name.startswith("tune-jax") for t in threading.enumerate()) and time.monotonic() < deadline:
            time.sleep(0.01)
        return {
            "descriptors": len(os.listdir("/proc/self/fd")),
            "threads": threading.active_count(),
            # Threads of XLA's own pools may still come up, but not one a tuning.
            "tens of native threads": (len(os.listdir("/proc/self/task")) - native) // 25,
            "children": count_children(),
            "files": sorted(os.listdir(tempfile.gettempdir())),
            "arrays": len(jax.live_arrays()),
        }

    def tune_sizes(sizes):
        for size in sizes:
            tuned.tune(jax.ShapeDtypeStruct((size,), jnp.float32))

    tune_sizes(range(1, 6))
    native = len(os.listdir("/proc/self/task"))
    before = count()
    tune_sizes(range(6, 56))
    assert len(tuned._tunable.state["memory"].results) == 55
    after = count()
    assert after == before, (before, after)
    assert after["files"] == []
"""

ONE = """
    import tempfile
    import jax.numpy as jnp
    from tune_jax import CONFIG, tune
    CONFIG.profiling_samples, CONFIG.max_rounds = 1, 1
    tuned = tune(lambda x, *, b: x * b, {"b": [2, 3]})
    tuned(jnp.ones(4))
    print(*{row.clock for row in tuned.results.timed})
"""


@needs_proc
def test_fifty_tunings_leave_nothing_behind(run_python: Run, tmp_path: pathlib.Path) -> None:
    run_python(MANY, TMPDIR=str(tmp_path))


@pytest.mark.parametrize("folder", ["gone", "a:b c", "/proc", "file"])
def test_a_temporary_folder_of_any_kind_serves(folder: str, run_python: Run, tmp_path: pathlib.Path) -> None:
    (tmp_path / "a:b c").mkdir()
    (tmp_path / "file").write_text("")
    # Missing, no folder, not to be written even by the administrator: Python then looks for another one itself.
    assert run_python(ONE, TMPDIR=str(tmp_path / folder)).stdout.split() == ["device"]
    assert os.listdir(tmp_path / "a:b c") == []


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="the administrator may write anywhere")
def test_a_temporary_folder_that_turns_read_only_ends_in_the_host_clock(
    run_python: Run, tmp_path: pathlib.Path
) -> None:
    code = "    import tempfile, os; tempfile.gettempdir(); os.chmod(tempfile.gettempdir(), 0o500)\n" + ONE
    done = run_python("    import warnings; warnings.simplefilter('default')\n" + code, TMPDIR=str(tmp_path))
    assert done.stdout.split() == ["host"]
    assert "no folder for the trace can be made" in done.stderr


def test_importing_starts_nothing(run_python: Run, tmp_path: pathlib.Path) -> None:
    run_python(
        """
        import logging, os, tempfile, threading
        handlers = list(logging.getLogger().handlers)
        import tune_jax
        assert threading.active_count() == 1
        assert logging.getLogger().handlers == handlers
        assert logging.getLogger("tune_jax").handlers == []
        assert os.listdir(tempfile.gettempdir()) == []
        """,
        TMPDIR=str(tmp_path),
    )
