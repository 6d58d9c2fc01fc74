"""What JAX runs beside programs: the profiler, and the coordinator of several processes."""

from __future__ import annotations

from typing import Any

from jax._src import distributed as _distributed
from jax._src import profiler as _profiler


def abandon_trace(folder: str) -> None:
    """Forget the profiler's session that writes to `folder` if it still is one, so that another can start.

    JAX keeps a session for good whose trace could not be written, or whose stop was interrupted.
    """
    state = _profiler._profile_state
    with state.lock:
        # jax 0.10 has the session's folder in the state itself.
        session = getattr(state, "session", state)
        if session is not None and session.log_dir == folder:
            state.reset()


def distributed_client() -> tuple[Any, int, int] | None:
    """The coordinator's client, this process's number and how many there are; None where this one is alone."""
    state = _distributed.global_state
    if state.client is None or (state.num_processes or 1) < 2:
        return None
    return state.client, state.process_id, state.num_processes
