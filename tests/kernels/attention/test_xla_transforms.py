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


@pytest.fixture
def qkv(oracle: Any) -> tuple[Any, Any, Any]:
    return oracle.inputs(oracle.Shape(37, 40, batch=4, heads=4, kv_heads=2, v_depth=24))


def gradients(function: Any) -> Any:
    return jax.grad(lambda *qkv: jnp.sum(jnp.sin(function(*qkv))), argnums=(0, 1, 2))


def assert_close(got: Any, want: Any) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=3e-5), got, want)


def test_jit_agrees_with_eager(qkv: Any) -> None:
    assert_close(jax.jit(attend)(*qkv), attend(*qkv))
    assert_close(jax.jit(gradients(attend))(*qkv), gradients(plain)(*qkv))


def test_a_repeated_eager_call_compiles_nothing(qkv: Any, caplog: pytest.LogCaptureFixture) -> None:
    attend(*qkv)
    with jax.log_compiles():
        attend(*qkv)
        assert not caplog.records
        flash_attention(*qkv, block_q=19)
        assert caplog.records


@pytest.mark.parametrize("axes", [(0, 0, 0), (1, None, None), (None, 2, 2), (3, 0, 1)])
def test_vmap(oracle: Any, axes: tuple[int | None, ...]) -> None:
    shape = oracle.Shape(20, 33)
    samples = [oracle.inputs(shape, seed=seed) for seed in range(3)]
    stacked = [
        array[0] if axis is None else jnp.stack(array, axis)
        for axis, array in zip(axes, zip(*samples, strict=True), strict=True)
    ]
    got = jax.vmap(gradients(attend), axes)(*stacked)
    want = jax.vmap(gradients(plain), axes)(*stacked)
    assert_close(got, want)
    assert_close(jax.jit(jax.vmap(attend, axes))(*stacked), jax.vmap(plain, axes)(*stacked))


def test_vmap_twice(oracle: Any) -> None:
    q, k, v = (jnp.stack([jnp.stack([x, x + 1])] * 2) for x in oracle.inputs(oracle.Shape(20, 20)))
    assert_close(jax.vmap(jax.vmap(attend))(q, k, v), jax.vmap(jax.vmap(plain))(q, k, v))


def test_vmap_over_scales(qkv: Any) -> None:
    scales = jnp.array([0.1, 1.0])
    got = jax.vmap(lambda scale: attend(*qkv, scale=scale))(scales)
    assert_close(got, jnp.stack([plain(*qkv, scale=0.1), plain(*qkv, scale=1.0)]))


@pytest.mark.parametrize("policy", [None, jax.checkpoint_policies.dots_saveable])
def test_checkpoint(qkv: Any, policy: Any) -> None:
    remat = jax.checkpoint(attend, policy=policy)
    assert_close(gradients(remat)(*qkv), gradients(attend)(*qkv))
    assert_close(jax.jit(gradients(remat))(*qkv), gradients(attend)(*qkv))


def test_inside_scan(qkv: Any) -> None:
    q, k, _ = qkv

    def layers(function: Any, x: Any) -> Any:
        return jax.lax.scan(lambda x, _: (function(x, k, k), None), x, None, length=3)[0].sum()

    got, want = (jax.jit(jax.grad(functools.partial(layers, function)))(q) for function in (attend, plain))
    assert_close(got, want)


def test_eval_shape(qkv: Any) -> None:
    out = jax.eval_shape(attend, *qkv)
    assert (out.shape, out.dtype) == ((4, 37, 4, 24), jnp.float32)
    abstract = [jax.ShapeDtypeStruct(x.shape, jnp.bfloat16) for x in qkv]
    assert jax.eval_shape(attend, *abstract).dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_x64_mode_changes_no_dtype_and_no_result(qkv: Any, dtype: str) -> None:
    arrays = [x.astype(dtype) for x in qkv]
    want = jax.jit(lambda *a: (attend(*a), gradients(attend)(*a)))(*arrays)
    with jax.enable_x64(True):
        got = jax.jit(lambda *a: (attend(*a), gradients(attend)(*a)))(*arrays)
        text = str(jax.make_jaxpr(gradients(attend))(*arrays))
    assert jax.tree.map(lambda x: x.dtype, got) == jax.tree.map(lambda x: x.dtype, want)
    jax.tree.map(np.testing.assert_array_equal, got, want)
    assert not re.search(r"\bf64\[\d", text)


def test_disable_jit(oracle: Any) -> None:
    q, k, v = oracle.inputs(oracle.Shape(20, 20, batch=1))
    with jax.disable_jit():
        oracle.check_forward(attend(q, k, v), q, k, v, causal=True)


def test_debug_nans(qkv: Any) -> None:
    with jax.debug_nans(True):
        jax.block_until_ready(jax.jit(gradients(attend))(*qkv))


def test_numpy_arrays(qkv: Any) -> None:
    assert_close(attend(*(np.asarray(x) for x in qkv)), attend(*qkv))


def test_forward_mode_raises(qkv: Any) -> None:
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(attend, qkv, qkv)


def test_second_derivatives_raise(qkv: Any) -> None:
    q, k, v = qkv
    with pytest.raises((TypeError, ValueError), match="differentiat"):
        jax.grad(lambda x: gradients(attend)(x, k, v)[0].sum())(q)


# Meshes

BATCH_AXIS, HEAD_AXIS, TIME_AXIS = P("x"), P(None, None, "x"), P(None, "x")


def mesh(kind: AxisType) -> Mesh:
    if len(jax.devices()) < 2:
        pytest.skip("needs two devices")
    return jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])


@pytest.mark.parametrize("spec", [BATCH_AXIS, HEAD_AXIS])
def test_shard_map(qkv: Any, spec: P) -> None:
    local = jax.shard_map(attend, mesh=mesh(AxisType.Auto), in_specs=(spec,) * 3, out_specs=spec)
    assert_close(jax.jit(local)(*qkv), attend(*qkv))
    assert_close(jax.jit(gradients(local))(*qkv), gradients(attend)(*qkv))


def test_shard_map_with_keys_on_every_device(oracle: Any) -> None:
    qkv = oracle.inputs(oracle.Shape(40, 30))
    full = functools.partial(flash_attention, block_q=16, block_k=16)
    specs = (TIME_AXIS, P(), P())
    local = jax.shard_map(full, mesh=mesh(AxisType.Auto), in_specs=specs, out_specs=TIME_AXIS)
    assert_close(jax.jit(gradients(local))(*qkv), gradients(full)(*qkv))


@pytest.mark.parametrize("spec", [BATCH_AXIS, HEAD_AXIS])
def test_sharded_batch_and_heads_stay_where_they_are(qkv: Any, spec: P) -> None:
    sharding = NamedSharding(mesh(AxisType.Auto), spec)
    placed = [jax.device_put(x, sharding) for x in qkv]
    compiled = jax.jit(gradients(attend)).lower(*placed).compile()
    assert not re.search(r"all-gather|all-to-all|collective-permute", compiled.as_text())
    assert_close(compiled(*placed), gradients(attend)(*qkv))


@pytest.mark.parametrize("spec", [BATCH_AXIS, HEAD_AXIS])
def test_explicit_sharding_reaches_the_output_type(qkv: Any, spec: P) -> None:
    with jax.set_mesh(mesh(AxisType.Explicit)):
        placed = [jax.device_put(x, spec) for x in qkv]
        out = jax.jit(attend)(*placed)
        grads = jax.jit(gradients(attend))(*placed)
    assert out.sharding.spec[: len(spec)] == spec
    assert_close(jax.device_get(grads), jax.device_get(gradients(attend)(*qkv)))
