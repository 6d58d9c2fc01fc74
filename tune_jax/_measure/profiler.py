"""Run something under JAX's profiler and hand back the bytes of its trace."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Callable, Iterator

import jax

from tune_jax._errors import ProfileError


def record_trace(run: Callable[[], None], *, platform: str, keep: str | None) -> bytes:
    """Call `run` under a lean trace and return the trace; it is left in the folder `keep` if one is given.

    Raises:
      ProfileError: no trace could be recorded, for instance because the caller is recording one.
    """
    with _trace_folder(keep) as folder:
        try:
            jax.profiler.start_trace(folder, profiler_options=_lean_options(platform))
        except RuntimeError as error:
            raise ProfileError(f"the profiler does not start: {error}") from error
        try:
            run()
        finally:
            jax.profiler.stop_trace()
        return _read_newest(folder)


def _lean_options(platform: str) -> jax.profiler.ProfileOptions:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1 if platform == "cpu" else 0
    options.enable_hlo_proto = False
    return options


@contextlib.contextmanager
def _trace_folder(keep: str | None) -> Iterator[pathlib.Path]:
    if keep is not None:
        pathlib.Path(keep).mkdir(parents=True, exist_ok=True)
        yield pathlib.Path(tempfile.mkdtemp(prefix="tuning-", dir=keep))
        return
    try:
        folder = tempfile.TemporaryDirectory(prefix="tune-jax-", ignore_cleanup_errors=True)
    except OSError as error:
        raise ProfileError(f"no folder for the trace can be made: {error}") from error
    with folder as name:
        yield pathlib.Path(name)


def _read_newest(folder: pathlib.Path) -> bytes:
    traces = sorted(folder.rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    if not traces:
        raise ProfileError("the profiler wrote no trace.")
    return traces[-1].read_bytes()
