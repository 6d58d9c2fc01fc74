"""The `cudnn` backend: what cuDNN's fused attention can do of a call, through `jax.nn.dot_product_attention`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .call import Array, Operands, Spec


def attend(spec: Spec, operands: Operands) -> tuple[Array, None]:
    """The output of a call that `backends.py` sends here, differentiable by rules of JAX's own."""
    rows, keys = _counting(operands.q, operands.q_lengths), _counting(operands.k, operands.kv_lengths)
    if operands.kv_lengths is not None:
        # Queries without any key: cuDNN makes no zeros of them.
        rows = jnp.logical_and(True if rows is None else rows, (operands.kv_lengths > 0)[:, None, None, None])
    out = jax.nn.dot_product_attention(
        _select(rows, operands.q),
        _select(keys, operands.k),
        _select(keys, operands.v),
        scale=spec.scale,
        is_causal=spec.right == 0,
        local_window_size=None if spec.left is None else (spec.left, 0),
        query_seq_lengths=operands.q_lengths,
        key_value_seq_lengths=operands.kv_lengths,
        implementation="cudnn",
    )
    return _select(rows, out), None


def _counting(x: Array, lengths: Array | None) -> Array | None:
    """Which places along time are no padding, to select from arrays `[batch, time, heads, D]`; None for all."""
    if lengths is None:
        return None
    return (jnp.arange(x.shape[1], dtype=jnp.int32) < lengths[:, None])[..., None, None]


def _select(counts: Array | None, x: Array) -> Array:
    # A product with zero would keep NaN.
    return x if counts is None else jnp.where(counts, x, 0)
