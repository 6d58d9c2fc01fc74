"""Who sees whom: which pairs of a tile count, and which blocks hold no such pair and are never loaded.

Everything here is plain arithmetic on int32, so that it runs inside kernels, in XLA and on NumPy arrays alike.
Bounds are half open. Segments and masks are not part of the bounds: see `segment_blocks`.
"""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from .call import Array, Spec

Index = Any  # an int, or an int32 scalar or array, traced or not


def sees_by_position(spec: Spec, rows: Array, columns: Array, offset: Index) -> Array | None:
    """Which pairs causal and window allow; `rows` and `columns` are indices that broadcast, None means all."""
    behind = rows + offset - columns
    allowed = None
    if spec.right is not None:
        allowed = behind >= -spec.right
    if spec.left is not None:
        near = behind <= spec.left
        allowed = near if allowed is None else allowed & near
    return allowed


def key_bounds(
    spec: Spec, row_start: Index, row_end: Index, offset: Index, q_length: Index, kv_length: Index
) -> tuple[Index, Index]:
    """The keys that any of the rows [row_start, row_end) may see; equal bounds if there is none.

    Args:
        spec: the call's masks by position.
        row_start: the first row.
        row_end: one past the last row; may lie past `q_length`.
        offset: the position of row 0.
        q_length: rows that count.
        kv_length: keys that count.
    """
    row_end = jnp.minimum(row_end, q_length)
    low, high = 0, kv_length
    if spec.left is not None:
        low = jnp.maximum(row_start + offset - spec.left, 0)
    if spec.right is not None:
        high = jnp.minimum(row_end + offset + spec.right, kv_length)
    high = jnp.where(row_start < row_end, high, 0)
    return low, jnp.maximum(high, low)


def full_key_bounds(
    spec: Spec, row_start: Index, row_end: Index, offset: Index, q_length: Index, kv_length: Index
) -> tuple[Index, Index]:
    """The keys that all of the rows [row_start, row_end) may see, by position and length; equal if none."""
    low, high = 0, kv_length
    if spec.left is not None:
        low = jnp.maximum(row_end - 1 + offset - spec.left, 0)
    if spec.right is not None:
        high = jnp.minimum(row_start + offset + spec.right + 1, kv_length)
    high = jnp.where(row_end <= q_length, high, 0)
    return low, jnp.maximum(high, low)


def query_bounds(
    spec: Spec, column_start: Index, column_end: Index, offset: Index, q_length: Index, kv_length: Index
) -> tuple[Index, Index]:
    """The rows that see any of the keys [column_start, column_end); equal bounds if there is none."""
    column_end = jnp.minimum(column_end, kv_length)
    low, high = 0, q_length
    if spec.right is not None:
        low = jnp.maximum(column_start - offset - spec.right, 0)
    if spec.left is not None:
        high = jnp.minimum(column_end - offset + spec.left, q_length)
    high = jnp.where(column_start < column_end, high, 0)
    return low, jnp.maximum(high, low)


def full_query_bounds(
    spec: Spec, column_start: Index, column_end: Index, offset: Index, q_length: Index, kv_length: Index
) -> tuple[Index, Index]:
    """The rows that see all of the keys [column_start, column_end), by position and length; equal if none."""
    low, high = 0, q_length
    if spec.right is not None:
        low = jnp.maximum(column_end - 1 - offset - spec.right, 0)
    if spec.left is not None:
        high = jnp.minimum(column_start - offset + spec.left + 1, q_length)
    high = jnp.where(column_end <= kv_length, high, 0)
    return low, jnp.maximum(high, low)


def segment_blocks(of: Array, among: Array, block_of: int, block_among: int) -> tuple[Array, Array]:
    """For each block of `of`, the range of blocks of `among` outside which no segment can match.

    A block is left out if its least and its largest segment say so: for sorted segments nothing else is kept,
    for others the range only gets wider.

    Args:
        of: segments, `[batch, T]`, int32.
        among: segments of the other side, `[batch, U]`, int32.
        block_of: entries a block of `of`.
        block_among: entries a block of `among`.

    Returns:
        First block and one past the last, `[batch, ceil(T / block_of)]` each, int32; equal if there is none.
    """
    low, high = _block_extremes(of, block_of)
    other_low, other_high = _block_extremes(among, block_among)
    meets = (low[:, :, None] <= other_high[:, None, :]) & (other_low[:, None, :] <= high[:, :, None])
    blocks = meets.shape[2]
    first = lax.argmax(meets, 2, jnp.int32)
    end = blocks - lax.argmax(meets[:, :, ::-1], 2, jnp.int32)
    return first, jnp.where(meets.any(axis=2), end, first)


def _block_extremes(segments: Array, block: int) -> tuple[Array, Array]:
    length = segments.shape[1]
    padding = ((0, 0), (0, -length % block))
    shape = (segments.shape[0], -1, block)
    limits = jnp.iinfo(jnp.int32)
    lowest = jnp.pad(segments, padding, constant_values=limits.max).reshape(shape)
    highest = jnp.pad(segments, padding, constant_values=limits.min).reshape(shape)
    return lax.reduce_min(lowest, [2]), lax.reduce_max(highest, [2])
