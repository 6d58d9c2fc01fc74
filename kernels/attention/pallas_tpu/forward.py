"""The forward walk: for each block of queries, its blocks of keys, with an online softmax (arXiv:1805.02867)."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl

from .._pallas import like, run
from ..call import Array, Operands, Spec
from .layout import Inputs, heads_last, lay_out
from .plan import Plan, plan_forward
from .ranges import Scalars, key_ranges
from .tile import load_keys, product, score, visible_pairs, visit_tile
from .walk import Index, Place, by_query, call, line, query_spec


class _State(NamedTuple):
    """In VMEM from one step to the next; columns hold one number a query."""

    acc: Any  # [block_q, Dv]
    highest: Any  # [block_q, 1]
    total: Any  # [block_q, 1]


def forward(spec: Spec, operands: Operands) -> tuple[Array, Array]:
    """Output `[batch, Tq, heads, Dv]` and log-sum-exp `[batch, heads, Tq]`, see `differentiable.Kernels`."""
    plan = plan_forward(spec, operands)
    inputs, scalars = lay_out(plan, operands), key_ranges(plan, operands)
    batch, heads, padded_length, _ = inputs.q.shape
    depth = inputs.v.shape[3]
    locate = functools.partial(by_query, plan)
    stats = (batch, heads, padded_length, 1)
    make_call = call(
        plan=plan,
        kernel=functools.partial(_kernel, plan),
        name="flash_attention_forward",
        grid=(batch, heads, plan.q_blocks, plan.key_steps),
        sums_over=1,
        locate=locate,
        outputs=(like(inputs, (*stats[:3], depth), operands.q.dtype), like(inputs, stats, jnp.float32)),
        out_specs=(query_spec(plan, depth, locate), query_spec(plan, 1, locate)),
        scratch=((plan.block_q, depth), (plan.block_q, 1), (plan.block_q, 1)),
    )
    out, lse = run(make_call, scalars, inputs, platform="tpu")
    return heads_last(out, plan.q_length, operands.v.shape[3]), lse[:, :, : plan.q_length, 0]


def _kernel(plan: Plan, scalars: Scalars, inputs: Inputs, out: Any, lse: Any, *scratch: Any) -> None:
    state = _State(*scratch)
    batch, head, q_block, step = (pl.program_id(axis) for axis in range(4))
    place = by_query(plan, batch, head, q_block, step, scalars)
    at = line(plan, plan.q_blocks, batch, q_block)

    @pl.when(step == 0)
    def _start() -> None:
        state.acc[...] = jnp.zeros_like(state.acc)
        state.highest[...] = jnp.full_like(state.highest, -jnp.inf)
        state.total[...] = jnp.zeros_like(state.total)

    add = functools.partial(_add_tile, plan, scalars, inputs, place, state)
    visit_tile(plan, scalars, at, scalars.first[at] + step, add)

    @pl.when(step == plan.key_steps - 1)
    def _finish() -> None:
        sink = None if scalars.sinks is None else scalars.sinks[head]
        _write(state, sink, out, lse)


def _add_tile(plan: Plan, scalars: Scalars, inputs: Inputs, place: Place, state: _State, masked: bool) -> None:
    visible = visible_pairs(plan, scalars, inputs, place) if masked else None
    k, v = load_keys(plan, inputs, visible)
    scores = score(plan, scalars, inputs, k, visible).scores
    before = state.highest[...]
    highest = jnp.maximum(before, scores.max(axis=1, keepdims=True))
    shift = _finite(highest)
    weights = jnp.exp(scores - shift)
    decay = jnp.exp(before - shift)
    state.highest[...] = highest
    state.total[...] = state.total[...] * decay + weights.sum(axis=1, keepdims=True)
    state.acc[...] = state.acc[...] * decay + product(weights.astype(v.dtype), v)


def _write(state: _State, sink: Index | None, out: Any, lse: Any) -> None:
    highest, total = state.highest[...], state.total[...]
    has_key = total > 0
    shift, decay = _finite(highest), 1.0
    if sink is not None:
        shift = jnp.maximum(shift, sink)
        decay = jnp.exp(highest - shift)
        total = total * decay + jnp.exp(sink - shift)
    total = jnp.where(has_key, total, 1)
    out[...] = jnp.where(has_key, state.acc[...] * (decay / total), 0).astype(out.dtype)
    lse[...] = jnp.where(has_key, shift + jnp.log(total), -jnp.inf)


def _finite(highest: Array) -> Array:
    """What to subtract from scores; for rows without keys any number will do."""
    return jnp.where(highest == -jnp.inf, 0, highest)
