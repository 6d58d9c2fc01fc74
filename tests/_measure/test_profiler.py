"""Recording a trace: what is handed back, what is left behind, and what others who profile see of it."""

from __future__ import annotations

import os
import pathlib
import tempfile
from collections.abc import Callable
from subprocess import CompletedProcess

import jax
import jax.numpy as jnp
import pytest

from tune_jax._errors import ProfileError
from tune_jax._measure.profiler import record_trace
from tune_jax._measure.xplane import read_launches


@pytest.fixture
def temporary_folder(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> pathlib.Path:
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


@jax.jit
def traced_sine(x: jax.Array) -> jax.Array:
    return jnp.sin(x)


X = jnp.ones((64, 64))


def run_sine() -> None:
    traced_sine(X).block_until_ready()


def profiler_is_free() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        jax.profiler.start_trace(folder)
        jax.profiler.stop_trace()
    return True


def test_the_trace_holds_what_ran() -> None:
    run_sine()
    trace = record_trace(run_sine, platform="cpu", keep=None)
    (time,) = read_launches(trace, ["jit_traced_sine"])
    assert time is not None
    assert time.busy_ns > 0


def test_no_file_outlives_a_recording(temporary_folder: pathlib.Path) -> None:
    record_trace(run_sine, platform="cpu", keep=None)
    assert list(temporary_folder.iterdir()) == []


def test_no_file_outlives_an_error(temporary_folder: pathlib.Path) -> None:
    def fail() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        record_trace(fail, platform="cpu", keep=None)
    assert list(temporary_folder.iterdir()) == []


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_the_profiler_is_free_after_an_error(error: type[BaseException]) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(error):
        record_trace(fail, platform="cpu", keep=None)
    assert profiler_is_free()


def test_a_kept_trace_lies_where_tensorboard_looks_for_it(tmp_path: pathlib.Path) -> None:
    record_trace(run_sine, platform="cpu", keep=str(tmp_path / "made" / "here"))
    (trace,) = (tmp_path / "made" / "here").glob("*/plugins/profile/*/*.xplane.pb")
    assert trace.stat().st_size > 0


def test_each_kept_trace_has_a_folder_of_its_own(tmp_path: pathlib.Path) -> None:
    for _ in range(3):
        record_trace(run_sine, platform="cpu", keep=str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 3
    assert len(list(tmp_path.rglob("*.xplane.pb"))) == 3


def test_the_kept_trace_is_the_one_handed_back(tmp_path: pathlib.Path) -> None:
    trace = record_trace(run_sine, platform="cpu", keep=str(tmp_path))
    (kept,) = tmp_path.rglob("*.xplane.pb")
    assert kept.read_bytes() == trace


def test_the_callers_own_trace_is_named_as_the_reason(tmp_path: pathlib.Path) -> None:
    with (
        jax.profiler.trace(str(tmp_path)),
        pytest.raises(ProfileError, match=r"profiler does not start: .*already been started"),
    ):
        record_trace(run_sine, platform="cpu", keep=None)


def test_the_callers_own_trace_goes_on(tmp_path: pathlib.Path) -> None:
    with jax.profiler.trace(str(tmp_path)):
        with pytest.raises(ProfileError):
            record_trace(run_sine, platform="cpu", keep=None)
        run_sine()
    (trace,) = tmp_path.rglob("*.xplane.pb")
    (time,) = read_launches(trace.read_bytes(), ["jit_traced_sine"])
    assert time is not None


def test_nothing_runs_where_no_trace_can_be_had(tmp_path: pathlib.Path) -> None:
    ran: list[None] = []
    with jax.profiler.trace(str(tmp_path)), pytest.raises(ProfileError):
        record_trace(lambda: ran.append(None), platform="cpu", keep=None)
    assert ran == []


def write_trace(folder: pathlib.Path, name: str, content: bytes, age_s: float) -> None:
    path = folder / "plugins" / "profile" / name / "host.xplane.pb"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    os.utime(path, (1e9 - age_s, 1e9 - age_s))


def replace_profiler(monkeypatch: pytest.MonkeyPatch, write: Callable[[pathlib.Path], None]) -> None:
    folders: list[pathlib.Path] = []
    monkeypatch.setattr(jax.profiler, "start_trace", lambda folder, **_: folders.append(pathlib.Path(folder)))
    monkeypatch.setattr(jax.profiler, "stop_trace", lambda: write(folders[-1]))


def test_a_profiler_that_writes_nothing_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_profiler(monkeypatch, lambda folder: None)
    with pytest.raises(ProfileError, match="wrote no trace"):
        record_trace(lambda: None, platform="cpu", keep=None)


def test_the_newest_of_two_traces_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: pathlib.Path) -> None:
        write_trace(folder, "a", b"new", age_s=0)
        write_trace(folder, "b", b"old", age_s=10)

    replace_profiler(monkeypatch, write)
    assert record_trace(lambda: None, platform="cpu", keep=None) == b"new"


def test_a_profiler_that_cannot_write_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: pathlib.Path) -> None:
        raise RuntimeError("RESOURCE_EXHAUSTED: no space left on device")

    replace_profiler(monkeypatch, write)
    with pytest.raises(ProfileError, match="no space left on device"):
        record_trace(lambda: None, platform="cpu", keep=None)


def test_an_error_of_what_ran_wins_over_one_of_the_profiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def write(folder: pathlib.Path) -> None:
        raise RuntimeError("no space")

    def fail() -> None:
        raise KeyboardInterrupt

    replace_profiler(monkeypatch, write)
    with pytest.raises(KeyboardInterrupt):
        record_trace(fail, platform="cpu", keep=None)


def test_the_profiler_is_free_after_a_trace_that_could_not_be_written(temporary_folder: pathlib.Path) -> None:
    def block_the_folder() -> None:
        (folder,) = temporary_folder.iterdir()
        folder.rmdir()
        folder.write_text("in the way")

    with pytest.raises(ProfileError, match="does not write its trace"):
        record_trace(block_the_folder, platform="cpu", keep=None)
    assert profiler_is_free()


def test_the_profiler_is_free_after_an_interrupt_while_it_stops(
    monkeypatch: pytest.MonkeyPatch, temporary_folder: pathlib.Path
) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(jax.profiler, "stop_trace", interrupt)
        with pytest.raises(KeyboardInterrupt):
            record_trace(run_sine, platform="cpu", keep=None)
    assert profiler_is_free()
    assert list(temporary_folder.iterdir()) == []


def test_a_temporary_folder_that_is_gone_is_an_error_of_ours(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(ProfileError, match="no folder for the trace"):
        record_trace(run_sine, platform="cpu", keep=None)


def test_a_keep_folder_that_cannot_be_made_is_an_error_of_ours(tmp_path: pathlib.Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ProfileError, match="no folder for the trace"):
        record_trace(run_sine, platform="cpu", keep=str(tmp_path / "file"))


def test_a_temporary_folder_with_odd_characters_serves(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "a:b c%20é"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    run_sine()
    (time,) = read_launches(record_trace(run_sine, platform="cpu", keep=None), ["jit_traced_sine"])
    assert time is not None


def test_a_trace_is_small(run_python: Callable[..., CompletedProcess[str]]) -> None:
    done = run_python("""
        import jax, jax.numpy as jnp
        from tune_jax._measure.profiler import record_trace
        f, x = jax.jit(jnp.sin), jnp.ones(8)
        f(x).block_until_ready()
        print(len(record_trace(lambda: f(x).block_until_ready(), platform="cpu", keep=None)))
    """)
    assert int(done.stdout) < 50_000
