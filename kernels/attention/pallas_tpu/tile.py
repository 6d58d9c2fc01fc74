"""What kernels do with one tile of scores."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from ..call import Array
from ..visible import sees_by_position
from .layout import Inputs
from .plan import LANES, Plan
from .ranges import Scalars
from .walk import Index, Place


class Tile(NamedTuple):
    """Scores of a tile; `slope` is their derivative by what the softcap caps, None without one."""

    scores: Array
    slope: Array | None
    visible: Array | None  # None where all pairs count


def product(left: Array, right: Array, contract: tuple[int, int] = (1, 0)) -> Array:
    """A matrix product in float32, over axis `contract[0]` of the left and `contract[1]` of the right."""
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


def visit_tile(plan: Plan, scalars: Scalars, line: Index, block: Index, add: Callable[[bool], None]) -> None:
    """Runs `add(masked)` where the block holds pairs that count, without masks where all do."""
    shown = (scalars.first[line] <= block) & (block < scalars.end[line])
    if plan.always_masked or not plan.ever_masked:
        pl.when(shown)(functools.partial(add, plan.always_masked))
        return
    full = (scalars.full_first[line] <= block) & (block < scalars.full_end[line])
    pl.when(shown & full)(functools.partial(add, False))
    pl.when(shown & jnp.logical_not(full))(functools.partial(add, True))


def visible_pairs(plan: Plan, scalars: Scalars, inputs: Inputs, place: Place) -> Array:
    """Which pairs of a tile count."""
    batch = place.batch if plan.per_batch else 0
    rows = place.q_block * plan.block_q + lax.broadcasted_iota(jnp.int32, plan.tile, plan.query_axis)
    columns = place.k_block * plan.block_k + lax.broadcasted_iota(jnp.int32, plan.tile, 1 - plan.query_axis)
    by_position = sees_by_position(plan.spec, rows, columns, scalars.offset[batch])
    terms = [] if by_position is None else [by_position]
    if plan.ragged_q or plan.pads_q:
        terms.append(rows < scalars.q_length[batch])
    if plan.ragged_k:
        terms.append(columns < scalars.kv_length[batch])
    if inputs.q_segments is not None and inputs.kv_segments is not None:
        terms.append(inputs.q_segments[...] == inputs.kv_segments[...])
    if inputs.mask is not None:
        terms.append(jnp.broadcast_to(inputs.mask[...].astype(jnp.int32), plan.tile) != 0)
    return functools.reduce(operator.and_, terms)


def load_keys(plan: Plan, inputs: Inputs, visible: Array | None) -> tuple[Array, Array]:
    """The tile's keys and values, zero where no query of the tile sees them: 0 * NaN would be NaN."""
    k, v = inputs.k[...], inputs.v[...]
    if visible is None or not plan.always_masked:
        return k, v
    seen = _any_query(plan, visible)
    return jnp.where(seen, k, 0), jnp.where(seen, v, 0)


def _any_query(plan: Plan, visible: Array) -> Array:
    """Which keys any query of the tile sees, as a column."""
    marks = visible.astype(jnp.float32)
    if plan.query_axis == 1:
        return marks.max(axis=1, keepdims=True) > 0
    # Mosaic turns whole squares round; one row by itself it does not.
    row = marks.max(axis=0, keepdims=True)
    return jnp.broadcast_to(row, (LANES, plan.block_k)).T[:, :1] > 0


def score(plan: Plan, scalars: Scalars, inputs: Inputs, k: Array, visible: Array | None) -> Tile:
    """The scores of a tile, and -inf for pairs that do not count."""
    q = inputs.q[...]
    raw = product(q, k, (1, 1)) if plan.query_axis == 0 else product(k, q, (1, 1))
    scores = raw * (plan.spec.scale if scalars.scale is None else scalars.scale[0])
    slope = None
    if plan.spec.softcap is not None:
        bounded = jnp.tanh(scores * (1 / plan.spec.softcap))
        scores, slope = plan.spec.softcap * bounded, 1 - bounded * bounded
    if inputs.bias is not None:
        scores = scores + inputs.bias[...].astype(jnp.float32)
    if visible is not None:
        scores = jnp.where(visible, scores, -jnp.inf)
    return Tile(scores, slope, visible)


def score_gradient(plan: Plan, inputs: Inputs, tile: Tile, v: Array) -> tuple[Array, Array]:
    """The weights of a tile and the gradient of its final scores, both 0 for pairs that do not count."""
    weights = jnp.exp(tile.scores - inputs.lse[...])
    dout = inputs.dout[...]
    dweights = product(dout, v, (1, 1)) if plan.query_axis == 0 else product(v, dout, (1, 1))
    dscores = weights * (dweights - inputs.delta[...])
    if tile.visible is not None:
        dscores = jnp.where(tile.visible, dscores, 0)
    return weights, dscores


def below_cap(tile: Tile, dscores: Array) -> Array:
    """The gradient of what the softcap caps, given that of the final scores."""
    if tile.slope is None:
        return dscores
    dscores = dscores * tile.slope
    return dscores if tile.visible is None else jnp.where(tile.visible, dscores, 0)
