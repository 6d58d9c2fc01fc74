"""The `pallas_tpu` backend, interpreted, against plain attention; and lowered for TPUs without one."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from tune_jax.kernels.attention import pallas_tpu, reference
from tune_jax.kernels.attention.call import Operands, Saved, Spec, Tiles
from tune_jax.kernels.attention.checks import read_call
from tune_jax.kernels.attention.pallas_tpu import VMEM_LIMIT, vmem_bytes
from tune_jax.kernels.attention.pallas_tpu.bias import bias_gradient
from tune_jax.kernels.attention.pallas_tpu.plan import plan_dkv, plan_forward
from tune_jax.kernels.attention.pallas_tpu.ranges import key_ranges, query_ranges
from tune_jax.kernels.attention.pallas_tpu.walk import by_query

BATCH, HEADS, KV_HEADS = 2, 4, 2
SMALL = Tiles(block_q=128, block_k=128)
DIFFERENTIABLE = ("q", "k", "v", "bias", "sinks", "scale")
LIMITS = {"float32": 5e-6, "bfloat16": 2e-2}


def normal(*shape: int, seed: int = 0, dtype: str = "float32") -> Any:
    return jnp.asarray(np.random.default_rng((seed, *shape)).standard_normal(shape), dtype)


def call(
    q_length: int, kv_length: int, *, depth: int = 24, v_depth: int = 40, dtype: str = "float32", **options: Any
) -> tuple[Spec, Operands]:
    q = normal(BATCH, q_length, HEADS, depth, seed=1, dtype=dtype)
    k = normal(BATCH, kv_length, KV_HEADS, depth, seed=2, dtype=dtype)
    v = normal(BATCH, kv_length, KV_HEADS, v_depth, seed=3, dtype=dtype)
    return read_call(q, k, v, tiles=options.pop("tiles", SMALL), **options)


def both_passes(attend: Any, spec: Spec, operands: Operands, dout: Any, dlse: Any) -> Any:
    """Output, log-sum-exp and all gradients; cotangents of rows that see nothing count for nothing."""

    def attention(arrays: dict[str, Any]) -> Any:
        out, lse = attend(spec, operands._replace(**arrays))
        return out, jnp.where(lse == -jnp.inf, 0, lse), lse

    arrays = {name: getattr(operands, name) for name in DIFFERENTIABLE if getattr(operands, name) is not None}
    (out, _, lse), pull_back = jax.vjp(attention, arrays)
    return {"out": out, "lse": lse, **pull_back((dout, dlse, jnp.zeros_like(lse)))[0]}


@pytest.fixture(scope="module")
def compute(oracle: Any) -> Any:
    quickly = oracle.jit(both_passes, static_argnums=(0, 1))
    # Not at optimisation level 0: there XLA makes infinite gradients of it.
    exactly = jax.jit(both_passes, static_argnums=(0, 1))

    def run(attend: Any, spec: Spec, operands: Operands) -> dict[str, np.ndarray]:
        rows = operands.q.shape[:3]
        dout = normal(*rows, operands.v.shape[3], seed=4, dtype=str(operands.q.dtype))
        compiled = exactly if attend is reference.attention else quickly
        results = compiled(attend, spec, operands, dout, normal(*rows, seed=5))
        return {name: np.asarray(value).astype(np.float32) for name, value in results.items()}

    return run


@pytest.fixture(scope="module")
def check(compute: Any) -> Any:
    def run(spec: Spec, operands: Operands) -> dict[str, np.ndarray]:
        got = compute(pallas_tpu.attend, spec, operands)
        want = compute(reference.attention, spec, operands)
        for name, value in want.items():
            finite = np.isfinite(value)
            assert np.array_equal(got[name][~finite], value[~finite]), name
            error = np.abs(got[name][finite] - value[finite]).max(initial=0)
            # The gradient of a scale is one sum of terms that cancel.
            limit = 1e-4 if name == "scale" else LIMITS[str(operands.q.dtype)]
            assert error <= limit * max(np.abs(value[finite]).max(initial=0), 1), name
        return got

    return run


# Positions and lengths: one program for all cases


def positioned(q_offset: Any, q_lengths: Any, kv_lengths: Any, **options: Any) -> tuple[Spec, Operands]:
    lengths = {"q_lengths": jnp.array(q_lengths), "kv_lengths": jnp.array(kv_lengths)}
    return call(
        150,
        300,
        window=(90, 20),
        q_offset=jnp.array(q_offset),
        softcap=4.0,
        scale=jnp.float32(0.4),
        sinks=normal(HEADS),
        **lengths,
        **options,
    )


@pytest.mark.parametrize(
    ("q_offset", "q_lengths", "kv_lengths"),
    [
        ([0, 0], [150, 150], [300, 300]),
        ([-60, 150], [150, 97], [300, 200]),
        ([40, 400], [1, 150], [1, 300]),
        ([128, 3], [0, 128], [256, 0]),
    ],
)
def test_windows_offsets_lengths_softcap_sinks_and_scale(
    check: Any, q_offset: list[int], q_lengths: list[int], kv_lengths: list[int]
) -> None:
    check(*positioned(q_offset, q_lengths, kv_lengths))


def test_what_nobody_sees_does_not_matter(check: Any, compute: Any) -> None:
    spec, operands = positioned([0, 30], [150, 90], [300, 150])
    clean = compute(pallas_tpu.attend, spec, operands)
    k, v = operands.k.at[:, 200:].set(jnp.nan), operands.v.at[:, 200:].set(jnp.inf)
    q = operands.q.at[1, 90:].set(jnp.nan)
    dirty = compute(pallas_tpu.attend, spec, operands._replace(q=q, k=k, v=v))
    for name, value in clean.items():
        assert np.array_equal(dirty[name], value), name


@pytest.mark.parametrize("hides", ["positions", "segments"])
def test_queries_that_pad_a_block_see_nothing(compute: Any, hides: str) -> None:
    # The 20 queries see the keys up to 49; the block has 32 rows, and segment ids are padded with 0.
    ids = jnp.ones((BATCH, 20), jnp.int32), jnp.broadcast_to(jnp.int32(jnp.arange(100) < 50), (BATCH, 100))
    options = {"positions": {"causal": True, "q_offset": 30}, "segments": {"segment_ids": ids}}[hides]
    spec, operands = call(20, 100, bias=normal(1, HEADS, 1, 100), **options)
    clean = compute(pallas_tpu.attend, spec, operands)
    k, v = operands.k.at[:, 50:].set(jnp.nan), operands.v.at[:, 50:].set(jnp.nan)
    dirty = compute(pallas_tpu.attend, spec, operands._replace(k=k, v=v, bias=operands.bias.at[..., 50:].set(jnp.nan)))
    for name, value in clean.items():
        assert np.array_equal(dirty[name], value), name


def test_repeats_bit_for_bit(compute: Any) -> None:
    spec, operands = positioned([0, 30], [150, 90], [300, 150])
    first, second = (compute(pallas_tpu.attend, spec, operands) for _ in range(2))
    assert all(np.array_equal(first[name], second[name]) for name in first)


# Whole blocks without a mask, and blocks that are left out


def test_causal_in_bfloat16(check: Any, compute: Any) -> None:
    spec, operands = call(300, 300, causal=True, dtype="bfloat16")
    check(spec, operands)
    # A product with a block above the diagonal would make NaN of its zero weights.
    broken = operands._replace(k=operands.k.at[:, 256:].set(jnp.nan), v=operands.v.at[:, 256:].set(jnp.nan))
    results = compute(pallas_tpu.attend, spec, broken)
    assert all(np.isfinite(results[name][:, :256]).all() for name in ("out", "lse", "q"))


def blocks_with_pairs(spec: Spec, operands: Operands, block: int) -> np.ndarray:
    """Which pairs of blocks hold a pair that counts, `[batch, blocks of queries, blocks of keys]`."""
    seen = np.asarray(reference.seen(spec, operands))[:, 0]
    padding = [(0, 0), *((0, -size % block) for size in seen.shape[1:])]
    seen = np.pad(np.broadcast_to(seen, (BATCH, *seen.shape[1:])), padding)
    rows, columns = seen.shape[1] // block, seen.shape[2] // block
    return seen.reshape(BATCH, rows, block, columns, block).any((2, 4))


RANGED = [
    {"causal": True},
    {"window": (150, 100), "q_offset": jnp.array([-200, 300])},
    {"causal": True, "q_lengths": jnp.array([0, 200]), "kv_lengths": jnp.array([500, 129])},
    {"segment_ids": (jnp.arange(1000).reshape(2, 500) // 90, jnp.arange(1400).reshape(2, 700) // 130)},
]


@pytest.mark.parametrize("options", RANGED)
def test_only_blocks_with_pairs_are_loaded(options: dict[str, Any]) -> None:
    spec, operands = call(500, 700, **options)
    plan = plan_forward(spec, operands)
    scalars = key_ranges(plan, operands)
    for batch, block in np.ndindex(BATCH, plan.q_blocks):
        walk = [by_query(plan, batch, 0, block, step, scalars) for step in range(plan.key_steps)]
        wanted = np.flatnonzero(blocks_with_pairs(spec, operands, 128)[batch, block])
        # Where there is no pair, something has to stand in.
        assert sorted({int(place.k_block) for place in walk}) == (list(wanted) or [0])


@pytest.mark.parametrize("options", RANGED)
def test_only_queries_with_pairs_are_loaded(options: dict[str, Any]) -> None:
    spec, operands = call(500, 700, **options)
    plan = plan_dkv(spec, operands)
    scalars = query_ranges(plan, operands)
    first, end = (np.broadcast_to(x.reshape(-1, plan.k_blocks), (BATCH, plan.k_blocks)) for x in scalars[:2])
    for batch, block in np.ndindex(BATCH, plan.k_blocks):
        wanted = np.flatnonzero(blocks_with_pairs(spec, operands, 128)[batch, :, block])
        assert list(range(first[batch, block], end[batch, block])) == list(wanted)


def test_a_window_keeps_the_walk_short() -> None:
    spec, operands = call(2000, 2000, window=(100, 50))
    assert plan_forward(spec, operands).key_steps == 4
    assert plan_dkv(spec, operands).query_steps == 4


# Segments, masks and bias: one program for all cases


def covered(**changes: Any) -> tuple[Spec, Operands]:
    q_length, kv_length = 140, 200
    ones = jnp.ones((BATCH, q_length), jnp.int32), jnp.ones((BATCH, kv_length), jnp.int32)
    options = {
        "segment_ids": ones,
        "mask": jnp.ones((BATCH, 1, q_length, kv_length), bool),
        "bias": normal(1, HEADS, q_length, kv_length),
        **changes,
    }
    return call(q_length, kv_length, **options)


def random_mask() -> Any:
    return normal(BATCH, 1, 140, 200, seed=7) > 0.5


@pytest.mark.parametrize(
    "changes",
    [
        {"segment_ids": (jnp.arange(280).reshape(2, 140) // 45, jnp.arange(400).reshape(2, 200) // 70)},
        {"segment_ids": (jnp.arange(280).reshape(2, 140) % 3, jnp.arange(400).reshape(2, 200) % 5)},
        {"mask": random_mask().at[0, :, 3:9].set(False)},
        {"bias": jnp.where(random_mask()[:1] & jnp.ones((1, HEADS, 1, 1), bool), -jnp.inf, normal(1, HEADS, 140, 200))},
    ],
    ids=["sorted segments", "unsorted segments", "mask", "infinite bias"],
)
def test_segments_masks_and_bias(check: Any, changes: dict[str, Any]) -> None:
    check(*covered(**changes))


def test_keys_that_a_mask_hides_from_all_do_not_matter(compute: Any) -> None:
    mask = random_mask().at[..., 50:90].set(False)
    spec, operands = covered(mask=mask)
    clean = compute(pallas_tpu.attend, spec, operands)
    k, v = operands.k.at[:, 50:90].set(jnp.inf), operands.v.at[:, 50:90].set(jnp.nan)
    dirty = compute(pallas_tpu.attend, spec, operands._replace(k=k, v=v))
    for name, value in clean.items():
        assert np.array_equal(dirty[name], value), name


def direct_bias_gradient(spec: Spec, operands: Operands, dout: Any) -> Any:
    zeros = jnp.zeros_like(operands.bias)
    attention = lambda bias: reference.attention(spec, operands._replace(bias=operands.bias + bias))[0]  # noqa: E731
    return jax.vjp(attention, zeros)[1](dout)[0]


@pytest.mark.parametrize("shape", [(1, 1, 140, 130), (BATCH, 1, 140, 1), (1, HEADS, 1, 130), (1, 1, 1, 1)])
def test_bias_gradient_is_summed_where_the_bias_is_broadcast(oracle: Any, shape: tuple[int, ...]) -> None:
    spec, operands = call(140, 130, causal=True, bias=normal(*shape))
    dout = normal(*operands.q.shape[:3], operands.v.shape[3])
    out, lse = reference.attention(spec, operands)
    saved = Saved(lse.swapaxes(1, 2), dout, (out * dout).sum(-1).swapaxes(1, 2))
    got = oracle.jit(bias_gradient, static_argnums=0)(spec, operands, saved)
    want = direct_bias_gradient(spec, operands, dout)
    assert got.shape == shape
    np.testing.assert_allclose(got, want, atol=1e-4, rtol=1e-5)


# Short lengths


def test_one_query_against_a_cache(oracle: Any) -> None:
    attend = oracle.jit(pallas_tpu.attend, static_argnums=0)
    for lengths in ([1, 77], [300, 0]):
        spec, operands = call(
            1, 300, causal=True, q_offset=jnp.array(lengths) - 1, kv_lengths=jnp.array(lengths), tiles=Tiles()
        )
        for got, want in zip(attend(spec, operands), reference.attention(spec, operands), strict=True):
            np.testing.assert_allclose(got, want, atol=1e-5)


# Where there is no TPU


LOWERED = {
    "plain": {},
    "all features": {
        "causal": True,
        "window": (100, 30),
        "q_offset": jnp.array([1, 2]),
        "q_lengths": jnp.array([100, 140]),
        "kv_lengths": jnp.array([100, 200]),
        "segment_ids": (jnp.zeros((2, 140), jnp.int32), jnp.zeros((2, 200), jnp.int32)),
        "mask": jnp.ones((BATCH, HEADS, 140, 200), bool),
        "bias": normal(1, HEADS, 140, 200),
        "scale": jnp.float32(0.5),
        "softcap": 3.0,
        "sinks": normal(HEADS),
    },
    "rows of mask and bias": {"mask": jnp.ones((BATCH, 1, 1, 200), bool), "bias": normal(BATCH, 1, 140, 1)},
}


def gradient(spec: Spec, operands: Operands) -> Any:
    (out, lse), pull_back = jax.vjp(functools.partial(pallas_tpu.attend, spec), operands)
    return pull_back((out, lse))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("options", LOWERED.values(), ids=LOWERED)
def test_lowers_for_tpu(options: dict[str, Any], dtype: str) -> None:
    spec, operands = call(140, 200, dtype=dtype, tiles=Tiles(), **options)
    lowered = jax.jit(functools.partial(gradient, spec)).trace(operands).lower(lowering_platforms=("tpu",))
    assert lowered.as_text().count("tpu_custom_call") >= (4 if "bias" in options else 3)


def kernel_calls(value: Any) -> Iterator[Any]:
    """All calls of kernels in a traced program, however deep."""
    for equation in getattr(getattr(value, "jaxpr", value), "eqns", ()):
        if equation.primitive.name == "pallas_call":
            yield equation
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            yield from kernel_calls(inner)


def test_indices_and_arrays_have_32_bits_under_x64() -> None:
    with jax.enable_x64(True):
        spec, operands = call(140, 200, tiles=Tiles(), **LOWERED["all features"])
        kernels = list(kernel_calls(jax.make_jaxpr(functools.partial(gradient, spec))(operands)))
    assert len(kernels) == 8  # four, interpreted and compiled
    for kernel in kernels:
        assert re.search(r"f64\[\d", str(kernel.params["jaxpr"])) is None
        maps = [mapping.index_map_jaxpr for mapping in kernel.params["grid_mapping"].block_mappings]
        assert {aval.dtype for index_map in maps for aval in index_map.out_avals} == {np.dtype(np.int32)}


def sharded(spec: Spec, operands: Operands, check_vma: bool) -> Any:
    mesh = jax.make_mesh((2, 2), ("rows", "heads"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    by_head = PartitionSpec("rows", None, "heads", None)
    lse = PartitionSpec("rows", None, "heads")
    attend = lambda q, k, v: pallas_tpu.attend(spec, Operands(q, k, v))  # noqa: E731
    shard = jax.shard_map(attend, mesh=mesh, in_specs=(by_head,) * 3, out_specs=(by_head, lse), check_vma=check_vma)
    return jax.jit(shard).trace(operands.q, operands.k, operands.v)


def test_varies_over_a_mesh_as_its_operands_do() -> None:
    traced = sharded(*call(140, 200, causal=True), check_vma=True)
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_shard_map() -> None:
    # JAX's interpreter of kernels does not keep track of what varies over a mesh.
    spec, operands = call(140, 200, causal=True)
    compiled = sharded(spec, operands, check_vma=False).lower().compile({"xla_backend_optimization_level": 0})
    got = compiled(operands.q, operands.k, operands.v)
    for value, want in zip(got, reference.attention(spec, operands), strict=True):
        np.testing.assert_allclose(value, want, atol=1e-5)


# Block sizes


@pytest.mark.parametrize("name", ["block_q", "block_k"])
def test_refuses_blocks_that_lanes_cannot_hold(name: str) -> None:
    spec, operands = call(140, 200, tiles=Tiles(**{name: 96}))
    with pytest.raises(ValueError, match=rf"{name} is 96, .*multiples of 128; try 128"):
        jax.eval_shape(functools.partial(pallas_tpu.attend, spec), operands)


def test_refuses_them_in_the_backward_pass_too() -> None:
    spec, operands = call(140, 200, tiles=Tiles(block_q_dkv=192))
    with pytest.raises(ValueError, match=r"block_q_dkv is 192, .*try 256"):
        jax.eval_shape(functools.partial(gradient, spec), operands)


def test_each_walk_has_its_own_blocks_and_none_is_longer_than_the_call() -> None:
    spec, operands = call(300, 1000, tiles=Tiles(block_q=128, block_k=256, block_q_dkv=512))
    forward, dkv = plan_forward(spec, operands), plan_dkv(spec, operands)
    assert (forward.block_q, forward.block_k) == (128, 256)
    assert (dkv.block_q, dkv.block_k) == (384, 256)


def abstract(depth: int, dtype: str, **arrays: Any) -> Operands:
    x = jax.ShapeDtypeStruct((4, 4096, 8, depth), dtype)
    return Operands(x, x, x, **arrays)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("depth", [64, 128, 256])
def test_default_blocks_fit_vmem(depth: int, dtype: str) -> None:
    pairs = (1, 8, 4096, 4096)
    segments = jax.ShapeDtypeStruct((4, 4096), jnp.int32)
    operands = abstract(
        depth,
        dtype,
        bias=jax.ShapeDtypeStruct(pairs, dtype),
        mask=jax.ShapeDtypeStruct(pairs, bool),
        q_segments=segments,
        kv_segments=segments,
    )
    assert max(vmem_bytes(Spec(), operands).values()) <= VMEM_LIMIT


# What libtpu 0.0.50 needed for 4096 queries and keys on v5e, found by halving the limit, in KiB.
NEEDED = [
    ("forward", 128, "bfloat16", 512, 512, 3406),
    ("forward", 128, "bfloat16", 1024, 1024, 10622),
    ("forward", 256, "float32", 512, 512, 10622),
    ("dq", 128, "bfloat16", 1024, 512, 8460),
    ("dq", 256, "float32", 512, 512, 14385),
    ("dkv", 128, "bfloat16", 512, 1024, 9846),
    ("dkv", 256, "float32", 512, 512, 18059),
]


@pytest.mark.parametrize(("walk", "depth", "dtype", "block_q", "block_k", "needed"), NEEDED)
def test_estimates_vmem(walk: str, depth: int, dtype: str, block_q: int, block_k: int, needed: int) -> None:
    spec = Spec(causal=True, tiles=Tiles(block_q=block_q, block_k=block_k))
    assert 0.9 <= vmem_bytes(spec, abstract(depth, dtype))[walk] / 1024 / needed <= 1.25


def test_only_a_bias_has_a_walk_for_its_gradient() -> None:
    with_bias = abstract(128, "bfloat16", bias=jax.ShapeDtypeStruct((1, 1, 4096, 4096), jnp.float32))
    assert "dbias" not in vmem_bytes(Spec(), abstract(128, "bfloat16"))
    assert "dbias" in vmem_bytes(Spec(), with_bias)
