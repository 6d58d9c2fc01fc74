"""The oracle against finite differences of its own forward pass, and against wrong results."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest


@pytest.fixture(scope="module")
def arguments() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    shapes = {"q": (2, 7, 4, 3), "k": (2, 9, 2, 3), "v": (2, 9, 2, 2), "bias": (2, 1, 7, 9), "sinks": (4,)}
    return {name: rng.standard_normal(shape) for name, shape in shapes.items()} | {"scale": np.array(0.7)}


def masks() -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {
        "causal": True,
        "window": (6, None),
        "softcap": 2.0,
        "q_offset": np.array([2, -3]),
        "kv_lengths": np.array([9, 5]),
        "segment_ids": (rng.integers(0, 2, (2, 7)), rng.integers(0, 2, (2, 9))),
        "mask": rng.random((4, 1, 9)) < 0.8,
    }


def cotangents() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    return rng.standard_normal((2, 7, 4, 2)), rng.standard_normal((2, 7, 4))


def loss(oracle: Any, arguments: dict[str, np.ndarray]) -> float:
    dout, dlse = cotangents()
    values = oracle.answer(**arguments, **masks()).values
    return float((values["out"] * dout).sum() + (np.where(values["lse"] == -np.inf, 0, values["lse"]) * dlse).sum())


@pytest.mark.parametrize("name", ["q", "k", "v", "bias", "sinks", "scale"])
def test_gradients_are_slopes_of_the_forward_pass(oracle: Any, arguments: dict[str, np.ndarray], name: str) -> None:
    direction = np.random.default_rng(3).standard_normal(arguments[name].shape)
    ahead, behind = ({**arguments, name: arguments[name] + step * direction} for step in (1e-5, -1e-5))
    slope = (loss(oracle, ahead) - loss(oracle, behind)) / 2e-5
    gradient = oracle.answer(**arguments, dout=cotangents()[0], dlse=cotangents()[1], **masks()).values[f"d{name}"]
    assert gradient.shape == arguments[name].shape
    np.testing.assert_allclose((gradient * direction).sum(), slope, rtol=1e-7)


def test_two_keys_by_hand(oracle: Any) -> None:
    q, k = np.ones((1, 1, 1, 1)), np.log([1.0, 3.0]).reshape(1, 2, 1, 1)
    v = np.array([8.0, 4.0]).reshape(1, 2, 1, 1)
    values = oracle.answer(q, k, v).values
    np.testing.assert_allclose([values["out"].item(), values["lse"].item()], [5, np.log(4)])
    sunk = oracle.answer(q, k, v, sinks=np.log([4.0])).values
    np.testing.assert_allclose([sunk["out"].item(), sunk["lse"].item()], [2.5, np.log(8)])


def test_masks_by_hand(oracle: Any) -> None:
    shape = oracle.Shape(2, 4, batch=1, heads=1)
    np.testing.assert_array_equal(oracle.seen(shape, causal=True, q_offset=1)[0, 0], [[1, 1, 0, 0], [1, 1, 1, 0]])
    np.testing.assert_array_equal(oracle.seen(shape, window=(0, 1))[0, 0], [[1, 1, 0, 0], [0, 1, 1, 0]])
    both = oracle.seen(shape, kv_lengths=np.array([3]), segment_ids=(np.array([[0, 1]]), np.array([[0, 1, 1, 1]])))
    np.testing.assert_array_equal(both[0, 0], [[1, 0, 0, 0], [0, 1, 1, 0]])


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize(("heads", "depth"), [(1, 16), (2, 64)])
def test_what_is_wrong_by_more_than_rounding_is_refused(oracle: Any, heads: int, depth: int, dtype: Any) -> None:
    q, k, v = (np.asarray(x) for x in oracle.inputs(oracle.Shape(20, 30, heads=heads, kv_heads=heads, depth=depth)))
    q, k, v = (x.astype(dtype) for x in (q, k, v))
    exact = oracle.answer(q, k, v).values["out"]
    oracle.check({"out": exact.astype(dtype)}, q, k, v)
    wrong = exact * (1 + (256 if dtype == np.float32 else 8) * float(ml_dtypes.finfo(dtype).eps))
    with pytest.raises(AssertionError, match=r"out\[.* is .*, not .* to within"):
        oracle.check({"out": wrong.astype(dtype)}, q, k, v)


def test_not_a_number_is_refused(oracle: Any) -> None:
    q, k, v = oracle.inputs(oracle.Shape(3, 3))
    out = np.asarray(oracle.forward(q, k, v), np.float32)
    out[1, 2, 0, 3] = np.nan
    with pytest.raises(AssertionError, match=r"out\[1, 2, 0, 3\] is nan, not"):
        oracle.check({"out": out}, q, k, v)
