"""How arrays are cut into blocks, and put together again.

Inside the backend, queries are `[blocks, batch, kv_heads, group, block_q, D]`: the query heads that read one key
head lie next to each other, so that they are further rows of its products. Keys and values are
`[blocks, batch, kv_heads, block_k, D]`. What belongs to pairs, bias and mask, keeps one time axis for each side,
`[batch, kv_heads, group, Tq, Tk]`, and is cut where it is used. Lengths that blocks do not divide are padded.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from ..call import Array, Operands, Tiles


@dataclass(frozen=True)
class _Limit:
    block: int  # rows or keys
    tile: int  # scores, over batch and heads


# A tile of scores goes through memory several times. On a CPU it should stay in the caches; other devices need large
# tiles to be busy, and the bound keeps their memory small.
_LIMITS = {"cpu": _Limit(block=256, tile=2**20)}
_LIMIT_ELSEWHERE = _Limit(block=1024, tile=2**26)
_SMALLEST_DEFAULT = 128


@dataclass(frozen=True)
class Blocks:
    """Sizes, all fixed when the call is traced; lengths are those before padding."""

    q_length: int
    kv_length: int
    block_q: int
    block_k: int
    kv_heads: int
    group: int

    @classmethod
    def of(cls, tiles: Tiles, operands: Operands) -> Blocks:
        """The blocks of a call, those that it leaves open chosen here."""
        batch, q_length, heads, _ = operands.q.shape
        _, kv_length, kv_heads, _ = operands.k.shape
        default = _default_block(batch * heads)
        return cls(
            q_length=q_length,
            kv_length=kv_length,
            block_q=min(tiles.block_q or default, q_length),
            block_k=min(tiles.block_k or default, kv_length),
            kv_heads=kv_heads,
            group=operands.group,
        )

    @property
    def q_blocks(self) -> int:
        """Blocks of queries, the last one perhaps padded."""
        return -(-self.q_length // self.block_q)

    @property
    def kv_blocks(self) -> int:
        """Blocks of keys, the last one perhaps padded."""
        return -(-self.kv_length // self.block_k)

    @property
    def pads_queries(self) -> bool:
        """Whether the last block of queries has rows past the end."""
        return self.q_length % self.block_q != 0

    @property
    def pads_keys(self) -> bool:
        """Whether the last block of keys has some past the end."""
        return self.kv_length % self.block_k != 0

    def split_queries(self, x: Array) -> Array:
        """`[batch, Tq, heads, D]` to `[blocks, batch, kv_heads, group, block_q, D]`."""
        x = _cut(x, 1, self.block_q)
        # One axis a reshape: explicit sharding follows those.
        x = x.reshape(*x.shape[:3], self.kv_heads, self.group, x.shape[4])
        return x.transpose(1, 0, 3, 4, 2, 5)

    def join_queries(self, x: Array) -> Array:
        """The inverse of `split_queries`, without the padding."""
        x = x.transpose(1, 0, 4, 2, 3, 5)
        x = x.reshape(*x.shape[:3], self.kv_heads * self.group, x.shape[5])
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : self.q_length]

    def split_rows(self, x: Array) -> Array:
        """`[batch, heads, Tq]` to `[blocks, batch, kv_heads, group, block_q]`."""
        return self.split_queries(x.swapaxes(1, 2)[..., None])[..., 0]

    def join_rows(self, x: Array) -> Array:
        """The inverse of `split_rows`, without the padding."""
        return self.join_queries(x[..., None])[..., 0].swapaxes(1, 2)

    def split_keys(self, x: Array) -> Array:
        """`[batch, Tk, kv_heads, D]` to `[blocks, batch, kv_heads, block_k, D]`."""
        return _cut(x, 1, self.block_k).transpose(1, 0, 3, 2, 4)

    def join_keys(self, x: Array) -> Array:
        """The inverse of `split_keys`, without the padding."""
        x = x.transpose(1, 0, 3, 2, 4)
        return x.reshape(x.shape[0], -1, *x.shape[3:])[:, : self.kv_length]

    def split_segments(self, x: Array, block: int) -> Array:
        """`[batch, T]` to `[blocks, batch, block]`."""
        return _cut(x, 1, block).swapaxes(0, 1)

    def open_pairs(self, x: Array) -> Array:
        """`[batch, heads, Tq, Tk]`, axes of size 1 as they are, to padded `[batch, kv_heads, group, Tq, Tk]`."""
        per_head = (1, 1) if x.shape[1] == 1 else (self.kv_heads, self.group)
        x = x.reshape(x.shape[0], *per_head, *x.shape[2:])
        x = x if x.shape[3] == 1 else _pad(x, 3, self.block_q)
        return x if x.shape[4] == 1 else _pad(x, 4, self.block_k)

    def close_pairs(self, x: Array) -> Array:
        """The inverse of `open_pairs`."""
        x = x[..., : self.q_length, : self.kv_length]
        return x.reshape(x.shape[0], x.shape[1] * x.shape[2], *x.shape[3:])

    def take_pairs(self, x: Array, q_index: Array, k_index: Array) -> Array:
        """What opened pairs hold for one block of queries and one of keys."""
        starts, sizes = self._pair_block(x, q_index, k_index)
        block: Array = lax.dynamic_slice(x, starts, sizes)
        return block

    def add_pairs(self, x: Array, q_index: Array, k_index: Array, block: Array) -> Array:
        """Opened pairs with a block added; it is summed over axes along which they are of size 1."""
        starts, sizes = self._pair_block(x, q_index, k_index)
        shared = tuple(axis for axis, size in enumerate(sizes) if size == 1)
        block = lax.dynamic_slice(x, starts, sizes) + block.sum(shared, keepdims=True)
        added: Array = lax.dynamic_update_slice(x, block, starts)
        return added

    def _pair_block(self, x: Array, q_index: Array, k_index: Array) -> tuple[tuple[Array, ...], tuple[int, ...]]:
        zero = jnp.int32(0)
        row, rows = (zero, 1) if x.shape[3] == 1 else (q_index * self.block_q, self.block_q)
        column, columns = (zero, 1) if x.shape[4] == 1 else (k_index * self.block_k, self.block_k)
        return (zero, zero, zero, row, column), (*x.shape[:3], rows, columns)


def _default_block(planes: int) -> int:
    """The largest power of two within the limits, for so many pairs of batch row and head."""
    limit = _LIMITS.get(jax.default_backend(), _LIMIT_ELSEWHERE)
    block = limit.block
    while block > _SMALLEST_DEFAULT and planes * block * block > limit.tile:
        block //= 2
    return block


def _cut(x: Array, axis: int, block: int) -> Array:
    x = _pad(x, axis, block)
    return x.reshape(*x.shape[:axis], x.shape[axis] // block, block, *x.shape[axis + 1 :])


def _pad(x: Array, axis: int, block: int) -> Array:
    """Zeros, or False, up to a multiple of the block."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, -x.shape[axis] % block)
    return jnp.pad(x, widths)
