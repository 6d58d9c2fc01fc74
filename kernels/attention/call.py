"""An attention call as the backends get it: checked, in one form, static parts apart from arrays."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


@dataclass(frozen=True)
class Tiles:
    """The hyperparameters of a call; None leaves a choice to the backend.

    Names without a suffix are for the forward pass. A backward pass in two walks has tiles for each: `_dkv` for
    the gradients of keys and values, `_dq` for those of queries and of a bias. Where these are None,
    `pallas_triton` has defaults of its own, whatever the forward pass is given; `pallas_tpu` takes `block_q` and
    `block_k` if they are given, else its defaults. `xla` has `block_q` and `block_k` only, for both passes.
    """

    block_q: int | None = None
    block_k: int | None = None
    num_warps: int | None = None
    num_stages: int | None = None
    block_q_dkv: int | None = None
    block_k_dkv: int | None = None
    num_warps_dkv: int | None = None
    num_stages_dkv: int | None = None
    block_q_dq: int | None = None
    block_k_dq: int | None = None
    num_warps_dq: int | None = None
    num_stages_dq: int | None = None

    @property
    def given(self) -> dict[str, int]:
        """The choices that are made, by name."""
        pairs = ((field.name, getattr(self, field.name)) for field in fields(self))
        return {name: value for name, value in pairs if value is not None}


@dataclass(frozen=True)
class Spec:
    """What is fixed when a call is traced.

    Query i of a batch row stands at position i + q_offset and sees key j if all of these hold:
    j <= position when `causal`; position - left <= j <= position + right for each side of `window` that is
    not None; i < q_length and j < kv_length; equal segments; a true mask.

    `scale` is None where the scale is an array, `Operands.scale`.
    """

    causal: bool = False
    window: tuple[int | None, int | None] = (None, None)
    scale: float | None = 1.0
    softcap: float | None = None
    deterministic: bool = False
    tiles: Tiles = Tiles()

    @property
    def left(self) -> int | None:
        """How far behind its own position a query sees, None for all the way."""
        return self.window[0]

    @property
    def right(self) -> int | None:
        """How far ahead of its own position a query sees, None for all the way."""
        sides = [side for side in (self.window[1], 0 if self.causal else None) if side is not None]
        return min(sides, default=None)


class Operands(NamedTuple):
    """The arrays of a call, None for what it does not have."""

    q: Array  # [batch, Tq, heads, D]
    k: Array  # [batch, Tk, kv_heads, D]
    v: Array  # [batch, Tk, kv_heads, Dv]
    bias: Array | None = None  # float, 4 axes that broadcast to [batch, heads, Tq, Tk]
    mask: Array | None = None  # bool, likewise
    sinks: Array | None = None  # [heads], float32
    scale: Array | None = None  # (), float32; then Spec.scale is None
    q_offset: Array | None = None  # [batch], int32; 0 if None
    q_lengths: Array | None = None  # [batch], int32, between 0 and Tq
    kv_lengths: Array | None = None  # [batch], int32, between 0 and Tk
    q_segments: Array | None = None  # [batch, Tq], int32; there if and only if kv_segments is
    kv_segments: Array | None = None  # [batch, Tk], int32

    @property
    def group(self) -> int:
        """How many query heads read one key head."""
        return int(self.q.shape[2] // self.k.shape[2])


class Saved(NamedTuple):
    """What the backward pass gets besides the operands. Rows that see nothing: `lse` +inf, `delta` 0.

    With s the final score of a pair (scaled, capped, with bias), p = exp(s - lse) and
    ds = p * (dout v' - delta); the +inf makes p zero without a further test.
    """

    lse: Array  # [batch, heads, Tq], float32, natural log
    dout: Array  # [batch, Tq, heads, Dv], in q's dtype
    delta: Array  # [batch, heads, Tq], float32: sum over Dv of dout * out, less the gradient of lse


class Gradients(NamedTuple):
    """Where `Spec.scale` is None, dq and dk are float32 and lack that factor; else they are in the operands' dtype."""

    q: Array
    k: Array
    v: Array


def scale_of(spec: Spec, operands: Operands) -> float | Array:
    """The factor on scores: a number, or a float32 scalar where it is an array."""
    if spec.scale is not None:
        return spec.scale
    assert operands.scale is not None
    return operands.scale


def gradient_dtype(spec: Spec, operands: Operands) -> jnp.dtype:
    """The dtype in which a backend returns dq and dk, see `Gradients`."""
    return operands.q.dtype if spec.scale is not None else jnp.dtype(jnp.float32)
