"""How large the tiles of each walk are, and how many warps and stages of loads each program has."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..call import Operands, Tiles
from ..resources import power_of_two

_SMALLEST = 16
_WARPS, _STAGES = 4, 3


@dataclass(frozen=True)
class Launch:
    """The settled hyperparameters of one walk."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


# The best or near it on an H200 in bfloat16, by the size of padded heads: the largest for which a line holds.
_FORWARD = {64: Launch(64, 64, 4, 3), 128: Launch(128, 64, 4, 2), 256: Launch(128, 64, 8, 2)}
_KEYS = {64: Launch(32, 128, 4, 3), 128: Launch(64, 64, 4, 2), 256: Launch(64, 32, 4, 2)}
_QUERIES = {64: Launch(128, 64, 4, 3), 128: Launch(128, 32, 8, 3), 256: Launch(128, 64, 8, 1)}
# float32 products at full precision run outside the tensor cores, their operands in registers.
_FLOAT32 = {64: Launch(32, 32, 4, 2), 128: Launch(32, 32, 4, 2), 256: Launch(16, 32, 4, 1)}


def forward_launch(tiles: Tiles, operands: Operands) -> Launch:
    """For the walk over keys that makes the output."""
    return _settle(tiles, "", _defaults(_FORWARD, operands), operands)


def keys_launch(tiles: Tiles, operands: Operands) -> Launch:
    """For the walk over queries that makes the gradients of keys and values."""
    return _settle(tiles, "_dkv", _defaults(_KEYS, operands), operands)


def queries_launch(tiles: Tiles, operands: Operands) -> Launch:
    """For the walk over keys that makes the gradient of queries."""
    return _settle(tiles, "_dq", _defaults(_QUERIES, operands), operands)


def _defaults(table: dict[int, Launch], operands: Operands) -> Launch:
    depth = max(power_of_two(operands.q.shape[3]), power_of_two(operands.v.shape[3]))
    if operands.q.dtype == "float32":
        table = _FLOAT32
    launch = table[max(64, depth)]
    if operands.bias is not None or operands.mask is not None:
        # Tiles of these take shared memory and registers as well.
        stages = min(launch.num_stages, 2 if depth <= 128 else 1)
        launch = replace(launch, num_warps=8 if launch.block_q >= 128 else launch.num_warps, num_stages=stages)
    return launch


def _settle(tiles: Tiles, walk: str, default: Launch, operands: Operands) -> Launch:
    names = ("block_q", "block_k", "num_warps", "num_stages")
    given = {name: getattr(tiles, name + walk) for name in names}
    given = {name: value for name, value in given.items() if value is not None}
    for name, value in given.items():
        _check(name + walk, value)
    if given:
        # What a Pallas kernel gets where it names neither.
        default = Launch(default.block_q, default.block_k, _WARPS, _STAGES)
    chosen = {name: given.get(name, getattr(default, name)) for name in names}
    # Tiles longer than the array would only hold more padding.
    chosen["block_q"] = min(chosen["block_q"], power_of_two(operands.q.shape[1]))
    chosen["block_k"] = min(chosen["block_k"], power_of_two(operands.k.shape[1]))
    return Launch(**chosen)


def _check(name: str, value: int) -> None:
    is_power = value & (value - 1) == 0
    if name.startswith("block") and not (is_power and value >= _SMALLEST):
        raise ValueError(
            f"{name} must be a power of two from {_SMALLEST} up with implementation 'pallas_triton', got {value}; "
            f"'xla' takes any size."
        )
    if name.startswith("num_warps") and not (is_power and value <= 32):
        raise ValueError(f"{name} must be a power of two up to 32 with implementation 'pallas_triton', got {value}.")
