"""The `xla` backend: every feature, alone and together, forward and backward."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax.kernels import flash_attention, reference_attention
from tune_jax.kernels.attention.checks import read_call
from tune_jax.kernels.attention.reference import seen

BATCH, Q_LENGTH, KV_LENGTH, HEADS, KV_HEADS, DEPTH, V_DEPTH = 2, 37, 45, 4, 2, 12, 20
TILES = {"block_q": 16, "block_k": 24}
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks", "scale")
STATICS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window and softcap": {"window": (14, 3), "softcap": 1.5},
}


def normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def integers(seed: int, high: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, high, shape).astype(np.int32)


NEUTRAL = {
    "q": normal(1, BATCH, Q_LENGTH, HEADS, DEPTH),
    "k": normal(2, BATCH, KV_LENGTH, KV_HEADS, DEPTH),
    "v": normal(3, BATCH, KV_LENGTH, KV_HEADS, V_DEPTH),
    "bias": np.zeros((BATCH, HEADS, Q_LENGTH, KV_LENGTH), np.float32),
    "sinks": np.full(HEADS, -30, np.float32),
    "scale": np.float32(0.3),
    "mask": np.ones((BATCH, HEADS, Q_LENGTH, KV_LENGTH), bool),
    "q_offset": np.zeros(BATCH, np.int32),
    "q_lengths": np.full(BATCH, Q_LENGTH, np.int32),
    "kv_lengths": np.full(BATCH, KV_LENGTH, np.int32),
    "q_segments": np.zeros((BATCH, Q_LENGTH), np.int32),
    "kv_segments": np.zeros((BATCH, KV_LENGTH), np.int32),
}
COTANGENTS = normal(4, BATCH, Q_LENGTH, HEADS, V_DEPTH), normal(5, BATCH, Q_LENGTH, HEADS)

SORTED = {
    "q_segments": np.sort(integers(6, 4, BATCH, Q_LENGTH)),
    "kv_segments": np.sort(integers(7, 4, BATCH, KV_LENGTH)),
}
LENGTHS = {"q_lengths": np.array([21, 37], np.int32), "kv_lengths": np.array([30, 7], np.int32)}
MASK = {"mask": integers(8, 5, BATCH, HEADS, Q_LENGTH, KV_LENGTH) > 1}
DEAD_COLUMNS = {"mask": np.broadcast_to(integers(9, 2, BATCH, 1, 1, KV_LENGTH) > 0, NEUTRAL["mask"].shape)}
BIAS = {"bias": normal(10, BATCH, HEADS, Q_LENGTH, KV_LENGTH)}
FEATURES: dict[str, dict[str, Any]] = {
    "nothing": {},
    "q_offset": {"q_offset": np.array([9, -6], np.int32)},
    "an offset past all keys": {"q_offset": np.array([200, -200], np.int32)},
    "q_lengths": {"q_lengths": np.array([16, 0], np.int32)},
    "kv_lengths": {"kv_lengths": np.array([0, 33], np.int32)},
    "both lengths": LENGTHS,
    "sorted segments": SORTED,
    "segments in any order": {
        "q_segments": integers(11, 3, BATCH, Q_LENGTH),
        "kv_segments": integers(12, 4, BATCH, KV_LENGTH),
    },
    "segments that never match": {"q_segments": np.ones((BATCH, Q_LENGTH), np.int32)},
    "mask": MASK,
    "keys masked for all": DEAD_COLUMNS,
    "bias": BIAS,
    "bias of -inf": {"bias": np.where(MASK["mask"], BIAS["bias"], -np.inf).astype(np.float32)},
    "sinks": {"sinks": normal(13, HEADS)},
    "negative scale": {"scale": np.float32(-0.7)},
    "everything": {
        **LENGTHS,
        **SORTED,
        **MASK,
        **BIAS,
        "sinks": normal(13, HEADS),
        "q_offset": np.array([3, 8], np.int32),
    },
}


def as_call(arrays: dict[str, Any]) -> dict[str, Any]:
    call = dict(arrays)
    return call | {"segment_ids": (call.pop("q_segments"), call.pop("kv_segments"))}


def run(attention: Any, statics: dict[str, Any], arrays: dict[str, Any], cotangents: Any) -> tuple[Any, Any]:
    """Output and log-sum-exp, and the gradients by name."""

    def attend(given: dict[str, Any]) -> Any:
        return attention(**as_call(arrays | given), **statics, return_lse=True)

    primals = {name: arrays[name] for name in DIFFERENTIABLE}
    results, pull_back = jax.vjp(attend, primals)
    return results, pull_back(cotangents)[0]


@pytest.fixture(scope="module", params=STATICS)
def statics(request: pytest.FixtureRequest) -> dict[str, Any]:
    return STATICS[request.param]


@pytest.fixture(scope="module")
def blocked(statics: dict[str, Any], oracle: Any) -> Any:
    attention = functools.partial(flash_attention, implementation="xla", **TILES)
    return oracle.jit(functools.partial(run, attention, statics))


@pytest.fixture(scope="module")
def plain(statics: dict[str, Any]) -> Any:
    return jax.jit(functools.partial(run, reference_attention, statics))


@pytest.mark.parametrize("feature", FEATURES)
def test_agrees_with_the_definition(feature: str, blocked: Any, plain: Any) -> None:
    arrays = NEUTRAL | FEATURES[feature]
    got, want = blocked(arrays, COTANGENTS), plain(arrays, COTANGENTS)
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=3e-5, rtol=3e-5), got, want)


@pytest.mark.parametrize("feature", FEATURES)
def test_what_nobody_sees_changes_nothing(feature: str, statics: dict[str, Any], blocked: Any) -> None:
    arrays = NEUTRAL | FEATURES[feature]
    rows, keys = who_takes_part(arrays, statics)
    poison = {
        "q": np.where(rows[..., None], arrays["q"], np.nan),
        "k": np.where(keys[..., None], arrays["k"], np.nan),
        "v": np.where(keys[..., None], arrays["v"], np.inf),
    }
    cotangents = np.where(rows[..., None], COTANGENTS[0], np.nan), np.where(rows, COTANGENTS[1], np.inf)
    got, want = blocked(arrays | poison, cotangents), blocked(arrays, COTANGENTS)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_padding_changes_nothing_without_other_masks(oracle: Any) -> None:
    q, k, v = (jnp.asarray(NEUTRAL[name]) for name in "qkv")
    lengths = jnp.array([30, 7])
    attention = functools.partial(flash_attention, kv_lengths=lengths, implementation="xla", **TILES)
    padding = (np.arange(KV_LENGTH) >= lengths[:, None])[..., None, None]

    @oracle.jit
    def both(*qkv: Any) -> Any:
        out, pull_back = jax.vjp(attention, *qkv)
        return out, pull_back(COTANGENTS[0])

    got = both(q, jnp.where(padding, jnp.nan, k), jnp.where(padding, jnp.inf, v))
    jax.tree.map(np.testing.assert_array_equal, got, both(q, k, v))


def who_takes_part(arrays: dict[str, Any], statics: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Rows that see a key, `[batch, Tq, heads]`, and keys that a row sees, `[batch, Tk, kv_heads]`."""
    rest = {"scale": None, "softcap": None, "deterministic": False, "causal": False, "window": None}
    allowed = np.asarray(seen(*read_call(**rest | as_call(arrays) | statics)))
    grouped = allowed.reshape(BATCH, KV_HEADS, HEADS // KV_HEADS, Q_LENGTH, KV_LENGTH)
    return allowed.any(3).swapaxes(1, 2), grouped.any((2, 3)).swapaxes(1, 2)


def test_repeated_calls_are_equal_bit_for_bit(blocked: Any) -> None:
    arrays = NEUTRAL | FEATURES["everything"]
    first = blocked(arrays, COTANGENTS)
    for _ in range(5):
        jax.tree.map(np.testing.assert_array_equal, first, blocked(arrays, COTANGENTS))


@pytest.mark.parametrize("axes", [(0,), (1, 2), (0, 1, 2, 3)])
def test_bias_gradient_is_summed_over_what_is_shared(axes: tuple[int, ...], oracle: Any) -> None:
    full = NEUTRAL["bias"].shape
    bias = normal(0, *(1 if axis in axes else size for axis, size in enumerate(full)))
    q, k, v = (NEUTRAL[name] for name in "qkv")

    def gradient(attention: Any, bias: Any) -> Any:
        return jax.grad(lambda bias: (attention(q, k, v, bias=bias) * COTANGENTS[0]).sum())(bias)

    attention = functools.partial(flash_attention, implementation="xla", **TILES)
    got = oracle.jit(functools.partial(gradient, attention))(bias)
    whole = jax.jit(functools.partial(gradient, reference_attention))(np.broadcast_to(bias, full))
    want = whole.sum(axes, keepdims=True)
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-4)


