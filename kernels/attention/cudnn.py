"""The `cudnn` backend: what cuDNN's fused attention can do of a call, through `jax.nn.dot_product_attention`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .call import Array, Operands, Spec

_WIDEST = 256  # columns of a head; 128 before Hopper


def attend(spec: Spec, operands: Operands) -> tuple[Array, None]:
    """The output of a call that `refusal` has no objection to, differentiable by rules of JAX's own."""
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


def refusal(spec: Spec, operands: Operands, *, return_lse: bool = False, widest_head: int = _WIDEST) -> str | None:
    """Why cuDNN through JAX does not do what a call asks, as the end of a sentence about it; None if it does.

    Args:
        spec: what is fixed of the call.
        operands: its arrays; abstract ones will do.
        return_lse: whether the call wants the log-sum-exp.
        widest_head: the largest head_dim on the device: 256 from Hopper on, 128 before.
    """
    objections = (
        *_objections_to_features(spec, operands, return_lse),
        *_objections_to_shapes(spec, operands, widest_head),
    )
    return next((reason for holds, reason in objections if holds), None)


def _objections_to_features(spec: Spec, operands: Operands, return_lse: bool) -> tuple[tuple[bool, str], ...]:
    has_lengths = operands.q_lengths is not None or operands.kv_lengths is not None
    return (
        (return_lse, "gives no log-sum-exp in float32"),
        (spec.deterministic, "has no switch for a backward pass that repeats bit for bit"),
        (operands.scale is not None, "takes no array as scale"),
        (spec.softcap is not None, "has no softcap"),
        (operands.sinks is not None, "has no sinks"),
        (operands.q_segments is not None, "has no segment_ids"),
        (operands.q_offset is not None, "has no q_offset"),
        # As a bias of large numbers, which makes no zeros of rows that see nothing and lets NaN through.
        (operands.mask is not None, "takes a mask for a bias"),
        (operands.bias is not None, "sums the gradient of a bias in its low precision"),
        (spec.right is not None and spec.right > 0, "has no window to the right"),
        (spec.left is not None and spec.right != 0, "has a window to the left only where the call is causal"),
        (spec.left is not None and has_lengths, "makes NaN of rows whose window lies past the last key"),
    )


def _objections_to_shapes(spec: Spec, operands: Operands, widest_head: int) -> tuple[tuple[bool, str], ...]:
    q_length, kv_length = operands.q.shape[1], operands.k.shape[1]
    depth, v_depth = operands.q.shape[3], operands.v.shape[3]
    past_keys = spec.left is not None and q_length - spec.left > kv_length
    return (
        (0 in (*operands.q.shape, *operands.k.shape), "takes no arrays without elements"),
        (operands.q.dtype == jnp.float32, "takes bfloat16 and float16 only"),
        (depth != v_depth, f"takes one head_dim, not {depth} for keys and {v_depth} for values"),
        (
            bool(depth % 8) or depth > widest_head,
            f"takes a head_dim that is a multiple of 8 up to {widest_head}, not {depth}",
        ),
        (past_keys, "makes NaN of rows whose window lies past the last key"),
    )


def _counting(x: Array, lengths: Array | None) -> Array | None:
    """Which places along time are no padding, to select from arrays `[batch, time, heads, D]`; None for all."""
    if lengths is None:
        return None
    return (jnp.arange(x.shape[1], dtype=jnp.int32) < lengths[:, None])[..., None, None]


def _select(counts: Array | None, x: Array) -> Array:
    # A product with zero would keep NaN.
    return x if counts is None else jnp.where(counts, x, 0)
