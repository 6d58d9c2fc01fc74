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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("lengths", "dtype"), [((1, 1), "float32"), ((33, 20), "bfloat16"), ((20, 33), "float16")])
def test_agrees_with_float64(oracle: Any, lengths: tuple[int, int], causal: bool, dtype: str) -> None:
    q, k, v = oracle.inputs(oracle.Shape(*lengths, heads=6, kv_heads=2, v_depth=8), dtype)
    out = oracle.jit(lambda *qkv: reference_attention(*qkv, causal=causal, scale=0.3))(q, k, v)
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


# One compiled program each; tests/kernels/attention/test_property.py draws for all features together.

SHAPE = {"q_length": 12, "kv_length": 15, "heads": 4, "v_depth": 8}


def every_argument(seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "q_offset": np.array([2, -4]),
        "q_lengths": np.array([12, 9]),
        "kv_lengths": np.array([15, 6]),
        "segment_ids": (rng.integers(0, 2, (2, 12)), rng.integers(0, 2, (2, 15))),
        "mask": rng.random((2, 1, 12, 15)) < 0.8,
        "bias": rng.standard_normal((2, 12, 1), np.float32)[:, None],
        "sinks": rng.standard_normal(4, np.float32),
        "scale": np.array(0.5, np.float32),
    }


STATIC = {"causal": True, "window": (7, None), "softcap": 4.0}
GIVEN = [
    *({name: value} for name, value in STATIC.items()),
    *({name: value} for name, value in every_argument().items()),
    {"window": (3, 0), "causal": False},
    {"window": (None, 2), "q_offset": 3},
]


@pytest.mark.parametrize("call", GIVEN, ids=["-".join(call) for call in GIVEN])
def test_each_argument_alone_agrees_with_float64(oracle: Any, call: dict[str, Any]) -> None:
    q, k, v = oracle.inputs(oracle.Shape(**SHAPE, kv_heads=4))
    out, lse = oracle.jit(lambda *qkv: reference_attention(*qkv, **call, return_lse=True))(q, k, v)
    oracle.check({"out": out, "lse": lse}, q, k, v, **call)


def pull_back(q: Any, k: Any, v: Any, dout: Any, dlse: Any, learnt: dict[str, Any], fixed: dict[str, Any]) -> Any:
    """All results, by name."""

    def attend(operands: dict[str, Any]) -> Any:
        return reference_attention(**operands, **fixed, **STATIC, return_lse=True)

    (out, lse), pull = jax.vjp(attend, {"q": q, "k": k, "v": v, **learnt})
    return {"out": out, "lse": lse, **{f"d{name}": value for name, value in pull((dout, dlse))[0].items()}}


@pytest.fixture(scope="module")
def all_together(oracle: Any) -> Any:
    compiled = oracle.jit(pull_back)

    def run(q: Any, k: Any, v: Any, dout: Any, dlse: Any, call: dict[str, Any]) -> Any:
        learnt = {name: call[name] for name in ("bias", "sinks", "scale")}
        fixed = {name: value for name, value in call.items() if name not in learnt}
        return compiled(q, k, v, dout, dlse, learnt, fixed)

    return run


def operands_of(oracle: Any) -> tuple[Any, ...]:
    shape = oracle.Shape(**SHAPE, kv_heads=2)
    dlse = np.random.default_rng(5).standard_normal(shape.q[:3], np.float32)
    return (*oracle.inputs(shape), oracle.cotangent(shape), dlse)


@pytest.mark.parametrize("seed", range(3))
def test_all_gradients_agree_with_float64(oracle: Any, all_together: Any, seed: int) -> None:
    operands, call = operands_of(oracle), every_argument(seed)
    oracle.check(all_together(*operands, call), *operands, **STATIC, **call)


EMPTY = {
    "no keys in a row of the batch": {"kv_lengths": np.array([0, 15])},
    "no queries": {"q_lengths": np.array([0, 0])},
    "all keys ahead": {"q_offset": np.array([-20, -20])},
    "no segment in common": {"segment_ids": (np.zeros((2, 12), int), np.ones((2, 15), int))},
    "nothing in the mask": {"mask": np.zeros((2, 1, 12, 15), bool)},
    "every other row masked": {"mask": np.tile(np.arange(12)[:, None] % 2 == 0, (2, 1, 1, 15))},
    "a bias of -inf": {"bias": np.full((2, 1, 12, 1), -np.inf, np.float32)},
    "a bias of -inf in some rows": {"bias": np.tile(np.where(np.arange(12) < 5, -np.inf, 1), (2, 1))[:, None, :, None]},
}


