"""The kernel for the gradient of a bias: a program for each of its own blocks, walking what it is shared by."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .._pallas import like
from ..call import Array, Operands, Saved, Spec
from ..visible import Index
from .backward import score_gradients
from .launch import for_device, launch
from .parts import Place, Plan, Tile, dot, load_rows, load_vector, place, seen, span
from .programs import split
from .tiles import queries_launch
from .walks import Ranges, key_ranges, walk_keys


class _Extent(NamedTuple):
    """Along one axis: how many blocks the gradient has, and how many each of them is summed over."""

    blocks: int
    shared: int

    def walk(self, index: Index) -> tuple[Index, Index]:
        """The first block and one past the last that a program sums over."""
        return (index, index + np.int32(1)) if self.shared == 1 else (np.int32(0), np.int32(self.shared))


def bias_gradient(spec: Spec, operands: Operands, saved: Saved) -> Array:
    """See `differentiable.Kernels`."""
    assert operands.bias is not None
    plan = Plan.of(spec, operands, queries_launch(spec.tiles, operands))
    extents = _extents(plan, operands.bias.shape)
    programs = int(np.prod([extent.blocks for extent in extents]))
    out = like(operands, operands.bias.shape, jnp.float32)
    inputs = for_device(operands), key_ranges(plan, operands), saved
    return launch(_flash_attention_backward_bias, plan, programs, out, *inputs)


def _extents(plan: Plan, shape: tuple[int, ...]) -> list[_Extent]:
    pairs = (plan.batch, plan.heads, plan.q_blocks, plan.k_blocks)
    return [_Extent(1, full) if size == 1 else _Extent(full, 1) for size, full in zip(shape, pairs, strict=True)]


def _flash_attention_backward_bias(
    plan: Plan, refs: Operands, ranges: Ranges | None, saved: Saved, out_ref: Any
) -> None:
    extents = _extents(plan, out_ref.shape)
    indices = split(pl.program_id(0), *(extent.blocks for extent in extents[1:]))
    batches, heads, q_blocks, k_blocks = (extent.walk(i) for extent, i in zip(extents, indices, strict=True))

    def add_batch(batch: Index, total: Array) -> Array:
        return lax.fori_loop(*heads, functools.partial(add_head, batch), total)

    def add_head(batch: Index, head: Index, total: Array) -> Array:
        here = place(plan, refs, batch, head)
        return lax.fori_loop(*q_blocks, functools.partial(add_rows, here), total)

    def add_rows(here: Place, index: Index, total: Array) -> Array:
        return _add_rows(plan, refs, ranges, saved, here, k_blocks, index, total)

    total = jnp.zeros((plan.launch.block_q, plan.launch.block_k), jnp.float32)
    total = lax.fori_loop(*batches, add_batch, total)
    _store(plan, out_ref, indices, total)


def _add_rows(
    plan: Plan,
    refs: Operands,
    ranges: Ranges | None,
    saved: Saved,
    here: Place,
    k_blocks: tuple[Index, Index],
    index: Index,
    total: Array,
) -> Array:
    """With the sums over the blocks of keys, of one block of queries."""
    rows = span(index, plan.launch.block_q)
    within = rows < here.q_length
    q = load_rows(refs.q, here.batch, rows, here.head, within)
    dout = load_rows(saved.dout, here.batch, rows, here.head, within)
    lse = load_vector(saved.lse, here, rows, within, jnp.inf)[:, None]
    delta = load_vector(saved.delta, here, rows, within, 0)[:, None]
    walk = walk_keys(plan, refs, ranges, here, index)

    def add(k_index: Index, total: Array) -> Array:
        columns = span(k_index, plan.launch.block_k)
        tile = Tile(rows[:, None], columns[None, :])
        k, v = (load_rows(ref, here.batch, columns, here.kv_head, walk.within(columns)) for ref in (refs.k, refs.v))
        products, dweights = dot(q, k, across=(1, 1)), dot(dout, v, across=(1, 1))
        visible = seen(plan, refs, here, tile)
        return total + score_gradients(plan, refs, here, tile, products, dweights, lse, delta, visible)[1]

    first = jnp.maximum(k_blocks[0], walk.first)
    return lax.fori_loop(first, jnp.minimum(k_blocks[1], walk.end), add, total)


def _store(plan: Plan, out_ref: Any, indices: tuple[Array, ...], total: Array) -> None:
    batch, head, q_index, k_index = indices
    rows = span(q_index, plan.launch.block_q)[:, None]
    columns = span(k_index, plan.launch.block_k)[None, :]
    if out_ref.shape[2] == 1:
        rows, total = jnp.zeros((1, 1), jnp.int32), total.sum(0, keepdims=True)
    if out_ref.shape[3] == 1:
        columns, total = jnp.zeros((1, 1), jnp.int32), total.sum(1, keepdims=True)
    within = (rows < out_ref.shape[2]) & (columns < out_ref.shape[3])
    plgpu.store(out_ref.at[batch, head, rows, columns], total, mask=within)
