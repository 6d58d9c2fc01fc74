"""Block sizes: which ones a call gets."""

from __future__ import annotations

from dataclasses import dataclass

import jax.numpy as jnp

from ..call import Operands, Spec

LANES = 128
# Rows of a tile of 8-bit data, which masks are; 16-bit data have 16, and 32-bit data 8.
_SUBLANES = 32
_DEFAULT_BLOCK = 512


@dataclass(frozen=True)
class Plan:
    """All that a walk over blocks must know when it is traced; lengths are those before padding.

    A tile of scores has the queries along `query_axis`: 0 where rows are summed up, 1 where columns are, so
    that every product takes its operands as they lie.
    """

    spec: Spec
    block_q: int
    block_k: int
    q_length: int
    kv_length: int
    group: int
    query_axis: int
    per_batch: bool
    ragged_q: bool
    ragged_k: bool
    always_masked: bool

    @property
    def q_blocks(self) -> int:
        """Blocks of queries."""
        return -(-self.q_length // self.block_q)

    @property
    def k_blocks(self) -> int:
        """Blocks of keys."""
        return -(-self.kv_length // self.block_k)

    @property
    def tile(self) -> tuple[int, int]:
        """The shape of a tile of scores."""
        return (self.block_q, self.block_k) if self.query_axis == 0 else (self.block_k, self.block_q)

    @property
    def pads_q(self) -> bool:
        """Whether the last block of queries holds more than there are.

        That alone is no reason for a mask: such queries are zero, their log-sum-exp +inf. Where there is a mask
        they must not count, for then they may see keys that no query of the call does, whatever those hold.
        """
        return self.q_length % self.block_q > 0

    @property
    def limits_positions(self) -> bool:
        """Whether causal or window rule out pairs."""
        return self.spec.left is not None or self.spec.right is not None

    @property
    def ever_masked(self) -> bool:
        """Whether any tile may hold pairs that do not count."""
        return self.always_masked or self.limits_positions or self.ragged_q or self.ragged_k

    @property
    def key_steps(self) -> int:
        """The most blocks of keys that a block of queries sees."""
        return self._steps(self.block_q, self.block_k, self.k_blocks)

    @property
    def query_steps(self) -> int:
        """The most blocks of queries that see a block of keys."""
        return self._steps(self.block_k, self.block_q, self.q_blocks)

    def _steps(self, block: int, other_block: int, other_blocks: int) -> int:
        if self.spec.left is None or self.spec.right is None:
            return other_blocks
        # A run of n places touches at most 1 + ceil((n - 1) / block) blocks, wherever it starts.
        run = block + self.spec.left + self.spec.right
        return min(other_blocks, 1 + -(-(run - 1) // other_block))


def plan_forward(spec: Spec, operands: Operands) -> Plan:
    """The plan of the forward walk."""
    return _plan(spec, operands, "", _SUBLANES, query_axis=0)


def plan_dq(spec: Spec, operands: Operands) -> Plan:
    """The plan of the walk that makes dq, and of that for the gradient of a bias."""
    return _plan(spec, operands, "_dq", _SUBLANES, query_axis=0)


def plan_dkv(spec: Spec, operands: Operands) -> Plan:
    """The plan of the walk that makes dk and dv; its tiles are transposed, so that queries lie along lanes."""
    return _plan(spec, operands, "_dkv", LANES, query_axis=1)


def _plan(spec: Spec, operands: Operands, walk: str, q_step: int, query_axis: int) -> Plan:
    q_length, kv_length = operands.q.shape[1], operands.k.shape[1]
    block_q = _block(spec, operands, "block_q", walk, q_length, q_step)
    block_k = _block(spec, operands, "block_k", walk, kv_length, LANES)
    by_row = (operands.q_offset, operands.q_lengths, operands.kv_lengths, operands.q_segments)
    return Plan(
        spec=spec,
        block_q=block_q,
        block_k=block_k,
        q_length=q_length,
        kv_length=kv_length,
        group=operands.group,
        query_axis=query_axis,
        per_batch=any(array is not None for array in by_row),
        ragged_q=operands.q_lengths is not None,
        ragged_k=operands.kv_lengths is not None or kv_length % block_k > 0,
        always_masked=operands.q_segments is not None or operands.mask is not None,
    )


def _block(spec: Spec, operands: Operands, name: str, walk: str, length: int, step: int) -> int:
    """The block size that is asked for, or the default; no longer than the length, rounded up to `step`."""
    given = spec.tiles.given
    chosen = name + walk if name + walk in given else name
    size = given.get(chosen) or _default_block(name, operands)
    if size % LANES:
        raise ValueError(
            f"{chosen} is {size}, and implementation 'pallas_tpu' takes multiples of {LANES}; "
            f"try {-(-size // LANES) * LANES}, or None for a choice of its own."
        )
    return min(size, -(-length // step) * step)


def _default_block(name: str, operands: Operands) -> int:
    """As many as fit 16 MiB of VMEM in every walk, with bias and mask too, see `vmem_bytes`."""
    wide = max(operands.q.shape[3], operands.v.shape[3]) > LANES and operands.q.dtype == jnp.float32
    return _DEFAULT_BLOCK // 2 if wide and name == "block_q" else _DEFAULT_BLOCK
