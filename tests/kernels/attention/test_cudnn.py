"""The way to cuDNN: what is handed on, and what is selected before and after."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax.kernels import reference_attention
from tune_jax.kernels.attention import cudnn
from tune_jax.kernels.attention.checks import read_call

LENGTHS = {
    "none": {},
    "of queries": {"q_lengths": np.array([5, 0])},
    "of keys": {"kv_lengths": np.array([7, 0])},
    "of both": {"q_lengths": np.array([6, 2]), "kv_lengths": np.array([1, 9])},
}


def attention(q: Any, k: Any, v: Any, **call: Any) -> Any:
    return cudnn.attend(*read_call(q, k, v, **call))[0]


# What is handed on, and what is made of it


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """In place of cuDNN, which only a GPU has: JAX's plain attention, with junk where cuDNN promises nothing."""
    calls: list[dict[str, Any]] = []
    plain = jax.nn.dot_product_attention

    def attend(q: Any, k: Any, v: Any, **call: Any) -> Any:
        calls.append(call)
        out = plain(q, k, v, **{**call, "implementation": "xla"})
        lengths, kv_lengths = call["query_seq_lengths"], call["key_value_seq_lengths"]
        rows = np.arange(q.shape[1])[None, :, None, None]
        if lengths is not None:
            out = jnp.where(rows < lengths[:, None, None, None], out, jnp.nan)
        if kv_lengths is not None:
            out = jnp.where(kv_lengths[:, None, None, None] > 0, out, jnp.nan)
        return out

    monkeypatch.setattr(jax.nn, "dot_product_attention", attend)
    return calls


@pytest.mark.parametrize(
    ("call", "is_causal", "window"),
    [
        ({}, False, None),
        ({"causal": True}, True, None),
        ({"window": (None, 0)}, True, None),
        ({"causal": True, "window": (3, None)}, True, (3, 0)),
        ({"causal": True, "window": (3, 2)}, True, (3, 0)),
        ({"window": (3, 0), "scale": 0.7}, True, (3, 0)),
    ],
    ids=str,
)
def test_hands_on_what_means_the_same(
    oracle: Any, stand_in: list[dict[str, Any]], call: dict[str, Any], is_causal: bool, window: Any
) -> None:
    qkv = oracle.inputs(oracle.Shape(9, 12, heads=4))
    out = attention(*qkv, **call)
    assert stand_in[0]["implementation"] == "cudnn"
    assert (stand_in[0]["is_causal"], stand_in[0]["local_window_size"]) == (is_causal, window)
    np.testing.assert_allclose(out, reference_attention(*qkv, **call), atol=2e-5)


def poisoned(x: Any, lengths: Any) -> Any:
    if lengths is None:
        return x
    return jnp.where(np.arange(x.shape[1])[None, :, None, None] < lengths[:, None, None, None], x, jnp.nan)


def with_gradients(function: Any, q: Any, k: Any, v: Any, dout: Any) -> Any:
    out, pull_back = jax.vjp(function, q, k, v)
    return out, pull_back(dout)


@pytest.mark.parametrize(
    ("name", "causal"), [("of queries", False), ("of keys", True), ("of both", False), ("of both", True)]
)
def test_padding_is_zero_and_changes_nothing(
    oracle: Any, stand_in: list[dict[str, Any]], name: str, causal: bool
) -> None:
    shape, lengths = oracle.Shape(8, 10), LENGTHS[name]
    q, k, v = oracle.inputs(shape)
    q_lengths, kv_lengths = lengths.get("q_lengths"), lengths.get("kv_lengths")
    dirty = (poisoned(q, q_lengths), poisoned(k, kv_lengths), poisoned(v, kv_lengths), oracle.cotangent(shape))
    got, want = (
        oracle.jit(functools.partial(with_gradients, functools.partial(function, causal=causal, **lengths)))(*arrays)
        for function, arrays in ((attention, dirty), (reference_attention, (q, k, v, dirty[3])))
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-5), got, want)


def test_without_lengths_nothing_is_selected(oracle: Any, stand_in: list[dict[str, Any]]) -> None:
    qkv = oracle.inputs(oracle.Shape(8, 10))
    text = str(jax.make_jaxpr(lambda *a: attention(*a, causal=False))(*qkv))
    assert "select_n" not in text


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize(("q_length", "kv_length"), [(64, 64), (64, 96), (96, 64)])
@pytest.mark.parametrize("causal", [False, True])
def test_agrees_with_the_reference(
    oracle: Any, lengths: dict[str, Any], q_length: int, kv_length: int, causal: bool
) -> None:
    shape = oracle.Shape(q_length, kv_length, heads=4, kv_heads=2, depth=64)
    q, k, v = oracle.inputs(shape, "bfloat16")
    scaled = {name: jnp.asarray(value * 7) for name, value in lengths.items()}
    q_lengths, kv_lengths = scaled.get("q_lengths"), scaled.get("kv_lengths")
    dirty = (poisoned(q, q_lengths), poisoned(k, kv_lengths), poisoned(v, kv_lengths))
    dout = oracle.cotangent(shape, "bfloat16")
    clean = [x.astype(jnp.float32) for x in (q, k, v)]
    got, want = (
        jax.jit(functools.partial(with_gradients, functools.partial(function, causal=causal, **scaled)))(
            *arrays, cotangent
        )
        for function, arrays, cotangent in (
            (attention, dirty, dout),
            (reference_attention, clean, dout.astype(jnp.float32)),
        )
    )
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(x.astype(jnp.float32), y, atol=0.03 * float(jnp.abs(y).max()) + 1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("q_length", "kv_length"), [(64, 64), (64, 96)])
def test_windows_agree_with_the_reference(oracle: Any, q_length: int, kv_length: int) -> None:
    q, k, v = oracle.inputs(oracle.Shape(q_length, kv_length, depth=64), "bfloat16")
    got = attention(q, k, v, window=(20, 0)).astype(jnp.float32)
    want = reference_attention(*(x.astype(jnp.float32) for x in (q, k, v)), window=(20, 0))
    np.testing.assert_allclose(got, want, atol=0.03)
