"""Which blocks of the other side each block must visit: made by XLA, prefetched as scalars by the kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp

from ..call import Array, Operands
from ..visible import full_key_bounds, full_query_bounds, key_bounds, query_bounds, segment_blocks
from .plan import Plan


class Scalars(NamedTuple):
    """What kernels and index maps read one number at a time; of one axis, since that takes the least memory.

    Ranges are of blocks and half open, one for each block of a walk and each batch row, or for all batch rows
    alike where `Plan.per_batch` is false; so are positions.
    """

    first: Array
    end: Array
    full_first: Array  # in between, all pairs count, as far as positions and lengths go
    full_end: Array
    offset: Array
    q_length: Array
    kv_length: Array
    scale: Array | None  # [1], float32
    sinks: Array | None  # [heads], float32


def positions(plan: Plan, operands: Operands) -> tuple[Array, Array, Array]:
    """Offset, query length and key length of each batch row, `[batch or 1, 1]`, int32."""
    batch = operands.q.shape[0] if plan.per_batch else 1
    pairs = ((operands.q_offset, 0), (operands.q_lengths, plan.q_length), (operands.kv_lengths, plan.kv_length))
    offset, q_length, kv_length = (
        jnp.full((batch, 1), default, jnp.int32) if array is None else array[:, None] for array, default in pairs
    )
    return offset, q_length, kv_length


def key_ranges(plan: Plan, operands: Operands) -> Scalars:
    """For each block of queries, the blocks of keys."""
    offset, q_length, kv_length = positions(plan, operands)
    start, end = _edges(plan.q_blocks, plan.block_q)
    shown = key_bounds(plan.spec, start, end, offset, q_length, kv_length)
    # Queries that only pad a block do not keep it from being full.
    last = q_length if plan.ragged_q else plan.q_blocks * plan.block_q
    full = full_key_bounds(plan.spec, start, end, offset, last, kv_length)
    segments = None
    if operands.q_segments is not None and operands.kv_segments is not None:
        segments = segment_blocks(operands.q_segments, operands.kv_segments, plan.block_q, plan.block_k)
    return _scalars(operands, plan.block_k, shown, full, segments, (offset, q_length, kv_length))


def query_ranges(plan: Plan, operands: Operands) -> Scalars:
    """For each block of keys, the blocks of queries."""
    offset, q_length, kv_length = positions(plan, operands)
    start, end = _edges(plan.k_blocks, plan.block_k)
    shown = query_bounds(plan.spec, start, end, offset, q_length, kv_length)
    # The last block of queries may be full, though it is padded.
    last = q_length if plan.ragged_q else plan.q_blocks * plan.block_q
    full = full_query_bounds(plan.spec, start, end, offset, last, kv_length)
    segments = None
    if operands.q_segments is not None and operands.kv_segments is not None:
        segments = segment_blocks(operands.kv_segments, operands.q_segments, plan.block_k, plan.block_q)
    return _scalars(operands, plan.block_q, shown, full, segments, (offset, q_length, kv_length))


def _edges(blocks: int, block: int) -> tuple[Array, Array]:
    start = jnp.arange(blocks, dtype=jnp.int32)[None, :] * block
    return start, start + block


def _scalars(
    operands: Operands, block: int, shown: Any, full: Any, segments: tuple[Array, Array] | None, positions: Any
) -> Scalars:
    first, end = shown[0] // block, (shown[1] + block - 1) // block
    empty = shown[0] >= shown[1]
    if segments is not None:
        first, end = jnp.maximum(first, segments[0]), jnp.minimum(end, segments[1])
        empty |= first >= end
    first, end = jnp.where(empty, 0, first), jnp.where(empty, 0, end)
    full_first, full_end = (full[0] + block - 1) // block, full[1] // block
    ranges = jnp.broadcast_arrays(first, end, full_first, full_end)
    scale = None if operands.scale is None else operands.scale.reshape(1)
    return Scalars(*(x.reshape(-1) for x in (*ranges, *positions)), scale=scale, sinks=operands.sinks)
