"""Plain attention in float32: short enough to check by eye, the yardstick for the fast backends."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from .api import check_call


def reference_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    scale: float | jax.Array | None = None,
) -> jax.Array:
    """Attention by its definition: softmax(scale * q k') v, with the whole score matrix in float32.

    Shapes, dtypes, meaning of the arguments and errors are those of `flash_attention`; the memory it takes
    grows with Tq x Tk, so use it to check results, not to train.

    Returns:
        `[batch, Tq, heads, Dv]` in the dtype of `q`. A query row that has no key (Tk = 0) is zero.

    Example:
        >>> import jax.numpy as jnp
        >>> q = jnp.ones((1, 4, 2, 8))
        >>> v = jnp.arange(4.0).reshape(1, 4, 1, 1)
        >>> reference_attention(q, q[:, :, :1], v, causal=True)[0, :, 0, 0].tolist()
        [0.0, 0.5, 1.0, 1.5]
    """
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    check_call(q, k, v, causal=causal, scale=scale)
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    group = q.shape[2] // k.shape[2]
    keys = jnp.repeat(k.astype(jnp.float32), group, axis=2)
    values = jnp.repeat(v.astype(jnp.float32), group, axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q.astype(jnp.float32), keys, precision="highest") * scale
    if causal:
        allowed = jnp.tri(q.shape[1], k.shape[1], dtype=bool)
        scores = jnp.where(allowed, scores, -jnp.inf)
    # `initial` keeps the maximum defined when there is no key at all; it is never the larger one otherwise.
    highest = jnp.max(scores, axis=-1, keepdims=True, initial=-jnp.inf)
    weights = jnp.exp(scores - jax.lax.stop_gradient(highest))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total == 0, 1, total)
    return jnp.einsum("bhqk,bkhd->bqhd", weights, values, precision="highest").astype(q.dtype)
