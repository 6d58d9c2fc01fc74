"""The parts that the kernels are made of: loads, products, scores, and which pairs count.

A tile is a block of query rows against a block of keys. Its `rows` and `columns` are index arrays that
broadcast against each other, so that a tile lies as its kernel likes: queries by keys, or keys by queries.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.pallas import triton as plgpu

from ..call import Array, Operands, Spec
from ..resources import power_of_two
from ..visible import Index, sees_by_position
from .tiles import Launch

LOG2_E = math.log2(math.e)


@dataclass(frozen=True)
class Plan:
    """All that is fixed when a kernel is traced."""

    spec: Spec
    launch: Launch
    batch: int
    heads: int
    group: int
    q_length: int
    kv_length: int
    depth: int
    v_depth: int
    item_size: int
    interpret: bool = False

    @classmethod
    def of(cls, spec: Spec, operands: Operands, launch: Launch) -> Plan:
        """The plan of a call."""
        batch, q_length, heads, depth = operands.q.shape
        kv_length, v_depth = operands.k.shape[1], operands.v.shape[3]
        item_size = operands.q.dtype.itemsize
        return cls(spec, launch, batch, heads, operands.group, q_length, kv_length, depth, v_depth, item_size)

    @property
    def q_blocks(self) -> int:
        """Blocks of query rows."""
        return -(-self.q_length // self.launch.block_q)

    @property
    def k_blocks(self) -> int:
        """Blocks of keys."""
        return -(-self.kv_length // self.launch.block_k)

    def has_ragged_rows(self, operands: Operands) -> bool:
        """Whether the last block of queries may be longer than what is left."""
        return operands.q_lengths is not None or self.q_length % self.launch.block_q != 0

    def has_ragged_keys(self, operands: Operands) -> bool:
        """Whether the last block of keys may be longer than what is left."""
        return operands.kv_lengths is not None or self.kv_length % self.launch.block_k != 0

    @property
    def is_float32(self) -> bool:
        """Whether inputs are float32; else they have 16 bits."""
        return self.item_size == 4

    @property
    def unit(self) -> float:
        """Scores in the kernels are these many times natural ones: `power` then takes what it takes fastest."""
        # Natural exponentials are exact to the last bit: float32 has its error budget from them.
        return 1.0 if self.is_float32 else LOG2_E

    def power(self, x: Array) -> Array:
        """The exponential of scores in these units; denormal results may be 0."""
        if self.is_float32:
            return jnp.exp(x)
        if self.interpret:
            return jnp.exp2(x)
        # One instruction, where the library's function takes four to keep denormals.
        like = jax.ShapeDtypeStruct(x.shape, x.dtype)
        [result] = plgpu.elementwise_inline_asm(
            "ex2.approx.ftz.f32 $0, $1;", args=[x], constraints="=f,f", pack=1, result_shape_dtypes=[like]
        )
        return result


class Place(NamedTuple):
    """Where in the batch a tile lies, and what holds there."""

    batch: Index
    head: Index
    kv_head: Index
    offset: Index
    q_length: Index
    kv_length: Index


class Tile(NamedTuple):
    """The indices of query rows and of keys, of shapes that broadcast."""

    rows: Array
    columns: Array


def place(plan: Plan, refs: Operands, batch: Index, head: Index) -> Place:
    """Batch row and query head, with the offset and the lengths of that row."""
    return Place(
        batch=batch,
        head=head,
        kv_head=lax.div(head, np.int32(plan.group)),
        offset=np.int32(0) if refs.q_offset is None else refs.q_offset[batch],
        q_length=np.int32(plan.q_length) if refs.q_lengths is None else refs.q_lengths[batch],
        kv_length=np.int32(plan.kv_length) if refs.kv_lengths is None else refs.kv_lengths[batch],
    )


def span(index: Index, block: int) -> Array:
    """The indices in a block."""
    return index * np.int32(block) + jnp.arange(block, dtype=jnp.int32)


def load_rows(
    ref: Any, batch: Index, rows: Array, head: Index, within: Array | None = None, columns: Array | None = None
) -> Array:
    """Rows of `[batch, time, heads, depth]`, the depth padded with zeros, and zero where not `within`."""
    depth = ref.shape[3]
    columns = jnp.arange(power_of_two(depth), dtype=jnp.int32) if columns is None else columns
    wanted = None if within is None else within[:, None]
    if depth != power_of_two(depth):
        inside = (columns < depth)[None, :]
        wanted = inside if wanted is None else wanted & inside
    source = ref.at[batch, rows[:, None], head, columns[None, :]]
    return plgpu.load(source) if wanted is None else plgpu.load(source, mask=wanted, other=0)


def load_parts(ref: Any, batch: Index, rows: Array, head: Index, within: Array | None = None) -> list[Array]:
    """What `load_rows` loads, for `dot_of_parts`: float32 in parts of few columns, else as one."""
    depth = power_of_two(ref.shape[3])
    size = min(depth, 32) if ref.dtype == jnp.float32 else depth
    return [load_rows(ref, batch, rows, head, within, span(np.int32(n), size)) for n in range(depth // size)]


def store_rows(ref: Any, batch: Index, rows: Array, head: Index, values: Array) -> None:
    """The inverse of `load_rows`; what lies past the end of the array is dropped."""
    depth = ref.shape[3]
    columns = jnp.arange(power_of_two(depth), dtype=jnp.int32)[None, :]
    wanted = (rows < ref.shape[1])[:, None] & (columns < depth)
    plgpu.store(ref.at[batch, rows[:, None], head, columns], values.astype(ref.dtype), mask=wanted)


def store_vector(ref: Any, here: Place, rows: Array, values: Array) -> None:
    """Rows of `[batch, heads, time]`; what lies past the end of the array is dropped."""
    plgpu.store(ref.at[here.batch, here.head, rows], values, mask=rows < ref.shape[2])


def load_vector(ref: Any, here: Place, rows: Array, within: Array | None, other: float) -> Array:
    """Rows of `[batch, heads, time]`, `other` where not `within`."""
    source = ref.at[here.batch, here.head, rows]
    return plgpu.load(source) if within is None else plgpu.load(source, mask=within, other=other)


def dot(left: Array, right: Array, across: tuple[int, int] = (1, 0)) -> Array:
    """Product in float32, of float32 operands at full precision."""
    precision = lax.Precision.HIGHEST if left.dtype == jnp.float32 else None
    dimensions = (((across[0],), (across[1],)), ((), ()))
    return lax.dot_general(left, right, dimensions, precision=precision, preferred_element_type=jnp.float32)


def add_product(total: Array, left: Array, right: Array) -> Array:
    """`total` with the product of `left`, in the dtype of `right`, and `right`."""
    if right.dtype != jnp.float32:
        return total + dot(left.astype(right.dtype), right)
    # Triton would let a product start from the sum that it is added to. Over thousands of float32 terms one
    # after another that loses three bits; a sum of sums over blocks, which this makes of it, does not.
    return total - dot(-left, right)


def dot_of_parts(left: list[Array], right: list[Array]) -> Array:
    """Products of rows with rows; a sum of sums over parts, as in `add_product`."""
    total, *others = (
        dot(a if n == 0 else -a, b, across=(1, 1)) for n, (a, b) in enumerate(zip(left, right, strict=True))
    )
    for other in others:
        total = total - other
    return total


def load_pairs(ref: Any, here: Place, tile: Tile, other: float | bool) -> Array:
    """A tile of an array that broadcasts to `[batch, heads, Tq, Tk]`; `other` outside of it."""
    # An axis that is broadcast is loaded once.
    batch, head, rows, columns = (
        index if size > 1 else jnp.zeros((1,) * jnp.ndim(index), jnp.int32)
        for index, size in zip((here.batch, here.head, *tile), ref.shape, strict=True)
    )
    within = (rows < ref.shape[2]) & (columns < ref.shape[3])
    return plgpu.load(ref.at[batch, head, rows, columns], mask=within, other=other)


def is_screened(refs: Operands) -> bool:
    """Whether segments or a mask decide pair by pair."""
    return refs.q_segments is not None or refs.mask is not None


def seen(plan: Plan, refs: Operands, here: Place, tile: Tile) -> Array:
    """Which pairs of a tile count."""
    conditions = [sees_by_position(plan.spec, tile.rows, tile.columns, here.offset)]
    if plan.has_ragged_rows(refs):
        conditions.append(tile.rows < here.q_length)
    if plan.has_ragged_keys(refs):
        conditions.append(tile.columns < here.kv_length)
    if refs.q_segments is not None:
        q_ids, kv_ids = (
            plgpu.load(ref.at[here.batch, indices], mask=indices < ref.shape[1], other=0)
            for ref, indices in zip((refs.q_segments, refs.kv_segments), tile, strict=True)
        )
        conditions.append(q_ids == kv_ids)
    if refs.mask is not None:
        conditions.append(load_pairs(refs.mask, here, tile, False))
    shape = np.broadcast_shapes(tile.rows.shape, tile.columns.shape)
    allowed = functools.reduce(lambda a, b: a & b, [each for each in conditions if each is not None], True)
    return jnp.broadcast_to(allowed, shape)


def any_along(allowed: Array, axis: int) -> Array:
    """Whether any is true along an axis."""
    return jnp.max(allowed.astype(jnp.int32), axis=axis) > 0


def _is_plain(spec: Spec, refs: Operands) -> bool:
    return spec.softcap is None and refs.bias is None and spec.scale is not None and spec.scale > 0


def factor_of(plan: Plan, refs: Operands) -> float:
    """What the numbers that `scores` returns still lack to be in the units of `Plan.power`."""
    if _is_plain(plan.spec, refs) and plan.spec.scale is not None:
        # It goes into the exponent's multiply-add, and the maximum can be taken before.
        return plan.spec.scale * plan.unit
    return 1.0


def scores(plan: Plan, refs: Operands, here: Place, tile: Tile, products: Array) -> tuple[Array, Array | None]:
    """From products of queries and keys to scores, up to `factor_of`; the slope of the cap, None if it is 1."""
    if _is_plain(plan.spec, refs):
        return products, None
    spec, slope = plan.spec, None
    x = products * (refs.scale[0] if spec.scale is None else spec.scale)
    if spec.softcap is not None:
        bounded = jnp.tanh(x * (1 / spec.softcap))
        x, slope = bounded * spec.softcap, 1 - bounded * bounded
    if refs.bias is not None:
        x = x + load_pairs(refs.bias, here, tile, 0).astype(jnp.float32)
    return x * plan.unit, slope
