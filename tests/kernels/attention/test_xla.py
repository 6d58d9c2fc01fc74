"""The `xla` backend against the float64 oracle, forward and backward."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tune_jax.kernels import flash_attention

LENGTHS = (1, 7, 33, 127, 129, 192, 257)
BLOCKS = ((16, 16), (16, 128), (32, 64), (64, 32), (128, 16), (128, 128), (48, 80))
HEAD_DIMS = [(d, d) for d in (8, 24, 40, 64, 80, 96, 136, 192, 256)] + [(192, 128), (64, 128)]


STATIC = ("causal", "block_q", "block_k")


def out_and_gradients(q: Any, k: Any, v: Any, dout: Any, **call: Any) -> tuple[Any, tuple[Any, Any, Any]]:
    out, pull_back = jax.vjp(lambda *qkv: flash_attention(*qkv, implementation="xla", **call), q, k, v)
    return out, pull_back(dout)


@pytest.fixture(scope="module")
def forward(oracle: Any) -> Any:
    return oracle.jit(flash_attention, static_argnames=STATIC)


@pytest.fixture(scope="module")
def both_passes(oracle: Any) -> Any:
    return oracle.jit(out_and_gradients, static_argnames=STATIC)


@pytest.fixture(scope="module")
def check_both_passes(oracle: Any, both_passes: Any) -> Any:
    return functools.partial(_check_both_passes, oracle, both_passes)


def _check_both_passes(
    oracle: Any, both_passes: Any, shape: Any, dtype: str = "float32", seed: int = 0, **call: Any
) -> None:
    q, k, v = oracle.inputs(shape, dtype, seed)
    dout = oracle.cotangent(shape, dtype, seed)
    out, grads = both_passes(q, k, v, dout, **call)
    asked = {name: call[name] for name in ("causal", "scale") if name in call}
    oracle.check_forward(out, q, k, v, **asked)
    oracle.check_gradients(grads, q, k, v, dout, **asked)


# Lengths and blocks


@pytest.mark.parametrize(("causal", "dtype"), [(True, "float32"), (False, "bfloat16")])
@pytest.mark.parametrize(("length", "blocks"), list(zip(LENGTHS, BLOCKS, strict=True)))
def test_lengths_that_blocks_do_not_divide(
    check_both_passes: Any, oracle: Any, length: int, blocks: tuple[int, int], dtype: str, causal: bool
) -> None:
    shape = oracle.Shape(length, length, batch=1)
    check_both_passes(shape, dtype, causal=causal, block_q=blocks[0], block_k=blocks[1])


def test_all_block_sizes_agree(oracle: Any, forward: Any) -> None:
    q, k, v = oracle.inputs(oracle.Shape(129, 129, batch=1))
    for block_q, block_k in BLOCKS:
        out = forward(q, k, v, causal=True, block_q=block_q, block_k=block_k)
        oracle.check_forward(out, q, k, v, causal=True)


def test_repeated_calls_are_equal_bit_for_bit(oracle: Any) -> None:
    q, k, v = oracle.inputs(oracle.Shape(33, 33))
    first = np.asarray(flash_attention(q, k, v, block_q=16, block_k=16))
    for _ in range(20):
        assert np.array_equal(first, flash_attention(q, k, v, block_q=16, block_k=16))


@pytest.mark.parametrize("lengths", [(64, 32), (40, 16), (1, 50), (17, 100)])
def test_causal_counts_from_the_first_query_and_key(
    check_both_passes: Any, oracle: Any, lengths: tuple[int, int]
) -> None:
    check_both_passes(oracle.Shape(*lengths), causal=True, block_q=16, block_k=16)


def test_causal_agrees_with_jax(oracle: Any) -> None:
    q, k, v = oracle.inputs(oracle.Shape(40, 24))
    want = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    np.testing.assert_allclose(flash_attention(q, k, v, causal=True, block_q=16), want, atol=1e-5)


@pytest.mark.parametrize("lengths", [(100, 30), (30, 100)])
def test_lengths_that_differ_without_causal(check_both_passes: Any, oracle: Any, lengths: tuple[int, int]) -> None:
    check_both_passes(oracle.Shape(*lengths), block_q=32, block_k=16)


def test_keys_that_no_query_sees_do_not_matter(both_passes: Any, oracle: Any) -> None:
    shape = oracle.Shape(20, 40)
    q, k, v = oracle.inputs(shape)
    k, v = k.at[:, 20:].set(jnp.nan), v.at[:, 20:].set(jnp.inf)
    dout = oracle.cotangent(shape)
    out, grads = both_passes(q, k, v, dout, causal=True, block_q=16, block_k=16)
    clean = both_passes(q, k[:, :20], v[:, :20], dout, causal=True, block_q=16, block_k=16)
    assert np.array_equal(out, clean[0])
    for grad in grads[1:]:
        assert np.all(np.asarray(grad[:, 20:]) == 0)
        assert np.isfinite(grad).all()


@pytest.mark.parametrize("causal", [False, True])
def test_no_keys_give_zeros(both_passes: Any, causal: bool) -> None:
    q, k = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 0, 2, 8))
    v = jnp.ones((2, 0, 2, 6))
    out, grads = both_passes(q, k, v, jnp.ones((2, 5, 4, 6)), causal=causal)
    assert np.array_equal(out, np.zeros((2, 5, 4, 6)))
    assert np.array_equal(grads[0], np.zeros(q.shape))


def test_no_queries_give_an_empty_output(both_passes: Any) -> None:
    q, k = jnp.ones((2, 0, 4, 8)), jnp.ones((2, 5, 4, 8))
    out, grads = both_passes(q, k, k, q)
    assert out.shape == q.shape
    assert np.array_equal(grads[1], np.zeros(k.shape))


# Heads


@pytest.mark.parametrize(("depth", "v_depth"), HEAD_DIMS)
def test_head_dims(check_both_passes: Any, oracle: Any, depth: int, v_depth: int) -> None:
    shape = oracle.Shape(40, 40, batch=1, depth=depth, v_depth=v_depth)
    check_both_passes(shape, causal=True, block_q=16, block_k=32)


@pytest.mark.parametrize(("heads", "kv_heads", "dtype"), [(6, 2, "float32"), (4, 1, "bfloat16"), (3, 3, "float16")])
def test_query_heads_share_key_heads(
    check_both_passes: Any, oracle: Any, heads: int, kv_heads: int, dtype: str
) -> None:
    shape = oracle.Shape(37, 45, heads=heads, kv_heads=kv_heads, v_depth=24)
    check_both_passes(shape, dtype, causal=True, block_q=16, block_k=16)


# Values


@pytest.mark.parametrize("scale", [0.25, 1, -0.7, 0.0])
def test_scale(check_both_passes: Any, oracle: Any, scale: float) -> None:
    check_both_passes(oracle.Shape(33, 20), scale=scale, block_q=16, block_k=16)


def test_scale_may_be_traced_and_has_a_gradient(oracle: Any) -> None:
    q, k, v = oracle.inputs(oracle.Shape(33, 20))

    def total(scale: Any) -> Any:
        return jnp.sum(flash_attention(q, k, v, scale=scale, block_q=16, block_k=16) * v[:, :1])

    def exact(scale: float) -> float:
        return float(np.sum(oracle.forward(q, k, v, scale=scale) * np.asarray(v[:, :1], np.float64)))

    slope = (exact(0.3 + 1e-4) - exact(0.3 - 1e-4)) / 2e-4
    assert float(jax.jit(jax.grad(total))(0.3)) == pytest.approx(slope, rel=1e-4)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shift", [-1e5, 1e5])
def test_logits_of_a_hundred_thousand(oracle: Any, shift: float, causal: bool) -> None:
    q, k, v = oracle.inputs(oracle.Shape(37, 37))
    q = q.at[..., 0].set(shift / 10)
    k = k.at[..., 0].set(10)
    out = flash_attention(q, k, v, scale=1.0, causal=causal, block_q=16, block_k=16)
    oracle.check_forward(out, q, k, v, scale=1.0, causal=causal, tolerance=2e-2)


@pytest.mark.parametrize("causal", [False, True])
def test_float16_products_beyond_its_range(oracle: Any, causal: bool) -> None:
    q = jnp.full((1, 37, 2, 64), 300, jnp.float16)
    v = oracle.inputs(oracle.Shape(37, 37, batch=1, depth=64), "float16")[2]
    oracle.check_forward(flash_attention(q, q, v, causal=causal, block_k=16), q, q, v, causal=causal)


def test_float16_gradients_where_those_of_scores_leave_its_range(both_passes: Any, oracle: Any) -> None:
    shape = oracle.Shape(8, 8, depth=64)
    q, k, v = (x * factor for x, factor in zip(oracle.inputs(shape, "float16"), (0.1, 0.1, 4), strict=True))
    dout = oracle.cotangent(shape, "float16") * 1e4
    _, grads = both_passes(q, k, v, dout)
    oracle.check_gradients(grads, q, k, v, dout)


@pytest.mark.parametrize("winner", [0, 20, 36])
def test_one_key_outweighs_all_others(oracle: Any, winner: int) -> None:
    q = jnp.ones((1, 5, 1, 1))
    k = jnp.full((1, 37, 1, 1), -1e4).at[0, winner].set(1e4)
    v = oracle.inputs(oracle.Shape(37, 37, batch=1, heads=1, kv_heads=1))[2]
    out = flash_attention(q, k, v, block_q=16, block_k=16)
    np.testing.assert_allclose(out, jnp.broadcast_to(v[:, winner : winner + 1], out.shape), rtol=1e-6)


@pytest.mark.parametrize("level", [0.0, 1e5])
def test_equal_keys_give_the_mean(both_passes: Any, oracle: Any, level: float) -> None:
    shape = oracle.Shape(33, 33, depth=4)
    q, k, v = oracle.inputs(shape)
    q, k, dout = jnp.ones_like(q), jnp.full_like(k, level), oracle.cotangent(shape)
    out, grads = both_passes(q, k, v, dout, causal=True, block_q=16, block_k=16)
    oracle.check_forward(out, q, k, v, causal=True)
    want = oracle.gradients(q, k, v, dout, causal=True)[2]
    np.testing.assert_allclose(grads[2], want, atol=1e-5)


# Any call at all


@st.composite
def calls(draw: Any) -> dict[str, Any]:
    lengths, blocks = st.integers(1, 70), st.integers(1, 80)
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return {
        "q_length": draw(lengths),
        "kv_length": draw(lengths),
        "batch": draw(st.integers(1, 3)),
        "heads": kv_heads * group,
        "kv_heads": kv_heads,
        "depth": draw(st.integers(1, 40)),
        "v_depth": draw(st.integers(1, 40)),
        "blocks": (draw(blocks), draw(blocks)),
        "dtype": draw(st.sampled_from(["float32", "bfloat16", "float16"])),
        "causal": draw(st.booleans()),
        "seed": draw(st.integers(0, 2**31)),
    }


@settings(max_examples=15, deadline=None)
@given(call=calls())
def test_any_call_agrees_with_the_oracle(check_both_passes: Any, oracle: Any, call: dict[str, Any]) -> None:
    (block_q, block_k), dtype = call.pop("blocks"), call.pop("dtype")
    seed, causal = call.pop("seed"), call.pop("causal")
    check_both_passes(oracle.Shape(**call), dtype, seed, causal=causal, block_q=block_q, block_k=block_k)
