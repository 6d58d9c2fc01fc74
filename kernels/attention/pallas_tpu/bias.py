"""The gradient of a bias: the gradients of the scores, summed over the axes along which the bias is broadcast.

The grid has those axes last, so that a block of the gradient stays in VMEM until it has its whole sum.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl

from .._pallas import like, run
from ..call import Array, Operands, Saved, Spec
from .layout import Inputs, lay_out
from .plan import Plan, plan_dq
from .ranges import Scalars, key_ranges
from .tile import score, score_gradient, visible_pairs, visit_tile
from .walk import Place, call, line, pair_spec


def bias_gradient(spec: Spec, operands: Operands, saved: Saved) -> Array:
    """The gradient of the bias in its shape, float32, see `differentiable.Kernels`."""
    plan = plan_dq(spec, operands)
    inputs, scalars = lay_out(plan, operands, saved), key_ranges(plan, operands)
    shape = inputs.bias.shape
    # The places of batch, head, block of queries and block of keys in the grid.
    order = sorted(range(4), key=lambda axis: shape[axis] == 1)
    sizes = (*inputs.q.shape[:2], plan.q_blocks, plan.k_blocks)
    make_call = call(
        plan=plan,
        kernel=functools.partial(_kernel, plan, order, shape),
        name="flash_attention_dbias",
        grid=tuple(sizes[axis] for axis in order),
        sums_over=sum(size == 1 for size in shape),
        locate=functools.partial(_loaded, plan, order),
        outputs=like(inputs, shape, jnp.float32),
        out_specs=pair_spec(plan, shape, functools.partial(_place, order)),
        scratch=(),
    )
    dbias = run(make_call, scalars, inputs, platform="tpu")
    return dbias[:, :, : operands.bias.shape[2], : operands.bias.shape[3]]


def _place(order: list[int], *indices: Any) -> Place:
    return Place(*(indices[order.index(axis)] for axis in range(4)))


def _loaded(plan: Plan, order: list[int], *indices: Any) -> Place:
    """The tile of a step; the very first one where no pair of it counts, so that nothing is loaded for it."""
    *indices, scalars = indices
    place = _place(order, *indices)
    at = line(plan, plan.q_blocks, place.batch, place.q_block)
    shown = (scalars.first[at] <= place.k_block) & (place.k_block < scalars.end[at])
    return Place(*(jnp.where(shown, index, 0) for index in place))


def _kernel(plan: Plan, order: list[int], shape: tuple[int, ...], scalars: Scalars, inputs: Inputs, dbias: Any) -> None:
    indices = [pl.program_id(axis) for axis in range(4)]
    place = _place(order, *indices)
    summed = [index for index, axis in zip(indices, order, strict=True) if shape[axis] == 1]
    is_first = functools.reduce(jnp.logical_and, [index == 0 for index in summed], jnp.bool_(True))

    @pl.when(is_first)
    def _start() -> None:
        dbias[...] = jnp.zeros_like(dbias)

    add = functools.partial(_add_tile, plan, scalars, inputs, place, dbias)
    visit_tile(plan, scalars, line(plan, plan.q_blocks, place.batch, place.q_block), place.k_block, add)


def _add_tile(plan: Plan, scalars: Scalars, inputs: Inputs, place: Place, dbias: Any, masked: bool) -> None:
    visible = visible_pairs(plan, scalars, inputs, place) if masked else None
    tile = score(plan, scalars, inputs, inputs.k[...], visible)
    _, dscores = score_gradient(plan, inputs, tile, inputs.v[...])
    for axis in range(2):
        if dbias.shape[axis] == 1:
            dscores = dscores.sum(axis=axis, keepdims=True)
    dbias[...] += dscores
