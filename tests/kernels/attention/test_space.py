"""The implementations and tiles offered for a call."""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax import tune
from tune_jax.kernels import flash_attention, flash_attention_space
from tune_jax.kernels.attention.call import Tiles
from tune_jax.kernels.attention.resources import Block, Sizes, power_of_two, register_share, shared_bytes, works
from tune_jax.kernels.attention.tables import walk_of

KIB = 1024


def struct(length: int, heads: int = 2, depth: int = 16, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((1, length, heads, depth), dtype)


def space(q_length: int, kv_length: int, **statics: Any) -> list[dict[str, Any]]:
    return flash_attention_space(struct(q_length), struct(kv_length), struct(kv_length), **statics)


def on_device(kind: str, platform: str, q_length: int, kv_length: int, depth: int, dtype: Any, **call: Any) -> Any:
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    q, k = struct(q_length, depth=depth, dtype=dtype), struct(kv_length, depth=depth, dtype=dtype)
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device)):
        return flash_attention_space(q, k, k, **call)


def on_h200(
    q_length: int = 4096, kv_length: int = 4096, depth: int = 128, dtype: Any = jnp.bfloat16, **call: Any
) -> Any:
    return on_device("NVIDIA H200", "gpu", q_length, kv_length, depth, dtype, **call)


def candidates(grids: list[dict[str, Any]], implementation: str | None = None) -> list[dict[str, Any]]:
    every = [dict(zip(grid, values, strict=True)) for grid in grids for values in itertools.product(*grid.values())]
    return [each for each in every if implementation in (None, each["implementation"])]


def implementations(grids: list[dict[str, Any]]) -> list[str]:
    return list(dict.fromkeys(each["implementation"] for each in candidates(grids)))


# On a CPU


def test_a_cpu_gets_few_blocks_of_xla() -> None:
    sizes = [64, 256, 1024]
    assert space(8192, 4096) == [{"implementation": ["xla"], "block_q": sizes, "block_k": sizes}]


def test_sizes_are_clipped_to_each_length_without_duplicates() -> None:
    assert space(100, 300) == [{"implementation": ["xla"], "block_q": [64, 100], "block_k": [64, 256, 300]}]
    assert space(256, 1) == [{"implementation": ["xla"], "block_q": [64, 256], "block_k": [1]}]


def test_causal_leaves_out_keys_past_the_last_query() -> None:
    assert space(100, 300, causal=True)[0]["block_k"] == [64, 100]
    assert space(300, 100, causal=True)[0]["block_k"] == [64, 100]


def test_an_offset_brings_keys_past_the_last_query_into_reach() -> None:
    assert space(1, 300, causal=True, q_offset=299)[0]["block_k"] == [64, 256, 300]


def test_empty_arrays_get_one_choice() -> None:
    assert space(0, 0) == [{"implementation": ["xla"], "block_q": [1], "block_k": [1]}]


def test_arrays_do_as_well_as_their_shapes(oracle: Any) -> None:
    q, k, v = oracle.inputs(oracle.Shape(100, 70))
    assert flash_attention_space(q, k, v) == space(100, 70)
    assert flash_attention_space(v=v, q=q, k=k) == space(100, 70)


def test_all_arguments_of_a_call_are_taken() -> None:
    ids = jax.ShapeDtypeStruct((1, 100), jnp.int32)
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    everything = {
        "window": (5, 3),
        "segment_ids": (ids, ids),
        "q_offset": 2,
        "q_lengths": lengths,
        "kv_lengths": np.array([3]),
        "mask": None,
        "bias": jax.ShapeDtypeStruct((2, 100, 100), jnp.float32),
        "scale": jax.ShapeDtypeStruct((), jnp.float32),
        "softcap": 2.0,
        "sinks": jnp.zeros(2),
        "return_lse": True,
        "deterministic": True,
        "implementation": None,
        "block_q": None,
    }
    assert space(100, 100, **everything) == space(100, 100)


def test_numbers_of_numpy_fix_a_call_as_those_of_python_do() -> None:
    assert space(300, 300, causal=np.True_, window=(np.int32(8), None), softcap=np.float32(30)) == space(
        300, 300, causal=True
    )
    assert "cudnn" in implementations(on_h200(scale=np.float32(0.5)))


def test_arrays_that_do_not_fit_are_an_error_before_any_candidate() -> None:
    with pytest.raises(ValueError, match="must be a multiple"):
        flash_attention_space(struct(64, heads=3), struct(64), struct(64))
    with pytest.raises(ValueError, match="softcap must be a positive number"):
        space(64, 64, softcap=-1)


def test_a_pass_that_there_is_not_is_an_error_that_names_those_there_are() -> None:
    with pytest.raises(ValueError, match=r"tune_pass must be one of 'forward', 'backward', 'dkv', 'dq', got 'both'"):
        space(64, 64, tune_pass="both")


