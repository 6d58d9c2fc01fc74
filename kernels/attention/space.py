"""Which block sizes are worth trying for an attention call."""

from __future__ import annotations

from typing import Any

from .checks import check_arrays

_BLOCK_SIZES = (64, 128, 256, 512, 1024)


def flash_attention_space(q: Any, k: Any, v: Any, *, causal: bool = False, **statics: Any) -> dict[str, list[int]]:
    """Hyperparameters of `flash_attention` to try for one call: powers of two, clipped to the lengths.

    Give it to the tuner as it is, `tune(flash_attention, hyperparams=flash_attention_space)`, or call it.

    Args:
        q: the queries of the call, or anything with their `shape` and `dtype`, such as
            `jax.ShapeDtypeStruct`.
        k: the keys, likewise.
        v: the values, likewise.
        causal: as in the call; with more keys than queries, later keys are never read and do not count.
        **statics: the call's other arguments; they do not change this space.

    Returns:
        A dict of lists, `block_q` and `block_k`. No two combinations make the same blocks.

    Raises:
        ValueError: for shapes that `flash_attention` does not take.
        TypeError: for such dtypes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> q = jax.ShapeDtypeStruct((1, 100, 4, 64), jnp.float32)
        >>> flash_attention_space(q, q, q)
        {'block_q': [64, 100], 'block_k': [64, 100]}
    """
    check_arrays(q, k, v)
    q_length, kv_length = q.shape[1], k.shape[1]
    keys_in_reach = min(kv_length, q_length) if causal else kv_length
    return {"block_q": _blocks_for(q_length), "block_k": _blocks_for(keys_in_reach)}


def _blocks_for(length: int) -> list[int]:
    # A block longer than the array is the array: clipping keeps that choice once.
    return sorted({min(size, max(length, 1)) for size in _BLOCK_SIZES})
