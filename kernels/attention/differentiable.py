"""What all backends with a backward pass of their own share: the rule that ties forward and backward together."""

from __future__ import annotations

import functools
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .call import Array, Gradients, Operands, Saved, Spec

OUT_NAME = "flash_attention_out"
LSE_NAME = "flash_attention_lse"


class Kernels(Protocol):
    """The three walks over blocks that make a backend; no operand has an axis without elements."""

    def forward(self, spec: Spec, operands: Operands) -> tuple[Array, Array]:
        """Output `[batch, Tq, heads, Dv]` in q's dtype and log-sum-exp `[batch, heads, Tq]`, float32.

        A row that sees no key is 0, its log-sum-exp -inf, with sinks as without.
        """
        ...

    def backward(self, spec: Spec, operands: Operands, saved: Saved) -> Gradients:
        """The gradients of queries, keys and values."""
        ...

    def bias_gradient(self, spec: Spec, operands: Operands, saved: Saved) -> Array:
        """The sum of ds over the axes along which the bias is broadcast; its shape, float32."""
        ...


class _Residuals(NamedTuple):
    operands: Operands
    out: Array
    lse: Array


def attend(kernels: Kernels, spec: Spec, operands: Operands) -> tuple[Array, Array]:
    """Output and log-sum-exp `[batch, Tq, heads]`, both differentiable once, in reverse mode."""
    if 0 in (operands.q.size, operands.k.size, operands.v.size):
        return _attend_to_nothing(operands)
    out, lse = _attend(kernels, spec, _vary_alike(operands))
    return out, lse.swapaxes(1, 2)


def _attend_to_nothing(operands: Operands) -> tuple[Array, Array]:
    rows = operands.q.shape[:3]
    return jnp.zeros((*rows, operands.v.shape[3]), operands.q.dtype), jnp.full(rows, -jnp.inf, jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(kernels: Kernels, spec: Spec, operands: Operands) -> tuple[Array, Array]:
    return kernels.forward(spec, operands)


def _forward(kernels: Kernels, spec: Spec, operands: Operands) -> tuple[tuple[Array, Array], _Residuals]:
    out, lse = kernels.forward(spec, operands)
    # Named, so that a checkpoint policy can keep them: the backward pass then needs no second forward pass.
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (out, lse), _Residuals(operands, out, lse)


def _backward(kernels: Kernels, spec: Spec, residuals: _Residuals, cotangents: tuple[Array, Array]) -> tuple[Operands]:
    operands, out, lse = residuals
    saved = _save(operands, out, lse, *cotangents)
    grads = kernels.backward(spec, operands, saved)
    dq, dk, dscale = _apply_scale(operands, grads)
    dbias = None
    if operands.bias is not None:
        dbias = kernels.bias_gradient(spec, operands, saved).astype(operands.bias.dtype)
    return (
        Operands(
            q=dq,
            k=dk,
            v=grads.v,
            bias=dbias,
            sinks=_sinks_gradient(operands, saved),
            scale=dscale,
        ),
    )


_attend.defvjp(_forward, _backward)


def _save(operands: Operands, out: Array, lse: Array, dout: Array, dlse: Array) -> Saved:
    products = dout.astype(jnp.float32) * out.astype(jnp.float32)
    empty = lse == -jnp.inf
    # Cotangents of rows that see nothing count for nothing, whatever they hold.
    delta = jnp.where(empty, 0, products.sum(-1).swapaxes(1, 2) - dlse)
    return Saved(lse=jnp.where(empty, jnp.inf, lse), dout=dout, delta=delta)


def _apply_scale(operands: Operands, grads: Gradients) -> tuple[Array, Array, Array | None]:
    if operands.scale is None:
        return grads.q, grads.k, None
    # Rows that see nothing may hold NaN in q, and have no part in this.
    products = jnp.where(grads.q == 0, 0, grads.q * operands.q.astype(jnp.float32))
    dq, dk = grads.q * operands.scale, grads.k * operands.scale
    return dq.astype(operands.q.dtype), dk.astype(operands.k.dtype), products.sum()


def _sinks_gradient(operands: Operands, saved: Saved) -> Array | None:
    if operands.sinks is None:
        return None
    weights = jnp.exp(operands.sinks[None, :, None] - saved.lse)
    return -(weights * saved.delta).sum((0, 2))


def _vary_alike(operands: Operands) -> Operands:
    """Inside shard_map, marks all arrays as varying over the mesh axes that any of them varies over.

    Loop carries must keep their type, and they mix all of the arrays.
    """
    varying = [jax.typeof(array).manual_axis_type.varying for array in jax.tree.leaves(operands)]
    axes = frozenset[str]().union(*varying)
    return jax.tree.map(
        lambda x: lax.pcast(x, tuple(axes - jax.typeof(x).manual_axis_type.varying), to="varying"), operands
    )
