"""What all walks of a call share: its keys in blocks, who sees whom in a tile, and which tiles there are."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import jax.numpy as jnp
from jax import lax

from ..call import Array, Operands, Spec
from ..visible import key_bounds, sees_by_position, segment_blocks
from .blocks import Blocks

Carry = TypeVar("Carry")


@dataclass(frozen=True)
class Plan:
    """A call made ready for walks over its tiles, a tile being one block of queries and one of keys."""

    spec: Spec
    operands: Operands
    blocks: Blocks
    k: Array  # [blocks, batch, kv_heads, block_k, D]
    v: Array  # likewise
    bias: Array | None  # opened pairs
    mask: Array | None  # opened pairs
    q_segments: Array | None  # [blocks, batch, block_q]
    kv_segments: Array | None  # [blocks, batch, block_k]
    ranges: tuple[Array, Array] | None  # first block of keys and one past the last, for each block of queries

    @classmethod
    def of(cls, spec: Spec, operands: Operands) -> Plan:
        """The plan of a call."""
        blocks = Blocks.of(spec.tiles, operands)
        q_segments, kv_segments = operands.q_segments, operands.kv_segments
        return cls(
            spec=spec,
            operands=operands,
            blocks=blocks,
            k=blocks.split_keys(_select_keys(spec, operands, operands.k)),
            v=blocks.split_keys(_select_keys(spec, operands, operands.v)),
            bias=None if operands.bias is None else blocks.open_pairs(operands.bias),
            mask=None if operands.mask is None else blocks.open_pairs(operands.mask),
            q_segments=None if q_segments is None else blocks.split_segments(q_segments, blocks.block_q),
            kv_segments=None if kv_segments is None else blocks.split_segments(kv_segments, blocks.block_k),
            ranges=_key_ranges(spec, operands, blocks),
        )

    def walk_keys(self, q_index: Array, step: Callable[[Array, Carry], Carry], start: Carry) -> Carry:
        """Takes a carry through the blocks of keys that a block of queries may see."""
        first: Array | int = 0
        end: Array | int = self.blocks.kv_blocks
        if self.ranges is not None:
            first, end = (take(bounds, q_index) for bounds in self.ranges)
        carry: Carry = lax.fori_loop(first, end, step, start)
        return carry

    def take_keys(self, k_index: Array, visible: Array | None) -> tuple[Array, Array]:
        """Keys and values of a block, zero where no row of the tile sees them: they may be NaN there."""
        k, v = take(self.k, k_index), take(self.v, k_index)
        if visible is None or (self.mask is None and self.q_segments is None):
            return k, v  # Seen by position and length alone: unseen ones are zero already.
        seen = visible.any((2, 3))[..., None]
        return jnp.where(seen, k, 0), jnp.where(seen, v, 0)

    def visible(self, q_index: Array, k_index: Array) -> Array | None:
        """Which pairs of a tile count, to broadcast to [batch, kv_heads, group, block_q, block_k]; None if all."""
        rows = _indices(q_index, self.blocks.block_q)[:, None]
        columns = _indices(k_index, self.blocks.block_k)[None, :]
        conditions = (
            sees_by_position(self.spec, rows, columns, _per_row(self.operands.q_offset, 0)),
            _within(rows, self.operands.q_lengths, self.blocks.q_length, self.blocks.pads_queries),
            _within(columns, self.operands.kv_lengths, self.blocks.kv_length, self.blocks.pads_keys),
            self._same_segment(q_index, k_index),
            None if self.mask is None else self.blocks.take_pairs(self.mask, q_index, k_index),
        )
        given = [condition for condition in conditions if condition is not None]
        return functools.reduce(operator.and_, given) if given else None

    def _same_segment(self, q_index: Array, k_index: Array) -> Array | None:
        if self.q_segments is None or self.kv_segments is None:
            return None
        of_rows, of_columns = take(self.q_segments, q_index), take(self.kv_segments, k_index)
        return of_rows[:, None, None, :, None] == of_columns[:, None, None, None, :]


def take(blocks: Array, index: Array) -> Array:
    """One block."""
    block: Array = lax.dynamic_index_in_dim(blocks, index, keepdims=False)
    return block


def _indices(block_index: Array, block: int) -> Array:
    return block_index * block + jnp.arange(block, dtype=jnp.int32)


def _within(indices: Array, lengths: Array | None, length: int, padded: bool) -> Array | None:
    if lengths is None and not padded:
        return None
    return indices < _per_row(lengths, length)


def _per_row(values: Array | None, default: int) -> Array | int:
    """One number per batch row, to broadcast against a tile; the default where there are none."""
    return default if values is None else values[:, None, None, None, None]


def _select_keys(spec: Spec, operands: Operands, x: Array) -> Array:
    """Keys or values, zero where causal, window and lengths let no row see them: they may be NaN there."""
    if not _has_bounds(spec, operands):
        return x
    low, high = _bounds(spec, operands, 0, operands.q.shape[1])
    columns = jnp.arange(x.shape[1], dtype=jnp.int32)
    seen = (columns >= low) & (columns < high)
    return jnp.where(seen[..., None, None], x, 0)


def _key_ranges(spec: Spec, operands: Operands, blocks: Blocks) -> tuple[Array, Array] | None:
    """The union over batch rows, whose blocks are computed together; None if always all blocks."""
    if not _has_bounds(spec, operands) and operands.q_segments is None:
        return None
    starts = jnp.arange(blocks.q_blocks, dtype=jnp.int32) * blocks.block_q
    low, high = _bounds(spec, operands, starts, starts + blocks.block_q)
    first, end = low // blocks.block_k, -(-high // blocks.block_k)
    empty = low >= high
    if operands.q_segments is not None and operands.kv_segments is not None:
        matching = segment_blocks(operands.q_segments, operands.kv_segments, blocks.block_q, blocks.block_k)
        first, end = jnp.maximum(first, matching[0]), jnp.minimum(end, matching[1])
        empty = empty | (first >= end)
    return jnp.where(empty, blocks.kv_blocks, first).min(0), jnp.where(empty, 0, end).max(0)


def _has_bounds(spec: Spec, operands: Operands) -> bool:
    by_position = spec.left is not None or spec.right is not None
    return by_position or operands.q_lengths is not None or operands.kv_lengths is not None


def _bounds(spec: Spec, operands: Operands, row_start: Array | int, row_end: Array | int) -> tuple[Array, Array]:
    """`key_bounds` for every batch row and each of the row ranges, `[batch or 1, ranges or 1]`, int32."""
    offset = _column(operands.q_offset, 0)
    q_length, kv_length = (
        _column(operands.q_lengths, operands.q.shape[1]),
        _column(operands.kv_lengths, operands.k.shape[1]),
    )
    low, high = key_bounds(spec, row_start, row_end, offset, q_length, kv_length)
    return jnp.asarray(low, jnp.int32), jnp.asarray(high, jnp.int32)


def _column(values: Array | None, default: int) -> Array:
    return jnp.full((1, 1), default, jnp.int32) if values is None else values[:, None]
