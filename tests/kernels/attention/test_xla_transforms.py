"""The `xla` backend under JAX's transformations."""

from __future__ import annotations

import functools
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tune_jax.kernels import flash_attention, reference_attention

attend = functools.partial(flash_attention, causal=True, implementation="xla", block_q=16, block_k=16)
plain = functools.partial(reference_attention, causal=True)


def both(function: Any) -> Any:
    """The function's output, and the gradients of a number made from it."""

    def run(*operands: Any) -> Any:
        out, pull_back = jax.vjp(function, *operands)
        return out, pull_back(jnp.cos(out))

    return run


@pytest.fixture(scope="module")
def qkv(oracle: Any) -> tuple[Any, Any, Any]:
    return oracle.inputs(oracle.Shape(37, 40, heads=4, kv_heads=2, v_depth=24))


@pytest.fixture(scope="module")
def want(oracle: Any, qkv: Any) -> Any:
    return oracle.jit(both(plain))(*qkv)


@pytest.fixture(scope="module")
def rest(qkv: Any) -> dict[str, Any]:
    """An array for all that may be one."""
    (batch, q_length, heads, _), kv_length = qkv[0].shape, qkv[1].shape[1]
    rng = np.random.default_rng(0)
    return {
        "bias": rng.standard_normal((1, heads, q_length, kv_length)).astype(np.float32),
        "sinks": rng.standard_normal(heads).astype(np.float32),
        "scale": np.float32(0.3),
        "mask": rng.random((batch, heads, q_length, kv_length)) < 0.8,
        "q_offset": np.array([3, 5]),
        "q_lengths": np.array([30, 37]),
        "kv_lengths": np.array([40, 20]),
        "q_segments": np.sort(rng.integers(0, 2, (batch, q_length))),
        "kv_segments": np.sort(rng.integers(0, 2, (batch, kv_length))),
    }


def with_rest(function: Any, rest: dict[str, Any]) -> Any:
    """The function, of q, k, v and what of the rest has a gradient."""

    def attend_with_rest(q: Any, k: Any, v: Any, bias: Any, sinks: Any, scale: Any) -> Any:
        call = rest | {"bias": bias, "sinks": sinks, "scale": scale}
        segments = call.pop("q_segments"), call.pop("kv_segments")
        return function(q, k, v, **call, segment_ids=segments, window=(20, None), softcap=2.0)

    return attend_with_rest


def differentiable(qkv: Any, rest: dict[str, Any]) -> tuple[Any, ...]:
    return (*qkv, rest["bias"], rest["sinks"], rest["scale"])


@pytest.fixture(scope="module")
def want_with_rest(qkv: Any, rest: dict[str, Any]) -> Any:
    return jax.jit(both(with_rest(plain, rest)))(*differentiable(qkv, rest))


def assert_close(got: Any, want: Any) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=3e-5), got, want)


def test_jit_and_eager(oracle: Any, qkv: Any, want: Any) -> None:
    assert_close(oracle.jit(both(attend))(*qkv), want)
    assert_close(attend(*qkv), want[0])


def test_a_repeated_eager_call_compiles_nothing(oracle: Any, caplog: pytest.LogCaptureFixture) -> None:
    qkv = oracle.inputs(oracle.Shape(5, 5, batch=1))
    flash_attention(*qkv, implementation="xla")
    with jax.log_compiles():
        flash_attention(*qkv, implementation="xla")
        assert not caplog.records
        flash_attention(*qkv, implementation="xla", block_q=2)
        assert caplog.records


@pytest.mark.parametrize("axes", [(1, None, None), (3, 0, 1)])
def test_vmap(oracle: Any, axes: tuple[int | None, ...]) -> None:
    samples = [oracle.inputs(oracle.Shape(20, 33), seed=seed) for seed in range(3)]
    stacked = [
        arrays[0] if axis is None else jnp.stack(arrays, axis)
        for axis, arrays in zip(axes, zip(*samples, strict=True), strict=True)
    ]
    got, want = (oracle.jit(jax.vmap(both(function), axes))(*stacked) for function in (attend, plain))
    assert_close(got, want)


