"""Attention calls that benchmarks time: their shapes, inputs, work, and a check of what comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

Arrays = Sequence[jax.Array]
Function = Callable[..., Any]

# Largest relative error in the 2-norm; bfloat16 rounds to 4e-3.
TOLERANCE = {"float32": 1e-4, "bfloat16": 2e-2}
ROWS_TO_CHECK = 256


@dataclasses.dataclass(frozen=True)
class Shape:
    """An attention call on random data; `window` counts the keys that a query sees, its own included."""

    batch: int
    q_length: int
    kv_length: int
    heads: int
    kv_heads: int
    depth: int
    causal: bool = False
    window: int | None = None
    dtype: str = "bfloat16"

    @property
    def masks(self) -> dict[str, Any]:
        """The masks as `flash_attention` takes them."""
        return {"causal": self.causal, "window": None if self.window is None else (self.window - 1, 0)}

    @property
    def label(self) -> str:
        lengths = f"T{self.q_length}" if self.q_length == self.kv_length else f"T{self.q_length}x{self.kv_length}"
        kind = "full" if not self.causal else "causal" if self.window is None else f"window{self.window}"
        return f"B{self.batch} {lengths} H{self.heads}/{self.kv_heads} D{self.depth} {kind}"

    @property
    def forward_flops(self) -> int:
        """Of the products: halved when causal, of the visible pairs with a window."""
        a_pair = 4 * self.batch * self.heads * self.depth
        if self.window is not None:
            rows = np.arange(self.q_length, dtype=np.int64)
            return a_pair * int(np.minimum(rows + 1, self.window).sum())
        return a_pair * self.q_length * self.kv_length // (2 if self.causal else 1)

    @property
    def cache_bytes(self) -> int:
        """Of keys and values."""
        return 2 * self.batch * self.kv_length * self.kv_heads * self.depth * jnp.dtype(self.dtype).itemsize

    def draw(self, seed: int = 0) -> tuple[jax.Array, ...]:
        """Queries, keys, values, and a cotangent of the output."""
        keys = jax.random.split(jax.random.key(seed), 4)
        q = (self.batch, self.q_length, self.heads, self.depth)
        kv = (self.batch, self.kv_length, self.kv_heads, self.depth)
        return tuple(jax.random.normal(key, size, self.dtype) for key, size in zip(keys, (q, kv, kv, q), strict=True))


def gradients(attention: Function) -> Function:
    """Forward and backward pass in one: (q, k, v, dout) to the gradients of q, k and v."""

    def forward_and_backward(q: jax.Array, k: jax.Array, v: jax.Array, dout: jax.Array) -> Any:
        return jax.vjp(attention, q, k, v)[1](dout)

    return forward_and_backward


def expect_rows(shape: Shape, arrays: Arrays, *, of_gradient: bool) -> jax.Array:
    """What the rows of `rows_of` must be, by plain attention in float32: of the output, or of the gradient of q."""
    q, k, v, dout = (x.astype(jnp.float32) for x in arrays)
    rows = _rows(shape)
    first = jnp.arange(shape.q_length)[rows]
    # All arrays are arguments: XLA would work on constants while it compiles.
    plain = jax.jit(lambda part, k, v: _plain_rows(part, k, v, first, shape))
    if not of_gradient:
        return plain(q[-1, rows], k[-1], v[-1])
    return jax.vjp(plain, q[-1, rows], k[-1], v[-1])[1](dout[-1, rows])[0]


def rows_of(shape: Shape, array: jax.Array) -> jax.Array:
    """The rows that are checked: some from the middle of the last batch entry."""
    return array[-1, _rows(shape)]


def distance(out: jax.Array, expected: jax.Array) -> float:
    """Relative error in the 2-norm, infinite where something is not finite."""
    out, expected = out.astype(jnp.float32), expected.astype(jnp.float32)
    error = jnp.linalg.norm((out - expected).ravel()) / jnp.linalg.norm(expected.ravel())
    return float(error) if bool(jnp.isfinite(out).all()) else float("inf")


def _rows(shape: Shape) -> slice:
    start = min(shape.q_length // 2 + 37, shape.q_length - 1)
    return slice(start, start + ROWS_TO_CHECK)


def _plain_rows(q: jax.Array, k: jax.Array, v: jax.Array, rows: jax.Array, shape: Shape) -> jax.Array:
    k, v = (jnp.repeat(x, shape.heads // shape.kv_heads, axis=1) for x in (k, v))
    scores = jnp.einsum("qhd,khd->hqk", q, k, precision="highest") * shape.depth**-0.5
    behind = rows[:, None] - jnp.arange(shape.kv_length)
    seen = (behind >= 0) if shape.causal else jnp.ones_like(behind, bool)
    if shape.window is not None:
        seen &= behind < shape.window
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
    return jnp.einsum("hqk,khd->qhd", weights, v, precision="highest")
