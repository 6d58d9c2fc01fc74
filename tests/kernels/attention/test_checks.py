"""What a call may be given, and what it says where it may not: what came, what was expected, what to try."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax.kernels.attention.call import Operands, Spec, Tiles
from tune_jax.kernels.attention.checks import read_call, read_flag, read_tiles

Q = (2, 300, 4, 16)
K = (2, 200, 2, 16)


def read(**call: Any) -> tuple[Spec, Operands]:
    arrays = {"q": zeros(*Q), "k": zeros(*K), "v": zeros(*K)}
    return read_call(**{**arrays, **call})


def zeros(*shape: int, dtype: Any = np.float32) -> np.ndarray:
    return np.zeros(shape, dtype)


def ones(*shape: int, dtype: Any = np.int32) -> np.ndarray:
    return np.ones(shape, dtype)


BAD = [
    # Queries, keys and values
    ({"q": None}, TypeError, "q must be an array, got None (NoneType)."),
    ({"v": "values"}, TypeError, "v must be an array, got 'values' (str)."),
    (
        {"q": ones(8, 4, 16)},
        ValueError,
        "4 axes, [batch, time, heads, head_dim], got shape (8, 4, 16); add",
    ),
    ({"k": ones(1, 2, 8, 4, 16)}, ValueError, "or use jax.vmap for more"),
    ({"q": zeros(3, 300, 4, 16)}, ValueError, "same batch (axis 0), got q (3, 300, 4, 16), k (2, 200, 2, 16)"),
    ({"v": zeros(2, 199, 2, 16)}, ValueError, "k and v must have the same time and heads (axes 1 and 2)"),
    ({"q": zeros(2, 300, 4, 8)}, ValueError, "q and k must have the same head_dim (axis 3)"),
    ({"q": zeros(2, 300, 3, 16)}, ValueError, "3 is not a multiple of 2"),
    ({"v": zeros(2, 200, 2, 257)}, ValueError, "head_dim (axis 3) may be at most 256"),
    ({"q": zeros(*Q, dtype=np.int32)}, TypeError, "float32, bfloat16, float16, got int32, float32, float32; cast"),
    ({"k": zeros(*K, dtype=jnp.bfloat16)}, TypeError, "share one dtype"),
    # Flags and numbers
    ({"causal": 1}, TypeError, "causal must be True or False, got 1 (int); under jit, make it static."),
    ({"causal": jnp.ones((3, 3), bool)}, TypeError, "got bool[3, 3]; under jit"),
    ({"deterministic": None}, TypeError, "deterministic must be True or False, got None"),
    ({"scale": "1"}, TypeError, "scale must be a finite real scalar or None, got '1' (str); None is 1/sqrt(head_dim)."),
    ({"scale": True}, TypeError, "got True (bool)"),
    ({"scale": 1j}, TypeError, "got 1j (complex)"),
    ({"scale": np.nan}, TypeError, "got nan (float)"),
    ({"scale": 1e39}, TypeError, "got 1e+39 (float)"),
    ({"scale": ones(1)}, TypeError, "got int32[1]"),
    ({"scale": jnp.array(True)}, TypeError, "scale must be a finite real scalar"),
    ({"softcap": 0}, ValueError, "softcap must be a positive number or None, got 0 (int); None leaves it out"),
    ({"softcap": -2.0}, ValueError, "got -2.0 (float)"),
    ({"softcap": 1e-60}, ValueError, "got 1e-60 (float)"),
    ({"softcap": np.inf}, ValueError, "got inf (float)"),
    ({"softcap": jnp.float32(2)}, ValueError, "under jit it must be static"),
    # Windows
    ({"window": 3}, ValueError, "window must be (left, right)"),
    ({"window": (3,)}, ValueError, "got (3,) (tuple)"),
    ({"window": (-1, 0)}, ValueError, "two whole numbers from 0 up, or None for a side without limit; got (-1, 0)"),
    ({"window": (1.0, 0)}, ValueError, "(255, 0) sees the query's own position and the 255 before it"),
    ({"window": (True, 0)}, ValueError, "got (True, 0)"),
    ({"window": ones(2)}, ValueError, "got int32[2]"),
    # Positions and lengths
    ({"q_offset": 1.5}, TypeError, "q_offset must be a whole number or one per batch row, got float32[]; cast"),
    ({"q_offset": None}, TypeError, "got None (NoneType)"),
    ({"q_offset": ones(3)}, ValueError, "of shape () or (2,), got shape (3,)"),
    (
        {"q_lengths": ones(2, dtype=bool)},
        TypeError,
        "q_lengths must be one whole number per batch row, or None",
    ),
    ({"kv_lengths": ones(2, dtype=np.float32)}, TypeError, "cast with .astype(jnp.int32)"),
    ({"kv_lengths": 5}, ValueError, "of shape (2,), got shape (); jnp.broadcast_to repeats what all share"),
    ({"kv_lengths": ones(3)}, ValueError, "got shape (3,)"),
    ({"kv_lengths": [2**70, 1]}, TypeError, "got [1180591620717411303424, 1] (list)"),
    # Segments
    (
        {"segment_ids": ones(2, 300)},
        ValueError,
        "a pair, (q_segment_ids, kv_segment_ids), got int32[2, 300]",
    ),
    ({"segment_ids": (ones(2, 300),)}, ValueError, "for self-attention give the same array twice"),
    (
        {"segment_ids": (ones(2, 300), ones(2, 300))},
        ValueError,
        "segment_ids[1] must be whole numbers, one per position",
    ),
    (
        {"segment_ids": (ones(2, 300), None)},
        TypeError,
        "whole numbers, one per position, got None",
    ),
    (
        {"segment_ids": (ones(2, 300, dtype=np.float32), ones(2, 200))},
        TypeError,
        "got float32[2, 300]",
    ),
    (
        {"segment_ids": (2**32 * ones(2, 300, dtype=np.int64), ones(2, 200))},
        ValueError,
        "got 4294967296 to 4294967296",
    ),
    # Masks, biases and sinks
    (
        {"mask": ones(300, 200)},
        TypeError,
        "mask must be boolean, True where a query may see a key",
    ),
    ({"mask": "causal"}, TypeError, "mask must be a boolean array, got 'causal' (str)"),
    ({"mask": ones(200, 300, dtype=bool)}, ValueError, "must broadcast to [batch, heads, Tq, Tk] = [2, 4, 300, 200]"),
    ({"mask": ones(1, 1, 1, 1, 1, dtype=bool)}, ValueError, "use axes of size 1 for what is shared"),
    ({"bias": ones(300, 200)}, TypeError, "cast with .astype, or give booleans as mask"),
    ({"bias": "alibi"}, TypeError, "bias must be a floating-point array, got 'alibi' (str)"),
    ({"bias": ones(3, 300, 200, dtype=np.float32)}, ValueError, "bias must broadcast to"),
    ({"sinks": ones(4)}, TypeError, "sinks must be floating point, got int32[4]; cast"),
    (
        {"sinks": ones(2, dtype=np.float32)},
        ValueError,
        "of shape (4,), got shape (2,); heads are q's axis 2",
    ),
    ({"sinks": "off"}, TypeError, "sinks must be one logit a head, got 'off' (str)"),
]


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[next(iter(call)) for call, *_ in BAD])
def test_what_is_wrong_is_named(call: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        read(**call)


@pytest.mark.parametrize("name", ["causal", "window", "softcap", "deterministic"])
def test_what_must_be_static_says_so_under_jit(name: str) -> None:
    value = (3, 0) if name == "window" else 1.0 if name == "softcap" else True
    with pytest.raises((TypeError, ValueError), match="static"):
        jax.eval_shape(lambda traced: read(**{name: traced})[1], value)


@pytest.mark.parametrize("name", ["block_q", "num_warps", "block_k_dq"])
@pytest.mark.parametrize("value", [0, -64, 64.0, True, "64", (64,)])
def test_a_tile_is_a_positive_whole_number(name: str, value: Any) -> None:
    advice = "a power of two such as 128" if name.startswith("block") else "a small number such as 4"
    message = f"{name} must be a positive whole number or None, got {value!r} ({type(value).__name__}); try {advice}"
    with pytest.raises(ValueError, match=re.escape(message)):
        read_tiles(**{name: value})


def test_tiles_are_python_numbers() -> None:
    assert read_tiles(block_q=np.int64(64), num_warps=None) == Tiles(block_q=64)
    assert read_tiles(block_q=np.int64(64)).given == {"block_q": 64}


# What a call becomes


def test_an_empty_call_has_no_arrays_but_three() -> None:
    spec, operands = read()
    assert spec == Spec(scale=0.25)
    assert [name for name, value in operands._asdict().items() if value is not None] == ["q", "k", "v"]


@pytest.mark.parametrize("scale", [2, 2.0, np.float32(2), np.int32(2), np.float64(2)])
def test_a_number_is_a_static_scale(scale: Any) -> None:
    spec, operands = read(scale=scale)
    assert (spec.scale, operands.scale) == (2.0, None)
    assert type(spec.scale) is float


@pytest.mark.parametrize("scale", [np.array(2.0), jnp.array(2), jnp.bfloat16(2), jnp.array(2.0, jnp.float16)])
def test_an_array_is_a_traced_scale(scale: Any) -> None:
    spec, operands = read(scale=scale)
    assert spec.scale is None
    assert operands.scale == 2
    assert operands.scale.dtype == jnp.float32


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64])
@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray])
def test_lengths_and_offsets_of_any_integers(convert: Any, dtype: Any, x64: bool) -> None:
    limits = np.iinfo(dtype)
    if convert is jnp.asarray and limits.bits == 64 and not x64:
        pytest.skip("JAX has no such arrays")
    with jax.enable_x64(x64):
        values = convert(np.array([limits.max, 100], dtype))
        operands = read(q_lengths=values, kv_lengths=values, q_offset=values)[1]
        assert operands.q_lengths.tolist() == [min(limits.max, 300), 100]
        assert operands.kv_lengths.tolist() == [min(limits.max, 200), 100]
        assert operands.q_offset.tolist() == [min(limits.max, 2**29), 100]
        below = convert(np.array([limits.min, 3], dtype))
        assert read(kv_lengths=below)[1].kv_lengths.tolist() == [0, 3]
        assert read(q_offset=below)[1].q_offset.tolist() == [max(limits.min, -(2**29)), 3]
    assert {x.dtype for x in operands if x is not None and x.ndim == 1} == {np.dtype(np.int32)}


@pytest.mark.parametrize("offset", [7, np.int64(7), jnp.int8(7), [7, 7], np.array([7, 7])])
def test_one_offset_or_one_a_row(offset: Any) -> None:
    assert read(q_offset=offset)[1].q_offset.tolist() == [7, 7]


@pytest.mark.parametrize(
    ("offset", "want"), [(2**40, 2**29), (-(2**40), -(2**29)), (2**70, 2**29), (-(2**70), -(2**29))]
)
def test_an_offset_beyond_all_keys_stays_there(offset: int, want: int) -> None:
    assert read(q_offset=offset)[1].q_offset.tolist() == [want, want]


@pytest.mark.parametrize(
    ("causal", "window", "left", "right"),
    [
        (False, None, None, None),
        (True, None, None, 0),
        (False, [3, None], 3, None),
        (True, (np.int32(3), 5), 3, 0),
        (False, (2**40, 2), None, 2),
    ],
)
def test_causal_and_window_together(causal: bool, window: Any, left: int | None, right: int | None) -> None:
    spec, _ = read(causal=causal, window=window)
    assert (spec.left, spec.right) == (left, right)


@pytest.mark.parametrize("softcap", [10**31, float(np.finfo(np.float32).max)])
def test_a_cap_beyond_all_scores_is_none(softcap: float) -> None:
    assert read(softcap=softcap)[0].softcap is None
    assert read(softcap=1e29)[0].softcap == 1e29


@pytest.mark.parametrize("shape", [(), (200,), (300, 1), (4, 1, 200), (2, 1, 300, 200), (2, 4, 300, 200)])
def test_masks_and_biases_get_four_axes(shape: tuple[int, ...]) -> None:
    operands = read(mask=np.ones(shape, bool), bias=jnp.ones(shape, jnp.bfloat16))[1]
    want = (1,) * (4 - len(shape)) + shape
    assert operands.mask.shape == operands.bias.shape == want
    assert operands.bias.dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64])
def test_segments_of_any_integers(dtype: Any) -> None:
    ids = np.arange(300, dtype=np.int64).clip(0, 100).astype(dtype)
    operands = read(segment_ids=[np.tile(ids, (2, 1)), np.tile(ids[:200], (2, 1))])[1]
    assert operands.q_segments.dtype == operands.kv_segments.dtype == jnp.int32
    np.testing.assert_array_equal(operands.q_segments[1], ids)


def test_sinks_are_float32() -> None:
    assert read(sinks=jnp.ones(4, jnp.bfloat16))[1].sinks.dtype == jnp.float32


def test_x64_makes_no_64_bit_array() -> None:
    with jax.enable_x64(True):
        arrays = {"mask": np.ones((300, 1), bool), "bias": jnp.ones((300, 1), jnp.float32), "sinks": np.ones(4)}
        ids = (np.ones((2, 300), np.int64), np.ones((2, 200), np.int64))
        lengths = {"q_offset": 3, "q_lengths": np.array([3, 4]), "kv_lengths": np.array([3, 4])}
        operands = read(**arrays, **lengths, segment_ids=ids, scale=jnp.array(2.0))[1]
    assert None not in operands
    assert {x.dtype.itemsize for x in operands} == {1, 4}


@pytest.mark.parametrize("flag", [True, np.True_])
def test_flags_are_bools(flag: Any) -> None:
    assert read_flag("causal", flag) is True
