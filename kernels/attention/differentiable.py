"""What all backends with a backward pass of their own share: the rule that ties forward and backward together."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType

from .call import Array, Gradients, Operands, Saved, Spec
from .reverse_only import reverse_only

OUT_NAME = "flash_attention_out"
LSE_NAME = "flash_attention_lse"


class Kernels(Protocol):
    """The three walks over blocks that make a backend; no operand has an axis without elements.

    Hashable. Walks that XLA cannot look into, such as Pallas kernels, go through `partition.Partitioned`, which
    deals with several devices and with `jax.vmap`; those in plain JAX need no such help.
    """

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
    if 0 in (operands.q.size, operands.k.size):
        return _attend_to_nothing(operands)
    if operands.v.size == 0:
        return _attend_without_values(kernels, spec, operands)
    out, lse = _attend(kernels, spec, vary_alike(reverse_only(operands)))
    return out, lse.swapaxes(1, 2)


def _attend_to_nothing(operands: Operands) -> tuple[Array, Array]:
    rows = operands.q.shape[:3]
    return jnp.zeros((*rows, operands.v.shape[3]), operands.q.dtype), jnp.full(rows, -jnp.inf, jnp.float32)


def _attend_without_values(kernels: Kernels, spec: Spec, operands: Operands) -> tuple[Array, Array]:
    values = jnp.zeros((*operands.v.shape[:3], 1), operands.v.dtype)
    out, lse = attend(kernels, spec, operands._replace(v=values))
    return out[..., :0], lse


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(kernels: Kernels, spec: Spec, operands: Operands) -> tuple[Array, Array]:
    return _walk(kernels.forward, spec, operands)


def _forward(kernels: Kernels, spec: Spec, operands: Operands) -> tuple[tuple[Array, Array], _Residuals]:
    out, lse = _walk(kernels.forward, spec, operands)
    # Named, so that a checkpoint policy can keep them: the backward pass then needs no second forward pass.
    out, lse = checkpoint_name(out, OUT_NAME), checkpoint_name(lse, LSE_NAME)
    return (out, lse), _Residuals(operands, out, lse)


def _backward(kernels: Kernels, spec: Spec, residuals: _Residuals, cotangents: tuple[Array, Array]) -> tuple[Operands]:
    operands, out, lse = residuals
    saved = _save(out, lse, *cotangents)
    grads = _walk(kernels.backward, spec, operands, saved)
    dq, dk, dscale = _apply_scale(operands, grads)
    dbias = None
    if operands.bias is not None:
        # A walk of its own, so that it is left out where the bias is not differentiated.
        dbias = _walk(kernels.bias_gradient, spec, operands, saved).astype(operands.bias.dtype)
    gradients = Operands(q=dq, k=dk, v=grads.v, bias=dbias, sinks=_sinks_gradient(operands, saved), scale=dscale)
    return (_place_as(operands, gradients),)


_attend.defvjp(_forward, _backward)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _walk(walk: Callable[..., Any], spec: Spec, *arrays: Any) -> Any:
    """A walk that says what to do when something wants its derivative: `_attend` has only the first."""
    return walk(spec, *arrays)


@_walk.defjvp
def _refuse_second_derivative(walk: Any, spec: Spec, primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        "flash_attention cannot be differentiated twice; use reference_attention, which takes the same arguments "
        "and can be differentiated as often as you like, in memory that grows with Tq x Tk."
    )


def _place_as(operands: Operands, gradients: Operands) -> Operands:
    """Explicit mesh axes are in the types of arrays, and a gradient must have the type of its operand."""
    if AxisType.Explicit not in jax.sharding.get_abstract_mesh().axis_types:
        return gradients
    pairs = zip(operands, gradients, strict=True)
    return Operands(*(y if y is None else jax.sharding.reshard(y, jax.typeof(x).sharding.spec) for x, y in pairs))


def _save(out: Array, lse: Array, dout: Array, dlse: Array) -> Saved:
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


def vary_alike(arrays: Any) -> Any:
    """Inside shard_map, marks all arrays as varying over the mesh axes that any of them varies over.

    Loop carries must keep their type, and they mix all of the arrays.
    """
    varying = [jax.typeof(array).manual_axis_type.varying for array in jax.tree.leaves(arrays)]
    axes = frozenset[str]().union(*varying)
    return jax.tree.map(
        lambda x: lax.pcast(x, tuple(axes - jax.typeof(x).manual_axis_type.varying), to="varying"), arrays
    )
