"""Which backends there are, what each can do, and which one answers a call."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass

from .call import Array, Operands, Spec

Attend = Callable[[Spec, Operands], tuple[Array, "Array | None"]]

_FORWARD_TILES = ("block_q", "block_k")
_TRITON_TILES = tuple(
    f"{name}{walk}" for walk in ("", "_dkv", "_dq") for name in ("block_q", "block_k", "num_warps", "num_stages")
)


@dataclass(frozen=True)
class Backend:
    """A module of this folder with a function `attend(spec, operands)`, imported when it is first used."""

    name: str
    tiles: tuple[str, ...]

    def load(self) -> Attend:
        """The backend's function."""
        return importlib.import_module(f".{self.name}", __package__).attend  # type: ignore[no-any-return]


BACKENDS = (
    Backend("xla", tiles=_FORWARD_TILES),
    Backend("pallas_triton", tiles=_TRITON_TILES),
    Backend("pallas_tpu", tiles=("block_q", "block_k", "block_q_dkv", "block_k_dkv", "block_q_dq", "block_k_dq")),
    Backend("cudnn", tiles=()),
)
IMPLEMENTATIONS = tuple(backend.name for backend in BACKENDS)


def choose(implementation: str | None, spec: Spec, operands: Operands, return_lse: bool) -> tuple[Backend, Spec]:
    """The backend for a call, and the call with its tiles settled; an error where none or not the one named can."""
    name = "xla" if implementation is None else implementation
    if name not in IMPLEMENTATIONS:
        available = ", ".join(repr(each) for each in IMPLEMENTATIONS)
        raise ValueError(f"implementation {name!r} is unknown; available: {available}, or None for the best one.")
    return next(backend for backend in BACKENDS if backend.name == name), spec
