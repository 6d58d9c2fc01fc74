"""Joins attention over disjoint sets of keys."""

from __future__ import annotations

import jax.numpy as jnp

from .call import Array


def merge_attention(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> tuple[Array, Array]:
    """Attention over two disjoint sets of keys, from that over each: for ring attention and split keys.

    Differentiable in both modes, to any order. The order of the two does not matter, and a third set can be
    merged with the result (the sums are those of the online softmax, arXiv:1805.02867).

    Sinks count once: give them to no part, as each would count them, and a part without keys none. Merge them last
    instead, as a set of their own: output zeros, log-sum-exp `jnp.broadcast_to(sinks, lse.shape)`.

    Args:
        out_a: output over the first set, `[..., Dv]`, such as `flash_attention` returns.
        lse_a: its log-sum-exp, `[...]`, as `flash_attention(..., return_lse=True)` returns it. A row that
            saw no key has -inf.
        out_b: output over the second set, of the shape and dtype of `out_a`.
        lse_b: its log-sum-exp.

    Returns:
        Output in the dtype of `out_a`, and log-sum-exp, float32, over both sets. A row that saw no key in
        either is 0 and -inf.

    Raises:
        ValueError: shapes that do not fit each other.
        TypeError: outputs of different dtypes.

    Example:
        >>> import jax
        >>> q, k, v = (jax.random.normal(key, (1, 64, 2, 16)) for key in jax.random.split(jax.random.key(0), 3))
        >>> halves = [
        ...     flash_attention(q, k[:, part], v[:, part], return_lse=True)
        ...     for part in (slice(0, 20), slice(20, None))
        ... ]
        >>> out, lse = merge_attention(*halves[0], *halves[1])
        >>> bool(jnp.allclose(out, flash_attention(q, k, v), atol=1e-5))
        True
    """
    _check(out_a, lse_a, out_b, lse_b)
    lse_a, lse_b = lse_a.astype(jnp.float32), lse_b.astype(jnp.float32)
    highest = jnp.maximum(lse_a, lse_b)
    empty = highest == -jnp.inf
    shift = jnp.where(empty, 0, highest)
    weight_a, weight_b = _weight(lse_a, shift), _weight(lse_b, shift)
    total = jnp.where(empty, 1, weight_a + weight_b)
    out = _of_seen_rows(out_a, lse_a) * (weight_a / total)[..., None]
    out += _of_seen_rows(out_b, lse_b) * (weight_b / total)[..., None]
    return out.astype(out_a.dtype), jnp.where(empty, -jnp.inf, jnp.log(total) + shift)


def _weight(lse: Array, shift: Array) -> Array:
    # The inner where keeps -inf out of the exponential's gradient.
    empty = lse == -jnp.inf
    return jnp.where(empty, 0, jnp.exp(jnp.where(empty, 0, lse - shift)))


def _of_seen_rows(out: Array, lse: Array) -> Array:
    # Attention of others may leave NaN in rows without keys, which a weight of zero would not stop.
    return jnp.where((lse == -jnp.inf)[..., None], 0, out.astype(jnp.float32))


def _check(out_a: Array, lse_a: Array, out_b: Array, lse_b: Array) -> None:
    if out_a.shape != out_b.shape or lse_a.shape != lse_b.shape or out_a.shape[:-1] != lse_a.shape:
        raise ValueError(
            f"outputs must share one shape, [..., Dv], and log-sum-exps must have it without the last axis; got "
            f"out_a {out_a.shape}, lse_a {lse_a.shape}, out_b {out_b.shape}, lse_b {lse_b.shape}."
        )
    if out_a.dtype != out_b.dtype:
        raise TypeError(f"outputs must share one dtype, got {out_a.dtype} and {out_b.dtype}; cast with .astype.")
