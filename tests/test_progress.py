"""Progress bars: where they show, where they do not, and that they end where they should."""

from __future__ import annotations

import concurrent.futures
import io
import os
import pathlib
import subprocess
import sys
import termios
import textwrap
import types
from collections.abc import Callable
from typing import Any

import pytest

from tune_jax import _progress
from tune_jax._progress import covering_bar, is_interactive, progress_bar

TUNE = """
import jax.numpy as jnp
from tune_jax import CONFIG, tune
CONFIG.profiling_samples, CONFIG.max_rounds = 1, 2
tune(lambda x, *, b: x * b, {"b": [1, 2]}, progress=PROGRESS)(jnp.ones(4))
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def show_bar(total: int, *steps: int, wanted: bool | None) -> None:
    with progress_bar("compiling f", total, wanted=wanted) as advance:
        for step in steps:
            advance(step)


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The bars that a test makes."""
    made: list[Any] = []
    make = _progress.tqdm

    def note(*args: Any, **kwargs: Any) -> Any:
        made.append(make(*args, **kwargs))
        return made[-1]

    monkeypatch.setattr(_progress, "tqdm", note)
    return made


def test_no_bar_where_standard_error_is_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    show_bar(3, 1, 1, 1, wanted=None)
    assert stream.getvalue() == ""


def test_a_bar_in_a_terminal_names_what_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    show_bar(3, 1, 1, 1, wanted=None)
    assert "compiling f" in stream.getvalue()


def test_a_bar_that_is_asked_for_shows_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    show_bar(3, 1, wanted=True)
    assert "compiling f" in stream.getvalue()


def test_a_bar_that_covers_others_is_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with covering_bar("tuning step") as show_steps:
        show_steps(1, 4)
        show_bar(3, 1, wanted=True)
        show_steps(6, 7)
    assert "1/4" in stream.getvalue()
    assert "6/7" in stream.getvalue()
    assert "compiling" not in stream.getvalue()
    show_bar(3, 1, wanted=None)
    assert "compiling f" in stream.getvalue()


def test_a_bar_is_covered_in_its_own_thread_only(
    monkeypatch: pytest.MonkeyPatch, background: concurrent.futures.Executor
) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with covering_bar("tuning step"):
        background.submit(show_bar, 3, 1, wanted=None).result()
    assert "compiling f" in stream.getvalue()


def test_bars_show_again_after_an_error_under_one_that_covers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with pytest.raises(KeyError), covering_bar("tuning step"):
        raise KeyError
    assert stream.getvalue() == ""
    show_bar(3, 1, wanted=True)
    assert "compiling f" in stream.getvalue()


def test_a_bar_that_is_declined_shows_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    show_bar(3, 1, wanted=False)
    assert stream.getvalue() == ""


def test_a_bar_counts_its_steps(bars: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    show_bar(5, 1, 3, wanted=True)
    assert bars[0].n == 4


def test_a_bar_never_goes_past_its_end(bars: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    show_bar(3, 3, 2, 2, wanted=True)
    assert bars[0].n == 3


def test_a_bar_that_does_not_show_can_be_advanced() -> None:
    show_bar(3, 3, 2, 2, wanted=False)


def test_a_bar_is_closed_after_an_error(bars: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(KeyError), progress_bar("f", 3, wanted=True):
        raise KeyError
    assert bars[0].disable


@pytest.mark.parametrize("stream", [None, object()])
def test_a_bar_that_is_asked_for_shows_nothing_where_nothing_can_be_written(
    stream: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    show_bar(3, 1, 1, 1, wanted=True)


def test_a_bar_that_is_asked_for_shows_nothing_where_standard_error_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    show_bar(3, 1, 1, 1, wanted=True)


@pytest.mark.parametrize("stream", [None, object()])
def test_no_terminal_where_standard_error_is_none(stream: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", stream)
    assert not is_interactive()


def test_no_terminal_where_standard_error_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    stream.close()
    monkeypatch.setattr(sys, "stderr", stream)
    assert not is_interactive()


@pytest.mark.parametrize(
    ("shell", "interactive"), [("ZMQInteractiveShell", True), ("TerminalInteractiveShell", False), ("NoneType", False)]
)
def test_a_notebook_is_interactive_and_other_shells_are_not(
    shell: str, interactive: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    running = None if shell == "NoneType" else type(shell, (), {})()
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = lambda: running  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert is_interactive() is interactive


def run_in_terminal(code: str, folder: pathlib.Path) -> str:
    """Run Python with standard error on a pseudo-terminal; returns what was written there."""
    ours, theirs = os.openpty()
    termios.tcsetwinsize(theirs, (24, 80))
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env={**os.environ, "JAX_PLATFORMS": "cpu"},
        cwd=folder,
    )
    os.close(theirs)
    written = b""
    while True:
        try:
            part = os.read(ours, 65536)
        except OSError:  # Linux says so where the other side has closed
            part = b""
        if not part:
            break
        written += part
    os.close(ours)
    assert process.wait(60) == 0, written.decode()
    return written.decode()


def test_a_tuning_in_a_terminal_shows_compiling_and_timing(tmp_path: pathlib.Path) -> None:
    written = run_in_terminal(TUNE.replace("PROGRESS", "None"), tmp_path)
    assert "compiling <lambda>" in written
    assert "timing <lambda>" in written
    assert "0/2" in written


def test_a_tuning_in_a_terminal_can_be_quiet(tmp_path: pathlib.Path) -> None:
    assert run_in_terminal(TUNE.replace("PROGRESS", "False"), tmp_path) == ""


def test_a_tuning_without_a_terminal_writes_nothing(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_python(TUNE.replace("PROGRESS", "None"))
    assert (done.stdout, done.stderr) == ("", "")


def test_a_tuning_that_is_asked_for_progress_goes_on_without_standard_error(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_python("import sys\nsys.stderr = None\n" + TUNE.replace("PROGRESS", "True") + "print('done')")
    assert done.stdout == "done\n"


def test_a_tuning_that_is_asked_for_progress_shows_it_in_a_file(
    run_python: Callable[..., subprocess.CompletedProcess[str]],
) -> None:
    done = run_python(TUNE.replace("PROGRESS", "True"))
    assert "timing <lambda>" in done.stderr
    assert done.stdout == ""
