"""The three walks over tiles: forward, backward, and the gradient of the bias.

Forward: for each block of queries, walk the blocks of keys and keep the running maximum, the running sum and
the unnormalised output of every row (online softmax, arXiv:1805.02867). Backward: walk the same tiles, compute
their scores again and add each tile's share to dq, dk and dv (FlashAttention, arXiv:2205.14135).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax

from ..call import Array, Gradients, Operands, Saved, Spec, gradient_dtype, scale_of
from .plan import Plan, take


class _Rows(NamedTuple):
    """One block of queries, or all of them with the blocks as a leading axis; what the backward pass knows of it."""

    block: Array  # which one
    q: Array
    dout: Array
    lse: Array
    delta: Array


class _Tile(NamedTuple):
    """What the walks that compute gradients need of a tile."""

    k: Array
    weights: Array
    dscores: Array  # gradient of the final scores
    dproducts: Array  # gradient of the scaled products, before softcap and bias


def forward(spec: Spec, operands: Operands) -> tuple[Array, Array]:
    """Output and log-sum-exp, see `Kernels`."""
    plan = Plan.of(spec, operands)
    q = plan.blocks.split_queries(operands.q)
    out, lse = lax.map(lambda rows: _forward_rows(plan, *rows), (_count(q), q))
    return plan.blocks.join_queries(out), plan.blocks.join_rows(lse)


def _forward_rows(plan: Plan, q_index: Array, q: Array) -> tuple[Array, Array]:
    def step(k_index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        acc, row_max, row_sum = carry
        visible = plan.visible(q_index, k_index)
        k, v = plan.take_keys(k_index, visible)
        scores, _ = _scores(plan, q_index, k_index, visible, q, k)
        new_max = jnp.maximum(row_max, scores.max(-1))
        # Where no key was seen yet any finite shift will do: all weights are exp(-inf).
        shift = jnp.where(new_max == -jnp.inf, 0, new_max)
        weights = jnp.exp(scores - shift[..., None])
        decay = jnp.exp(row_max - shift)
        acc = acc * decay[..., None] + _sum_over_keys(weights.astype(v.dtype), v)
        return acc, new_max, row_sum * decay + weights.sum(-1)

    zero = _full_like(q[..., 0], 0)
    acc = zero[..., None] + jnp.zeros(plan.v.shape[-1], jnp.float32)
    start = (acc, _full_like(zero, -jnp.inf), zero)
    acc, row_max, row_sum = plan.walk_keys(q_index, step, start)
    factor, lse = _normalise(plan, row_max, row_sum)
    return (acc * factor[..., None]).astype(q.dtype), lse


def _normalise(plan: Plan, row_max: Array, row_sum: Array) -> tuple[Array, Array]:
    """The factor that makes accumulated values the output, and the log-sum-exp."""
    empty = row_max == -jnp.inf
    highest, decay = row_max, jnp.float32(1)
    if plan.operands.sinks is not None:
        sinks = plan.operands.sinks.reshape(plan.blocks.kv_heads, plan.blocks.group, 1)
        highest = jnp.where(empty, -jnp.inf, jnp.maximum(row_max, sinks))
        decay = jnp.exp(row_max - highest)
        row_sum = row_sum * decay + jnp.exp(sinks - highest)
    return jnp.where(empty, 0, decay / row_sum), jnp.where(empty, -jnp.inf, highest + jnp.log(row_sum))


def backward(spec: Spec, operands: Operands, saved: Saved) -> Gradients:
    """The gradients of queries, keys and values, see `Kernels`."""
    plan = Plan.of(spec, operands)
    blocks = plan.blocks
    start = (_full_like(plan.k, 0), _full_like(plan.v, 0))
    (dk, dv), dq = lax.scan(functools.partial(_backward_rows, plan), start, _split_rows(plan, saved))
    factor = 1.0 if spec.scale is None else spec.scale
    dtype = gradient_dtype(spec, operands)
    return Gradients(
        q=(blocks.join_queries(dq) * factor).astype(dtype),
        k=(blocks.join_keys(dk) * factor).astype(dtype),
        v=blocks.join_keys(dv).astype(operands.v.dtype),
    )


def _backward_rows(plan: Plan, grads: tuple[Array, Array], rows: _Rows) -> tuple[tuple[Array, Array], Array]:
    """One block of queries: its dq, and its share added to dk and dv; dq and dk still lack the scale."""

    def step(k_index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        dq, dk, dv = carry
        tile = _tile(plan, rows, k_index)
        dproducts = _as_operand(tile.dproducts, rows.q.dtype)
        weights = _as_operand(tile.weights, rows.q.dtype)
        dv = _add_block(dv, k_index, _sum_over_rows(weights, rows.dout))
        dk = _add_block(dk, k_index, _sum_over_rows(dproducts, rows.q))
        return dq + _sum_over_keys(dproducts, tile.k), dk, dv

    dq, dk, dv = plan.walk_keys(rows.block, step, (_full_like(rows.q, 0), *grads))
    return (dk, dv), dq


def bias_gradient(spec: Spec, operands: Operands, saved: Saved) -> Array:
    """The gradient of the bias in its shape, float32, see `Kernels`."""
    plan = Plan.of(spec, operands)
    assert plan.bias is not None

    def add_rows(total: Array, rows: _Rows) -> tuple[Array, None]:
        def step(k_index: Array, total: Array) -> Array:
            return plan.blocks.add_pairs(total, rows.block, k_index, _tile(plan, rows, k_index).dscores)

        return plan.walk_keys(rows.block, step, total), None

    total, _ = lax.scan(add_rows, _full_like(plan.bias, 0), _split_rows(plan, saved))
    return plan.blocks.close_pairs(total)


def _split_rows(plan: Plan, saved: Saved) -> _Rows:
    # Rows that see nothing may hold NaN, which a weight of zero would not stop.
    sees_keys = (saved.lse != jnp.inf).swapaxes(1, 2)[..., None]
    blocks = plan.blocks
    q = blocks.split_queries(jnp.where(sees_keys, plan.operands.q, 0))
    return _Rows(
        block=_count(q),
        q=q,
        dout=blocks.split_queries(jnp.where(sees_keys, saved.dout, 0)),
        lse=blocks.split_rows(saved.lse),
        delta=blocks.split_rows(saved.delta),
    )


def _tile(plan: Plan, rows: _Rows, k_index: Array) -> _Tile:
    visible = plan.visible(rows.block, k_index)
    k, v = plan.take_keys(k_index, visible)
    scores, slope = _scores(plan, rows.block, k_index, visible, rows.q, k)
    weights = jnp.exp(scores - rows.lse[..., None])
    dweights = _times_keys(rows.dout, v)
    dscores = weights * (dweights - rows.delta[..., None])
    if visible is not None:
        # A weight of zero does not do: a value that other rows see may be NaN.
        dscores = jnp.where(visible, dscores, 0)
    return _Tile(k, weights, dscores, dscores if slope is None else dscores * slope)


def _scores(
    plan: Plan, q_index: Array, k_index: Array, visible: Array | None, q: Array, k: Array
) -> tuple[Array, Array | None]:
    """Final scores of a tile, -inf where not visible, and their derivative by scaled products where not 1."""
    scores = _times_keys(q, k) * scale_of(plan.spec, plan.operands)
    slope = None
    if plan.spec.softcap is not None:
        bounded = jnp.tanh(scores / plan.spec.softcap)
        scores, slope = plan.spec.softcap * bounded, 1 - bounded * bounded
    if plan.bias is not None:
        scores = scores + plan.blocks.take_pairs(plan.bias, q_index, k_index).astype(jnp.float32)
    return scores if visible is None else jnp.where(visible, scores, -jnp.inf), slope


def _times_keys(rows: Array, keys: Array) -> Array:
    """[.., group, block_q, D] and [.., block_k, D] to [.., group, block_q, block_k]."""
    return _open(_product("bhqd,bhkd->bhqk", _close(rows), keys), rows)


def _sum_over_keys(pairs: Array, keys: Array) -> Array:
    """[.., group, block_q, block_k] and [.., block_k, D] to [.., group, block_q, D]."""
    return _open(_product("bhqk,bhkd->bhqd", _close(pairs), keys), pairs)


def _sum_over_rows(pairs: Array, rows: Array) -> Array:
    """[.., group, block_q, block_k] and [.., group, block_q, D] to [.., block_k, D]."""
    return _product("bhqk,bhqd->bhkd", _close(pairs), _close(rows))


def _close(x: Array) -> Array:
    # XLA copies a factor of a product that sums over two axes; over one that was two it does not.
    return x.reshape(*x.shape[:2], x.shape[2] * x.shape[3], x.shape[4])


def _open(x: Array, like: Array) -> Array:
    return x.reshape(*like.shape[:4], x.shape[3])


def _product(equation: str, left: Array, right: Array) -> Array:
    # Accelerators round float32 factors to fewer bits unless asked not to.
    exact = left.dtype == right.dtype == jnp.float32
    precision = lax.Precision.HIGHEST if exact else None
    return jnp.einsum(equation, left, right, precision=precision, preferred_element_type=jnp.float32)


def _as_operand(x: Array, dtype: jnp.dtype) -> Array:
    """Computed factors of the backward pass: gradients of scores can leave float16's range."""
    return x if dtype == jnp.float16 else x.astype(dtype)


def _count(blocks: Array) -> Array:
    return jnp.arange(blocks.shape[0], dtype=jnp.int32)


def _add_block(blocks: Array, index: Array, update: Array) -> Array:
    added: Array = lax.dynamic_update_index_in_dim(blocks, take(blocks, index) + update, index, 0)
    return added


def _full_like(x: Array, value: float) -> Array:
    # Made from an array of the same shape so that it is sharded and varies over a mesh as that one does.
    return jnp.full_like(x, value, jnp.float32)
