"""Attention over blocks in plain JAX: for every device XLA compiles for, linear memory in both passes.

Forward: for each block of queries, walk the blocks of keys and keep the running maximum, the running sum and
the unnormalised output of every row (online softmax, arXiv:1805.02867). Backward: walk the same blocks,
compute their scores again and add each block's share to dq, dk and dv (FlashAttention, arXiv:2205.14135).

Inside, queries are `[blocks, batch, kv_heads, group * block_q, D]`: the query heads that read one key head
are further rows of its product. Keys and values are `[blocks, batch, kv_heads, block_k, D]`.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from .call import Array, Operands, Spec, scale_of

_DEFAULT_BLOCK = 256

_Residuals = tuple[Array, Array, Array, Array, Array, Array, Array]


@dataclass(frozen=True)
class _Plan:
    """All that is fixed when the call is traced; lengths are those before padding."""

    causal: bool
    q_length: int
    kv_length: int
    block_q: int
    block_k: int
    group: int

    @property
    def kv_blocks(self) -> int:
        return -(-self.kv_length // self.block_k)

    def visible_kv_blocks(self, q_index: Array) -> int | Array:
        """How many leading blocks of keys this block of queries sees; the rest lies above the diagonal."""
        if not self.causal:
            return self.kv_blocks
        rows_end = (q_index + 1) * self.block_q
        return jnp.minimum((rows_end + self.block_k - 1) // self.block_k, self.kv_blocks)


def attend(spec: Spec, operands: Operands) -> tuple[Array, Array | None]:
    """The `xla` backend of `flash_attention`: plain JAX, for every device and every feature."""
    q, k, v = operands.q, operands.k, operands.v
    if spec.causal:
        # Keys past the last query are seen by none: cut off, whatever they hold cannot matter.
        k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
    q_length, kv_length = q.shape[1], k.shape[1]
    if 0 in (q.size, k.size, v.size):
        return jnp.zeros((*q.shape[:3], v.shape[3]), q.dtype), None
    plan = _Plan(
        causal=spec.causal,
        q_length=q_length,
        kv_length=kv_length,
        block_q=min(spec.tiles.block_q or _DEFAULT_BLOCK, q_length),
        block_k=min(spec.tiles.block_k or _DEFAULT_BLOCK, kv_length),
        group=operands.group,
    )
    factor = jnp.asarray(scale_of(spec, operands), jnp.float32)
    return _attend(plan, *_vary_alike(q, k, v, factor)), None


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(plan: _Plan, q: Array, k: Array, v: Array, scale: Array) -> Array:
    return _forward(plan, q, k, v, scale)[0]


def _forward(plan: _Plan, q: Array, k: Array, v: Array, scale: Array) -> tuple[Array, _Residuals]:
    q_blocks = _split(q, plan.block_q, plan.group)
    k_blocks, v_blocks = _split(k, plan.block_k), _split(v, plan.block_k)
    walk = functools.partial(_forward_rows, plan, k_blocks, v_blocks, scale)
    out_blocks, row_max, row_sum = lax.map(walk, (_indices(q_blocks), q_blocks))
    out = _join(out_blocks, plan.q_length, plan.group)
    return out, (q, k, v, scale, out, row_max, row_sum)


def _forward_rows(
    plan: _Plan, k_blocks: Array, v_blocks: Array, scale: Array, rows: tuple[Array, Array]
) -> tuple[Array, Array, Array]:
    """One block of queries against all the keys that it sees: output, row maximum, row sum."""
    q_index, q = rows

    def step(k_index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        acc, row_max, row_sum = carry
        v = _take(v_blocks, k_index)
        scores = _scores(plan, q_index, k_index, q, _take(k_blocks, k_index), scale)
        # Every row sees key 0, so after its first block this maximum is a real score, never -inf.
        new_max = jnp.maximum(row_max, scores.max(-1))
        weights = jnp.exp(scores - new_max[..., None])
        decay = jnp.exp(row_max - new_max)
        acc = acc * decay[..., None] + _matmul("bhqk,bhkd->bhqd", weights.astype(v.dtype), v)
        return acc, new_max, row_sum * decay + weights.sum(-1)

    row = q[..., 0]
    zero = _full_like(row, 0)
    start = (zero[..., None] + jnp.zeros(v_blocks.shape[-1], jnp.float32), _full_like(row, -jnp.inf), zero)
    acc, row_max, row_sum = lax.fori_loop(0, plan.visible_kv_blocks(q_index), step, start)
    return (acc / row_sum[..., None]).astype(q.dtype), row_max, row_sum


def _backward(plan: _Plan, residuals: _Residuals, dout: Array) -> tuple[Array, Array, Array, Array]:
    q, k, v, scale, out, row_max, row_sum = residuals
    q_blocks = _split(q, plan.block_q, plan.group)
    k_blocks, v_blocks = _split(k, plan.block_k), _split(v, plan.block_k)
    dout_blocks = _split(dout, plan.block_q, plan.group)
    out_blocks = _split(out, plan.block_q, plan.group)
    delta = (dout_blocks.astype(jnp.float32) * out_blocks.astype(jnp.float32)).sum(-1)

    walk = functools.partial(_backward_rows, plan, k_blocks, v_blocks, scale)
    start = (_full_like(k_blocks, 0), _full_like(v_blocks, 0))
    rows = (_indices(q_blocks), q_blocks, dout_blocks, row_max, 1 / row_sum, delta)
    (dk_blocks, dv_blocks), dq_blocks = lax.scan(walk, start, rows)

    dq = _join(dq_blocks, plan.q_length, plan.group)
    dk = _join(dk_blocks, plan.kv_length)
    dv = _join(dv_blocks, plan.kv_length)
    dscale = jnp.sum(dq * q)
    return (dq * scale).astype(q.dtype), (dk * scale).astype(k.dtype), dv.astype(v.dtype), dscale


def _backward_rows(
    plan: _Plan,
    k_blocks: Array,
    v_blocks: Array,
    scale: Array,
    grads: tuple[Array, Array],
    rows: tuple[Array, Array, Array, Array, Array, Array],
) -> tuple[tuple[Array, Array], Array]:
    """One block of queries: its dq, and its share added to dk and dv; dq and dk still lack the scale."""
    q_index, q, dout, row_max, inverse_sum, delta = rows
    operand = _gradient_operand(q.dtype)

    def step(k_index: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        dq, dk, dv = carry
        k, v = _take(k_blocks, k_index), _take(v_blocks, k_index)
        scores = _scores(plan, q_index, k_index, q, k, scale)
        # Maximum and sum kept apart are exact where their log-sum-exp would lose the sum (scores of 1e5).
        weights = jnp.exp(scores - row_max[..., None]) * inverse_sum[..., None]
        dweights = _matmul("bhqd,bhkd->bhqk", dout, v) - delta[..., None]
        dscores = (weights * dweights).astype(operand)
        dv = _add_at(dv, k_index, _matmul("bhqk,bhqd->bhkd", weights.astype(operand), dout))
        dk = _add_at(dk, k_index, _matmul("bhqk,bhqd->bhkd", dscores, q))
        return dq + _matmul("bhqk,bhkd->bhqd", dscores, k), dk, dv

    start = (_full_like(q, 0), *grads)
    dq, dk, dv = lax.fori_loop(0, plan.visible_kv_blocks(q_index), step, start)
    return (dk, dv), dq


_attend.defvjp(_forward, _backward)


def _scores(plan: _Plan, q_index: Array, k_index: Array, q: Array, k: Array, scale: Array) -> Array:
    """Scaled scores of one pair of blocks; -inf above the diagonal and in the padding of the keys."""
    scores = _matmul("bhqd,bhkd->bhqk", q, k) * scale
    columns = k_index * plan.block_k + lax.broadcasted_iota(jnp.int32, scores.shape[-2:], 1)
    if plan.causal:
        row = lax.broadcasted_iota(jnp.int32, scores.shape[-2:], 0) % plan.block_q
        scores = jnp.where(columns <= q_index * plan.block_q + row, scores, -jnp.inf)
    if plan.kv_length % plan.block_k:
        scores = jnp.where(columns < plan.kv_length, scores, -jnp.inf)
    return scores


def _matmul(equation: str, left: Array, right: Array) -> Array:
    return jnp.einsum(equation, left, right, preferred_element_type=jnp.float32)


def _gradient_operand(dtype: jnp.dtype) -> jnp.dtype:
    """Dtype of computed factors in the backward pass: gradients of scores can leave float16's range."""
    return jnp.dtype(jnp.float32) if dtype == jnp.float16 else dtype


