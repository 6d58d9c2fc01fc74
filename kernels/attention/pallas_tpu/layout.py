"""The arrays of a call as the kernels read them: heads first, padded to whole blocks."""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp

from ..call import Array, Operands, Saved
from ..visible import query_bounds
from .plan import LANES, Plan
from .ranges import positions


class Inputs(NamedTuple):
    """What kernels read, None for what a call does not have; inside the kernels, the same of references.

    Those from `bias` on broadcast to [batch, heads, Tq, Tk], or to [batch, heads, Tk, Tq] where the plan has
    queries along lanes.
    """

    q: Array  # [batch, heads, Tq, D]
    k: Array  # [batch, kv_heads, Tk, D]
    v: Array  # [batch, kv_heads, Tk, Dv]
    dout: Array | None = None  # [batch, heads, Tq, Dv]
    bias: Array | None = None
    mask: Array | None = None  # int8 or int32
    q_segments: Array | None = None
    kv_segments: Array | None = None
    lse: Array | None = None
    delta: Array | None = None


def lay_out(plan: Plan, operands: Operands, saved: Saved | None = None) -> Inputs:
    """The arrays, padded and transposed.

    Keys that nobody sees by position or length, and in the backward pass queries that see nothing, become
    zero here, so that whatever they hold reaches no product.
    """
    q, k, v = operands.q, operands.k, operands.v
    seen = _seen_keys(plan, operands)
    if seen is not None:
        k, v = jnp.where(seen, k, 0), jnp.where(seen, v, 0)
    pairs = _pairs(plan, operands)
    if saved is None:
        return Inputs(_heads_first(q, plan.block_q), *(_heads_first(x, plan.block_k) for x in (k, v)), **pairs)
    sees = (saved.lse < jnp.inf).swapaxes(1, 2)[..., None]
    return Inputs(
        q=_heads_first(jnp.where(sees, q, 0), plan.block_q),
        k=_heads_first(k, plan.block_k),
        v=_heads_first(v, plan.block_k),
        dout=_heads_first(jnp.where(sees, saved.dout, 0), plan.block_q),
        lse=_per_query(plan, saved.lse, jnp.inf),
        delta=_per_query(plan, saved.delta, 0),
        **pairs,
    )


def heads_last(x: Array, length: int, depth: int) -> Array:
    """The inverse of the layout of queries, keys and values; drops the padding."""
    return x[:, :, :length, :depth].swapaxes(1, 2)


def _heads_first(x: Array, block: int) -> Array:
    _, length, _, depth = x.shape
    return jnp.pad(x.swapaxes(1, 2), ((0, 0), (0, 0), (0, -length % block), (0, -depth % LANES)))


def _seen_keys(plan: Plan, operands: Operands) -> Array | None:
    """Which keys any query sees by position and length, `[batch, Tk, 1, 1]`; None if all."""
    by_length = operands.q_lengths is not None or operands.kv_lengths is not None
    shifted = operands.q_offset is not None or plan.q_length != plan.kv_length
    if not by_length and not (plan.limits_positions and shifted):
        return None
    columns = jnp.arange(plan.kv_length, dtype=jnp.int32)[None, :]
    low, high = query_bounds(plan.spec, columns, columns + 1, *positions(plan, operands))
    return (low < high)[..., None, None]


def _pairs(plan: Plan, operands: Operands) -> dict[str, Array | None]:
    """What belongs to queries, to keys or to pairs of them, with 4 axes."""
    mask, bias, q_segments, kv_segments = operands.mask, operands.bias, operands.q_segments, operands.kv_segments
    if mask is not None:
        mask = _pad_pairs(plan, mask.astype(jnp.int32 if 1 in mask.shape[2:] else jnp.int8))
    if bias is not None:
        # Rows and columns by themselves are small, and easiest to spread over a tile in 32 bits.
        bias = _pad_pairs(plan, bias.astype(jnp.float32) if 1 in bias.shape[2:] else bias)
    if q_segments is not None and kv_segments is not None:
        q_segments = _per_query(plan, q_segments[:, None], 0)
        kv_segments = _pad_pairs(plan, kv_segments[:, None, None])
    return {"bias": bias, "mask": mask, "q_segments": q_segments, "kv_segments": kv_segments}


def _pad_pairs(plan: Plan, x: Array) -> Array:
    """Padded to whole blocks along the axes that are not of size 1; queries where the plan has them."""
    q_padding, k_padding = (
        (0, 0 if size == 1 else -size % block)
        for size, block in zip(x.shape[2:], (plan.block_q, plan.block_k), strict=True)
    )
    x = jnp.pad(x, ((0, 0), (0, 0), q_padding, k_padding))
    return x if plan.query_axis == 0 else x.swapaxes(2, 3)


def _per_query(plan: Plan, x: Array, padding: float) -> Array:
    """[batch, heads, Tq] as a column of a tile, or as a row where queries lie along lanes."""
    x = jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % plan.block_q)), constant_values=padding)
    return x[..., None] if plan.query_axis == 0 else x[:, :, None, :]
