"""The backward pass in two walks: dq block of queries by block of queries, dk and dv block of keys by block of keys.

Scores are computed again from the saved log-sum-exp (FlashAttention, arXiv:2205.14135).
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from .._pallas import like, run
from ..call import Array, Gradients, Operands, Saved, Spec, gradient_dtype
from .layout import Inputs, heads_last, lay_out
from .plan import Plan, plan_dkv, plan_dq
from .ranges import Scalars, key_ranges, query_ranges
from .tile import below_cap, load_keys, product, score, score_gradient, visible_pairs, visit_tile
from .walk import Place, by_key, by_query, call, key_spec, line, query_spec


def backward(spec: Spec, operands: Operands, saved: Saved) -> Gradients:
    """The gradients of queries, keys and values, see `differentiable.Kernels`."""
    dk, dv = _key_gradients(spec, operands, saved)
    return Gradients(_query_gradient(spec, operands, saved), dk, dv)


def _query_gradient(spec: Spec, operands: Operands, saved: Saved) -> Array:
    plan = plan_dq(spec, operands)
    inputs, scalars = lay_out(plan, operands, saved), key_ranges(plan, operands)
    batch, heads, _, depth = inputs.q.shape
    locate = functools.partial(by_query, plan)
    make_call = call(
        plan=plan,
        kernel=functools.partial(_dq_kernel, plan),
        name="flash_attention_dq",
        grid=(batch, heads, plan.q_blocks, plan.key_steps),
        sums_over=1,
        locate=locate,
        outputs=like(inputs, inputs.q.shape, gradient_dtype(spec, operands)),
        out_specs=query_spec(plan, depth, locate),
        scratch=((plan.block_q, depth),),
    )
    dq = run(make_call, scalars, inputs, platform="tpu")
    return heads_last(dq, plan.q_length, operands.q.shape[3])


def _key_gradients(spec: Spec, operands: Operands, saved: Saved) -> tuple[Array, Array]:
    plan = plan_dkv(spec, operands)
    inputs, scalars = lay_out(plan, operands, saved), query_ranges(plan, operands)
    batch, kv_heads, _, depth = inputs.k.shape
    v_depth = inputs.v.shape[3]
    locate = functools.partial(by_key, plan)
    make_call = call(
        plan=plan,
        kernel=functools.partial(_dkv_kernel, plan),
        name="flash_attention_dkv",
        grid=(batch, kv_heads, plan.k_blocks, plan.group, plan.query_steps),
        sums_over=2,
        locate=locate,
        outputs=(
            like(inputs, inputs.k.shape, gradient_dtype(spec, operands)),
            like(inputs, inputs.v.shape, operands.v.dtype),
        ),
        out_specs=(key_spec(plan, depth, locate), key_spec(plan, v_depth, locate)),
        scratch=((plan.block_k, depth), (plan.block_k, v_depth)),
    )
    dk, dv = run(make_call, scalars, inputs, platform="tpu")
    length = plan.kv_length
    return heads_last(dk, length, operands.k.shape[3]), heads_last(dv, length, operands.v.shape[3])


def _dq_kernel(plan: Plan, scalars: Scalars, inputs: Inputs, dq: Any, acc: Any) -> None:
    batch, head, q_block, step = (pl.program_id(axis) for axis in range(4))
    at = line(plan, plan.q_blocks, batch, q_block)
    place = by_query(plan, batch, head, q_block, step, scalars)

    @pl.when(step == 0)
    def _start() -> None:
        acc[...] = jnp.zeros_like(acc)

    add = functools.partial(_add_to_dq, plan, scalars, inputs, place, acc)
    visit_tile(plan, scalars, at, scalars.first[at] + step, add)

    @pl.when(step == plan.key_steps - 1)
    def _finish() -> None:
        dq[...] = (acc[...] * _factor(plan)).astype(dq.dtype)


def _add_to_dq(plan: Plan, scalars: Scalars, inputs: Inputs, place: Place, acc: Any, masked: bool) -> None:
    visible = visible_pairs(plan, scalars, inputs, place) if masked else None
    k, v = load_keys(plan, inputs, visible)
    tile = score(plan, scalars, inputs, k, visible)
    _, dscores = score_gradient(plan, inputs, tile, v)
    acc[...] += product(below_cap(tile, dscores).astype(k.dtype), k)


def _dkv_kernel(plan: Plan, scalars: Scalars, inputs: Inputs, dk: Any, dv: Any, dk_acc: Any, dv_acc: Any) -> None:
    batch, kv_head, k_block, member, step = (pl.program_id(axis) for axis in range(5))
    at = line(plan, plan.k_blocks, batch, k_block)
    place = by_key(plan, batch, kv_head, k_block, member, step, scalars)

    @pl.when((member == 0) & (step == 0))
    def _start() -> None:
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)

    add = functools.partial(_add_to_dkv, plan, scalars, inputs, place, dk_acc, dv_acc)
    visit_tile(plan, scalars, at, scalars.first[at] + step, add)

    @pl.when((member == plan.group - 1) & (step == plan.query_steps - 1))
    def _finish() -> None:
        dk[...] = (dk_acc[...] * _factor(plan)).astype(dk.dtype)
        dv[...] = dv_acc[...].astype(dv.dtype)


def _add_to_dkv(
    plan: Plan, scalars: Scalars, inputs: Inputs, place: Place, dk_acc: Any, dv_acc: Any, masked: bool
) -> None:
    visible = visible_pairs(plan, scalars, inputs, place) if masked else None
    k, v = load_keys(plan, inputs, visible)
    tile = score(plan, scalars, inputs, k, visible)
    weights, dscores = score_gradient(plan, inputs, tile, v)
    q, dout = inputs.q[...], inputs.dout[...]
    dv_acc[...] += product(weights.astype(dout.dtype), dout)
    dk_acc[...] += product(below_cap(tile, dscores).astype(q.dtype), q)


def _factor(plan: Plan) -> float:
    """What gradients of products are to be multiplied by; an array of a scale is applied outside."""
    return 1.0 if plan.spec.scale is None else plan.spec.scale