def test_a_named_backend_that_is_interpreted_answers_for_itself() -> None:
    assert space(64, 64, implementation="pallas_triton") == [{"implementation": ["pallas_triton"]}]


# On a GPU


def test_a_gpu_gets_every_backend_that_can_do_the_call() -> None:
    assert implementations(on_h200()) == ["cudnn", "pallas_triton", "xla"]
    assert implementations(on_h200(softcap=2.0)) == ["pallas_triton", "xla"]
    assert implementations(on_h200(implementation="xla")) == ["xla"]


def test_given_hyperparameters_leave_those_that_take_them() -> None:
    grids = on_h200(num_warps=4)
    assert implementations(grids) == ["pallas_triton"]
    assert {each["num_warps"] for each in candidates(grids)} == {4}


@pytest.mark.parametrize("tune_pass", ["forward", "backward", "dkv", "dq"])
@pytest.mark.parametrize("depth", [64, 128, 256])
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
def test_candidates_are_distinct_and_as_many_as_can_be_tuned_in_a_minute(
    tune_pass: str, depth: int, dtype: Any
) -> None:
    every = candidates(on_h200(depth=depth, dtype=dtype, tune_pass=tune_pass))
    assert 20 <= len(every) <= 120
    assert len({tuple(sorted(each.items())) for each in every}) == len(every)
    assert all(set(each) <= {"implementation", *Tiles.__dataclass_fields__} for each in every)


@pytest.mark.parametrize(
    ("depth", "best"),
    [
        (64, (128, 128, 4, 3)),
        (64, (64, 128, 4, 3)),
        (128, (128, 128, 8, 3)),
        (128, (64, 128, 4, 3)),
        (256, (128, 32, 8, 3)),
    ],
)
def test_the_best_known_settings_are_among_them(depth: int, best: tuple[int, ...]) -> None:
    names = ("block_q", "block_k", "num_warps", "num_stages")
    wanted = {"implementation": "pallas_triton"} | dict(zip(names, best, strict=True))
    assert wanted in candidates(on_h200(depth=depth))


def test_what_does_not_fit_is_left_out() -> None:
    settings = candidates(on_h200(), "pallas_triton")
    tall = {each["num_stages"] for each in settings if each["block_q"] == each["block_k"] == 128}
    assert tall == {1, 2, 3}
    wide = candidates(on_h200(depth=256), "pallas_triton")
    assert {each["num_warps"] for each in wide if each["block_q"] == 128 and each["block_k"] >= 32} == {8}


def test_a_bias_leaves_less_room() -> None:
    plain = len(candidates(on_h200(), "pallas_triton"))
    bias = jax.ShapeDtypeStruct((4096, 4096), jnp.float32)
    assert len(candidates(on_h200(bias=bias), "pallas_triton")) < plain


def test_float32_gets_small_blocks_whose_operands_fit_into_registers() -> None:
    settings = candidates(on_h200(dtype=jnp.float32), "pallas_triton")
    assert {16, 32} < {each["block_q"] for each in settings}
    assert all(each["block_q"] * each["block_k"] < 128 * 128 for each in settings)


def test_one_query_gets_the_smallest_block_of_queries() -> None:
    assert {each["block_q"] for each in candidates(on_h200(1, 32768), "pallas_triton")} == {16}


def test_the_backward_pass_varies_its_own_tiles_only() -> None:
    for tune_pass, walks in [("dkv", {"_dkv"}), ("dq", {"_dq"}), ("backward", {"_dkv", "_dq"})]:
        for each in candidates(on_h200(tune_pass=tune_pass), "pallas_triton"):
            assert {walk_of(name) for name in each if name != "implementation"} == walks


def test_both_walks_of_the_backward_pass_are_mirrored() -> None:
    for each in candidates(on_h200(tune_pass="backward"), "pallas_triton"):
        assert each["block_q_dkv"] == each["block_k_dq"]
        assert each["block_k_dkv"] == each["block_q_dq"]
        assert each["num_stages_dkv"] == each["num_stages_dq"]
        assert each["num_warps_dkv"] == each["num_warps_dq"]


def test_backends_without_tiles_of_their_own_for_the_backward_pass_vary_the_others() -> None:
    assert set(candidates(on_h200(tune_pass="backward"), "xla")[0]) == {"implementation", "block_q", "block_k"}
    assert candidates(on_h200(tune_pass="backward"), "cudnn") == [{"implementation": "cudnn"}]


# On a TPU


def test_a_tpu_gets_whole_lanes() -> None:
    grids = on_device("TPU v5 lite", "tpu", 300, 4096, 128, jnp.bfloat16)
    assert grids == [
        {"implementation": ["pallas_tpu"], "block_q": [256, 384], "block_k": [256, 512, 1024]},
        {"implementation": ["xla"], "block_q": [300], "block_k": [1024]},
    ]


