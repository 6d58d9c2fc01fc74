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

attend = functools.partial(flash_attention, causal=True, block_q=16, block_k=16)
plain = functools.partial(reference_attention, causal=True)


def both(function: Any) -> Any:
    """The function's output, and the gradients of a number made from it."""

    def run(*qkv: Any) -> Any:
        out, pull_back = jax.vjp(function, *qkv)
        return out, pull_back(jnp.cos(out))

    return run


@pytest.fixture(scope="module")
def qkv(oracle: Any) -> tuple[Any, Any, Any]:
    return oracle.inputs(oracle.Shape(37, 40, heads=4, kv_heads=2, v_depth=24))


@pytest.fixture(scope="module")
def want(oracle: Any, qkv: Any) -> Any:
    return oracle.jit(both(plain))(*qkv)


def assert_close(got: Any, want: Any) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=3e-5), got, want)


def test_jit_and_eager(qkv: Any, want: Any) -> None:
    assert_close(jax.jit(both(attend))(*qkv), want)
    assert_close(both(attend)(*qkv), want)


def test_a_repeated_eager_call_compiles_nothing(qkv: Any, caplog: pytest.LogCaptureFixture) -> None:
    attend(*qkv)
    with jax.log_compiles():
        attend(*qkv)
        assert not caplog.records
        flash_attention(*qkv, block_q=19)
        assert caplog.records


@pytest.mark.parametrize("axes", [(0, 0, 0), (1, None, None), (None, 2, 2), (3, 0, 1)])
def test_vmap(oracle: Any, axes: tuple[int | None, ...]) -> None:
    samples = [oracle.inputs(oracle.Shape(20, 33), seed=seed) for seed in range(3)]
    stacked = [
        arrays[0] if axis is None else jnp.stack(arrays, axis)
        for axis, arrays in zip(axes, zip(*samples, strict=True), strict=True)
    ]
    got, want = (oracle.jit(jax.vmap(both(function), axes))(*stacked) for function in (attend, plain))
    assert_close(got, want)


def test_vmap_twice(oracle: Any) -> None:
    stacked = [jnp.stack([jnp.stack([x, x + 1])] * 2) for x in oracle.inputs(oracle.Shape(20, 20))]
    got, want = (oracle.jit(jax.vmap(jax.vmap(function)))(*stacked) for function in (attend, plain))
    assert_close(got, want)


def test_vmap_over_scales(oracle: Any, qkv: Any) -> None:
    scales = jnp.array([0.1, 1.0])
    got = oracle.jit(jax.vmap(lambda scale: attend(*qkv, scale=scale)))(scales)
    assert_close(got, jnp.stack([plain(*qkv, scale=0.1), plain(*qkv, scale=1.0)]))


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_checkpoint(oracle: Any, qkv: Any, want: Any, policy: Any) -> None:
    assert_close(oracle.jit(both(jax.checkpoint(attend, policy=policy)))(*qkv), want)


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_x64_mode_changes_no_dtype_and_no_result(oracle: Any, qkv: Any, dtype: str) -> None:
    arrays = [x.astype(dtype) for x in qkv]
    want = oracle.jit(both(attend))(*arrays)
    with jax.enable_x64(True):
        got = oracle.jit(both(attend))(*arrays)
        text = str(jax.make_jaxpr(both(attend))(*arrays))
    assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, want)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not re.search(r"\b[fi]64\[\d", text)


def test_disable_jit(oracle: Any) -> None:
    q, k, v = oracle.inputs(oracle.Shape(20, 20, batch=1))
    with jax.disable_jit():
        oracle.check_forward(attend(q, k, v), q, k, v, causal=True)


def test_debug_nans(qkv: Any) -> None:
    with jax.debug_nans(True):
        jax.block_until_ready(jax.jit(both(attend))(*qkv))


def test_numpy_arrays(qkv: Any, want: Any) -> None:
    assert_close(attend(*(np.asarray(x) for x in qkv)), want[0])


def test_forward_mode_raises(qkv: Any) -> None:
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(attend, qkv, qkv)


def test_second_derivatives_raise(qkv: Any) -> None:
    q, k, v = qkv
    with pytest.raises((TypeError, ValueError), match="differentiat"):
        jax.grad(lambda x: both(attend)(x, k, v)[1][0].sum())(q)


# Meshes

BATCH_AXIS, HEAD_AXIS, TIME_AXIS = P("x"), P(None, None, "x"), P(None, "x")


def mesh(kind: AxisType) -> Mesh:
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    return jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])


@pytest.mark.parametrize("spec", [BATCH_AXIS, HEAD_AXIS])
def test_shard_map(oracle: Any, qkv: Any, want: Any, spec: P) -> None:
    local = jax.shard_map(attend, mesh=mesh(AxisType.Auto), in_specs=(spec,) * 3, out_specs=spec)
    assert_close(oracle.jit(both(local))(*qkv), want)


def test_shard_map_with_keys_on_every_device(oracle: Any) -> None:
    qkv = oracle.inputs(oracle.Shape(40, 30))
    full = functools.partial(flash_attention, block_q=16, block_k=16)
    specs = (TIME_AXIS, P(), P())
    local = jax.shard_map(full, mesh=mesh(AxisType.Auto), in_specs=specs, out_specs=TIME_AXIS)
    assert_close(oracle.jit(both(local))(*qkv), oracle.jit(both(reference_attention))(*qkv))


@pytest.mark.parametrize("spec", [BATCH_AXIS, HEAD_AXIS])
def test_sharded_batch_and_heads_stay_where_they_are(oracle: Any, qkv: Any, want: Any, spec: P) -> None:
    sharding = NamedSharding(mesh(AxisType.Auto), spec)
    placed = [jax.device_put(x, sharding) for x in qkv]
    compiled = oracle.jit(both(attend)).lower(*placed).compile()
    assert not re.search(r"all-gather|all-reduce|all-to-all|collective-permute", compiled.as_text())
    assert_close(compiled(*placed), want)


@pytest.mark.parametrize("spec", [BATCH_AXIS, HEAD_AXIS])
def test_explicit_sharding_reaches_the_output_type(oracle: Any, qkv: Any, want: Any, spec: P) -> None:
    with jax.set_mesh(mesh(AxisType.Explicit)):
        placed = [jax.device_put(x, spec) for x in qkv]
        got = oracle.jit(both(attend))(*placed)
    assert tuple(got[0].sharding.spec)[: len(spec)] == tuple(spec)
    assert_close(jax.device_get(got), jax.device_get(want))
