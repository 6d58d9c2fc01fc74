"""The plain reference against the float64 oracle and JAX's own attention."""

from __future__ import annotations

import doctest
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax.kernels import reference_attention


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 1), (33, 20), (20, 33)])
def test_agrees_with_float64(oracle: Any, lengths: tuple[int, int], causal: bool, dtype: str) -> None:
    q, k, v = oracle.inputs(oracle.Shape(*lengths, heads=6, kv_heads=2, v_depth=8), dtype)
    out = reference_attention(q, k, v, causal=causal, scale=0.3)
    oracle.check_forward(out, q, k, v, causal=causal, scale=0.3)


@pytest.mark.parametrize("causal", [False, True])
def test_agrees_with_jax_where_lengths_differ(oracle: Any, causal: bool) -> None:
    q, k, v = oracle.inputs(oracle.Shape(24, 40, heads=4, kv_heads=2))
    want = jax.nn.dot_product_attention(q, k, v, is_causal=causal)
    np.testing.assert_allclose(reference_attention(q, k, v, causal=causal), want, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_gradients_agree_with_float64(oracle: Any, causal: bool) -> None:
    shape = oracle.Shape(33, 20, heads=4, kv_heads=2)
    q, k, v = oracle.inputs(shape)
    dout = oracle.cotangent(shape)

    def pull_back(*qkv: Any) -> Any:
        return jax.vjp(lambda *a: reference_attention(*a, causal=causal), *qkv)[1](dout)

    grads = oracle.jit(pull_back)(q, k, v)
    oracle.check_gradients(grads, q, k, v, dout, causal=causal)


def test_no_keys_give_zeros() -> None:
    q, k = jnp.ones((1, 3, 2, 8)), jnp.ones((1, 0, 2, 8))
    assert np.array_equal(reference_attention(q, k, k), np.zeros(q.shape))


def test_large_logits_do_not_overflow(oracle: Any) -> None:
    q, k, v = oracle.inputs(oracle.Shape(9, 9))
    out = reference_attention(q * 300, k * 300, v)
    oracle.check_forward(out, q * 300, k * 300, v, tolerance=2e-2)


@pytest.mark.parametrize("module", ["api", "reference", "space"])
def test_docstring_examples_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"tune_jax.kernels.attention.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
