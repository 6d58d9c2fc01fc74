"""The key-value store of `jax.distributed`, through which the processes of one job talk."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from tune_jax._agree import OutOfReachError
from tune_jax._jax import distributed_client

T = TypeVar("T")


@dataclasses.dataclass(frozen=True)
class Coordinator:
    """The store that `_agree` takes, on top of JAX's client."""

    client: Any
    process: int
    processes: int

    def put(self, key: str, text: str) -> None:
        """Write, over what may be there."""
        _ask(lambda: self.client.key_value_set(key, text, allow_overwrite=True))

    def put_once(self, key: str, text: str) -> bool:
        """Write unless something is there; whether it was written."""
        return bool(_ask(lambda: self.client.key_value_set(key, text) is None, "ALREADY_EXISTS"))

    def read(self, key: str) -> str | None:
        """The text, None if there is none."""
        return _ask(lambda: str(self.client.key_value_try_get(key)), "NOT_FOUND")

    def wait(self, key: str, seconds: float) -> str | None:
        """The text as soon as it is there, None if it is not within that time."""
        milliseconds = max(1, round(seconds * 1000))
        return _ask(lambda: str(self.client.blocking_key_value_get(key, milliseconds)), "DEADLINE_EXCEEDED")

    def list(self, folder: str) -> dict[str, str]:
        """All texts whose keys begin with `folder` and a slash."""
        return dict(_ask(lambda: self.client.key_value_dir_get(folder), "NOT_FOUND") or [])

    def delete(self, folder: str) -> None:
        """Forget a key, and all that begin with it and a slash."""
        _ask(lambda: self.client.key_value_delete(folder), "NOT_FOUND")


def find_coordinator() -> Coordinator | None:
    """The store that this process shares with others; None where it is alone."""
    found = distributed_client()
    return None if found is None else Coordinator(*found)


def _ask(question: Callable[[], T], no: str | None = None) -> T | None:
    """The answer of the coordinator, None where it says `no` by this status."""
    try:
        return question()
    except jax.errors.JaxRuntimeError as error:
        status, _, _ = str(error).partition(":")
        if status == no:
            return None
        raise OutOfReachError(str(error).partition("\n")[0]) from error
