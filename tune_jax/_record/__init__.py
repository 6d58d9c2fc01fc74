"""Record the calls of a function in a running program, and write a script that tunes the function for them."""

from __future__ import annotations

from tune_jax._record.recorder import Recorded, record
from tune_jax._record.replay import Todo, ensure_pytree, leave_open, random_array, rebuild
from tune_jax._record.script import RecordedCall

__all__ = ["Recorded", "RecordedCall", "Todo", "ensure_pytree", "leave_open", "random_array", "rebuild", "record"]
