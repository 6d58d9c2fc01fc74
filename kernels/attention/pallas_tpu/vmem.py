"""How much VMEM the kernels take: to drop block sizes that cannot compile before anything is traced."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from ..call import Operands, Spec
from .plan import LANES, Plan, plan_dkv, plan_dq, plan_forward

# What the compiler allows a kernel that asks for nothing else, in bytes.
VMEM_LIMIT = 16 * 2**20

# Tiles of float32 that are alive at a time, besides what is counted one by one, and how often blocks of
# float32 operands are held again as parts of lower precision. Fitted to what libtpu 0.0.50 asked for on v5e.
_TILES = {"forward": 1.5, "dq": 2.2, "dkv": 3.1, "dbias": 2.5}
_PARTS = 3
_MASK_TILES = 1


def vmem_bytes(spec: Spec, operands: Operands) -> dict[str, int]:
    """An estimate of the VMEM that each kernel of a call takes, in bytes, by walk.

    Compare with `VMEM_LIMIT`. Of 49 combinations of walk, block sizes, head size, dtype and masks that libtpu
    compiled, estimates were between 0.92 and 1.47 of what was needed. Reads shapes and dtypes only, so the operands
    may be `jax.ShapeDtypeStruct`s.

    Args:
        spec: the call, with the tiles in question.
        operands: the arrays of the call.

    Returns:
        Bytes for "forward", "dq", "dkv", and "dbias" if there is a bias.

    Raises:
        ValueError: for block sizes that the kernels do not take.
    """
    forward, dq, dkv = plan_forward(spec, operands), plan_dq(spec, operands), plan_dkv(spec, operands)
    own = {"forward": _forward(forward, operands), "dq": _dq(dq, operands), "dkv": _dkv(dkv, operands)}
    plans = {"forward": forward, "dq": dq, "dkv": dkv}
    if operands.bias is not None:
        own["dbias"], plans["dbias"] = _dbias(dq, operands), dq
    return {walk: int(own[walk] + _shared(walk, plan, operands)) for walk, plan in plans.items()}


def _forward(plan: Plan, operands: Operands) -> int:
    out, column = _rows(plan.block_q, operands.v), _array(plan.block_q, 1, 4)
    acc = _array(plan.block_q, operands.v.shape[3], 4)
    return 2 * (out + column) + acc + 2 * column


def _dq(plan: Plan, operands: Operands) -> int:
    acc = _array(plan.block_q, operands.q.shape[3], 4)
    return 2 * _rows(plan.block_q, operands.q) + acc + _saved(plan, operands)


def _dkv(plan: Plan, operands: Operands) -> int:
    out = _rows(plan.block_k, operands.k) + _rows(plan.block_k, operands.v)
    acc = _array(plan.block_k, operands.k.shape[3], 4) + _array(plan.block_k, operands.v.shape[3], 4)
    return 2 * out + acc + _saved(plan, operands)


def _dbias(plan: Plan, operands: Operands) -> int:
    return 2 * _pairs(plan, operands.bias.shape, 4) + _saved(plan, operands)


def _saved(plan: Plan, operands: Operands) -> int:
    """The gradient of the output, log-sum-exp and delta, held twice so that the next are loaded meanwhile."""
    stats = 2 * _pairs(plan, (1, 1, plan.q_length + plan.block_q, 1), 4)
    return 2 * (_rows(plan.block_q, operands.v) + stats)


def _shared(walk: str, plan: Plan, operands: Operands) -> float:
    """What all walks hold: their inputs twice, and tiles."""
    loaded = _rows(plan.block_q, operands.q) + _rows(plan.block_k, operands.k) + _rows(plan.block_k, operands.v)
    parts = loaded if walk == "forward" else loaded + _rows(plan.block_q, operands.v)
    tiles = _TILES[walk]
    if operands.bias is not None:
        loaded += _pairs(plan, operands.bias.shape, operands.bias.dtype.itemsize)
    if operands.mask is not None:
        loaded += _pairs(plan, operands.mask.shape, 1)
        tiles += _MASK_TILES
    if operands.q_segments is not None:
        loaded += _pairs(plan, (1, 1, plan.q_length, 1), 4) + _pairs(plan, (1, 1, 1, plan.kv_length), 4)
    copies = _PARTS * parts if operands.q.dtype == jnp.float32 else 0
    return 2 * loaded + copies + tiles * _array(*plan.tile, 4)


def _rows(block: int, x: Any) -> int:
    return _array(block, x.shape[3], x.dtype.itemsize)


def _pairs(plan: Plan, shape: tuple[int, ...], itemsize: int) -> int:
    """A block of what broadcasts to all pairs."""
    rows, columns = (
        1 if size == 1 else block for size, block in zip(shape[2:], (plan.block_q, plan.block_k), strict=True)
    )
    return _array(rows, columns, itemsize) if plan.query_axis == 0 else _array(columns, rows, itemsize)


def _array(rows: int, columns: int, itemsize: int) -> int:
    """Bytes of an array in whole tiles of registers: 8 rows of 32 bits, by 128 lanes."""
    sublanes = 32 // itemsize
    return -(-rows // sublanes) * sublanes * -(-columns // LANES) * LANES * itemsize
