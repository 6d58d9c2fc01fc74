"""The grid of block sizes offered for a call."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from tune_jax.kernels import flash_attention, flash_attention_space


def struct(length: int, heads: int = 2, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, length, heads, 16), dtype)


def space(q_length: int, kv_length: int, **statics: Any) -> dict[str, list[int]]:
    return flash_attention_space(struct(q_length), struct(kv_length), struct(kv_length), **statics)


def test_long_arrays_get_every_power_of_two() -> None:
    sizes = [64, 128, 256, 512, 1024]
    assert space(8192, 4096) == {"block_q": sizes, "block_k": sizes}


def test_sizes_are_clipped_to_each_length_without_duplicates() -> None:
    assert space(100, 300) == {"block_q": [64, 100], "block_k": [64, 128, 256, 300]}
    assert space(256, 1) == {"block_q": [64, 128, 256], "block_k": [1]}


def test_causal_leaves_out_keys_past_the_last_query() -> None:
    assert space(100, 300, causal=True)["block_k"] == [64, 100]
    assert space(300, 100, causal=True)["block_k"] == [64, 100]


def test_empty_arrays_get_one_choice() -> None:
    assert space(0, 0) == {"block_q": [1], "block_k": [1]}


def test_other_arguments_of_the_call_are_taken() -> None:
    assert space(100, 100, scale=0.5, implementation="xla") == space(100, 100)


def test_arrays_do_as_well_as_their_shapes(oracle: Any) -> None:
    q, k, v = oracle.inputs(oracle.Shape(100, 70))
    assert flash_attention_space(q, k, v) == space(100, 70)
    assert flash_attention_space(v=v, q=q, k=k) == space(100, 70)


def test_arrays_that_do_not_fit_are_an_error_before_any_candidate() -> None:
    with pytest.raises(ValueError, match="must be a multiple"):
        flash_attention_space(struct(64, heads=3), struct(64), struct(64))


@pytest.mark.parametrize("causal", [False, True])
def test_every_candidate_runs_and_agrees(oracle: Any, causal: bool) -> None:
    q, k, v = oracle.inputs(oracle.Shape(100, 80, batch=1))
    grid = flash_attention_space(q, k, v, causal=causal)
    candidates = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
    assert len(candidates) == 4
    for candidate in candidates:
        oracle.check_forward(flash_attention(q, k, v, causal=causal, **candidate), q, k, v, causal=causal)
