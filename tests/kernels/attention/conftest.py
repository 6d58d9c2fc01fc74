"""A backend as plain as can be, to test what the backends share apart from any of them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tune_jax.kernels.attention import reference
from tune_jax.kernels.attention.call import Gradients, Operands, Saved, Spec, gradient_dtype, scale_of


class PlainKernels:
    """The three walks without blocks, from the formulas of the contract; named in lowered programs."""

    def forward(self, spec: Spec, operands: Operands) -> tuple[Any, Any]:
        def forward_walk(operands: Operands) -> tuple[Any, Any]:
            out, lse = reference.attention(spec, operands)
            return out, lse.swapaxes(1, 2)

        return jax.jit(forward_walk)(operands)

    def backward(self, spec: Spec, operands: Operands, saved: Saved) -> Gradients:
        def backward_walk(operands: Operands, saved: Saved) -> Gradients:
            return _gradients(spec, operands, saved)

        return jax.jit(backward_walk)(operands, saved)

    def bias_gradient(self, spec: Spec, operands: Operands, saved: Saved) -> Any:
        def bias_walk(operands: Operands, saved: Saved) -> Any:
            _, dscores, _ = _score_gradients(spec, operands, saved)
            broadcast = [axis for axis, size in enumerate(operands.bias.shape) if size == 1]
            return dscores.sum(broadcast, keepdims=True)

        return jax.jit(bias_walk)(operands, saved)


def _score_gradients(spec: Spec, operands: Operands, saved: Saved) -> tuple[Any, Any, Any]:
    """Weights, gradients of the final scores, and the derivative of those by scaled products."""
    _, k, v = (jnp.repeat(x.astype(jnp.float32), operands.group, 2) for x in operands[:3])
    q, dout = operands.q.astype(jnp.float32), saved.dout.astype(jnp.float32)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) * scale_of(spec, operands)
    slope = jnp.ones_like(scores)
    if spec.softcap is not None:
        capped = jnp.tanh(scores / spec.softcap)
        scores, slope = spec.softcap * capped, 1 - capped**2
    if operands.bias is not None:
        scores = scores + operands.bias
    seen = reference.seen(spec, operands)
    weights = jnp.where(seen, jnp.exp(scores - saved.lse[..., None]), 0)
    dweights = jnp.einsum("bqhd,bkhd->bhqk", dout, v)
    return weights, jnp.where(seen, weights * (dweights - saved.delta[..., None]), 0), slope


def _gradients(spec: Spec, operands: Operands, saved: Saved) -> Gradients:
    weights, dscores, slope = _score_gradients(spec, operands, saved)
    # Rows that see nothing may hold anything.
    empty = jnp.isposinf(saved.lse).swapaxes(1, 2)[..., None]
    q, dout = (jnp.where(empty, 0, x.astype(jnp.float32)) for x in (operands.q, saved.dout))
    k = jnp.repeat(operands.k.astype(jnp.float32), operands.group, 2)
    dscores = dscores * slope * (1 if spec.scale is None else spec.scale)
    dq = jnp.einsum("bhqk,bkhd->bqhd", dscores, k)
    dk, dv = (jnp.einsum("bhqk,bqhd->bkhd", *pair) for pair in ((dscores, q), (weights, dout)))
    dk, dv = (x.reshape(*x.shape[:2], -1, operands.group, x.shape[3]).sum(3) for x in (dk, dv))
    dtype = gradient_dtype(spec, operands)
    return Gradients(dq.astype(dtype), dk.astype(dtype), dv.astype(operands.v.dtype))


@pytest.fixture(scope="session")
def plain_kernels() -> PlainKernels:
    return PlainKernels()