def test_the_backward_pass_on_a_tpu_varies_its_own_tiles() -> None:
    (grid, _) = on_device("TPU v5 lite", "tpu", 256, 256, 128, jnp.bfloat16, tune_pass="dkv")
    assert grid == {"implementation": ["pallas_tpu"], "block_q_dkv": [256], "block_k_dkv": [256]}


# The estimate


@pytest.mark.parametrize(
    ("block", "expected"),
    [
        (Block("", 128, 128, num_stages=3), 32 * KIB + 3 * 64 * KIB),
        (Block("", 64, 32, num_stages=1), 16 * KIB + 16 * KIB),
        (Block("_dkv", 32, 128, num_stages=2), 64 * KIB + 8 * KIB + 2 * 16 * KIB),
        (Block("_dq", 128, 32, num_stages=2), 64 * KIB + 8 * KIB + 2 * 16 * KIB),
    ],
)
def test_shared_memory_is_the_tile_that_stays_and_a_copy_a_stage_of_those_that_pass(
    block: Block, expected: int
) -> None:
    assert shared_bytes(block, Sizes(128, 128, 2)) == expected
    assert shared_bytes(block, Sizes(100, 65, 2)) == expected  # tiles are padded
    more = shared_bytes(block, Sizes(128, 128, 2, pair_bytes=4)) - expected
    assert more == block.num_stages * 4 * block.block_q * block.block_k


def test_registers_hold_accumulators_and_scores() -> None:
    a_thread = register_share(Block("", 128, 128, num_warps=8), Sizes(64, 128, 2)) * 255
    assert a_thread == pytest.approx((128 * 128 + 128 * 128) / 256)
    assert register_share(Block("_dkv", 64, 64), Sizes(128, 128, 2)) > register_share(
        Block("_dq", 64, 64), Sizes(128, 128, 2)
    )


def test_float32_operands_are_in_registers_too() -> None:
    block = Block("", 32, 64)
    half, full = (register_share(block, Sizes(64, 32, itemsize)) * 128 * 255 for itemsize in (2, 4))
    assert full - half == pytest.approx(32 * 64 + 64 * (64 + 32))


def test_an_older_gpu_has_less_room() -> None:
    block, sizes = Block("", 128, 128, num_warps=8), Sizes(128, 128, 2)
    assert works(block, sizes, 9.0)
    assert works(block, sizes, None)
    assert not works(block, sizes, 8.0)
    assert not works(block, sizes, 8.9)


@pytest.mark.parametrize(("size", "padded"), [(1, 16), (16, 16), (17, 32), (128, 128), (129, 256)])
def test_tiles_are_padded_to_powers_of_two(size: int, padded: int) -> None:
    assert power_of_two(size) == padded


# With the tuner


@pytest.mark.usefixtures("quick_tuning")
def test_tune_takes_the_space_as_it_is(oracle: Any) -> None:
    q, k, v = oracle.inputs(oracle.Shape(70, 66, batch=1))
    tuned = tune(flash_attention, hyperparams=flash_attention_space)
    out = tuned(q, k, v, causal=True, mask=None, scale=None)
    oracle.check_forward(out, q, k, v, causal=True)
    assert [row.failure for row in tuned.results] == [None] * 4
    assert {row.hyperparams["implementation"] for row in tuned.results} == {"xla"}
    assert {row.hyperparams["block_q"] for row in tuned.results} == {64, 70}


@pytest.mark.usefixtures("quick_tuning")
def test_what_a_call_fixes_is_not_tuned(oracle: Any) -> None:
    q, k, v = oracle.inputs(oracle.Shape(70, 66, batch=1))
    tuned = tune(flash_attention, hyperparams=flash_attention_space)
    tuned(q, k, v, implementation="xla", block_q=32)
    assert {(row.hyperparams["implementation"], row.hyperparams["block_q"]) for row in tuned.results} == {("xla", 32)}


@pytest.mark.usefixtures("quick_tuning")
def test_training_is_tuned_by_forward_and_backward_together(oracle: Any) -> None:
    q, k, v = oracle.inputs(oracle.Shape(24, 20, batch=1))
    training_space = functools.partial(flash_attention_space, tune_pass="backward")
    tuned = tune(flash_attention, hyperparams=training_space, with_vjp=True)
    dout = jnp.ones_like(q)
    grads = jax.grad(lambda *qkv: tuned(*qkv).sum(), (0, 1, 2))(q, k, v)
    oracle.check_gradients(grads, q, k, v, dout)
    assert math.prod(tuned.results.timed[0].hyperparams[name] for name in ("block_q", "block_k")) == 24 * 20