def _split(x: Array, block: int, group: int = 1) -> Array:
    """[batch, time, heads, D] to [blocks, batch, heads / group, group * block, D], padded with zeros."""
    batch, length, heads, depth = x.shape
    blocks = -(-length // block)
    x = jnp.pad(x, ((0, 0), (0, blocks * block - length), (0, 0), (0, 0)))
    # One axis a reshape: explicit sharding follows those.
    x = x.reshape(batch, blocks, block, heads, depth)
    x = x.reshape(batch, blocks, block, heads // group, group, depth)
    return x.transpose(1, 0, 3, 4, 2, 5).reshape(blocks, batch, heads // group, group * block, depth)


def _join(x: Array, length: int, group: int = 1) -> Array:
    """The inverse of `_split`; drops the padding."""
    blocks, batch, kv_heads, rows, depth = x.shape
    x = x.reshape(blocks, batch, kv_heads, group, rows // group, depth).transpose(1, 0, 4, 2, 3, 5)
    x = x.reshape(batch, blocks, rows // group, kv_heads * group, depth)
    return x.reshape(batch, blocks * (rows // group), kv_heads * group, depth)[:, :length]


def _indices(blocks: Array) -> Array:
    return jnp.arange(blocks.shape[0], dtype=jnp.int32)


def _take(blocks: Array, index: Array) -> Array:
    block: Array = lax.dynamic_index_in_dim(blocks, index, keepdims=False)
    return block


def _add_at(blocks: Array, index: Array, update: Array) -> Array:
    added: Array = lax.dynamic_update_index_in_dim(blocks, _take(blocks, index) + update, index, 0)
    return added


def _full_like(x: Array, value: float) -> Array:
    # Made from an array of the same shape so that it is sharded and varies over a mesh as that one does.
    return jnp.full_like(x, value, jnp.float32)


def _vary_alike(*arrays: Array) -> tuple[Array, ...]:
    """Inside shard_map, marks all arrays as varying over the mesh axes that any of them varies over.

    Loop carries must keep their type, and they mix all of the arrays.
    """
    varying = [jax.typeof(array).manual_axis_type.varying for array in arrays]
    axes = frozenset[str]().union(*varying)
    return tuple(lax.pcast(x, tuple(axes - has), to="varying") for x, has in zip(arrays, varying, strict=True))
