"""The `xla` backend never holds a Tq x Tk array, and leaves out the blocks above the diagonal."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tune_jax.kernels import flash_attention, reference_attention

BATCH, HEADS, DEPTH, BLOCK = 1, 1, 8, 32


def arrays(length: int) -> tuple[Any, Any, Any]:
    q = jax.ShapeDtypeStruct((BATCH, length, HEADS, DEPTH), jnp.float32)
    return q, q, q


def blocked(q: Any, k: Any, v: Any, causal: bool) -> Any:
    return flash_attention(q, k, v, causal=causal, block_q=BLOCK, block_k=BLOCK)


def plain(q: Any, k: Any, v: Any, causal: bool) -> Any:
    return reference_attention(q, k, v, causal=causal)


def gradients(attention: Any, causal: bool) -> Any:
    return jax.grad(lambda *qkv: attention(*qkv, causal).sum(), argnums=(0, 1, 2))


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
    "forward": lambda attention, causal: lambda *qkv: attention(*qkv, causal),
    "backward": gradients,
    "checkpointed": lambda attention, causal: gradients(jax.checkpoint(attention, static_argnums=(3,)), causal),
    "vmapped": lambda attention, causal: (
        lambda *qkv: jax.vmap(lambda q, k, v: attention(q[None], k[None], v[None], causal))(*qkv)
    ),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", PASSES)
def test_no_array_grows_with_both_lengths(name: str, causal: bool) -> None:
    run = PASSES[name](blocked, causal)
    assert largest(run, 512) < 512 * 512
    assert largest(run, 1024) == 2 * largest(run, 512)
    assert not [shape for shape in shapes(run, 512) if shape.count(512) > 1]


@pytest.mark.parametrize("name", PASSES)
def test_the_walk_over_equations_would_see_such_an_array(name: str) -> None:
    assert largest(PASSES[name](plain, True), 512) >= 512 * 512


@pytest.mark.parametrize("name", ["forward", "backward"])
def test_compiled_memory_is_a_small_part_of_the_plain_one(name: str) -> None:
    length = 4096

    def temporary_bytes(attention: Any) -> int:
        compiled = jax.jit(PASSES[name](attention, True)).lower(*arrays(length)).compile()
        return int(compiled.memory_analysis().temp_size_in_bytes)

    assert temporary_bytes(blocked) < 32 * length * DEPTH * 4
    assert temporary_bytes(plain) > length * length * 4


@pytest.mark.parametrize(("block_q", "block_k"), [(32, 32), (16, 32), (64, 32), (32, 16), (32, 64)])
def test_blocks_above_the_diagonal_are_not_computed(oracle: Any, block_q: int, block_k: int) -> None:
    # A block that is computed and masked afterwards lets NaN through, since 0 * NaN is NaN.
    first_bad = 64
    q = jax.random.normal(jax.random.key(0), (2, 128, 2, 8))
    bad = q.at[:, first_bad:].set(jnp.nan)

    def attend(queries: Any) -> Any:
        return flash_attention(queries, bad, bad, causal=True, block_q=block_q, block_k=block_k)

    def out_and_dq(queries: Any) -> Any:
        out, pull_back = jax.vjp(attend, queries)
        return out, pull_back(jnp.ones_like(out))[0]

    out, dq = oracle.jit(out_and_dq)(q)
    assert bool(jnp.isfinite(out[:, :first_bad]).all())
    assert bool(jnp.isfinite(dq[:, :first_bad]).all())
    assert bool(jnp.isnan(out[:, -1]).all())
