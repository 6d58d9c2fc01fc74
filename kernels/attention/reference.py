"""Plain attention in float32: short enough to check by eye, the yardstick for the fast backends."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from .call import Array, Operands, Spec, scale_of
from .checks import read_call, read_flag
from .visible import sees_by_position


def reference_attention(q: Array, k: Array, v: Array, **call: Any) -> Array | tuple[Array, Array]:
    """Attention by its definition, with the whole score matrix in float32.

    Arguments, their meaning and errors are those of `flash_attention`, hyperparameters and `implementation`
    aside; the memory it takes grows with Tq x Tk, so use it to check results, not to train. Differentiable as
    often as you like, in both modes.

    Args:
        q: queries, `[batch, Tq, heads, D]`.
        k: keys, `[batch, Tk, kv_heads, D]`.
        v: values, `[batch, Tk, kv_heads, Dv]`.
        **call: `causal`, `window`, `scale`, ... as in `flash_attention`.

    Returns:
        `[batch, Tq, heads, Dv]` in the dtype of `q`; with `return_lse=True` also the log-sum-exp,
        `[batch, Tq, heads]`, float32. A row that sees no key is zero, its log-sum-exp -inf.

    Example:
        >>> import jax.numpy as jnp
        >>> q = jnp.ones((1, 4, 2, 8))
        >>> v = jnp.arange(4.0).reshape(1, 4, 1, 1)
        >>> reference_attention(q, q[:, :, :1], v, causal=True)[0, :, 0, 0].tolist()
        [0.0, 0.5, 1.0, 1.5]
    """
    return_lse = read_flag("return_lse", call.pop("return_lse", False))
    spec, operands = read_call(q, k, v, **call)
    out, lse = attention(spec, operands)
    return (out, lse) if return_lse else out


def attention(spec: Spec, operands: Operands) -> tuple[Array, Array]:
    """Output and log-sum-exp `[batch, Tq, heads]` of a checked call."""
    allowed = seen(spec, operands)
    scores = jnp.where(allowed, _scores(spec, operands, allowed), -jnp.inf)
    is_pair = scores != -jnp.inf
    has_key = is_pair.any(-1, keepdims=True)
    shift = _shift(scores, operands)
    # Inner where's keep gradients finite.
    weights = jnp.where(is_pair, jnp.exp(jnp.where(is_pair, scores - shift, 0)), 0)
    total = weights.sum(-1, keepdims=True)
    if operands.sinks is not None:
        total = total + jnp.exp(operands.sinks[:, None, None] - shift)
    total = jnp.where(has_key, total, 1)
    values = _per_query_head(_of_seen_keys(operands.v, allowed), operands.group)
    out = jnp.einsum("bhqk,bkhd->bqhd", weights / total, values, precision="highest")
    # A row without a key is zero as it is: this keeps what its cotangent holds out of the gradients.
    out = jnp.where(has_key.swapaxes(1, 2), out, 0)
    lse = jnp.where(has_key, jnp.log(total) + shift, -jnp.inf)[..., 0]
    return out.astype(operands.q.dtype), lse.swapaxes(1, 2)


def _shift(scores: Array, operands: Operands) -> Array:
    """What keeps a row's exponentials in range: any value will do, so it takes no part in derivatives."""
    highest = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    if operands.sinks is not None:
        highest = jnp.maximum(highest, operands.sinks[:, None, None])
    return lax.stop_gradient(jnp.where(highest == -jnp.inf, 0, highest))


def seen(spec: Spec, operands: Operands) -> Array:
    """Which query sees which key, all masks together; `[batch, heads, Tq, Tk]`, or 1 in place of the first two."""
    q_length, kv_length = operands.q.shape[1], operands.k.shape[1]
    rows, columns = jnp.arange(q_length)[:, None], jnp.arange(kv_length)[None, :]
    offset = 0 if operands.q_offset is None else operands.q_offset[:, None, None, None]
    allowed = jnp.ones((1, 1, q_length, kv_length), bool)
    by_position = sees_by_position(spec, rows, columns, offset)
    if by_position is not None:
        allowed = allowed & by_position
    if operands.q_lengths is not None:
        allowed = allowed & (rows < operands.q_lengths[:, None, None, None])
    if operands.kv_lengths is not None:
        allowed = allowed & (columns < operands.kv_lengths[:, None, None, None])
    if operands.q_segments is not None and operands.kv_segments is not None:
        allowed = allowed & (operands.q_segments[:, None, :, None] == operands.kv_segments[:, None, None, :])
    if operands.mask is not None:
        allowed = allowed & operands.mask
    return allowed


def _scores(spec: Spec, operands: Operands, allowed: Array) -> Array:
    # Rows and keys that take part in no pair must not reach a product: 0 * NaN is NaN.
    q = jnp.where(allowed.any(3).swapaxes(1, 2)[..., None], operands.q, 0).astype(jnp.float32)
    k = _per_query_head(_of_seen_keys(operands.k, allowed), operands.group)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k, precision="highest") * scale_of(spec, operands)
    if spec.softcap is not None:
        scores = spec.softcap * jnp.tanh(scores / spec.softcap)
    if operands.bias is not None:
        scores = scores + jnp.where(allowed, operands.bias, 0).astype(jnp.float32)
    return scores


def _of_seen_keys(x: Array, allowed: Array) -> Array:
    """Keys or values, zero where no row of any head sees them."""
    return jnp.where(allowed.any((1, 2))[..., None, None], x, 0)


def _per_query_head(x: Array, group: int) -> Array:
    return jnp.repeat(x.astype(jnp.float32), group, axis=2)
