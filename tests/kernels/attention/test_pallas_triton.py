"""The `pallas_triton` backend: interpreted against the reference, lowered for CUDA, and what its programs walk."""

from __future__ import annotations

import importlib
import itertools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractDevice, AbstractMesh, PartitionSpec, use_abstract_mesh

from tune_jax.kernels import flash_attention, reference_attention
from tune_jax.kernels.attention.call import Operands, Spec, Tiles

BLOCKS = {f"block_{side}{walk}": 16 for side in "qk" for walk in ("", "_dkv", "_dq")}
LENGTHS = (40, 50)
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks", "scale")


def part(name: str) -> Any:
    return importlib.import_module(f"tune_jax.kernels.attention.pallas_triton.{name}")


def draw(seed: int, *shape: int, dtype: Any = np.float32) -> Any:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def arrays(
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    depth: int = 20,
    v_depth: int = 8,
    lengths: tuple[int, int] = LENGTHS,
    dtype: Any = np.float32,
) -> dict[str, Any]:
    q_length, kv_length = lengths
    return {
        "q": draw(0, batch, q_length, heads, depth, dtype=dtype),
        "k": draw(1, batch, kv_length, kv_heads, depth, dtype=dtype),
        "v": draw(2, batch, kv_length, kv_heads, v_depth, dtype=dtype),
        "dout": draw(3, batch, q_length, heads, v_depth, dtype=dtype),
        "dlse": draw(4, batch, q_length, heads),
    }


def both_passes(attention: Any, given: dict[str, Any], **call: Any) -> Any:
    """Output, log-sum-exp, and the gradients by name; rows without keys have no gradient of their own."""
    given = dict(given)
    dout, dlse = given.pop("dout"), given.pop("dlse")
    inputs = {name: given.pop(name) for name in DIFFERENTIABLE if name in given}

    def run(inputs: dict[str, Any]) -> Any:
        return attention(**inputs, **given, **call, return_lse=True)

    (out, lse), pull_back = jax.vjp(run, inputs)
    return out, lse, pull_back((dout, jnp.where(lse == -jnp.inf, 0, dlse)))[0]


def triton(given: dict[str, Any], **call: Any) -> Any:
    return both_passes(flash_attention, given, implementation="pallas_triton", **BLOCKS, **call)


def assert_close(got: Any, want: Any, tolerance: float = 2e-6) -> None:
    for mine, other in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert mine.shape == other.shape
        assert mine.dtype == other.dtype
        mine, other = (np.asarray(x, np.float64) for x in (mine, other))
        assert np.array_equal(np.isinf(mine), np.isinf(other))
        mine, other = (np.where(np.isinf(x), 0, x) for x in (mine, other))
        assert np.abs(mine - other).max() <= tolerance * max(1, np.abs(other).max())


@pytest.fixture(scope="module")
def check(oracle: Any) -> Any:
    def check_call(given: dict[str, Any], tolerance: float = 2e-6, **call: Any) -> Any:
        got = oracle.jit(lambda given: triton(given, **call))(given)
        # Not by the oracle's jit: at that level XLA's CPU backend loses the gradient of a broadcast bias.
        want = jax.jit(lambda given: both_passes(reference_attention, given, **call))(given)
        assert_close(got, want, tolerance)
        return got

    return check_call


# Results, interpreted


def test_positions_and_lengths_in_one_program(oracle: Any) -> None:
    call = {"causal": True, "window": (21, 3)}
    mine = oracle.jit(lambda given: triton(given, **call))
    reference = oracle.jit(lambda given: both_passes(reference_attention, given, **call))
    for offsets, q_lengths, kv_lengths in (
        ((0, 13), (40, 40), (50, 31)),
        ((-20, 60), (17, 40), (50, 50)),
        ((5, -45), (0, 33), (1, 0)),
    ):
        given = arrays() | {
            "q_offset": jnp.asarray(offsets),
            "q_lengths": jnp.asarray(q_lengths),
            "kv_lengths": jnp.asarray(kv_lengths),
        }
        assert_close(mine(given), reference(given))


