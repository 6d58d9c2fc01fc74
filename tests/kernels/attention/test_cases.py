"""What people ran into with attention kernels: lengths, heads, logits and masks at the edges, on every backend."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax.kernels import flash_attention
from tune_jax.kernels.attention.backends import BACKENDS

gpu = pytest.mark.gpu
TILES = {backend.name: backend.tiles for backend in BACKENDS}
DIFFERENTIABLE = ("bias", "sinks")
INTERPRETED = ["xla", "pallas_triton", "pallas_tpu"]
ON_GPU = [pytest.param(name, marks=gpu, id=f"{name}-gpu") for name in ("xla", "pallas_triton", "cudnn")]
EVERYWHERE = [*INTERPRETED, *ON_GPU]
# Interpreting costs a long compilation: what a backend's own tests cover is not repeated here.
ONE_INTERPRETED = ["xla", "pallas_triton", *ON_GPU]
XLA_AND_GPU = ["xla", *ON_GPU]


@pytest.fixture(scope="session")
def both_passes(oracle: Any) -> Any:
    """Output, log-sum-exp and gradients by name; one compiled program for each backend, shape and static choice."""

    @functools.cache
    def compiled(backend: str, static: tuple[tuple[str, Any], ...]) -> Any:
        attend = functools.partial(flash_attention, implementation=backend, **dict(static))
        jit = oracle.jit if jax.default_backend() == "cpu" else jax.jit
        return jit(functools.partial(differentiate, attend, backend != "cudnn"))

    def run(backend: str, q: Any, k: Any, v: Any, dout: Any, static: dict[str, Any], arrays: dict[str, Any]) -> Any:
        tiles = {name: tile_for(backend, value) for name, value in static.items() if name.startswith("block")}
        static = {name: value for name, value in static.items() if name not in tiles}
        static |= {name: value for name, value in tiles.items() if name in TILES[backend]}
        function = compiled(backend, tuple(sorted(static.items())))
        skip_what_cudnn_refuses(backend, function, q, k, v, dout, arrays)
        return function(q, k, v, dout, arrays)

    return run


def differentiate(attend: Any, has_lse: bool, q: Any, k: Any, v: Any, dout: Any, arrays: dict[str, Any]) -> Any:
    fixed = {name: value for name, value in arrays.items() if name not in DIFFERENTIABLE}
    learnt = {name: value for name, value in arrays.items() if name in DIFFERENTIABLE}

    def forward(operands: dict[str, Any]) -> Any:
        results = attend(**operands, **fixed, return_lse=has_lse)
        return results if has_lse else (results, None)

    out, pull_back, lse = jax.vjp(forward, {"q": q, "k": k, "v": v, **learnt}, has_aux=True)
    results = {f"d{name}": value for name, value in pull_back(dout)[0].items()}
    return {"out": out, **results, **({"lse": lse} if has_lse else {})}


def tile_for(backend: str, size: int) -> int:
    return 128 if backend == "pallas_tpu" else size


def skip_what_cudnn_refuses(backend: str, function: Any, *arguments: Any) -> None:
    if backend == "cudnn":
        try:
            jax.eval_shape(function, *arguments)
        except ValueError as error:
            # That is a right answer if it says whose it is.
            if "cudnn" not in str(error):
                raise
            pytest.skip(str(error))


@pytest.fixture(scope="session")
def check(oracle: Any, both_passes: Any) -> Any:
    """Runs a backend forward and backward and compares everything with float64."""

    def run(backend: str, shape: Any, dtype: str = "float32", **call: Any) -> dict[str, Any]:
        dtype = "bfloat16" if (backend, dtype) == ("cudnn", "float32") else dtype
        q, k, v, dout = (*oracle.inputs(shape, dtype), oracle.cotangent(shape, dtype))
        is_array = {name: isinstance(value, np.ndarray) or name == "segment_ids" for name, value in call.items()}
        static = {name: value for name, value in call.items() if not is_array[name]}
        arrays = {name: value for name, value in call.items() if is_array[name]}
        got = both_passes(backend, q, k, v, dout, static, arrays)
        oracle.check(got, q, k, v, dout, **{name: x for name, x in call.items() if not name.startswith("block")})
        return got

    return run


# Lengths that blocks do not divide (C37)

LENGTHS = [(1, 16, 16), (7, 16, 32), (33, 32, 16), (127, 64, 32), (129, 32, 64), (192, 128, 128), (257, 128, 64)]


@pytest.mark.parametrize(("length", "block_q", "block_k"), LENGTHS)
@pytest.mark.parametrize("backend", XLA_AND_GPU)
def test_lengths_that_no_block_divides(
    check: Any, oracle: Any, backend: str, length: int, block_q: int, block_k: int
) -> None:
    causal, dtype = length % 4 == 1, "bfloat16" if length in (33, 192) else "float32"
    check(backend, oracle.Shape(length, length), dtype, causal=causal, block_q=block_q, block_k=block_k)


def test_interpreted_length_that_no_block_divides(check: Any, oracle: Any) -> None:
    check("pallas_triton", oracle.Shape(129, 129, batch=1, heads=1, kv_heads=1), causal=True, block_q=64, block_k=32)


@gpu
@pytest.mark.parametrize("backend", ["xla", "pallas_triton", "cudnn"])
def test_twenty_calls_are_equal_bit_for_bit(oracle: Any, both_passes: Any, backend: str) -> None:
    q, k, v = oracle.inputs(oracle.Shape(257, 257, depth=64), "bfloat16")
    results = [both_passes(backend, q, k, v, q, {"causal": True}, {})["out"] for _ in range(20)]
    assert all(np.array_equal(results[0], result) for result in results)


# Causal with more queries than keys, and rows with no key (C39)


@pytest.mark.parametrize("lengths", [(64, 32), (40, 16)])
@pytest.mark.parametrize("backend", ONE_INTERPRETED)
def test_causal_rows_past_the_last_key_see_all_of_them(
    check: Any, oracle: Any, backend: str, lengths: tuple[int, int]
) -> None:
    if lengths == (40, 16) and backend not in ("xla", "cudnn"):
        pytest.skip("one shape is enough to interpret")
    out = check(backend, oracle.Shape(*lengths), causal=True, block_q=16, block_k=16)["out"]
    assert np.isfinite(np.asarray(out, np.float32)).all()


@pytest.mark.parametrize("backend", ONE_INTERPRETED)
def test_rows_before_the_first_key_are_zero(check: Any, oracle: Any, backend: str) -> None:
    shape = oracle.Shape(64, 32)
    got = check(backend, shape, causal=True, q_offset=np.array([-32, -32]), block_q=16, block_k=16)
    assert not np.asarray(got["out"], np.float32)[:, :32].any()
    assert np.isneginf(got["lse"][:, :32]).all()
    assert not np.asarray(got["dq"], np.float32)[:, :32].any()


# Head sizes (C41)

HEAD_DIMS = [(d, d) for d in (8, 24, 40, 64, 80, 96, 136, 192, 256)] + [(192, 128), (64, 128)]


@pytest.mark.parametrize(("depth", "v_depth"), HEAD_DIMS)
@pytest.mark.parametrize("backend", XLA_AND_GPU)
def test_head_dims(check: Any, oracle: Any, backend: str, depth: int, v_depth: int) -> None:
    check(backend, oracle.Shape(40, 40, batch=1, depth=depth, v_depth=v_depth), causal=True, block_q=16, block_k=32)


@pytest.mark.parametrize("backend", INTERPRETED[1:])
def test_interpreted_head_dims(check: Any, oracle: Any, backend: str) -> None:
    shape = oracle.Shape(20, 20, batch=1, heads=1, kv_heads=1, depth=136, v_depth=192)
    check(backend, shape, causal=True, block_q=16, block_k=16)


# Very large and very negative logits (C43)


@pytest.mark.parametrize("case", ["low", "high", "one", "same", "overflow"])
@pytest.mark.parametrize("backend", EVERYWHERE)
def test_large_logits(oracle: Any, both_passes: Any, backend: str, case: str) -> None:
    dtype = "float32" if backend != "cudnn" else "bfloat16"
    q, k, v = (np.array(x, np.float32) for x in oracle.inputs(oracle.Shape(33, 33, batch=1, depth=64)))
    q = np.ones_like(q)
    if case in ("low", "high"):
        k = np.full_like(k, 1e5 / 64 * (-1 if case == "low" else 1)) + k
    elif case == "one":
        k = np.where(np.arange(33)[:, None, None] == 20, 1e4 / 64, -1e4 / 64) + 0 * k
    else:
        k = np.full_like(k, 300 / 8 if case == "overflow" else 1)
        q = 300 * q if case == "overflow" else q
    q, k, v = (jnp.asarray(x, dtype) for x in (q, k, v))
    call = {"causal": True, "scale": 1.0, "block_q": 16, "block_k": 16}
    out = both_passes(backend, q, k, v, v, call, {})["out"]
    oracle.check_forward(out, q, k, v, causal=True, scale=1.0, tolerance=2e-2)


@pytest.mark.parametrize("backend", XLA_AND_GPU)
def test_float16_products_beyond_its_range(oracle: Any, both_passes: Any, backend: str) -> None:
    ones = jnp.full((1, 33, 2, 64), 300, jnp.float16)
    v = oracle.inputs(oracle.Shape(33, 33, batch=1, depth=64), "float16")[2]
    out = both_passes(backend, ones, ones, v, v, {"causal": True, "block_q": 16, "block_k": 16}, {})["out"]
    oracle.check_forward(out, ones, ones, v, causal=True)


# Launch limits and 32-bit offsets (C45)


@pytest.mark.parametrize(("batch", "heads"), [(70_000, 1), pytest.param(1, 70_000, marks=gpu)])
@pytest.mark.parametrize("backend", XLA_AND_GPU)
def test_batches_and_heads_past_65535(oracle: Any, backend: str, batch: int, heads: int) -> None:
    length = 4 if jax.default_backend() == "cpu" else 16
    shape = oracle.Shape(length, length, batch, heads, heads, 16)
    dtype = "bfloat16" if backend == "cudnn" else "float32"
    q, k, v = oracle.inputs(shape, dtype)

    def both(q: Any, k: Any, v: Any) -> Any:
        out, pull_back = jax.vjp(functools.partial(flash_attention, implementation=backend), q, k, v)
        return out, pull_back(v)

    skip_what_cudnn_refuses(backend, both, q, k, v)
    out, grads = jax.jit(both)(q, k, v)
    for part in (slice(0, 3), slice(32_700, 32_800), slice(65_530, 65_540), slice(69_990, 70_000)):
        cut = functools.partial(cut_axis, part=part, axis=0 if batch > 1 else 2)
        oracle.check_forward(cut(out), cut(q), cut(k), cut(v))
        oracle.check_gradients([cut(x) for x in grads], cut(q), cut(k), cut(v), cut(v))


def cut_axis(x: Any, part: slice, axis: int) -> np.ndarray:
    return np.asarray(x)[(slice(None),) * axis + (part,)]


@gpu
@pytest.mark.parametrize("backend", ["pallas_triton", "cudnn"])
def test_arrays_of_more_than_2_to_the_31_elements(oracle: Any, backend: str) -> None:
    shape = (1100, 1024, 16, 128)
    keys = jax.random.split(jax.random.key(0), 3)
    q, k, v = (jax.jit(functools.partial(jax.random.normal, shape=shape, dtype=jnp.bfloat16))(key) for key in keys)
    out = jax.jit(functools.partial(flash_attention, implementation=backend))(q, k, v)
    for batch in (0, 549, 1099):
        oracle.check_forward(*(np.asarray(x[batch : batch + 1]) for x in (out, q, k, v)))


# Segments, masks and causal together (C47)


@pytest.mark.parametrize("backend", ONE_INTERPRETED)
def test_a_row_whose_segment_has_no_key_is_zero(check: Any, oracle: Any, backend: str) -> None:
    ids = np.array([[0, 0, 1, 1, 9]] * 2), np.array([[0, 0, 1, 1, 1]] * 2)
    got = check(backend, oracle.Shape(5, 5), segment_ids=ids)
    assert not np.asarray(got["out"][:, 4]).any()
    assert np.isneginf(got["lse"][:, 4]).all()


@pytest.fixture(scope="module")
def masked(oracle: Any) -> dict[str, Any]:
    """Segments that differ by row of the batch and lengths that differ; padding in both; a mask."""
    rng = np.random.default_rng(0)
    ids = np.sort(rng.integers(0, 3, (2, 40))), np.sort(rng.integers(0, 3, (2, 50)))
    return {
        "segment_ids": ids,
        "mask": rng.random((2, 1, 40, 50)) < 0.7,
        "q_lengths": np.array([33, 40]),
        "kv_lengths": np.array([50, 31]),
    }


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_every_mask_holds(oracle: Any, both_passes: Any, check: Any, masked: dict[str, Any], backend: str) -> None:
    static = {"causal": True, "window": (20, None), "block_q": 16, "block_k": 16}
    shape = oracle.Shape(40, 50)
    got = check(backend, shape, **static, **masked)
    q, k, v, dout = (np.array(x) for x in (*oracle.inputs(shape), oracle.cotangent(shape)))
    for row, length in enumerate(masked["kv_lengths"]):
        k[row, length:] = v[row, length:] = np.nan
    for row, length in enumerate(masked["q_lengths"]):
        q[row, length:] = dout[row, length:] = np.nan
    poisoned = both_passes(backend, q, k, v, dout, static, masked)
    jax.tree.map(np.testing.assert_array_equal, poisoned, got)


# Other faults that users reported of kernels like these


@pytest.mark.parametrize("backend", ONE_INTERPRETED)
def test_a_window_to_the_left_sees_nothing_ahead(oracle: Any, both_passes: Any, check: Any, backend: str) -> None:
    shape, static = oracle.Shape(40, 40), {"window": (7, 0), "block_q": 16, "block_k": 16}
    out = check(backend, shape, **static)["out"]
    dtype = out.dtype
    q, k, v = oracle.inputs(shape, str(dtype))
    changed = both_passes(backend, q, k.at[:, 20:].add(1), v.at[:, 20:].add(1), v, static, {})["out"]
    assert np.array_equal(out[:, :20], changed[:, :20])
    assert not np.array_equal(out[:, 20:], changed[:, 20:])


@pytest.mark.parametrize("backend", XLA_AND_GPU)
def test_a_window_counts_without_any_other_mask(check: Any, oracle: Any, backend: str) -> None:
    check(backend, oracle.Shape(40, 40), window=(3, 5), block_q=16, block_k=16)


@pytest.mark.parametrize("axes", [(1, 2, 40, 40), (2, 1, 40, 1), (1, 1, 1, 40)])
@pytest.mark.parametrize("backend", XLA_AND_GPU)
def test_the_gradient_of_a_bias_is_summed_over_the_batch(
    check: Any, oracle: Any, backend: str, axes: tuple[int, ...]
) -> None:
    bias = np.random.default_rng(0).standard_normal(axes, np.float32)
    check(backend, oracle.Shape(40, 40, batch=3 if axes[0] == 1 else 2), bias=bias, block_q=16, block_k=16)


@pytest.mark.parametrize("backend", ONE_INTERPRETED)
def test_masks_at_64_past_a_multiple_of_128(check: Any, oracle: Any, backend: str) -> None:
    mask = np.random.default_rng(0).random((1, 1, 192, 192)) < 0.5
    check(backend, oracle.Shape(192, 192, batch=1, heads=1, kv_heads=1), mask=mask, block_q=128, block_k=128)


@pytest.mark.parametrize("backend", XLA_AND_GPU)
def test_the_backward_pass_reads_nothing_past_the_end(check: Any, oracle: Any, backend: str) -> None:
    check(backend, oracle.Shape(17, 35, heads=3, kv_heads=1, depth=24), causal=False, block_q=16, block_k=32)


@pytest.mark.parametrize("backend", XLA_AND_GPU)
def test_x64_traces_and_changes_nothing(oracle: Any, backend: str) -> None:
    dtype = "bfloat16" if backend == "cudnn" else "float32"
    q, k, v = oracle.inputs(oracle.Shape(33, 33), dtype)

    def both(q: Any, k: Any, v: Any) -> Any:
        attend = functools.partial(flash_attention, causal=True, implementation=backend)
        out, pull_back = jax.vjp(attend, q, k, v)
        return out, *pull_back(v)

    skip_what_cudnn_refuses(backend, both, q, k, v)
    with jax.enable_x64(True):
        out, *grads = oracle.jit(both)(q, k, v)
    oracle.check_forward(out, q, k, v, causal=True)
    oracle.check_gradients(grads, q, k, v, v, causal=True)


@pytest.mark.parametrize("backend", EVERYWHERE)
def test_the_default_scale_is_one_over_the_root_of_the_head_dim(oracle: Any, backend: str) -> None:
    shape = oracle.Shape(20, 20, batch=1, depth=24)
    q, k, v = oracle.inputs(shape, "bfloat16")
    out = flash_attention(q, k, v, implementation=backend)
    oracle.check({"out": out}, q, k, v, scale=24**-0.5)