@pytest.mark.parametrize("case", EMPTY)
def test_rows_that_see_nothing_are_zero_and_so_are_their_gradients(oracle: Any, all_together: Any, case: str) -> None:
    operands, call = operands_of(oracle), {**every_argument(), **EMPTY[case]}
    call["bias"] = call["bias"].astype(np.float32)
    got = all_together(*operands, call)
    oracle.check(got, *operands, **STATIC, **call)
    blind = np.isneginf(got["lse"])
    assert blind.any()
    assert not np.asarray(got["out"])[blind].any()
    assert not np.asarray(got["dq"])[blind].any()


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_what_nobody_sees_does_not_matter(oracle: Any, all_together: Any, poison: float) -> None:
    q, k, v, dout, dlse = (np.array(x) for x in operands_of(oracle))
    call = {**every_argument(), "q_lengths": np.array([10, 3]), "kv_lengths": np.array([9, 4])}
    clean = all_together(q, k, v, dout, dlse, call)
    for row, (queries, keys) in enumerate(zip(call["q_lengths"], call["kv_lengths"], strict=True)):
        for rows in (q, dout, dlse):
            rows[row, queries:] = poison
        for rows in (k, v):
            rows[row, keys:] = poison
        call["bias"][row, :, queries:] = poison
    jax.tree.map(np.testing.assert_array_equal, all_together(q, k, v, dout, dlse, call), clean)


def test_a_row_that_one_head_sees_and_another_does_not(oracle: Any, all_together: Any) -> None:
    q, k, v, dout, dlse = (np.array(x) for x in operands_of(oracle))
    mask = np.ones((2, 4, 12, 15), bool)
    mask[:, 1, :5] = False
    q[:, :5, 1] = dout[:, :5, 1] = np.nan
    call = {**every_argument(), "mask": mask}
    oracle.check(all_together(q, k, v, dout, dlse, call), q, k, v, dout, dlse, **STATIC, **call)


def test_a_sink_far_above_all_scores_takes_the_whole_weight(oracle: Any, all_together: Any) -> None:
    operands, call = operands_of(oracle), {**every_argument(), "sinks": np.float32([1e4, -1e4, 300, -np.inf])}
    got = all_together(*operands, call)
    oracle.check(got, *operands, **STATIC, **call)
    assert np.isneginf(got["lse"][1, 9:]).all()
    assert (got["lse"][0, :, 0] >= 1e4)[np.isfinite(got["lse"][0, :, 0])].all()


def test_no_keys_give_zeros() -> None:
    q, k = jnp.ones((1, 3, 2, 8)), jnp.ones((1, 0, 2, 8))
    out, lse = reference_attention(q, k, k, return_lse=True)
    assert np.array_equal(out, np.zeros(q.shape))
    assert np.array_equal(lse, np.full((1, 3, 2), -np.inf))


def test_return_lse_is_a_flag_as_it_is_elsewhere() -> None:
    q = jnp.ones((1, 3, 2, 8))
    with pytest.raises(TypeError, match="return_lse must be True or False, got 1"):
        reference_attention(q, q, q, return_lse=1)


def test_large_logits_do_not_overflow(oracle: Any) -> None:
    q, k, v = oracle.inputs(oracle.Shape(9, 9))
    out = reference_attention(q * 300, k * 300, v)
    oracle.check_forward(out, q * 300, k * 300, v, tolerance=2e-2)


def test_x64_changes_no_dtype_and_no_result(oracle: Any, all_together: Any) -> None:
    operands, call = tuple(np.asarray(x) for x in operands_of(oracle)), every_argument()
    want = all_together(*operands, call)
    with jax.enable_x64(True):
        got = all_together(*operands, call)
    assert {name: x.dtype for name, x in got.items()} == {name: x.dtype for name, x in want.items()}
    oracle.check(got, *operands, **STATIC, **call)


def test_second_derivatives_are_those_of_the_gradient(oracle: Any) -> None:
    q, k, v = oracle.inputs(oracle.Shape(3, 4, batch=1, heads=1, kv_heads=1, depth=2))
    step = jnp.asarray(np.random.default_rng(1).standard_normal(q.shape), jnp.float32)

    gradient = jax.grad(lambda q: (reference_attention(q, k, v, q_lengths=np.array([2])) ** 2).sum())
    slope = oracle.jit(lambda q: jax.jvp(gradient, (q,), (step,))[1])(q)
    difference = oracle.jit(lambda q: (gradient(q + 1e-2 * step) - gradient(q - 1e-2 * step)) / 2e-2)(q)
    np.testing.assert_allclose(slope, difference, atol=1e-3)


@pytest.mark.parametrize("module", ["api", "reference", "space"])
def test_docstring_examples_run(module: str) -> None:
    result = doctest.testmod(importlib.import_module(f"tune_jax.kernels.attention.{module}"))
    assert result.attempted > 0
    assert result.failed == 0
