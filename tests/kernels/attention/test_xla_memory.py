"""The `xla` backend never holds a Tq x Tk array, and leaves out the blocks that nobody sees."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax.kernels import flash_attention, reference_attention
from tune_jax.kernels.attention.call import Operands, Tiles
from tune_jax.kernels.attention.checks import read_call, read_tiles
from tune_jax.kernels.attention.reference import seen
from tune_jax.kernels.attention.xla.blocks import Blocks
from tune_jax.kernels.attention.xla.plan import Plan

BATCH, HEADS, DEPTH, BLOCK = 1, 1, 8, 32


def arrays(length: int) -> tuple[Any, Any, Any]:
    q = jax.ShapeDtypeStruct((BATCH, length, HEADS, DEPTH), jnp.float32)
    return q, q, q


def blocked(q: Any, k: Any, v: Any, masked: bool) -> Any:
    return flash_attention(q, k, v, **call(q, masked), implementation="xla", block_q=BLOCK, block_k=BLOCK)


def plain(q: Any, k: Any, v: Any, masked: bool) -> Any:
    return reference_attention(q, k, v, **call(q, masked))


def call(q: Any, masked: bool) -> dict[str, Any]:
    """All that takes no Tq x Tk array, or nothing."""
    if not masked:
        return {}
    length = q.shape[1]
    places = jnp.broadcast_to(jnp.arange(length) // 100, (BATCH, length))
    lengths = jnp.full(BATCH, length - 5)
    return {
        "causal": True,
        "window": (200, None),
        "q_offset": jnp.full(BATCH, 3),
        "segment_ids": (places, places),
        "q_lengths": lengths,
        "kv_lengths": lengths,
        "bias": q[:, :, :, 0].swapaxes(1, 2)[:, :, None],
        "softcap": 20.0,
        "sinks": q[0, 0, :, 0],
        "scale": q[0, 0, 0, 0],
    }


def gradients(attention: Any, masked: bool) -> Any:
    return jax.grad(lambda *qkv: attention(*qkv, masked).sum(), argnums=(0, 1, 2))


def all_equations(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        yield equation
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(value):
                yield from all_equations(getattr(value, "jaxpr", value))


def _is_jaxpr(value: Any) -> bool:
    return hasattr(value, "eqns")


def shapes(function: Any, length: int) -> set[tuple[int, ...]]:
    jaxpr = jax.make_jaxpr(function)(*arrays(length)).jaxpr
    variables = (out for equation in all_equations(jaxpr) for out in equation.outvars)
    return {tuple(variable.aval.shape) for variable in variables}


def largest(function: Any, length: int) -> int:
    return max(math.prod(shape) for shape in shapes(function, length))


PASSES = {
    "forward": lambda attention, masked: lambda *qkv: attention(*qkv, masked),
    "backward": gradients,
    "checkpointed": lambda attention, masked: gradients(jax.checkpoint(attention, static_argnums=(3,)), masked),
    "vmapped": lambda attention, masked: (
        lambda *qkv: jax.vmap(lambda q, k, v: attention(q[None], k[None], v[None], masked))(*qkv)
    ),
}


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("name", PASSES)
def test_no_array_grows_with_both_lengths(name: str, masked: bool) -> None:
    run = PASSES[name](blocked, masked)
    assert largest(run, 512) < 512 * 512
    assert largest(run, 1024) == 2 * largest(run, 512)
    assert not [shape for shape in shapes(run, 512) if shape.count(512) > 1]


@pytest.mark.parametrize("name", PASSES)
def test_the_walk_over_equations_would_see_such_an_array(name: str) -> None:
    assert largest(PASSES[name](plain, True), 512) >= 512 * 512


@pytest.mark.parametrize(("name", "times"), [("forward", 8), ("backward", 16)])
def test_compiled_memory_is_a_few_times_that_of_the_arguments(oracle: Any, name: str, times: int) -> None:
    length = 4096
    compiled = oracle.jit(PASSES[name](blocked, True)).lower(*arrays(length)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < times * length * DEPTH * 4


def test_a_bias_gradient_that_is_not_asked_for_is_not_computed(oracle: Any) -> None:
    q, bias = jnp.ones((1, 40, 1, 8)), jnp.ones((40, 40))
    attention = functools.partial(flash_attention, implementation="xla", block_q=16, block_k=16)

    def loops(*wanted: int) -> int:
        gradient = jax.grad(lambda q, bias: attention(q, q, q, bias=bias).sum(), wanted)
        return int(oracle.jit(gradient).lower(q, bias).compile().as_text().count(" while("))

    assert loops(0) < loops(0, 1)


# Blocks that are left out


@pytest.mark.parametrize(("block_q", "block_k"), [(32, 32), (16, 64), (64, 16)])
def test_blocks_out_of_reach_are_not_computed(oracle: Any, block_q: int, block_k: int) -> None:
    # A block that is computed and masked afterwards lets NaN through, since 0 * NaN is NaN.
    length, left = 256, 32
    q = jax.random.normal(jax.random.key(0), (2, length, 2, 8))
    attention = functools.partial(
        flash_attention, causal=True, window=(left, None), implementation="xla", block_q=block_q, block_k=block_k
    )

    @oracle.jit
    def out_and_dq(keys: Any, offset: Any) -> Any:
        out, pull_back = jax.vjp(lambda q: attention(q, keys, keys, q_offset=offset), q)
        return out, pull_back(jnp.ones_like(out))[0]

    for offset in ([0, 0], [16, 0], [-64, -64]):
        rows, good = np.arange(length) + np.array(offset)[:, None], slice(64, 224)
        keys = jnp.full_like(q, jnp.nan).at[:, good].set(q[:, good])
        # Rows of a block share its keys, and batch rows share the blocks.
        reach = [lowest_and_highest(rows, block_q, block_k, row, left) for row in range(length)]
        clean = np.array([low >= good.start and high <= good.stop for low, high in reach])
        assert clean.any()
        for result in out_and_dq(keys, jnp.array(offset)):
            assert bool(jnp.isfinite(result[:, clean]).all())


def lowest_and_highest(rows: np.ndarray, block_q: int, block_k: int, row: int, left: int) -> tuple[int, int]:
    """The keys of the blocks that the block of a row has to load."""
    block = rows[:, row // block_q * block_q :][:, :block_q]
    low, high = max(block.min() - left, 0), block.max() + 1
    return low // block_k * block_k, -(-high // block_k) * block_k


RANGES: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "causal with offsets": {"causal": True, "q_offset": [9, -30]},
    "window": {"window": (7, 3)},
    "window with an offset out of reach": {"window": (7, 3), "q_offset": [0, 500]},
    "left of a window": {"window": (7, None)},
    "lengths": {"causal": True, "q_lengths": [40, 3], "kv_lengths": [21, 0]},
    "segments": {"segment_ids": ([[0] * 16 + [1] * 61, [4] * 77], [[0] * 20 + [1] * 40, [3] * 60])},
    "segments and causal": {"causal": True, "segment_ids": ([[0] * 32 + [1] * 45] * 2, [[0] * 30 + [1] * 30] * 2)},
}


@pytest.mark.parametrize("name", RANGES)
def test_ranges_hold_the_blocks_that_any_batch_row_sees(name: str) -> None:
    spec, operands = read(77, 60, **RANGES[name])
    plan = Plan.of(spec, operands)
    assert plan.ranges is not None
    for q_block, (first, end) in enumerate(zip(*map(np.asarray, plan.ranges), strict=True)):
        rows = np.asarray(seen(spec, operands))[..., q_block * 16 : (q_block + 1) * 16, :]
        columns = np.flatnonzero(rows.any((0, 1, 2)))
        if len(columns):
            assert (first, end) == (columns[0] // 10, columns[-1] // 10 + 1)
        else:
            assert first >= end


def test_without_bounds_all_blocks_are_walked_in_a_loop_of_fixed_length() -> None:
    assert Plan.of(*read(77, 60)).ranges is None


def read(q_length: int, kv_length: int, **given: Any) -> tuple[Any, Any]:
    """A call of batch 2 in blocks of 16 and 10."""
    q, k = jnp.ones((2, q_length, 1, 1)), jnp.ones((2, kv_length, 1, 1))
    rest = {"causal": False, "window": None, "q_offset": 0, "segment_ids": None, "q_lengths": None, "kv_lengths": None}
    rest |= {"mask": None, "bias": None, "scale": None, "softcap": None, "sinks": None, "deterministic": False}
    lists = {name: np.array(value) for name, value in given.items() if isinstance(value, list)}
    if "segment_ids" in given:
        lists["segment_ids"] = tuple(np.array(ids) for ids in given["segment_ids"])
    return read_call(q, k, k, **rest | given | lists, tiles=read_tiles(block_q=16, block_k=10))


# Default blocks


@pytest.mark.parametrize(
    ("backend", "batch", "heads", "length", "block"),
    [
        ("cpu", 1, 4, 8192, 256),
        ("cpu", 1, 4, 100, 100),
        ("cpu", 8, 16, 8192, 128),
        ("gpu", 4, 16, 8192, 1024),
        ("gpu", 16, 16, 8192, 512),
        ("gpu", 1000, 100, 8192, 128),
    ],
)
def test_default_blocks_shrink_as_batch_and_heads_grow(
    monkeypatch: pytest.MonkeyPatch, backend: str, batch: int, heads: int, length: int, block: int
) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    q = jax.ShapeDtypeStruct((batch, length, heads, 64), jnp.float32)
    blocks = Blocks.of(Tiles(), Operands(q, q, q))
    assert (blocks.block_q, blocks.block_k) == (block, block)