@pytest.mark.parametrize(("lengths", "dtype", "tolerance"), [((50, 33), "bfloat16", 2e-2), ((1, 1), "float32", 4e-6)])
def test_plain_causal(check: Any, lengths: tuple[int, int], dtype: str, tolerance: float) -> None:
    check(arrays(heads=2, depth=16, lengths=lengths, dtype=dtype), tolerance, causal=True)


def test_bias_with_sinks_and_an_array_for_scale(check: Any) -> None:
    bias = jnp.where(draw(5, 1, 4, *LENGTHS) > 1, -jnp.inf, draw(6, 1, 4, *LENGTHS)).at[:, 1, 7].set(-jnp.inf)
    check(arrays() | {"bias": bias, "sinks": draw(7, 4), "scale": jnp.float32(-0.2)}, causal=True)


def test_gradients_of_a_bias_that_is_broadcast() -> None:
    given = arrays() | {"bias": draw(5, 1, 4, 40, 1), "kv_lengths": jnp.asarray([50, 7])}
    got = jax.jit(lambda given: triton(given)[2]["bias"])(given)
    assert_close(got, jax.jit(lambda given: both_passes(reference_attention, given)[2]["bias"])(given))


def test_float16_gradients_beyond_and_below_its_range(oracle: Any) -> None:
    given = arrays(batch=1, heads=2, depth=16, v_depth=16, dtype=np.float16)
    mine = oracle.jit(triton)
    reference = oracle.jit(lambda given: both_passes(reference_attention, given))
    for size in (1e4, 1e-5):
        scaled = given | {"q": given["q"] * 0.1, "dout": given["dout"] * size, "dlse": given["dlse"] * 0}
        wide = {name: x.astype(jnp.float32) for name, x in scaled.items()}
        got, want = mine(scaled)[2], reference(wide)[2]
        for name in ("q", "k"):
            # What float16 itself can hold of the result.
            error = np.abs(np.asarray(got[name], np.float64) - want[name]).max()
            assert error <= 5e-3 * np.abs(want[name]).max() + 2.0**-24


@pytest.mark.parametrize("call", ["causal", "segments"])
def test_what_nobody_sees_does_not_matter(oracle: Any, call: str) -> None:
    given, options = arrays(batch=1, heads=2, depth=16), {}
    unseen_keys, unseen_rows = slice(45, None), slice(35, None)
    if call == "causal":
        options, unseen_keys, unseen_rows = {"causal": True, "window": (4, 4)}, slice(40, None), slice(0)
    else:
        ids = (np.arange(n) >= end for n, end in zip(LENGTHS, (35, 45), strict=True))
        given["segment_ids"] = tuple(jnp.asarray(x[None] * sign) for x, sign in zip(ids, (1, 2), strict=True))
    poisoned = dict(given)
    for name, where in (("q", unseen_rows), ("dout", unseen_rows), ("k", unseen_keys), ("v", unseen_keys)):
        poisoned[name] = given[name].at[:, where].set(jnp.nan)
    run = oracle.jit(lambda given: triton(given, **options))
    for clean, other in zip(jax.tree.leaves(run(given)), jax.tree.leaves(run(poisoned)), strict=True):
        assert np.array_equal(clean, other)


