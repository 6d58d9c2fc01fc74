"""How the kernels move: where a step of a grid stands, and which blocks of the arrays it gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from .layout import Inputs
from .plan import Plan
from .ranges import Scalars

Index = Any  # an int32 scalar

# A plain 0 would be a 64-bit index under x64, which TPUs do not have.
_ZERO = np.int32(0)


class Place(NamedTuple):
    """A tile of the scores of a call; `head` counts query heads."""

    batch: Index
    head: Index
    q_block: Index
    k_block: Index


# From the indices of a grid, and the prefetched scalars, to the tile.
Locate = Callable[..., Place]


def line(plan: Plan, blocks: int, batch: Index, block: Index) -> Index:
    """Where the ranges of a block stand among `blocks` a batch row."""
    return batch * blocks + block if plan.per_batch else block


def visit(scalars: Scalars, line: Index, step: Index) -> Index:
    """The block for a step; past the end of the range the last one again, which is not loaded anew."""
    return jnp.minimum(scalars.first[line] + step, jnp.maximum(scalars.end[line] - 1, 0))


def by_query(plan: Plan, batch: Index, head: Index, q_block: Index, step: Index, scalars: Scalars) -> Place:
    """Where a step stands in a walk of blocks of queries over their keys."""
    k_block = visit(scalars, line(plan, plan.q_blocks, batch, q_block), step)
    return Place(batch, head, q_block, k_block)


def by_key(
    plan: Plan, batch: Index, kv_head: Index, k_block: Index, member: Index, step: Index, scalars: Scalars
) -> Place:
    """Where a step stands in a walk of blocks of keys over the queries of each head of a group."""
    q_block = visit(scalars, line(plan, plan.k_blocks, batch, k_block), step)
    return Place(batch, kv_head * plan.group + member, q_block, k_block)


def query_spec(plan: Plan, depth: int, locate: Locate) -> pl.BlockSpec:
    """Blocks of `[batch, heads, Tq, depth]`."""

    def index(*indices: Any) -> tuple[Index, ...]:
        place = locate(*indices)
        return place.batch, place.head, place.q_block, _ZERO

    return pl.BlockSpec((None, None, plan.block_q, depth), index)


def key_spec(plan: Plan, depth: int, locate: Locate) -> pl.BlockSpec:
    """Blocks of `[batch, kv_heads, Tk, depth]`."""

    def index(*indices: Any) -> tuple[Index, ...]:
        place = locate(*indices)
        return place.batch, lax.div(place.head, jnp.int32(plan.group)), place.k_block, _ZERO

    return pl.BlockSpec((None, None, plan.block_k, depth), index)


def pair_spec(plan: Plan, shape: tuple[int, ...], locate: Locate) -> pl.BlockSpec:
    """Blocks of what broadcasts to all pairs; of size 1 along the axes where `shape` is."""
    sizes = [1 if size == 1 else block for size, block in zip(shape[2:], plan.tile, strict=True)]

    def index(*grid_indices: Any) -> tuple[Index, ...]:
        place = locate(*grid_indices)
        blocks = (place.q_block, place.k_block) if plan.query_axis == 0 else (place.k_block, place.q_block)
        return tuple(
            _ZERO if size == 1 else at for size, at in zip(shape, (place.batch, place.head, *blocks), strict=True)
        )

    return pl.BlockSpec((None, None, *sizes), index)


def input_specs(plan: Plan, inputs: Inputs, locate: Locate) -> Inputs:
    """The blocks of all inputs that there are."""
    specs = {name: pair_spec(plan, x.shape, locate) for name, x in inputs._asdict().items() if x is not None}
    specs["q"] = query_spec(plan, inputs.q.shape[3], locate)
    specs["k"] = key_spec(plan, inputs.k.shape[3], locate)
    specs["v"] = key_spec(plan, inputs.v.shape[3], locate)
    if inputs.dout is not None:
        specs["dout"] = query_spec(plan, inputs.dout.shape[3], locate)
    return Inputs(**specs)


def call(
    *,
    plan: Plan,
    kernel: Callable[..., None],
    name: str,
    grid: tuple[int, ...],
    sums_over: int,
    locate: Locate,
    outputs: Any,
    out_specs: Any,
    scratch: tuple[tuple[int, ...], ...],
) -> Callable[[bool], Callable[[Scalars, Inputs], Any]]:
    """Makes, for `_pallas.run`, the call of a kernel over a grid whose last `sums_over` axes it sums over."""

    def make_call(interpret: bool) -> Callable[[Scalars, Inputs], Any]:
        def called(scalars: Scalars, inputs: Inputs) -> Any:
            grid_spec = pltpu.PrefetchScalarGridSpec(
                num_scalar_prefetch=1,
                grid=grid,
                in_specs=[input_specs(plan, inputs, locate)],
                out_specs=out_specs,
                scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
            )
            semantics = ("parallel",) * (len(grid) - sums_over) + ("arbitrary",) * sums_over
            return pl.pallas_call(
                kernel,
                out_shape=outputs,
                grid_spec=grid_spec,
                compiler_params=pltpu.CompilerParams(dimension_semantics=semantics),
                interpret=interpret,
                name=name,
            )(scalars, inputs)

        return called

    return make_call
