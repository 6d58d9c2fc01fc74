"""Partial attention joined into attention over all keys."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from tune_jax.kernels import flash_attention, merge_attention, reference_attention

CALLS = {
    "all": {},
    "lengths": {"kv_lengths": np.array([5, 0]), "q_lengths": np.array([3, 7])},
    "segments": {"segment_ids": (np.array([[0] * 3 + [1] * 4, [2] * 7]), np.array([[1] * 6 + [0] * 5, [3] * 11]))},
}
PARTS = {"two": (4, 7), "three": (1, 9, 1), "one of none": (0, 11)}


@pytest.fixture(scope="module")
def qkv(oracle: Any) -> tuple[Any, Any, Any]:
    return oracle.inputs(oracle.Shape(7, 11, heads=4, kv_heads=2, depth=8, v_depth=6))


def in_parts(function: Any, sizes: tuple[int, ...], q: Any, k: Any, v: Any, **call: Any) -> tuple[Any, Any]:
    """Attention to the first keys, then to the next, ..., all merged."""
    joined = None
    start = 0
    for size in sizes:
        part = slice(start, start + size)
        own = {}
        if "kv_lengths" in call:
            own["kv_lengths"] = np.clip(call["kv_lengths"] - start, 0, size)
        if "segment_ids" in call:
            own["segment_ids"] = (call["segment_ids"][0], call["segment_ids"][1][:, part])
        result = function(q, k[:, part], v[:, part], return_lse=True, **{**call, **own})
        joined = result if joined is None else merge_attention(*joined, *result)
        start += size
    assert joined is not None
    return joined


def with_gradients(function: Callable[..., Any], q: Any, k: Any, v: Any) -> Any:
    """Results, and the gradients of a number made from both of them."""

    def number(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        out, lse = function(q, k, v)
        return jnp.cos(out).sum() + jnp.sin(jnp.where(jnp.isfinite(lse), lse, 0)).sum(), (out, lse)

    grads, results = jax.grad(number, (0, 1, 2), has_aux=True)(q, k, v)
    return results, grads


def assert_close(got: Any, want: Any) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=3e-5, rtol=1e-5), got, want)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_parts_make_the_whole_and_so_do_their_gradients(oracle: Any, qkv: Any, call: dict[str, Any]) -> None:
    parts = functools.partial(in_parts, reference_attention, PARTS["two"], **call)
    whole = functools.partial(reference_attention, return_lse=True, **call)
    got, want = (oracle.jit(functools.partial(with_gradients, function))(*qkv) for function in (parts, whole))
    assert_close(got, want)


@pytest.mark.parametrize("sizes", PARTS.values(), ids=PARTS)
def test_any_number_of_parts(oracle: Any, qkv: Any, sizes: tuple[int, ...]) -> None:
    got = oracle.jit(functools.partial(in_parts, reference_attention, sizes))(*qkv)
    assert_close(got, oracle.jit(functools.partial(reference_attention, return_lse=True))(*qkv))


def test_a_ring_of_blocks_is_causal_attention(oracle: Any) -> None:
    """Each step sees the block of keys that the neighbour had the step before, at its own offset."""
    q, k, v = oracle.inputs(oracle.Shape(4, 12))
    blocks = tuple(x.reshape(2, 3, 4, *x.shape[2:]).swapaxes(0, 1) for x in (k, v))
    place = 1  # of the queries in the ring: positions 4 to 7

    def ring(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        def step(joined: Any, block: Any) -> tuple[Any, None]:
            index, keys, values = block
            offset = (place - index) * 4
            part = reference_attention(q, keys, values, causal=True, q_offset=offset, return_lse=True)
            return merge_attention(*joined, *part), None

        nothing = (jnp.zeros(q.shape), jnp.full(q.shape[:3], -jnp.inf))
        return jax.lax.scan(step, nothing, (jnp.arange(3), k, v))[0]

    def whole(q: Any, k: Any, v: Any) -> tuple[Any, Any]:
        k, v = (x.swapaxes(0, 1).reshape(2, 12, *x.shape[3:]) for x in (k, v))
        return reference_attention(q, k, v, causal=True, q_offset=place * 4, return_lse=True)

    got, want = (oracle.jit(functools.partial(with_gradients, function))(q, *blocks) for function in (ring, whole))
    assert_close(got, want)


def test_order_does_not_matter() -> None:
    rng = np.random.default_rng(0)
    a, b = ((jnp.asarray(rng.standard_normal((5, 3))), jnp.asarray(rng.standard_normal(5))) for _ in range(2))
    assert_close(merge_attention(*a, *b), merge_attention(*b, *a))


def test_rows_empty_on_both_sides_stay_empty_and_take_no_gradient() -> None:
    out, lse = jnp.zeros((2, 3)), jnp.full(2, -jnp.inf)
    results, pull_back = jax.vjp(merge_attention, out, lse, out, lse)
    assert np.array_equal(results[0], out)
    assert np.array_equal(results[1], lse)
    for grad in pull_back((jnp.ones((2, 3)), jnp.ones(2))):
        assert np.array_equal(grad, np.zeros(grad.shape))


def test_a_side_that_saw_nothing_leaves_the_other_as_it_is() -> None:
    out, lse = jnp.array([[1.0, 2.0]]), jnp.array([700.0])
    got = merge_attention(jnp.zeros((1, 2)), jnp.array([-jnp.inf]), out, lse)
    assert_close(got, (out, lse))


@pytest.mark.parametrize("level", [-1e4, 1e4])
def test_far_log_sum_exps_do_not_overflow(level: float) -> None:
    out, lse = merge_attention(jnp.array([[1.0]]), jnp.array([level]), jnp.array([[3.0]]), jnp.array([level]))
    assert_close((out, lse), (np.array([[2.0]]), np.array([level + np.log(2)])))


def test_second_derivatives_and_forward_mode() -> None:
    arrays = (jnp.array([[1.0, 2.0]]), jnp.array([0.3]), jnp.array([[0.5, -1.0]]), jnp.array([-0.2]))
    check_grads(jax.jit(merge_attention), arrays, order=2, modes=("fwd", "rev"), atol=2e-2, rtol=2e-2)


def test_sums_are_float32_and_the_output_keeps_its_dtype() -> None:
    half = jnp.ones((1, 4), jnp.bfloat16)
    out, lse = merge_attention(half, jnp.zeros(1, jnp.bfloat16), 2 * half, jnp.zeros(1, jnp.bfloat16))
    assert (out.dtype, lse.dtype) == (jnp.bfloat16, jnp.float32)
    assert_close(out.astype(jnp.float32), np.full((1, 4), 1.5))


@pytest.mark.parametrize("name", ["out_b", "lse_a", "lse_b"])
def test_shapes_that_do_not_fit_are_named(name: str) -> None:
    arrays = {"out_a": jnp.zeros((2, 3)), "lse_a": jnp.zeros(2), "out_b": jnp.zeros((2, 3)), "lse_b": jnp.zeros(2)}
    arrays[name] = arrays[name][:1]
    with pytest.raises(ValueError, match=rf"must share one shape.*{name} \(1"):
        merge_attention(**arrays)


def test_dtypes_that_differ_are_named() -> None:
    out, lse = jnp.zeros((2, 3)), jnp.zeros(2)
    with pytest.raises(TypeError, match="float32 and bfloat16"):
        merge_attention(out, lse, out.astype(jnp.bfloat16), lse)


def test_a_backend_in_parts(oracle: Any, qkv: Any) -> None:
    backend = functools.partial(flash_attention, implementation="xla", block_q=4, block_k=4)
    parts = functools.partial(in_parts, backend, PARTS["two"])
    whole = functools.partial(reference_attention, return_lse=True)
    got, want = (oracle.jit(functools.partial(with_gradients, function))(*qkv) for function in (parts, whole))
    assert_close(got, want)


def test_sinks_are_merged_last_as_a_set_of_their_own(qkv: Any) -> None:
    sinks = jnp.array([0.5, -1.0, 2.0, 0.0])
    out, lse = in_parts(reference_attention, PARTS["two"], *qkv)
    got = merge_attention(out, lse, jnp.zeros_like(out), jnp.broadcast_to(sinks, lse.shape))
    assert_close(got, reference_attention(*qkv, sinks=sinks, return_lse=True))


def test_what_lies_in_rows_without_keys_counts_for_nothing() -> None:
    lse = jnp.array([0.5, -jnp.inf])
    out, junk = jnp.ones((2, 3)), jnp.array([[2.0] * 3, [jnp.nan] * 3])

    def number(junk: Any, lse: Any) -> Any:
        return merge_attention(out, jnp.zeros(2), junk, lse)[0].sum()

    clean = jnp.nan_to_num(junk)
    assert_close(jax.value_and_grad(number, (0, 1))(junk, lse), jax.value_and_grad(number, (0, 1))(clean, lse))
