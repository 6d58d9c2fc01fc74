"""The forward kernel: a program for each block of queries of each head, walking the keys it sees."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .._pallas import like
from ..call import Array, Operands, Spec
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
    factor_of,
    is_screened,
    load_rows,
    place,
    scores,
    seen,
    span,
    store_rows,
    store_vector,
)
from .programs import query_block
from .tiles import forward_launch
from .walks import Ranges, Walk, key_ranges, walk_keys


class _State(NamedTuple):
    """Of each row: the output so far, not normalised, the largest score and the sum of weights."""

    acc: Array
    top: Array
    total: Array


def forward(spec: Spec, operands: Operands) -> tuple[Array, Array]:
    """Output and log-sum-exp, see `differentiable.Kernels`."""
    plan = Plan.of(spec, operands, forward_launch(spec.tiles, operands))
    out = like(operands, (*operands.q.shape[:3], plan.v_depth), operands.q.dtype)
    lse = like(operands, (plan.batch, plan.heads, plan.q_length), jnp.float32)
    programs = plan.batch * plan.heads * plan.q_blocks
    return launch(
        _flash_attention_forward, plan, programs, (out, lse), for_device(operands), key_ranges(plan, operands)
    )


def _flash_attention_forward(plan: Plan, refs: Operands, ranges: Ranges | None, out_ref: Any, lse_ref: Any) -> None:
    batch, head, index = query_block(plan)
    here = place(plan, refs, batch, head)
    rows = span(index, plan.launch.block_q)
    q = load_rows(refs.q, batch, rows, head, rows < here.q_length)
    walk = walk_keys(plan, refs, ranges, here, index)
    state = _State(
        acc=jnp.zeros((plan.launch.block_q, power_of_two(plan.v_depth)), jnp.float32),
        top=jnp.full((plan.launch.block_q,), -jnp.inf, jnp.float32),
        total=jnp.zeros((plan.launch.block_q,), jnp.float32),
    )
    for first, end, masked in walk.spans:
        step = functools.partial(_step, plan, refs, here, rows, q, walk, masked)
        state = lax.fori_loop(first, end, step, state)
    out, lse = _finish(plan, refs, here, rows, state)
    store_rows(out_ref, batch, rows, head, out)
    store_vector(lse_ref, here, rows, lse)


def _step(
    plan: Plan,
    refs: Operands,
    here: Place,
    rows: Array,
    q: Array,
    walk: Walk,
    masked: bool,
    index: Index,
    state: _State,
) -> _State:
    columns = span(index, plan.launch.block_k)
    tile = Tile(rows[:, None], columns[None, :])
    within = walk.within(columns) if masked else None
    k = load_rows(refs.k, here.batch, columns, here.kv_head, within)
    x, _ = scores(plan, refs, here, tile, dot(q, k, across=(1, 1)))
    factor = factor_of(plan, refs)
    v = load_rows(refs.v, here.batch, columns, here.kv_head, within)
    if masked:
        visible = seen(plan, refs, here, tile)
        x = jnp.where(visible, x, -jnp.inf)
        if is_screened(refs):
            # Weights of zero do not keep out what is not a number.
            v = jnp.where(any_along(visible, 0)[:, None], v, 0)
    top = jnp.maximum(state.top, x.max(1))
    shift = top * factor
    if masked or refs.bias is not None:
        shift = jnp.where(top == -jnp.inf, 0, shift)
    weights = plan.power(x * factor - shift[:, None])
    decay = plan.power(state.top * factor - shift)
    return _State(
        acc=add_product(state.acc * decay[:, None], weights, v),
        top=top,
        total=state.total * decay + weights.sum(1),
    )


def _finish(plan: Plan, refs: Operands, here: Place, rows: Array, state: _State) -> tuple[Array, Array]:
    top, total, factor = state.top * factor_of(plan, refs), state.total, jnp.ones_like(state.total)
    has_key = total != 0
    if refs.q_lengths is not None:
        has_key = has_key & (rows < here.q_length)
    if refs.sinks is not None:
        sink = refs.sinks[here.head] * plan.unit
        top = jnp.maximum(top, sink)
        shift = jnp.where(top == -jnp.inf, 0, top)
        factor = plan.power(state.top * factor_of(plan, refs) - shift)
        total = total * factor + plan.power(sink - shift)
    total = jnp.where(has_key, total, 1)
    out = jnp.where(has_key[:, None], state.acc * (factor / total)[:, None], 0)
    return out, jnp.where(has_key, top / plan.unit + jnp.log(total), -jnp.inf)
