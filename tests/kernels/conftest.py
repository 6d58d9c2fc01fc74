"""The attention oracle: float64 NumPy, written from the formulas, blind to how any backend computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

FORWARD_TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}
GRADIENT_TOLERANCE = {"float32": 5e-5, "float16": 2e-2, "bfloat16": 2e-2}
ROUNDING = {"float32": 2e-6, "float16": 2e-3, "bfloat16": 1.6e-2}
FEW = 8


@dataclass(frozen=True)
class Shape:
    q_length: int
    kv_length: int
    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    depth: int = 16
    v_depth: int | None = None

    @property
    def q(self) -> tuple[int, ...]:
        return (self.batch, self.q_length, self.heads, self.depth)

    @property
    def k(self) -> tuple[int, ...]:
        return (self.batch, self.kv_length, self.kv_heads, self.depth)

    @property
    def v(self) -> tuple[int, ...]:
        return (*self.k[:3], self.v_depth or self.depth)

    @property
    def out(self) -> tuple[int, ...]:
        return (*self.q[:3], self.v[3])


class Oracle:
    """Inputs, exact answers and the verdict."""

    Shape = Shape

    def jit(self, function: Any, **options: Any) -> Any:
        """`jax.jit` at half its compile time: tests compile hundreds of programs and run each once."""
        return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0}, **options)

    def inputs(self, shape: Shape, dtype: str = "float32", seed: int = 0) -> tuple[Any, Any, Any]:
        rng = np.random.default_rng(seed)
        return tuple(jnp.asarray(rng.standard_normal(s), dtype) for s in (shape.q, shape.k, shape.v))

    def cotangent(self, shape: Shape, dtype: str = "float32", seed: int = 0) -> Any:
        return jnp.asarray(np.random.default_rng(seed + 10_000).standard_normal(shape.out), dtype)

    def forward(self, q: Any, k: Any, v: Any, causal: bool = False, scale: float | None = None) -> np.ndarray:
        weights, _, v = self._weights(q, k, v, causal, scale)
        return np.einsum("bhqk,bkhd->bqhd", weights, v)

    def gradients(
        self, q: Any, k: Any, v: Any, dout: Any, causal: bool = False, scale: float | None = None
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        weights, k64, v64 = self._weights(q, k, v, causal, scale)
        q64, dout = _double(q), _double(dout)
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        dv = np.einsum("bhqk,bqhd->bkhd", weights, dout)
        dweights = np.einsum("bqhd,bkhd->bhqk", dout, v64)
        dscores = weights * (dweights - (dweights * weights).sum(-1, keepdims=True))
        dq = scale * np.einsum("bhqk,bkhd->bqhd", dscores, k64)
        dk = scale * np.einsum("bhqk,bqhd->bkhd", dscores, q64)
        return dq, _sum_groups(dk, k.shape[2]), _sum_groups(dv, k.shape[2])

    def check_forward(self, out: Any, q: Any, k: Any, v: Any, tolerance: float | None = None, **call: Any) -> None:
        want = self.forward(q, k, v, **call)
        assert out.shape == want.shape
        assert out.dtype == q.dtype
        assert np.isfinite(_double(out)).all()
        error = np.abs(_double(out) - want).max() / np.abs(_double(v)).max()
        assert error <= (tolerance or FORWARD_TOLERANCE[str(q.dtype)])

    def check_gradients(
        self, grads: Any, q: Any, k: Any, v: Any, dout: Any, tolerance: float | None = None, **call: Any
    ) -> None:
        dtype = str(q.dtype)
        slack = self._cancellation(q, k, v, dout, **call)
        wanted = self.gradients(q, k, v, dout, **call)
        for name, got, want, operand in zip("qkv", grads, wanted, (q, k, v), strict=True):
            assert got.shape == operand.shape
            assert got.dtype == operand.dtype
            assert np.isfinite(_double(got)).all(), f"d{name}"
            error = np.abs(_double(got) - want).max()
            allowed = (tolerance or GRADIENT_TOLERANCE[dtype]) * np.abs(want).max() + slack[name]
            assert error <= allowed, f"d{name}: {error} > {allowed}"

    def _cancellation(
        self, q: Any, k: Any, v: Any, dout: Any, causal: bool = False, scale: float | None = None
    ) -> dict[str, float]:
        """What rounding may leave of gradients that cancel: with few rows, keys or values all may."""
        if min(q.shape[1], k.shape[1], v.shape[3]) >= FEW:
            return dict.fromkeys("qkv", 0.0)
        weights, k64, v64 = self._weights(q, k, v, causal, scale)
        dweights = np.einsum("bqhd,bkhd->bhqk", abs(_double(dout)), abs(v64))
        dscores = weights * (dweights + (dweights * weights).sum(-1, keepdims=True))
        factor = ROUNDING[str(q.dtype)] * (q.shape[-1] ** -0.5 if scale is None else abs(scale))
        dq = factor * np.einsum("bhqk,bkhd->bqhd", dscores, abs(k64))
        dk = factor * np.einsum("bhqk,bqhd->bkhd", dscores, abs(_double(q)))
        return {"q": dq.max(), "k": _sum_groups(dk, k.shape[2]).max(), "v": 0.0}

    def _weights(self, q: Any, k: Any, v: Any, causal: bool, scale: float | None) -> tuple[np.ndarray, ...]:
        group = q.shape[2] // k.shape[2]
        k64, v64 = (np.repeat(_double(x), group, axis=2) for x in (k, v))
        scale = q.shape[-1] ** -0.5 if scale is None else scale
        scores = scale * np.einsum("bqhd,bkhd->bhqk", _double(q), k64)
        if causal:
            forbidden = np.arange(k.shape[1])[None, :] > np.arange(q.shape[1])[:, None]
            scores[:, :, forbidden] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e30))
        total = weights.sum(-1, keepdims=True)
        return weights / np.where(total == 0, 1, total), k64, v64


def _double(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _sum_groups(grad: np.ndarray, kv_heads: int) -> np.ndarray:
    batch, length, heads, depth = grad.shape
    return grad.reshape(batch, length, kv_heads, heads // kv_heads, depth).sum(3)


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()
