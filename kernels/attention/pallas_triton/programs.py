"""Which block of which head a program computes."""

from __future__ import annotations

import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from ..call import Array
from .parts import Plan

# Well within the second-level cache of an H100 or H200, 50 MiB.
_CACHE = 2**25


def split(program: Array, *sizes: int) -> tuple[Array, ...]:
    """The indices that a flat one stands for, the last running fastest; the first has no bound."""
    indices = []
    for size in reversed(sizes):
        indices.append(lax.rem(program, np.int32(size)))
        program = lax.div(program, np.int32(size))
    return (program, *reversed(indices))


def query_block(plan: Plan) -> tuple[Array, Array, Array]:
    """Batch row, head and block of queries of this program.

    Programs start in order. Where later blocks of queries walk more keys, they start first: those of as many
    heads as have their keys in the cache together, then the next block of each.
    """
    pairs = plan.batch * plan.heads
    bytes_of_head = plan.kv_length * (plan.depth + plan.v_depth) * plan.item_size // plan.group
    pair, index = _ordered(plan, pl.program_id(0), pairs, plan.q_blocks, bytes_of_head)
    if plan.spec.right is not None:
        index = np.int32(plan.q_blocks - 1) - index
    batch, head = split(pair, plan.heads)
    return batch, head, index


def key_block(plan: Plan) -> tuple[Array, Array, Array]:
    """Batch row, key head and block of keys of this program, likewise; first blocks have the longest walks."""
    kv_heads = plan.heads // plan.group
    bytes_of_head = plan.q_length * (plan.depth + plan.v_depth) * plan.item_size * plan.group
    pair, index = _ordered(plan, pl.program_id(0), plan.batch * kv_heads, plan.k_blocks, bytes_of_head)
    batch, kv_head = split(pair, kv_heads)
    return batch, kv_head, index


def _ordered(plan: Plan, program: Array, pairs: int, blocks: int, bytes_of_head: int) -> tuple[Array, Array]:
    uneven = plan.spec.right is not None and plan.spec.left is None
    limit = max(1, _CACHE // max(1, bytes_of_head)) if uneven else 1
    together = next(size for size in range(min(limit, pairs), 0, -1) if pairs % size == 0)
    chunk, index, member = split(program, blocks, together)
    return chunk * np.int32(together) + member, index
