"""The two backward kernels: keys and values by blocks of keys, queries by blocks of queries.

Each computes the weights of its tiles again from the saved log-sum-exp, and adds up in a fixed order what it
alone writes: gradients repeat bit for bit.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._pallas import like
from ..call import Array, Operands, Saved, Spec, gradient_dtype
from ..resources import power_of_two
from ..visible import Index
from .launch import for_device, launch
from .parts import (
    Place,
    Plan,
    Tile,
    add_product,
    any_along,
    dot,
    dot_of_parts,
    factor_of,
    is_screened,
    load_parts,
    load_rows,
    load_vector,
    place,
    scores,
    seen,
    span,
    store_rows,
)
from .programs import key_block, query_block
from .tiles import keys_launch, queries_launch
from .walks import Ranges, Walk, key_ranges, query_ranges, walk_keys, walk_queries

# Smaller than any gradient of a score that matters.
_TINY = 1e-30


class Sum(NamedTuple):
    """A sum of products, `[rows, depth]`; that is `acc` times the unit of its row, 1 if None.

    Gradients of scores can leave float16's range on both sides: their rows are divided by the largest yet.
    """

    acc: Array
    unit: Array | None

    @classmethod
    def zero(cls, rows: int, depth: int, dtype: Any = None) -> Sum:
        """Nothing added yet; `dtype` is that of factors which hold gradients of scores."""
        acc = jnp.zeros((rows, power_of_two(depth)), jnp.float32)
        return cls(acc, jnp.full((rows,), _TINY, jnp.float32) if dtype == jnp.float16 else None)

    def add(self, left: Array, right: Array) -> Sum:
        """With the product of float32 `left`, in the dtype of `right`, and `right`."""
        if self.unit is None:
            return Sum(add_product(self.acc, left, right), None)
        unit = jnp.maximum(self.unit, jnp.abs(left).max(1))
        inverse = 1 / unit
        scaled = self.acc * (self.unit * inverse)[:, None]
        return Sum(add_product(scaled, left * inverse[:, None], right), unit)

    @property
    def value(self) -> Array:
        """The sum."""
        return self.acc if self.unit is None else self.acc * self.unit[:, None]


def score_gradients(
    plan: Plan,
    refs: Operands,
    here: Place,
    tile: Tile,
    products: Array,
    dweights: Array,
    lse: Array,
    delta: Array,
    visible: Array | None,
) -> tuple[Array, Array, Array | None]:
    """Weights, gradients of the scores, and the slope of the cap; `lse` and `delta` broadcast to the tile."""
    x, slope = scores(plan, refs, here, tile, products)
    weights = plan.power(x * factor_of(plan, refs) - lse * plan.unit)
    gradients = weights * (dweights - delta)
    if visible is not None:
        weights, gradients = jnp.where(visible, weights, 0), jnp.where(visible, gradients, 0)
        slope = None if slope is None else jnp.where(visible, slope, 0)
    return weights, gradients, slope


def key_gradients(spec: Spec, operands: Operands, saved: Saved) -> tuple[Array, Array]:
    """The gradients of keys and values."""
    plan = Plan.of(spec, operands, keys_launch(spec.tiles, operands))
    dk = like(operands, operands.k.shape, gradient_dtype(spec, operands))
    dv = like(operands, operands.v.shape, operands.v.dtype)
    programs = plan.batch * (plan.heads // plan.group) * plan.k_blocks
    inputs = for_device(operands), query_ranges(plan, operands), saved
    return launch(_flash_attention_backward_keys, plan, programs, (dk, dv), *inputs)


def _flash_attention_backward_keys(
    plan: Plan, refs: Operands, ranges: Ranges | None, saved: Saved, dk_ref: Any, dv_ref: Any
) -> None:
    batch, kv_head, index = key_block(plan)
    columns = span(index, plan.launch.block_k)
    first_head = place(plan, refs, batch, kv_head * plan.group)
    within = columns < first_head.kv_length
    k = load_rows(refs.k, batch, columns, kv_head, within)
    v = load_rows(refs.v, batch, columns, kv_head, within)
    walk = walk_queries(plan, refs, ranges, first_head, index)

    def add_head(member: Index, sums: tuple[Sum, Sum]) -> tuple[Sum, Sum]:
        here = first_head._replace(head=first_head.head + member)
        for first, end, masked in walk.spans:
            step = functools.partial(_add_queries, plan, refs, saved, here, columns, (k, v), walk, masked)
            sums = lax.fori_loop(first, end, step, sums)
        return sums

    # Weights are at most 1 and need no unit.
    sums = Sum.zero(plan.launch.block_k, plan.depth, k.dtype), Sum.zero(plan.launch.block_k, plan.v_depth)
    sums = add_head(0, sums) if plan.group == 1 else lax.fori_loop(np.int32(0), np.int32(plan.group), add_head, sums)
    dk, dv = (jnp.where(within[:, None], total.value, 0) for total in sums)
    store_rows(dk_ref, batch, columns, kv_head, dk * (1.0 if plan.spec.scale is None else plan.spec.scale))
    store_rows(dv_ref, batch, columns, kv_head, dv)


def _add_queries(
    plan: Plan,
    refs: Operands,
    saved: Saved,
    here: Place,
    columns: Array,
    keys: tuple[Array, Array],
    walk: Walk,
    masked: bool,
    index: Index,
    sums: tuple[Sum, Sum],
) -> tuple[Sum, Sum]:
    """A step of the walk over queries; the tile is keys by queries, so that no product is of a transposed one."""
    (k, v), (dk, dv) = keys, sums
    rows = span(index, plan.launch.block_q)
    tile = Tile(rows[None, :], columns[:, None])
    within = walk.within(rows) if masked else None
    q = load_rows(refs.q, here.batch, rows, here.head, within)
    dout = load_rows(saved.dout, here.batch, rows, here.head, within)
    lse = load_vector(saved.lse, here, rows, within, jnp.inf)
    delta = load_vector(saved.delta, here, rows, within, 0)
    if is_screened(refs) or refs.bias is not None:
        # Rows that see nothing may hold what is not a number; weights of zero do not keep that out.
        sees = (lse != jnp.inf)[:, None]
        q, dout = jnp.where(sees, q, 0), jnp.where(sees, dout, 0)
    products, dweights = dot(k, q, across=(1, 1)), dot(v, dout, across=(1, 1))
    visible = seen(plan, refs, here, tile) if masked else None
    weights, gradients, slope = score_gradients(
        plan, refs, here, tile, products, dweights, lse[None, :], delta[None, :], visible
    )
    return dk.add(gradients if slope is None else gradients * slope, q), dv.add(weights, dout)


def query_gradient(spec: Spec, operands: Operands, saved: Saved) -> Array:
    """The gradient of queries."""
    plan = Plan.of(spec, operands, queries_launch(spec.tiles, operands))
    dq = like(operands, operands.q.shape, gradient_dtype(spec, operands))
    programs = plan.batch * plan.heads * plan.q_blocks
    inputs = for_device(operands), key_ranges(plan, operands), saved
    return launch(_flash_attention_backward_queries, plan, programs, dq, *inputs)


class _Rows(NamedTuple):
    """What a program knows of its block of queries."""

    rows: Array
    q: Array
    dout: list[Array]
    lse: Array
    delta: Array


def _flash_attention_backward_queries(
    plan: Plan, refs: Operands, ranges: Ranges | None, saved: Saved, dq_ref: Any
) -> None:
    batch, head, index = query_block(plan)
    here = place(plan, refs, batch, head)
    rows = span(index, plan.launch.block_q)
    within = rows < here.q_length
    block = _Rows(
        rows=rows,
        q=load_rows(refs.q, batch, rows, head, within),
        dout=load_parts(saved.dout, batch, rows, head, within),
        lse=load_vector(saved.lse, here, rows, within, jnp.inf)[:, None],
        delta=load_vector(saved.delta, here, rows, within, 0)[:, None],
    )
    walk = walk_keys(plan, refs, ranges, here, index)
    dq = Sum.zero(plan.launch.block_q, plan.depth, block.q.dtype)
    # The long span first: here that was faster by up to a third, and in the other kernels slower.
    for first, end, masked in reversed(walk.spans):
        dq = lax.fori_loop(first, end, functools.partial(_add_keys, plan, refs, here, block, walk, masked), dq)
    store_rows(dq_ref, batch, rows, head, dq.value * (1.0 if plan.spec.scale is None else plan.spec.scale))


def _add_keys(
    plan: Plan, refs: Operands, here: Place, block: _Rows, walk: Walk, masked: bool, index: Index, dq: Sum
) -> Sum:
    columns = span(index, plan.launch.block_k)
    tile = Tile(block.rows[:, None], columns[None, :])
    within = walk.within(columns) if masked else None
    k = load_rows(refs.k, here.batch, columns, here.kv_head, within)
    v = load_parts(refs.v, here.batch, columns, here.kv_head, within)
    # Rows with few keys lose most digits of `dweights` to `delta`.
    products, dweights = dot(block.q, k, across=(1, 1)), dot_of_parts(block.dout, v)
    visible = seen(plan, refs, here, tile) if masked else None
    if is_screened(refs):
        k = jnp.where(any_along(visible, 0)[:, None], k, 0)
    _, gradients, slope = score_gradients(plan, refs, here, tile, products, dweights, block.lse, block.delta, visible)
    return dq.add(gradients if slope is None else gradients * slope, k)