def test_64_bit_mode(check: Any) -> None:
    with jax.enable_x64(True):
        ids = tuple(jnp.arange(n)[None] // 21 for n in LENGTHS)
        check(arrays(batch=1, heads=2) | {"q_offset": jnp.asarray([7]), "segment_ids": ids}, causal=True)


def attend(q: Any, k: Any, v: Any) -> Any:
    return flash_attention(q, k, v, implementation="pallas_triton", block_q=16, block_k=16)


def spread(**options: Any) -> Any:
    mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(attend, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"), **options)


def test_vmap_and_shard_map(oracle: Any) -> None:
    given = arrays(batch=1, heads=2, depth=16)
    q, k, v = (jnp.stack([given[name], given[name] + 1]) for name in "qkv")
    want = jnp.stack([reference_attention(*one) for one in zip(q, k, v, strict=True)])
    assert_close(oracle.jit(jax.vmap(attend))(q, k, v), want)
    # Pallas's interpreter knows nothing of what varies over a mesh.
    assert_close(oracle.jit(spread(check_vma=False))(q[1], k[1], v[1]), want[1])


# Lowered for CUDA


def lowered(given: dict[str, Any], **call: Any) -> str:
    def run(given: dict[str, Any]) -> Any:
        return both_passes(flash_attention, given, implementation="pallas_triton", **call)

    h200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=h200)):
        return jax.jit(run).trace(given).lower(lowering_platforms=("cuda",)).as_text()


def test_all_features_lower_for_cuda_without_a_warning() -> None:
    given = arrays(dtype="bfloat16", depth=80) | {
        "bias": draw(5, 2, 1, 1, 50, dtype="bfloat16"),
        "mask": draw(6, 1, 4, *LENGTHS) > 0,
        "sinks": draw(7, 4),
        "scale": jnp.float32(0.1),
        "q_offset": jnp.asarray([3, 9]),
        "q_lengths": jnp.asarray([30, 40]),
        "kv_lengths": jnp.asarray([50, 0]),
        "segment_ids": (jnp.ones((2, 40), int), jnp.ones((2, 50), int)),
    }
    text = lowered(given, causal=True, window=(20, None), softcap=5.0)
    assert len(re.findall(r"_flash_attention_(?:forward|backward_\w+)", text)) >= 4


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_plain_calls_lower_for_cuda(dtype: str) -> None:
    assert "_flash_attention_backward_keys" in lowered(arrays(dtype=dtype, depth=64, v_depth=64))


def test_warps_and_stages_reach_the_compiler() -> None:
    text = lowered(arrays(), block_q=32, num_warps=2, num_stages=5, num_warps_dq=1, num_stages_dq=7)
    for setting in ("num_warps = 2", "num_stages = 5", "num_warps = 1", "num_stages = 7"):
        assert setting in text


def test_export_for_cuda() -> None:
    h200 = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    allowed = [jax.export.DisabledSafetyCheck.custom_call("__gpu$xla.gpu.triton")]
    q = jax.ShapeDtypeStruct((1, 40, 2, 64), jnp.bfloat16)
    with use_abstract_mesh(AbstractMesh((), (), abstract_device=h200)):
        exported = jax.export.export(jax.jit(attend), platforms=["cuda"], disabled_checks=allowed)(q, q, q)
    assert exported.out_avals[0].shape == q.shape


# Hyperparameters


@pytest.mark.parametrize("name", ["block_q", "block_k", "block_q_dkv", "block_k_dq"])
@pytest.mark.parametrize("value", [8, 48])
def test_blocks_that_triton_cannot_do_are_named(name: str, value: int) -> None:
    q = jnp.ones((1, 16, 1, 16))
    with pytest.raises(ValueError, match=rf"{name} must be a power of two from 16 up .*, got {value}; 'xla'"):
        jax.eval_shape(
            jax.grad(lambda q: flash_attention(q, q, q, implementation="pallas_triton", **{name: value}).sum()), q
        )


def test_warps_that_triton_cannot_do_are_named() -> None:
    q = jnp.ones((1, 16, 1, 16))
    with pytest.raises(ValueError, match=r"num_warps must be a power of two up to 32 .*, got 3"):
        jax.eval_shape(lambda q: flash_attention(q, q, q, implementation="pallas_triton", num_warps=3), q)


def operands(q_length: int, kv_length: int, depth: int = 64, dtype: Any = jnp.bfloat16, **others: Any) -> Operands:
    q, k = (jax.ShapeDtypeStruct((1, length, 1, depth), dtype) for length in (q_length, kv_length))
    return Operands(q, k, k, **others)