def test_vmap_over_everything(oracle: Any, qkv: Any, rest: dict[str, Any], want_with_rest: Any) -> None:
    def one(qkv: Any, rest: dict[str, Any]) -> Any:
        return both(with_rest(attend, rest))(*differentiable(qkv, rest))

    # The first sample's bounds are not those of the second, which is the one that is checked.
    wider = rest | {"q_offset": rest["q_offset"] + 9, "kv_lengths": rest["kv_lengths"] * 0 + 40}
    stacked = jax.tree.map(lambda *x: np.stack([np.asarray(y) for y in x]), (qkv, wider), (qkv, rest))
    got = oracle.jit(jax.vmap(one))(*stacked)
    assert_close(jax.tree.map(lambda x: x[1], got), want_with_rest)


@pytest.mark.parametrize(
    ("policy", "forward_passes"),
    [(None, 2), (jax.checkpoint_policies.save_only_these_names("flash_attention_out", "flash_attention_lse"), 1)],
)
def test_checkpoint(oracle: Any, qkv: Any, want: Any, policy: Any, forward_passes: int) -> None:
    run = both(jax.checkpoint(attend, policy=policy))
    assert_close(oracle.jit(run)(*qkv), want)
    # Each pass is a loop in a loop, whatever that is in the text.
    passes = {
        text: str(jax.make_jaxpr(each)(*qkv)).count(" while[") for text, each in (("run", run), ("forward", attend))
    }
    assert passes["run"] == (forward_passes + 1) * passes["forward"]


def test_inside_scan(oracle: Any, qkv: Any) -> None:
    q, k, _ = qkv

    def layers(function: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (function(x, k, k), None), x, None, length=3)[0].sum()

    got, want = (oracle.jit(jax.grad(functools.partial(layers, function)))(q) for function in (attend, plain))
    assert_close(got, want)


def test_eval_shape(qkv: Any) -> None:
    out = jax.eval_shape(attend, *qkv)
    assert (out.shape, out.dtype) == ((2, 37, 4, 24), jnp.float32)
    abstract = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in qkv]
    assert jax.eval_shape(attend, *abstract).dtype == jnp.bfloat16


def test_x64_mode_changes_no_dtype_and_no_result(oracle: Any, qkv: Any) -> None:
    want = oracle.jit(both(attend))(*qkv)
    with jax.enable_x64(True):
        got = oracle.jit(both(attend))(*qkv)
    assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, want)
    jax.tree.map(np.testing.assert_array_equal, got, want)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_x64_mode_makes_no_array_of_64_bits(qkv: Any, rest: dict[str, Any], dtype: str) -> None:
    narrow = {name: x.astype(np.int32) if x.dtype == np.int64 else x for name, x in rest.items()}
    operands = differentiable([x.astype(dtype) for x in qkv], narrow)
    with jax.enable_x64(True):
        text = str(jax.make_jaxpr(both(with_rest(attend, narrow)))(*operands))
    assert not re.search(r"\b[fi]64\[\d", text)


def test_disable_jit(oracle: Any) -> None:
    q, k, v = oracle.inputs(oracle.Shape(5, 5, batch=1))
    with jax.disable_jit():
        out = flash_attention(q, k, v, causal=True, implementation="xla", block_q=3)
    oracle.check_forward(out, q, k, v, causal=True)


def test_debug_nans(oracle: Any, qkv: Any, rest: dict[str, Any]) -> None:
    with jax.debug_nans(True):
        jax.block_until_ready(oracle.jit(both(with_rest(attend, rest)))(*differentiable(qkv, rest)))


def test_export(qkv: Any, want: Any) -> None:
    exported = jax.export.export(jax.jit(attend), platforms=["cpu", "cuda", "tpu"])(*qkv)
    assert_close(exported.call(*qkv), want[0])


def test_numpy_arrays(qkv: Any, want: Any) -> None:
    assert_close(attend(*(np.asarray(x) for x in qkv)), want[0])


