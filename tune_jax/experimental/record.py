"""Record and replay: `record`, and what the scripts that it writes are made of."""

from __future__ import annotations

from tune_jax._record import Todo, ensure_pytree, leave_open, random_array, rebuild, record

__all__ = ["Todo", "ensure_pytree", "leave_open", "random_array", "rebuild", "record"]