# Dtypes


@pytest.mark.parametrize(("heads", "kv_heads", "dtype"), [(6, 2, "float32"), (4, 1, "bfloat16"), (3, 3, "float16")])
def test_agrees_with_float64_in_every_dtype(oracle: Any, heads: int, kv_heads: int, dtype: str) -> None:
    shape = oracle.Shape(37, 45, heads=heads, kv_heads=kv_heads, v_depth=24)
    check_both_passes(oracle, oracle.inputs(shape, dtype), oracle.cotangent(shape, dtype), causal=True)


def test_float16_gradients_where_those_of_scores_leave_its_range(oracle: Any) -> None:
    shape = oracle.Shape(8, 8, depth=64)
    qkv = [x * factor for x, factor in zip(oracle.inputs(shape, "float16"), (0.1, 0.1, 4), strict=True)]
    check_both_passes(oracle, qkv, oracle.cotangent(shape, "float16") * 1e4, causal=False)


def check_both_passes(oracle: Any, qkv: Any, dout: Any, causal: bool) -> None:
    attention = functools.partial(flash_attention, causal=causal, implementation="xla", block_q=16, block_k=16)

    def both(*qkv: Any) -> Any:
        out, pull_back = jax.vjp(attention, *qkv)
        return out, pull_back(dout)

    out, grads = oracle.jit(both)(*qkv)
    oracle.check_forward(out, *qkv, causal=causal)
    oracle.check_gradients(grads, *qkv, dout, causal=causal)


