"""Opaque kernels on several devices and under vmap: each device works on what it has, and nothing is gathered."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from tune_jax.kernels.attention.call import Operands
from tune_jax.kernels.attention.checks import read_call
from tune_jax.kernels.attention.differentiable import attend
from tune_jax.kernels.attention.partition import Partitioned

BATCH, HEADS, BOTH = P("x", None, None, None), P(None, None, "y", None), P("x", None, "y", None)
WHOLE = P(None, None, None, None)
BIAS, BIAS_HEADS = P(None, None, None, None), P(None, "y", None, None)


def copy(x: Any, interpret: bool) -> Any:
    """What XLA cannot look into."""

    def kernel(source: Any, target: Any) -> None:
        target[...] = source[...]

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype, manual_axis_type=jax.typeof(x).manual_axis_type)
    return pl.pallas_call(kernel, out_shape=shape, interpret=interpret)(x)


class OpaqueKernels:
    """Plain kernels whose queries pass through a Pallas kernel; remembers the shapes that it worked on."""

    def __init__(self, plain: Any, interpret: bool = True) -> None:
        self.plain = plain
        self.interpret = interpret
        self.walks: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = []

    def through(self, name: str, spec: Any, operands: Operands, *saved: Any) -> Any:
        self.walks.append((name, operands.q.shape, operands.k.shape))
        return getattr(self.plain, name)(spec, operands._replace(q=copy(operands.q, self.interpret)), *saved)

    def __getattr__(self, name: str) -> Any:
        return functools.partial(self.through, name)


@pytest.fixture
def opaque(plain_kernels: Any) -> OpaqueKernels:
    return OpaqueKernels(plain_kernels)


def attention(kernels: Any, q: Any, k: Any, v: Any, bias: Any) -> Any:
    """The output where each row of the batch has another number of keys."""
    lengths = np.arange(q.shape[0]) * 3 % 7
    call = {"causal": True, "kv_lengths": lengths, "scale": jnp.float32(0.3), "sinks": jnp.ones(q.shape[2])}
    return attend(kernels, *read_call(q, k, v, bias=bias, **call))[0]


def both(kernels: Any, *arrays: Any) -> Any:
    """The output, and all gradients of a number made from it."""
    out, pull_back = jax.vjp(functools.partial(attention, kernels), *arrays)
    return out, pull_back(jnp.cos(out))


def inputs(oracle: Any, kv_heads: int = 2) -> tuple[Any, ...]:
    shape = oracle.Shape(6, 6, batch=4, heads=4, kv_heads=kv_heads, depth=8, v_depth=5)
    bias = np.random.default_rng(1).standard_normal((1, 4, 6, 6))
    return (*oracle.inputs(shape), jnp.asarray(bias, jnp.float32))


@pytest.fixture(scope="module")
def want(oracle: Any, plain_kernels: Any) -> Callable[[int], Any]:
    return functools.cache(
        lambda kv_heads: jax.device_get(
            oracle.jit(functools.partial(both, plain_kernels))(*inputs(oracle, kv_heads)),
        )
    )


def mesh(*kinds: AxisType, sizes: tuple[int, int] = (2, 2)) -> Mesh:
    count = sizes[0] * sizes[1]
    if len(jax.devices()) < count:
        pytest.skip("needs more devices")
    return jax.make_mesh(sizes, ("x", "y"), axis_types=kinds or (AxisType.Auto,) * 2, devices=jax.devices()[:count])


def collectives(compiled: Any) -> set[str]:
    return set(re.findall(r"(all-gather|all-reduce|all-to-all|collective-permute)\(", compiled.as_text()))


def assert_close(got: Any, want: Any) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=3e-5), jax.device_get(got), want)


def run_placed(oracle: Any, kernels: Any, on: Mesh, specs: tuple[P, ...], kv_heads: int = 2) -> tuple[Any, set[str]]:
    """Results of a call whose arrays are placed so, and what the program communicates."""
    placed = [
        jax.device_put(x, NamedSharding(on, spec)) for x, spec in zip(inputs(oracle, kv_heads), specs, strict=True)
    ]
    compiled = oracle.jit(functools.partial(both, Partitioned(kernels))).lower(*placed).compile()
    return compiled(*placed), collectives(compiled)


def specs_of(results: Any) -> list[tuple[Any, ...]]:
    """How results are placed, without what JAX leaves away at the end."""
    leaves = jax.tree.leaves(results)
    return [tuple(x.sharding.spec) + (None,) * (x.ndim - len(x.sharding.spec)) for x in leaves]


# Auto axes


@contextlib.contextmanager
def partitioner(name: str) -> Iterator[None]:
    before = jax.config.jax_use_shardy_partitioner
    jax.config.update("jax_use_shardy_partitioner", name == "shardy")
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", before)


@pytest.mark.parametrize("by", ["shardy", "gspmd"])
def test_batch_and_heads_stay_where_they_are(oracle: Any, opaque: Any, want: Any, by: str) -> None:
    with partitioner(by):
        got, communication = run_placed(oracle, opaque, mesh(), (BOTH, BOTH, BOTH, BIAS_HEADS))
    assert communication == {"all-reduce"}  # the gradient of the bias, over the batch
    assert specs_of(got) == [tuple(spec) for spec in (BOTH, BOTH, BOTH, BOTH, BIAS_HEADS)]
    assert ("forward", (2, 6, 2, 8), (2, 6, 1, 8)) in opaque.walks
    assert ("backward", (2, 6, 2, 8), (2, 6, 1, 8)) in opaque.walks
    assert_close(got, want(2))


def test_heads_alone_communicate_nothing(oracle: Any, opaque: Any, want: Any) -> None:
    got, communication = run_placed(oracle, opaque, mesh(), (HEADS, HEADS, HEADS, BIAS_HEADS))
    assert not communication
    assert_close(got, want(2))


def test_one_key_head_is_shared_by_devices_that_have_query_heads(oracle: Any, opaque: Any, want: Any) -> None:
    got, communication = run_placed(oracle, opaque, mesh(), (HEADS, WHOLE, WHOLE, BIAS), kv_heads=1)
    assert communication == {"all-reduce"}
    assert specs_of(got)[:2] == [tuple(HEADS), tuple(HEADS)]
    assert ("backward", (4, 6, 2, 8), (4, 6, 1, 8)) in opaque.walks
    assert_close(got, want(1))


def test_heads_that_cannot_be_divided_are_gathered(oracle: Any, opaque: Any, want: Any) -> None:
    specs = (BOTH, BATCH, BATCH, BIAS)
    got, _ = run_placed(oracle, opaque, mesh(sizes=(2, 4)), specs)
    assert ("forward", (2, 6, 4, 8), (2, 6, 2, 8)) in opaque.walks
    assert_close(got, want(2))


def test_lengths_are_gathered(oracle: Any, opaque: Any, want: Any) -> None:
    time = P(None, "y")
    got, communication = run_placed(oracle, opaque, mesh(), (time, time, time, P(None, None, "x")))
    assert "all-gather" in communication
    assert_close(got, want(2))


def test_arrays_placed_unlike_each_other_follow_one(oracle: Any, opaque: Any, want: Any) -> None:
    got, _ = run_placed(oracle, opaque, mesh(), (BATCH, P("y"), WHOLE, BIAS))
    assert_close(got, want(2))


# Explicit axes


def run_explicit(oracle: Any, kernels: Any, specs: tuple[P, ...], *kinds: AxisType) -> tuple[Any, set[str]]:
    with jax.set_mesh(mesh(*kinds)):
        placed = [jax.device_put(x, spec) for x, spec in zip(inputs(oracle), specs, strict=True)]
        compiled = oracle.jit(functools.partial(both, Partitioned(kernels))).lower(*placed).compile()
        return compiled(*placed), collectives(compiled)


def test_explicit_axes_reach_the_types_of_all_results(oracle: Any, opaque: Any, want: Any) -> None:
    specs = (BOTH, BOTH, BOTH, BIAS_HEADS)
    got, communication = run_explicit(oracle, opaque, specs, AxisType.Explicit, AxisType.Explicit)
    assert communication == {"all-reduce"}
    assert [jax.typeof(x).sharding.spec for x in jax.tree.leaves(got)] == [BOTH, *specs]
    assert_close(got, want(2))


def test_gradients_are_placed_as_their_operands_where_those_are_gathered(oracle: Any, opaque: Any, want: Any) -> None:
    specs = (BATCH, P(None, "x", None, None), BATCH, P(None, None, "x", None))
    got, _ = run_explicit(oracle, opaque, specs, AxisType.Explicit, AxisType.Explicit)
    assert [jax.typeof(x).sharding.spec for x in jax.tree.leaves(got[1])] == list(specs)
    assert_close(got, want(2))


def test_explicit_beside_auto_axes(oracle: Any, opaque: Any, want: Any) -> None:
    got, _ = run_explicit(oracle, opaque, (BATCH, BATCH, BATCH, BIAS), AxisType.Explicit, AxisType.Auto)
    assert ("forward", (2, 6, 4, 8), (2, 6, 2, 8)) in opaque.walks
    assert_close(got, want(2))


# Manual axes


def sharded(kernels: Any, on: Mesh, spec: P, bias_spec: P, **options: Any) -> Callable[..., Any]:
    def local(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> Any:
        return attend(kernels, *read_call(q, k, v, bias=bias, causal=True, kv_lengths=lengths))[0]

    def run(q: Any, k: Any, v: Any, bias: Any) -> Any:
        specs = (spec, spec, spec, bias_spec, P(spec[0]))
        mapped = jax.shard_map(local, mesh=on, in_specs=specs, out_specs=spec, **options)
        return mapped(q, k, v, bias, jnp.arange(4, dtype=jnp.int32) * 3 % 7)

    return run


def pulled_back(function: Any, *arrays: Any) -> Any:
    out, pull_back = jax.vjp(function, *arrays)
    return out, pull_back(jnp.cos(out))


@pytest.mark.parametrize("manual", [{"x", "y"}, {"x"}], ids=["all", "some"])
def test_shard_map(oracle: Any, plain_kernels: Any, manual: set[str]) -> None:
    # Interpreted Pallas kernels do not pass check_vma, so these are plain.
    spec, bias_spec = (BOTH, BIAS_HEADS) if "y" in manual else (BATCH, BIAS)
    arrays = inputs(oracle)
    run = sharded(Partitioned(plain_kernels), mesh(), spec, bias_spec, axis_names=manual)
    whole = sharded(plain_kernels, mesh(), WHOLE, WHOLE)
    got, want = (oracle.jit(functools.partial(pulled_back, function))(*arrays) for function in (run, whole))
    assert_close(got, jax.device_get(want))


def test_compiled_kernels_pass_the_checks_of_shard_map(oracle: Any, plain_kernels: Any) -> None:
    kernels = Partitioned(OpaqueKernels(plain_kernels, interpret=False))
    run = sharded(kernels, mesh(), BOTH, BIAS_HEADS)
    traced = jax.jit(functools.partial(pulled_back, run)).trace(*inputs(oracle))
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


# vmap


@pytest.mark.parametrize(
    ("axes", "q_of_walk"),
    [
        ((0, 1, 2, None), (12, 6, 4, 8)),
        ((0, 0, 0, 0), (4, 6, 4, 8)),
        ((1, None, None, None), (4, 6, 4, 8)),
    ],
    ids=["queries and keys", "bias of one for many rows", "shared keys"],
)
def test_vmap(oracle: Any, plain_kernels: Any, opaque: Any, axes: Any, q_of_walk: tuple[int, ...]) -> None:
    stacked = [
        x if axis is None else jnp.stack([x, 1.1 * x, 0.9 * x], axis)
        for x, axis in zip(inputs(oracle), axes, strict=True)
    ]
    got, want = (
        oracle.jit(jax.vmap(functools.partial(both, kernels), axes))(*stacked)
        for kernels in (Partitioned(opaque), plain_kernels)
    )
    # Tracing starts with the call of one.
    assert [shape for name, shape, _ in opaque.walks if name == "forward"][1:] == [q_of_walk]
    assert_close(got, jax.device_get(want))


def test_vmap_twice_is_one_long_batch(oracle: Any, plain_kernels: Any, opaque: Any) -> None:
    *qkv, bias = inputs(oracle)
    stacked = [jnp.stack([jnp.stack([x, x + 1])] * 2) for x in qkv]
    got, want = (
        oracle.jit(jax.vmap(jax.vmap(functools.partial(attention, kernels, bias=bias))))(*stacked)
        for kernels in (Partitioned(opaque), plain_kernels)
    )
    assert opaque.walks[-1][1] == (16, 6, 4, 8)
    assert_close(got, jax.device_get(want))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_vmap_over_a_sharded_axis_gathers_nothing(oracle: Any, plain_kernels: Any, opaque: Any, kind: AxisType) -> None:
    *qkv, bias = inputs(oracle)
    stacked = [jnp.stack([x, x + 1]) for x in qkv]
    want = jax.device_get(oracle.jit(jax.vmap(functools.partial(attention, plain_kernels, bias=bias)))(*stacked))
    on = mesh(kind, kind)
    with jax.set_mesh(on) if kind == AxisType.Explicit else contextlib.nullcontext():
        placed = [jax.device_put(x, NamedSharding(on, P("x", None, None, "y", None))) for x in stacked]
        run = oracle.jit(jax.vmap(functools.partial(attention, Partitioned(opaque), bias=bias)))
        compiled = run.lower(*placed).compile()
        got = compiled(*placed)
    assert not collectives(compiled)
    assert_close(got, want)


# One device, or none


def test_export_for_one_device(oracle: Any, opaque: Any, want: Any) -> None:
    arrays = inputs(oracle)
    exported = jax.export.export(jax.jit(functools.partial(both, Partitioned(opaque))))(*arrays)
    assert_close(exported.call(*arrays), want(2))


def test_lowers_for_an_abstract_device(oracle: Any, opaque: Any) -> None:
    gpu = AbstractMesh((1,), ("x",), abstract_device=AbstractDevice("NVIDIA H200", platform="cuda", num_cores=None))
    arrays = inputs(oracle)
    with jax.sharding.use_abstract_mesh(gpu):
        traced = jax.jit(functools.partial(both, Partitioned(opaque))).trace(*arrays)
        assert "stablehlo" in traced.lower(lowering_platforms=("cuda",)).as_text()


def test_x64_mode_changes_nothing(oracle: Any, opaque: Any) -> None:
    run = functools.partial(both, Partitioned(opaque))
    want = jax.eval_shape(run, *inputs(oracle))
    with jax.enable_x64(True):
        assert jax.eval_shape(run, *inputs(oracle)) == want