def test_none_is_four_warps_and_three_stages_where_tiles_are_given() -> None:
    tiles, big = part("tiles"), operands(1000, 1000, 256)
    assert tiles.forward_launch(Tiles(block_q=64, block_k=32), big) == tiles.Launch(64, 32, 4, 3)
    assert tiles.forward_launch(Tiles(num_warps=8), big).num_stages == 3
    assert tiles.queries_launch(Tiles(block_q=64), big) == tiles.queries_launch(Tiles(), big)


def test_tiles_are_no_longer_than_the_array_needs() -> None:
    tiles = part("tiles")
    launch = tiles.forward_launch(Tiles(block_q=128, block_k=256), operands(1, 70))
    assert (launch.block_q, launch.block_k) == (16, 128)


@pytest.mark.parametrize("walk", ["forward", "keys", "queries"])
@pytest.mark.parametrize("depth", [16, 64, 80, 128, 256])
@pytest.mark.parametrize("dtype", [jnp.float16, jnp.float32])
@pytest.mark.parametrize("has_bias", [False, True])
def test_defaults_fit_the_shared_memory_of_hopper(walk: str, depth: int, dtype: Any, has_bias: bool) -> None:
    call = operands(4096, 4096, depth, dtype, bias=1 if has_bias else None)
    launch = getattr(part("tiles"), f"{walk}_launch")(Tiles(), call)
    bytes_of_row = max(16, 1 << (depth - 1).bit_length()) * call.q.dtype.itemsize
    kept, streamed = launch.block_q, 2 * launch.block_k
    if walk == "keys":
        kept, streamed = 2 * launch.block_k, 2 * launch.block_q
    elif walk == "queries":
        kept = 2 * launch.block_q
    of_bias = 4 * launch.block_q * launch.block_k if has_bias else 0
    assert kept * bytes_of_row + launch.num_stages * (streamed * bytes_of_row + of_bias) <= 227 * 1024


# What programs walk


def specs() -> list[Spec]:
    windows = [(None, None), (0, None), (20, 3), (None, 9), (7, 0)]
    return [Spec(causal=causal, window=window) for causal, window in itertools.product((False, True), windows)]


def visible(spec: Spec, offset: int, q_length: int, kv_length: int) -> np.ndarray:
    behind = np.arange(LENGTHS[0])[:, None] + offset - np.arange(LENGTHS[1])[None, :]
    seen = (np.arange(LENGTHS[0])[:, None] < q_length) & (np.arange(LENGTHS[1])[None, :] < kv_length)
    if spec.left is not None:
        seen &= behind <= spec.left
    if spec.right is not None:
        seen &= behind >= -spec.right
    return seen


