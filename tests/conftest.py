"""Settings of the whole test run; importing this file comes before any import of jax."""

from __future__ import annotations

import concurrent.futures
import gc
import logging
import os
import socket
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest

HOST_DEVICES = 8
WORKERS = 2
HAS_GPU = os.path.exists("/dev/nvidia0")


def _set_xla_flags() -> None:
    """Split the CPU into several devices, for the tests on meshes, and compile fast; what the caller set stays."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        flags += f" --xla_force_host_platform_device_count={HOST_DEVICES}"
    # Thousands of small programs are compiled and run a few times each. On a GPU the code that users run is tested.
    if "xla_backend_optimization_level" not in flags and not HAS_GPU:
        flags += " --xla_backend_optimization_level=0"
    os.environ["XLA_FLAGS"] = flags.strip()


_set_xla_flags()

# The first example of a test often compiles, so a deadline for one example says nothing.
hypothesis.settings.register_profile("house", deadline=None, derandomize="CI" in os.environ)
hypothesis.settings.load_profile("house")


@pytest.hookimpl(tryfirst=True)
def pytest_cmdline_main(config: pytest.Config) -> None:
    """Where folders are to be tested, and `-n` says nothing, share the tests between processes, neighbours together.

    Not in `addopts`: pytest-xdist may be absent or left out.
    """
    option = config.option
    is_free = getattr(option, "numprocesses", 0) is None and option.capture != "no"
    # A worker reads this file too, and shares nothing further.
    if is_free and not hasattr(config, "workerinput") and any(os.path.isdir(path) for path in config.args):
        option.numprocesses = "auto"
    if getattr(option, "numprocesses", 0) and option.dist == "no":
        option.dist = "worksteal"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """Leave a GPU to one process: another would disturb its timings."""
    return 0 if HAS_GPU else WORKERS


def pytest_collection_finish() -> None:
    """Spare what was imported from each later collection: looking for leaked tracers makes thousands of them."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") is not None:
        import jax

        if jax.default_backend() != "gpu":
            pytest.skip("needs a GPU")


@pytest.fixture(autouse=True)
def forget_tunings() -> None:
    """Let no test find what an equal function of another test was tuned for."""
    from tune_jax._lookup import SHARED

    SHARED.clear()


@pytest.fixture
def quick_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure little: for tests that ask how a tuning goes, not who wins it."""
    from tune_jax import CONFIG

    monkeypatch.setattr(CONFIG, "profiling_samples", 2)
    monkeypatch.setattr(CONFIG, "max_rounds", 4)
    monkeypatch.setattr(CONFIG, "max_measure_s", 2.0)


@pytest.fixture
def background() -> Iterator[concurrent.futures.Executor]:
    """Threads for a test's own use; the test must let them all end."""
    with concurrent.futures.ThreadPoolExecutor(12, thread_name_prefix="test") as pool:
        yield pool


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Run Python code in a process of its own, where warnings are errors; it must exit with 0."""

    def run(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", textwrap.dedent(code)],
            env={**os.environ, "JAX_PLATFORMS": "cpu", **environment},
            capture_output=True,
            text=True,
            timeout=120,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done

    return run


@pytest.fixture
def compiles() -> Iterator[list[str]]:
    """The names of the programs that XLA compiles during a test, in the order they are done."""
    import jax

    names: list[str] = []

    def note(event: str, duration: float, **details: Any) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            names.append(str(details.get("fun_name")))

    jax.monitoring.register_event_duration_secs_listener(note)
    yield names
    jax.monitoring.unregister_event_duration_listener(note)


@pytest.fixture
def quick_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rounds: for tests that look at what is tuned, not at how well it is timed."""
    from tune_jax import CONFIG

    monkeypatch.setattr(CONFIG, "profiling_samples", 1)
    monkeypatch.setattr(CONFIG, "max_rounds", 1)


@pytest.fixture
def count_tunings(quick_tuning: None) -> Iterator[Callable[[], int]]:
    """How many tunings have ended since the test began, by the log line that each one leaves."""
    from tune_jax import logger

    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    before = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield lambda: sum(line.startswith("tuned ") for line in lines)
    logger.setLevel(before)
    logger.removeHandler(handler)


@pytest.fixture(scope="session")
def find_port() -> Callable[[], int]:
    """Find a port of this machine that nothing listens on."""

    def find() -> int:
        with socket.socket() as free:
            free.bind(("localhost", 0))
            return int(free.getsockname()[1])

    return find


class Shelf:
    """What all stores of a job share."""

    def __init__(self, processes: int) -> None:
        self.processes = processes
        self.texts: dict[str, str] = {}
        self.changed = threading.Condition()


class ShelfStore:
    """The store as one process sees it; `is_cut` puts it out of reach."""

    def __init__(self, shelf: Shelf, process: int) -> None:
        self.shelf = shelf
        self.process = process
        self.processes = shelf.processes
        self.is_cut = False

    def put(self, key: str, text: str) -> None:
        with self.reached():
            self.shelf.texts[key] = text
            self.shelf.changed.notify_all()

    def put_once(self, key: str, text: str) -> bool:
        with self.reached():
            written = key not in self.shelf.texts
            self.shelf.texts.setdefault(key, text)
            self.shelf.changed.notify_all()
            return written

    def read(self, key: str) -> str | None:
        with self.reached():
            return self.shelf.texts.get(key)

    def wait(self, key: str, seconds: float) -> str | None:
        with self.reached():
            self.shelf.changed.wait_for(lambda: key in self.shelf.texts, seconds)
            return self.shelf.texts.get(key)

    def list(self, folder: str) -> dict[str, str]:
        with self.reached():
            return {key: text for key, text in self.shelf.texts.items() if key.startswith(f"{folder}/")}

    def delete(self, folder: str) -> None:
        with self.reached():
            for key in [key for key in self.shelf.texts if key == folder or key.startswith(f"{folder}/")]:
                del self.shelf.texts[key]

    def reached(self) -> threading.Condition:
        from tune_jax._agree import OutOfReachError

        if self.is_cut:
            raise OutOfReachError("connection refused")
        return self.shelf.changed


@pytest.fixture
def make_stores() -> Callable[[int], list[ShelfStore]]:
    """Make the stores of that many processes, which threads stand for."""

    def make(processes: int) -> list[ShelfStore]:
        shelf = Shelf(processes)
        return [ShelfStore(shelf, process) for process in range(processes)]

    return make
