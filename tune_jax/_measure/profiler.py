"""Run something under JAX's profiler and hand back the bytes of its trace."""

from __future__ import annotations

import contextlib
import pathlib
import tempfile
from collections.abc import Callable

import jax

from tune_jax._errors import ProfileError
from tune_jax._jax import abandon_trace


def record_trace(run: Callable[[], None], *, platform: str, keep: str | None) -> bytes:
    """Call `run` under a lean trace and return the trace; it is left in the folder `keep` if one is given.

    Raises:
      ProfileError: no trace could be recorded, for instance because the caller is recording one.
    """
    with _trace_folder(keep) as folder:
        try:
            _start(folder, platform)
            try:
                run()
            finally:
                # Not raised here: what `run` raised, Ctrl-C for one, matters more.
                problem = _stop()
        finally:
            abandon_trace(folder)
        if problem is not None:
            raise ProfileError(f"the profiler does not write its trace: {problem}") from problem
        return _read_newest(folder)


def _start(folder: str, platform: str) -> None:
    try:
        jax.profiler.start_trace(folder, profiler_options=_lean_options(platform))
    except RuntimeError as error:
        raise ProfileError(f"the profiler does not start: {error}") from error


def _stop() -> RuntimeError | None:
    try:
        jax.profiler.stop_trace()
    except RuntimeError as error:
        return error
    return None


def _lean_options(platform: str) -> jax.profiler.ProfileOptions:
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1 if platform == "cpu" else 0
    options.enable_hlo_proto = False
    return options


def _trace_folder(keep: str | None) -> contextlib.AbstractContextManager[str]:
    try:
        if keep is None:
            return tempfile.TemporaryDirectory(prefix="tune-jax-", ignore_cleanup_errors=True)
        pathlib.Path(keep).mkdir(parents=True, exist_ok=True)
        return contextlib.nullcontext(tempfile.mkdtemp(prefix="tuning-", dir=keep))
    except OSError as error:
        raise ProfileError(f"no folder for the trace can be made: {error}") from error


def _read_newest(folder: str) -> bytes:
    traces = sorted(pathlib.Path(folder).rglob("*.xplane.pb"), key=lambda path: path.stat().st_mtime_ns)
    if not traces:
        raise ProfileError("the profiler wrote no trace.")
    return traces[-1].read_bytes()