def test_gradients_have_the_dtypes_of_their_operands(oracle: Any) -> None:
    q, k, v = oracle.inputs(oracle.Shape(8, 8), "bfloat16")
    bias, sinks, scale = jnp.zeros((8, 8), jnp.float16), jnp.zeros(2, jnp.bfloat16), jnp.float32(1)

    def total(q: Any, k: Any, v: Any, bias: Any, sinks: Any, scale: Any) -> Any:
        return flash_attention(q, k, v, bias=bias, sinks=sinks, scale=scale, implementation="xla").sum()

    operands = (q, k, v, bias, sinks, scale)
    grads = jax.eval_shape(jax.grad(total, argnums=range(6)), *operands)
    assert [(x.shape, x.dtype) for x in grads] == [(x.shape, x.dtype) for x in operands]


# Empty calls


@pytest.mark.parametrize("causal", [False, True])
def test_no_keys_give_zeros(causal: bool) -> None:
    q, k, v = jnp.ones((2, 5, 4, 8)), jnp.ones((2, 0, 2, 8)), jnp.ones((2, 0, 2, 6))
    out, pull_back = jax.vjp(lambda *qkv: flash_attention(*qkv, causal=causal, implementation="xla"), q, k, v)
    assert np.array_equal(out, np.zeros((2, 5, 4, 6)))
    assert np.array_equal(pull_back(out)[0], np.zeros(q.shape))


def test_no_queries_give_an_empty_output() -> None:
    q, k = jnp.ones((2, 0, 4, 8)), jnp.ones((2, 5, 4, 8))
    out, pull_back = jax.vjp(lambda *qkv: flash_attention(*qkv, implementation="xla"), q, k, k)
    assert out.shape == q.shape
    assert np.array_equal(pull_back(out)[1], np.zeros(k.shape))
