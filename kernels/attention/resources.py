"""What a block of a GPU kernel takes of shared memory and registers: an estimate, to leave out what cannot work."""

from __future__ import annotations

from dataclasses import dataclass

# Bytes that one block may use, by compute capability, from NVIDIA's CUDA C++ Programming Guide, "Compute
# Capabilities".
_SHARED_BYTES = {8.0: 163 * 1024, 8.6: 99 * 1024, 8.7: 163 * 1024, 8.9: 99 * 1024, 12.0: 99 * 1024}
_SHARED_BYTES_ELSEWHERE = 227 * 1024
_REGISTERS_A_THREAD = 255
_THREADS_A_WARP = 32
# Shared memory that kernels use besides their tiles, for reductions among warps.
_SPARE_BYTES = 1024
# Accumulators somewhat over the registers still make good kernels: not all of them are needed at a time.
_MOST_REGISTERS = 1.1

WALKS = ("", "_dkv", "_dq")


@dataclass(frozen=True)
class Block:
    """A block of one walk: the tile that stays, the tiles that pass by, and who works on them.

    The forward pass and the walk for dq keep queries and pass over keys; the walk for dk and dv the other way round.
    """

    walk: str
    block_q: int
    block_k: int
    num_warps: int = 4
    num_stages: int = 3


@dataclass(frozen=True)
class Sizes:
    """Of a call: head dims, bytes an element, and bytes of bias and mask for each pair of a query and a key."""

    depth: int
    v_depth: int
    itemsize: int
    pair_bytes: int = 0


def works(block: Block, sizes: Sizes, capability: float | None) -> bool:
    """Whether a block of a Triton kernel is expected to compile, without spilling most of its accumulators."""
    shared = _SHARED_BYTES.get(capability or 9.0, _SHARED_BYTES_ELSEWHERE)
    return shared_bytes(block, sizes) + _SPARE_BYTES <= shared and register_share(block, sizes) <= _MOST_REGISTERS


def shared_bytes(block: Block, sizes: Sizes) -> int:
    """Shared memory of a block: the tile that stays, and one copy a stage of the tiles that pass by.

    The backward pass also turns a tile of weights round there.
    """
    staying, passing = block.block_q, block.block_k
    if block.walk == "_dkv":
        staying, passing = passing, staying
    a_row = (power_of_two(sizes.depth) + power_of_two(sizes.v_depth)) * sizes.itemsize
    # The forward pass keeps queries alone, the others two arrays on either side.
    a_staying_row = a_row if block.walk else power_of_two(sizes.depth) * sizes.itemsize
    pairs = block.block_q * block.block_k
    turned = pairs * sizes.itemsize if block.walk else 0
    return staying * a_staying_row + turned + max(block.num_stages, 1) * (passing * a_row + pairs * sizes.pair_bytes)


def register_share(block: Block, sizes: Sizes) -> float:
    """Float32 accumulators and tiles of scores, as a share of the registers of all threads of a block.

    Products of float32 run outside the tensor cores, which take their operands from registers too.
    """
    pairs = block.block_q * block.block_k
    depth, v_depth = power_of_two(sizes.depth), power_of_two(sizes.v_depth)
    values = {
        "": block.block_q * v_depth + pairs,
        "_dkv": block.block_k * (depth + v_depth) + 2 * pairs,
        "_dq": block.block_q * depth + 2 * pairs,
    }[block.walk]
    if sizes.itemsize > 2:
        values += block.block_q * depth + block.block_k * (depth + v_depth)
    return values / (block.num_warps * _THREADS_A_WARP * _REGISTERS_A_THREAD)


def power_of_two(size: int) -> int:
    """The least power of two from `size` up, at least 16: what tiles of matrix products are padded to."""
    return max(16, 1 << (size - 1).bit_length())
