"""`flash_attention`: one call, checked here, computed by one of the backends next to this file."""

from __future__ import annotations

import importlib
from typing import Any, Protocol, cast

import jax
import jax.numpy as jnp
import numpy as np

# In order of preference. A backend is a module of this folder that has this name and holds a function
# `attention` (see `Backend`); it is imported when it is first used, so it may need what not everyone has.
IMPLEMENTATIONS = ("xla",)

_DTYPES = ("float32", "bfloat16", "float16")


class Backend(Protocol):
    """What a backend's `attention` function takes: arguments that `check_call` has passed."""

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        *,
        causal: bool,
        scale: float | jax.Array | None,
        block_q: int | None,
        block_k: int | None,
    ) -> jax.Array:
        """Returns the attention output, `[batch, Tq, heads, Dv]` in the dtype of `q`."""
        ...


def flash_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    causal: bool = False,
    scale: float | jax.Array | None = None,
    implementation: str | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
) -> jax.Array:
    """Exact attention, softmax(scale * q k') v, computed block by block in memory linear in the lengths.

    The softmax is built up over blocks of keys (online softmax, Milakov and Gimelshein 2018,
    arXiv:1805.02867) and the backward pass computes the blocks again instead of keeping them
    (FlashAttention, Dao et al. 2022, arXiv:2205.14135). Sums are float32 in every dtype. Differentiable in
    reverse mode with respect to `q`, `k`, `v` and `scale`; works under `jit`, `vmap`, `grad`,
    `jax.checkpoint` and `shard_map`.

    Args:
        q: queries, `[batch, Tq, heads, D]`; float32, bfloat16 or float16.
        k: keys, `[batch, Tk, kv_heads, D]`, same dtype. `heads` is a multiple of `kv_heads`: query head h
            reads key and value head `h // (heads // kv_heads)`.
        v: values, `[batch, Tk, kv_heads, Dv]`, same dtype. `Dv` may differ from `D`.
        causal: query i sees keys 0 to i, counted from the first of each, also when Tq and Tk differ (as in
            `jax.nn.dot_product_attention`).
        scale: factor on the scores, 1/sqrt(D) if None.
        implementation: the backend, one of `IMPLEMENTATIONS`; if None, the best for the call.
        block_q: queries a block, any positive whole number, also one that does not divide Tq; the backend's
            own choice if None. Changes speed and memory, not the result.
        block_k: keys a block, likewise.

    Returns:
        `[batch, Tq, heads, Dv]` in the dtype of `q`. A query row that has no key (Tk = 0) is zero.

    Raises:
        ValueError: shapes that do not fit each other, an unknown implementation, a block size that is not a
            positive whole number.
        TypeError: a dtype other than the three, dtypes that differ, a `causal` that is not a bool, a
            `scale` that is not a real scalar; forward-mode differentiation (from JAX).

    Example:
        >>> import jax, jax.numpy as jnp
        >>> q = jax.random.normal(jax.random.key(0), (2, 100, 8, 64))
        >>> k, v = q[:, :, :2], q[:, :, 2:4]
        >>> out = flash_attention(q, k, v, causal=True, block_q=32, block_k=64)
        >>> out.shape
        (2, 100, 8, 64)
        >>> bool(jnp.allclose(out[:, 0, :4], v[:, 0, :1], atol=1e-5))  # the first query sees one key
        True
    """
    q, k, v = jnp.asarray(q), jnp.asarray(k), jnp.asarray(v)
    check_call(q, k, v, causal=causal, scale=scale)
    block_q, block_k = _checked_block("block_q", block_q), _checked_block("block_k", block_k)
    attention = _backend(IMPLEMENTATIONS[0] if implementation is None else implementation)
    return attention(q, k, v, causal=bool(causal), scale=scale, block_q=block_q, block_k=block_k)


def check_call(q: Any, k: Any, v: Any, *, causal: Any, scale: Any) -> None:
    """Raises for an attention call that no backend can mean anything by."""
    check_arrays(q, k, v)
    if not isinstance(causal, (bool, np.bool_)):
        raise TypeError(f"causal must be True or False, got {_kind(causal)}; under jit, make it static.")
    number = isinstance(scale, (int, float, np.number, np.ndarray, jax.Array)) and not isinstance(scale, bool)
    if scale is not None and not (number and np.ndim(scale) == 0 and not jnp.iscomplexobj(scale)):
        raise TypeError(f"scale must be a real scalar or None, got {_kind(scale)}; None is 1/sqrt(head_dim).")


def check_arrays(q: Any, k: Any, v: Any) -> None:
    """Raises unless shapes and dtypes fit each other; abstract arrays will do."""
    _check_ranks(q, k, v)
    _check_sizes(q.shape, k.shape, v.shape)
    _check_dtypes(q, k, v)


def _check_ranks(q: Any, k: Any, v: Any) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        if len(array.shape) != 4:
            raise ValueError(
                f"{name} must have 4 axes, [batch, time, heads, head_dim], got shape {array.shape}; "
                f"add an axis of size 1 for each that is missing, or use jax.vmap for more."
            )


def _check_sizes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    shapes = f"got q {q}, k {k}, v {v}"
    if not q[0] == k[0] == v[0]:
        raise ValueError(f"q, k and v must have the same batch (axis 0), {shapes}; broadcast the smaller one.")
    if k[1:3] != v[1:3]:
        raise ValueError(
            f"k and v must have the same time and heads (axes 1 and 2), {shapes}; "
            f"arrays are [batch, time, heads, head_dim]."
        )
    if q[3] != k[3] or q[3] == 0:
        raise ValueError(
            f"q and k must have the same head_dim (axis 3), at least 1, {shapes}; "
            f"only v may have a head_dim of its own."
        )
    if k[2] == 0 or q[2] % k[2]:
        raise ValueError(
            f"q's heads must be a multiple of k's (axis 2): {q[2]} is not a multiple of {k[2]}, {shapes}; "
            f"arrays are [batch, time, heads, head_dim], so time and heads may be swapped."
        )


def _check_dtypes(q: Any, k: Any, v: Any) -> None:
    names = tuple(str(array.dtype) for array in (q, k, v))
    if len(set(names)) > 1 or names[0] not in _DTYPES:
        raise TypeError(
            f"q, k and v must share one dtype out of {', '.join(_DTYPES)}, got {', '.join(names)}; cast with .astype."
        )


def _checked_block(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if isinstance(value, (bool, np.bool_)) or not isinstance(value, (int, np.integer)) or value < 1:
        raise ValueError(
            f"{name} must be a positive whole number or None, got {_kind(value)}; try a power of two such as "
            f"128, and make it static under jit."
        )
    return int(value)


def _backend(name: str) -> Backend:
    if name not in IMPLEMENTATIONS:
        available = ", ".join(repr(each) for each in IMPLEMENTATIONS)
        raise ValueError(f"implementation {name!r} is unknown; available: {available}, or None for the best one.")
    return cast(Backend, importlib.import_module(f".{name}", __package__).attention)


def _kind(value: object) -> str:
    return f"{value!r} ({type(value).__name__})"