def test_forward_mode_raises(qkv: Any) -> None:
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(attend, qkv, qkv)


def test_second_derivatives_raise(qkv: Any) -> None:
    q, k, v = qkv
    with pytest.raises(NotImplementedError, match="cannot be differentiated twice"):
        jax.eval_shape(jax.grad(lambda x: both(attend)(x, k, v)[1][0].sum()), q)


# Meshes

BATCH_AND_HEADS, TIME_AXIS = P("x", None, "y"), P(None, "x")
BY_BATCH = ("q_offset", "q_lengths", "kv_lengths", "q_segments", "kv_segments")
REST = dict.fromkeys(BY_BATCH, P("x")) | {"bias": P(None, "y"), "sinks": P("y"), "scale": P(), "mask": P("x", "y")}


def mesh(kind: AxisType) -> Mesh:
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    return jax.make_mesh((2, 2), ("x", "y"), axis_types=(kind, kind), devices=jax.devices()[:4])


def collectives(compiled: Any) -> set[str]:
    return set(re.findall(r"all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text()))


def test_shard_map(oracle: Any, qkv: Any, rest: dict[str, Any], want_with_rest: Any) -> None:
    local = jax.shard_map(
        lambda operands, rest: with_rest(attend, rest)(*operands),
        mesh=mesh(AxisType.Auto),
        # What has a gradient goes in beside the rest.
        in_specs=(differentiable((BATCH_AND_HEADS,) * 3, REST), REST),
        out_specs=BATCH_AND_HEADS,
    )
    got = oracle.jit(both(lambda *operands: local(operands, rest)))(*differentiable(qkv, rest))
    assert_close(got, want_with_rest)


def test_shard_map_with_keys_on_every_device(oracle: Any) -> None:
    qkv = oracle.inputs(oracle.Shape(40, 30))
    full = functools.partial(flash_attention, implementation="xla", block_q=16, block_k=16)
    specs = (TIME_AXIS, P(), P())
    local = jax.shard_map(full, mesh=mesh(AxisType.Auto), in_specs=specs, out_specs=TIME_AXIS)
    assert_close(oracle.jit(both(local))(*qkv), oracle.jit(both(reference_attention))(*qkv))


def test_sharded_batch_and_heads_stay_where_they_are(oracle: Any, qkv: Any, want: Any) -> None:
    sharding = NamedSharding(mesh(AxisType.Auto), BATCH_AND_HEADS)
    placed = [jax.device_put(x, sharding) for x in qkv]
    compiled = oracle.jit(both(attend)).lower(*placed).compile()
    assert not collectives(compiled)
    assert_close(compiled(*placed), want)


def test_nothing_but_sums_crosses_devices(oracle: Any, qkv: Any, rest: dict[str, Any], want_with_rest: Any) -> None:
    devices = mesh(AxisType.Auto)
    placed_qkv = [jax.device_put(x, NamedSharding(devices, BATCH_AND_HEADS)) for x in qkv]
    placed = {name: jax.device_put(x, NamedSharding(devices, REST[name])) for name, x in rest.items()}
    run = oracle.jit(lambda operands, rest: both(with_rest(attend, rest))(*operands))
    arguments = differentiable(placed_qkv, placed), placed
    compiled = run.lower(*arguments).compile()
    assert collectives(compiled) == {"all-reduce"}
    assert_close(compiled(*arguments), want_with_rest)


def test_explicit_sharding_reaches_the_output_type(
    oracle: Any, qkv: Any, rest: dict[str, Any], want_with_rest: Any
) -> None:
    with jax.set_mesh(mesh(AxisType.Explicit)):
        placed_qkv = [jax.device_put(x, BATCH_AND_HEADS) for x in qkv]
        placed = {name: jax.device_put(x, REST[name]) for name, x in rest.items()}
        got = oracle.jit(both(with_rest(attend, placed)))(*differentiable(placed_qkv, placed))
    assert tuple(got[0].sharding.spec)[:3] == tuple(BATCH_AND_HEADS)
    assert_close(jax.device_get(got), jax.device_get(want_with_rest))