@pytest.mark.parametrize("side", ["keys", "queries"])
@pytest.mark.parametrize("spec", specs(), ids=str)
def test_programs_walk_the_blocks_that_are_seen_and_no_others(side: str, spec: Spec) -> None:
    parts, walks, launch = part("parts"), part("walks"), part("tiles").Launch(16, 8, 4, 1)
    plan = parts.Plan(spec, launch, 1, 1, 1, *LENGTHS, 16, 16, 2)
    refs = Operands(None, None, None, q_lengths=1, kv_lengths=1)
    of, among = (launch.block_q, launch.block_k) if side == "keys" else (launch.block_k, launch.block_q)
    blocks = plan.q_blocks if side == "keys" else plan.k_blocks
    for offset, lengths in itertools.product((0, -13, 30, 90), (LENGTHS, (23, 37), (40, 0))):
        pairs = visible(spec, offset, *lengths)
        pairs = pairs if side == "keys" else pairs.T
        here = parts.Place(0, 0, 0, *(np.int32(n) for n in (offset, *lengths)))
        for index in range(blocks):
            walk = getattr(walks, f"walk_{side}")(plan, refs, None, here, np.int32(index))
            walked = [(block, masked) for first, end, masked in walk.spans for block in range(int(first), int(end))]
            rows = pairs[index * of : (index + 1) * of]
            counted = lengths[0] if side == "keys" else lengths[1]
            seen = [b for b in range(-(-pairs.shape[1] // among)) if rows[:, b * among : (b + 1) * among].any()]
            assert sorted(block for block, _ in walked) == seen
            whole = rows[: max(0, counted - index * of)]
            assert all(whole[:, b * among : (b + 1) * among].all() for b, masked in walked if not masked)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kernel", ["query_block", "key_block"])
def test_each_block_has_one_program(monkeypatch: pytest.MonkeyPatch, kernel: str, causal: bool) -> None:
    parts = part("parts")
    plan = parts.Plan(Spec(causal=causal), part("tiles").Launch(16, 16, 4, 1), 3, 4, 2, 4096, 3000, 64, 64, 2)
    blocks = (3, 4, plan.q_blocks) if kernel == "query_block" else (3, 2, plan.k_blocks)
    programs = jnp.arange(np.prod(blocks), dtype=jnp.int32)
    monkeypatch.setattr(part("programs").pl, "program_id", lambda axis: programs)
    found = set(zip(*(np.asarray(x).tolist() for x in getattr(part("programs"), kernel)(plan)), strict=True))
    assert found == set(itertools.product(*(range(size) for size in blocks)))


def test_long_walks_of_heads_that_share_the_cache_start_first(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = part("parts")
    plan = parts.Plan(Spec(causal=True), part("tiles").Launch(128, 64, 4, 1), 1, 16, 1, 8192, 8192, 128, 128, 2)
    monkeypatch.setattr(part("programs").pl, "program_id", lambda axis: jnp.arange(16, dtype=jnp.int32))
    _, heads, blocks = part("programs").query_block(plan)
    assert heads.tolist() == [*range(8), *range(8)]
    assert blocks.tolist() == [63] * 8 + [62] * 8


def test_heads_may_be_smaller_than_their_group(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = part("parts")
    plan = parts.Plan(Spec(causal=True), part("tiles").Launch(16, 16, 4, 1), 1, 64, 64, 1, 1, 1, 1, 2)
    monkeypatch.setattr(part("programs").pl, "program_id", lambda axis: jnp.int32(63))
    assert [int(index) for index in part("programs").query_block(plan)] == [0, 63, 0]


def test_masks_too_long_for_signed_offsets_are_widened() -> None:
    prepare = part("launch").for_device
    for rows, dtype in ((2**15, bool), (2**16, jnp.int16)):
        mask = jax.ShapeDtypeStruct((1, 1, rows, 2**15), bool)
        assert jax.eval_shape(lambda mask: prepare(Operands(None, None, None, mask=mask)), mask).mask.dtype == dtype


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(70_000, 16, 1, 16), (1, 16, 70_000, 16)])
def test_batches_and_heads_past_the_limits_of_a_launch(shape: tuple[int, ...]) -> None:
    q, k, v, dout = (jax.random.normal(jax.random.key(seed), shape) for seed in range(4))

    def gradients(attention: Any, **call: Any) -> Any:
        return jax.jit(lambda *qkv: jax.vjp(lambda *qkv: attention(*qkv, causal=True, **call), *qkv)[1](dout))(q, k, v)

    assert_close(gradients(flash_attention, implementation="pallas_triton"), gradients(reference_attention), 1e-5)


@pytest.mark.gpu
def test_arrays_past_32_bit_offsets() -> None:
    shape = (1100, 1024, 16, 128)
    draw_all = jax.jit(lambda seed: jax.random.normal(jax.random.key(seed), shape, jnp.bfloat16))
    q, k, v = (draw_all(seed) for seed in range(3))
    out = jax.jit(lambda *qkv: flash_attention(*qkv, implementation="pallas_triton"))(q, k, v)
    for row in (0, 549, 1099):
        part_of = slice(row, row + 1)
        assert_close(out[part_of], reference_attention(q[part_of], k[part_of], v[part_of]), 1e-2)
