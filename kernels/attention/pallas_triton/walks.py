"""Which blocks a program walks: those with pairs that count, apart whether all of their pairs do."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ..call import Array, Operands
from ..visible import Index, full_key_bounds, full_query_bounds, key_bounds, query_bounds, segment_blocks
from .parts import Place, Plan, is_screened


class Walk(NamedTuple):
    """The blocks `[first, end)` in spans, `(first, end, masked)`, and the indices outside which nothing counts."""

    first: Index
    end: Index
    spans: list[tuple[Index, Index, bool]]
    low: Index
    high: Index

    def within(self, indices: Array) -> Array:
        """Which indices may count."""
        return (indices >= self.low) & (indices < self.high)


class Ranges(NamedTuple):
    """For each block, the blocks of the other side that its segments may match: `[batch, blocks]` each."""

    first: Any
    end: Any


def key_ranges(plan: Plan, operands: Operands) -> Ranges | None:
    """The blocks of keys for each block of queries."""
    if operands.q_segments is None or operands.kv_segments is None:
        return None
    blocks = plan.launch.block_q, plan.launch.block_k
    return Ranges(*segment_blocks(operands.q_segments, operands.kv_segments, *blocks))


def query_ranges(plan: Plan, operands: Operands) -> Ranges | None:
    """The blocks of queries for each block of keys."""
    if operands.q_segments is None or operands.kv_segments is None:
        return None
    blocks = plan.launch.block_k, plan.launch.block_q
    return Ranges(*segment_blocks(operands.kv_segments, operands.q_segments, *blocks))


def walk_keys(plan: Plan, refs: Operands, ranges: Ranges | None, here: Place, index: Index) -> Walk:
    """The blocks of keys that a block of queries walks."""
    start = index * np.int32(plan.launch.block_q)
    # Rows past the end see what they like: nobody keeps their output.
    end = jnp.minimum(start + np.int32(plan.launch.block_q), here.q_length)
    where = (plan.spec, start, end, here.offset, here.q_length, here.kv_length)
    low, high = key_bounds(*where)
    return _walk(
        (low, high),
        full_key_bounds(*where),
        plan.launch.block_k,
        has_head=plan.spec.left is not None,
        has_tail=plan.spec.right is not None or plan.has_ragged_keys(refs),
        screened=is_screened(refs),
        limits=_limits(ranges, here, index),
    )


def walk_queries(plan: Plan, refs: Operands, ranges: Ranges | None, here: Place, index: Index) -> Walk:
    """The blocks of queries that a block of keys walks."""
    start = index * np.int32(plan.launch.block_k)
    # Keys past the end may be seen: nobody keeps their gradients.
    end = jnp.minimum(start + np.int32(plan.launch.block_k), here.kv_length)
    where = (plan.spec, start, end, here.offset, here.q_length, here.kv_length)
    return _walk(
        query_bounds(*where),
        full_query_bounds(*where),
        plan.launch.block_q,
        has_head=plan.spec.right is not None,
        has_tail=plan.spec.left is not None or plan.has_ragged_rows(refs),
        screened=is_screened(refs),
        limits=_limits(ranges, here, index),
    )


def _limits(ranges: Ranges | None, here: Place, index: Index) -> tuple[Index, Index] | None:
    if ranges is None:
        return None
    return ranges.first[here.batch, index], ranges.end[here.batch, index]


def _walk(
    bounds: tuple[Index, Index],
    full_bounds: tuple[Index, Index],
    block: int,
    has_head: bool,
    has_tail: bool,
    screened: bool,
    limits: tuple[Index, Index] | None,
) -> Walk:
    low, high = (np.int32(bound) if isinstance(bound, int) else bound for bound in bounds)
    first = _floor(low, block)
    end = jnp.where(low < high, _ceil(high, block), first)
    if limits is not None:
        first, end = jnp.maximum(first, limits[0]), jnp.minimum(end, limits[1])
    if screened:
        return Walk(first, end, [(first, end, True)], low, high)
    full_first, full_end = first, end
    spans = []
    if has_head:
        full_first = jnp.clip(_ceil(full_bounds[0], block), first, end)
        spans.append((first, full_first, True))
    if has_tail:
        full_end = jnp.clip(_floor(full_bounds[1], block), full_first, end)
        spans.append((full_end, end, True))
    # Last, so that the longest loop's loads are under way without a break.
    spans.append((full_first, full_end, False))
    return Walk(first, end, spans, low, high)


def _floor(index: Index, block: int) -> Index:
    # Indices are never negative, which a division that rounds down could not know.
    return index >> np.int32(block.bit_length() - 1)


def _ceil(index: Index, block: int) -> Index:
    return _floor(index + np.int32(block - 1), block)
