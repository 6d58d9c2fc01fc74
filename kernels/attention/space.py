"""Which backends and tiles are worth trying for an attention call."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import jax
import numpy as np

from .backends import Backend, supporting, training_refusal
from .call import Operands, Spec, Tiles
from .checks import check_arrays, read_call, read_flag, read_tiles, show
from .device import Device, find_device
from .resources import Block, Sizes, power_of_two, register_share, works
from .tables import sizes_of

Grid = dict[str, list[Any]]

_PASSES = {"forward": ("",), "backward": ("_dkv", "_dq"), "dkv": ("_dkv",), "dq": ("_dq",)}
_TRITON_BLOCKS = (32, 64, 128)
_WIDE_HEAD, _SMALL_TRITON_BLOCKS = 256, (16, 32, 64, 128)
_TRITON_WARPS, _LEAST_REGISTERS = (2, 4, 8), 0.12
_TRITON_STAGES, _FEWER_TRITON_STAGES = (1, 2, 3, 4), (1, 2, 3)
_TPU_BLOCKS, _TPU_LANES = (256, 512, 1024), 128
_XLA_BLOCKS = {"cpu": (64, 256, 1024)}
# Elsewhere small blocks are far from the fastest, and each program takes seconds to compile.
_XLA_BLOCKS_ELSEWHERE = (1024,)


def flash_attention_space(q: Any, k: Any, v: Any, *, tune_pass: str = "forward", **call: Any) -> list[Grid]:
    """Implementations and hyperparameters of `flash_attention` to try for one call, as a list of grids.

    Each backend that supports the call on the device it is for has a grid or several; what is expected not to fit
    into a GPU's shared memory or registers is left out. Give it to the tuner as it is, `tune(flash_attention,
    hyperparams=flash_attention_space)`, or call it.

    For training, tune the backward pass, with the forward pass at its defaults, by
    `tune(flash_attention, hyperparams=functools.partial(flash_attention_space, tune_pass="backward"), with_vjp=True)`.

    Args:
        q: the queries of the call, or anything with their `shape` and `dtype`, such as
            `jax.ShapeDtypeStruct`.
        k: the keys, likewise.
        v: the values, likewise.
        tune_pass: whose tiles to try: "forward"; "backward", for which the tiles of both of its walks are tried
            together, each with the other's mirror image; or "dkv" or "dq", the walk for the gradients of keys and
            values or that for queries alone. Other tiles stay at their defaults.
        **call: the call's other arguments, arrays or their like. With an `implementation`, the space is that
            one's; with hyperparameters, that of the backends that take them.

    Returns:
        A list of dicts of lists. No two combinations make the same blocks.

    Raises:
        ValueError: for a call that `flash_attention` does not take, and another `tune_pass`.
        TypeError: for such dtypes.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> q = jax.ShapeDtypeStruct((1, 100, 4, 64), jnp.float32)
        >>> flash_attention_space(q, q, q)  # on a CPU
        [{'implementation': ['xla'], 'block_q': [64, 100], 'block_k': [64, 100]}]
    """
    if tune_pass not in _PASSES:
        raise ValueError(f"tune_pass must be one of {', '.join(map(repr, _PASSES))}, got {show(tune_pass)}.")
    check_arrays(q, k, v)
    device = find_device(q, k, v)
    implementation = call.pop("implementation", None)
    spec, operands, return_lse = _read(q, k, v, **call)
    backends = [
        backend
        for backend in supporting(spec, operands, return_lse, device)
        if implementation in (None, backend.name)
        and (tune_pass == "forward" or training_refusal(backend, spec, operands, device) is None)
    ]
    grids = [grid for backend in backends for grid in _grids(backend, tune_pass, spec, operands, device)]
    # A backend that is named, and runs here by interpreting or not at all, answers for itself.
    return grids or [{"implementation": [implementation]}]


def _read(q: Any, k: Any, v: Any, return_lse: Any = False, **call: Any) -> tuple[Spec, Operands, bool]:
    """The checked form of a call, its arrays abstract."""
    tiles = {name: call.pop(name) for name in Tiles.__dataclass_fields__ if name in call}
    arrays, statics = {"q": q, "k": k, "v": v}, {"tiles": read_tiles(**tiles)}
    for name, value in call.items():
        # NumPy's scalars have a shape as well, and may be what is fixed when a call is traced.
        is_array = any(hasattr(leaf, "shape") and not isinstance(leaf, np.generic) for leaf in jax.tree.leaves(value))
        (arrays if is_array else statics)[name] = value
    specs: list[Spec] = []

    def read(arrays: dict[str, Any]) -> Operands:
        spec, operands = read_call(**arrays, **statics)
        specs.append(spec)
        return operands

    operands = jax.eval_shape(read, arrays)
    return specs[0], operands, read_flag("return_lse", return_lse)


def _grids(backend: Backend, tune_pass: str, spec: Spec, operands: Operands, device: Device) -> Iterator[Grid]:
    name: Grid = {"implementation": [backend.name]}
    if "num_warps" in backend.tiles:
        for tiles in _triton_tiles(tune_pass, spec, operands, device):
            yield name | tiles
    elif "tpu" in backend.platforms:
        yield name | _product(_PASSES[tune_pass], _TPU_BLOCKS, spec, operands, step=_TPU_LANES)
    elif backend.tiles:
        sizes = _XLA_BLOCKS.get(device.platform, _XLA_BLOCKS_ELSEWHERE)
        yield name | _product(("",), sizes, spec, operands)
    else:
        yield name


def _product(walks: tuple[str, ...], sizes: tuple[int, ...], spec: Spec, operands: Operands, step: int = 1) -> Grid:
    """All sizes for either side, as long as the lengths rounded up to whole steps."""
    lengths = {"block_q": operands.q.shape[1], "block_k": _keys_in_reach(spec, operands)}
    whole = {name: -(-length // step) * step for name, length in lengths.items()}
    return {f"{name}{walk}": _clip(sizes, length) for walk in walks for name, length in whole.items()}


def _triton_tiles(tune_pass: str, spec: Spec, operands: Operands, device: Device) -> Iterator[Grid]:
    """A grid for each block size and number of warps, with the numbers of stages that fit."""
    walks = _PASSES[tune_pass]
    given, sizes = spec.tiles.given, sizes_of(operands)

    def choices(name: str, offered: Iterable[int]) -> list[int]:
        fixed = [given[name + walk] for walk in walks if name + walk in given]
        return fixed[:1] or list(offered)

    offered = _triton_blocks(walks[0], sizes)
    has_room = tune_pass == "forward" and sizes.itemsize <= 2
    stages = choices("num_stages", _TRITON_STAGES if has_room else _FEWER_TRITON_STAGES)
    rows = choices("block_q", _powers(offered["block_q"], operands.q.shape[1]))
    columns = choices("block_k", _powers(offered["block_k"], _keys_in_reach(spec, operands)))
    for block_q, block_k, num_warps in itertools.product(rows, columns, choices("num_warps", _TRITON_WARPS)):
        blocks = [Block(walks[0], block_q, block_k, num_warps, number) for number in stages]
        is_given = f"num_warps{walks[0]}" in given
        fitting = [
            block.num_stages
            for block in blocks
            if (is_given or _are_busy(block, sizes))
            and all(works(_for_walk(block, walk), sizes, device.capability) for walk in walks)
        ]
        # Two walks share their number of stages: a grid each, for a grid of both would pair all with all.
        for together in [fitting] if len(walks) == 1 else [[number] for number in fitting]:
            if together:
                yield _join_walks([_for_walk(blocks[0], walk) for walk in walks], together)


def _triton_blocks(walk: str, sizes: Sizes) -> dict[str, tuple[int, ...]]:
    """Sizes to try for either side: small ones for what passes by wide heads, and for what fills registers."""
    is_wide = power_of_two(max(sizes.depth, sizes.v_depth)) >= _WIDE_HEAD
    passing = "block_q" if walk == "_dkv" else "block_k"
    return {
        side: _SMALL_TRITON_BLOCKS if sizes.itemsize > 2 or (is_wide and side == passing) else _TRITON_BLOCKS
        for side in ("block_q", "block_k")
    }


def _are_busy(block: Block, sizes: Sizes) -> bool:
    """Whether a block's warps have enough to do, and enough of them do it."""
    # Tensor cores of Hopper take 64 rows from four warps together.
    return register_share(block, sizes) >= _LEAST_REGISTERS and (block.num_warps >= 4 or block.block_q < 64)


def _for_walk(block: Block, walk: str) -> Block:
    """The same tiles in another walk, which keeps the other side: mirrored."""
    if walk == block.walk:
        return block
    return Block(walk, block.block_k, block.block_q, block.num_warps, block.num_stages)


def _join_walks(blocks: list[Block], stages: list[int]) -> Grid:
    grid: Grid = {}
    for block in blocks:
        grid |= {
            f"block_q{block.walk}": [block.block_q],
            f"block_k{block.walk}": [block.block_k],
            f"num_warps{block.walk}": [block.num_warps],
        }
    return grid | {f"num_stages{block.walk}": stages for block in blocks}


def _keys_in_reach(spec: Spec, operands: Operands) -> int:
    kv_length = int(operands.k.shape[1])
    is_bounded = spec.right == 0 and operands.q_offset is None
    return min(kv_length, int(operands.q.shape[1])) if is_bounded else kv_length


def _powers(sizes: tuple[int, ...], length: int) -> list[int]:
    return _clip(sizes, power_of_two(length))


def _clip(sizes: tuple[int, ...], length: int) -> list[int]:
    # A block longer than the array is the array: clipping keeps that choice once.
    return sorted({min(size, max(length, 1)) for size in sizes})
