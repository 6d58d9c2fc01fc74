"""Tuned Pallas kernels on a GPU, in the contexts in which programs call them."""

from __future__ import annotations

import concurrent.futures
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tune_jax
from tune_jax._lookup import memory_of

pytestmark = [
    pytest.mark.gpu,
    # It is what people have today, whatever comes after it.
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]

ROWS, COLUMNS = 4096, 256
GRID = {"rows": [4, 64], "num_warps": [4, 8]}


def softmax_kernel(x_ref, o_ref):
    x = x_ref[...]
    weights = jnp.exp(x - jnp.max(x, axis=1, keepdims=True))
    o_ref[...] = weights / jnp.sum(weights, axis=1, keepdims=True)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def softmax(x, rows, num_warps):
    block = pl.BlockSpec((rows, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        softmax_kernel,
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        grid=(x.shape[0] // rows,),
        in_specs=[block],
        out_specs=block,
        compiler_params=plt.CompilerParams(num_warps=num_warps),
    )(x)


def _forward(x, rows, num_warps):
    weights = softmax(x, rows, num_warps)
    return weights, weights


def _backward(rows, num_warps, weights, slope):
    return (weights * (slope - jnp.sum(weights * slope, axis=1, keepdims=True)),)


softmax.defvjp(_forward, _backward)


@pytest.fixture
def tuned() -> Any:
    return tune_jax.tune(softmax, GRID, progress=False)


@pytest.fixture(scope="module")
def x() -> Any:
    return jax.random.normal(jax.random.key(0), (ROWS, COLUMNS), jnp.float32)


def energy(function: Any) -> Any:
    return lambda x: jnp.sum(function(x) ** 2)


CONTEXTS = {
    "eager": lambda f: f,
    "jit": jax.jit,
    "nested jit": lambda f: jax.jit(lambda x: jax.jit(f)(x) + jax.jit(f)(2 * x)),
    "grad": lambda f: jax.grad(energy(f)),
    "jitted value and grad": lambda f: jax.jit(jax.value_and_grad(energy(f))),
    "checkpoint": lambda f: jax.jit(jax.grad(jax.checkpoint(energy(f)))),
    "scan": lambda f: jax.jit(lambda x: lax.scan(lambda c, _: (f(c), None), x, None, 3)[0]),
    "cond": lambda f: jax.jit(lambda x: lax.cond(x[0, 0] > 9, lambda x: x, f, x)),
    "while": lambda f: jax.jit(lambda x: lax.fori_loop(0, 3, lambda _, c: f(c), x)),
    "vmap": lambda f: lambda x: jax.vmap(f)(x.reshape(4, -1, COLUMNS)),
    "vmap of a jitted grad": lambda f: lambda x: jax.vmap(jax.jit(jax.grad(energy(f))))(x.reshape(4, -1, COLUMNS)),
}


def same(came: Any, expected: Any) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-6), came, expected)


@pytest.mark.parametrize("name", CONTEXTS)
def test_results_are_right_and_each_key_is_tuned_once_by_the_devices_clock(name, tuned, x, count_tunings):
    for _ in range(2):
        with jax.checking_leaks():
            came = CONTEXTS[name](tuned)(x)
    same(came, CONTEXTS[name](lambda x: jax.nn.softmax(x, axis=1))(x))
    assert count_tunings() == 1
    assert len(memory_of(tuned._tunable).results) == 1
    assert tuned.results.clock == "device"
    assert not tuned.results.failures


@pytest.mark.usefixtures("quick_rounds")
def test_training_is_timed_with_the_backward_pass(x):
    forward, both = (tune_jax.tune(softmax, GRID, progress=False, with_vjp=with_vjp) for with_vjp in (False, True))
    for function in (forward, both):
        jax.grad(energy(function))(x)
    assert both.results.best.median_s > 1.5 * forward.results.best.median_s


@pytest.mark.usefixtures("quick_rounds")
def test_a_tuned_function_inside_a_tuned_function(tuned, x):
    outer = tune_jax.tune(lambda x, scale: tuned(x * scale) / scale, {"scale": [1, 2]}, progress=False)
    came = jax.jit(outer)(x)
    scale = outer.optimal_hyperparams["scale"]
    same(came, jax.nn.softmax(x * scale, axis=1) / scale)


def test_ten_threads_tune_once_and_all_get_the_winner(tuned, x, count_tunings):
    with concurrent.futures.ThreadPoolExecutor(10) as pool:
        came = list(pool.map(lambda _: tuned(x), range(10)))
    for result in came:
        same(result, jax.nn.softmax(x, axis=1))
    assert count_tunings() == 1


@pytest.mark.usefixtures("quick_tuning")
def test_a_trace_of_the_callers_own_goes_on_and_the_rows_say_which_clock(tuned, x, tmp_path):
    with jax.profiler.trace(str(tmp_path)), pytest.warns(UserWarning, match="wall clock"):
        tuned(x)
    assert tuned.results.clock == "host"
    assert list(tmp_path.rglob("*.xplane.pb"))


# Two devices


@pytest.fixture
def two() -> Any:
    devices = jax.devices()
    if len(devices) < 2:
        pytest.skip("needs two GPUs")
    return devices[:2]


@pytest.mark.usefixtures("quick_tuning")
def test_inputs_on_the_second_device_are_tuned_there(two, tuned, x):
    first, second = two
    there = jax.block_until_ready(jax.device_put(x, second))
    before = first.memory_stats()["num_allocs"]
    result = jax.block_until_ready(tuned(there))
    assert first.memory_stats()["num_allocs"] == before
    assert result.devices() == {second}
    assert tuned.results.clock == "device"
    same(result, jax.nn.softmax(x, axis=1))


@pytest.mark.usefixtures("quick_tuning")
@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit], ids=["auto", "explicit"])
def test_sharded_rows_are_tuned_on_both_devices(two, kind, x):
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(kind,), devices=two)
    function = tune_jax.tune(lambda x, repeats: jnp.sin(x * 2 + 1) * repeats / repeats, {"repeats": [1, 2]})
    with jax.set_mesh(mesh):
        sharded = jax.device_put(x, NamedSharding(mesh, P("rows")))
        came = function(sharded)
    assert len(came.sharding.device_set) == 2
    same(came, jnp.sin(x * 2 + 1))
    assert function.results.clock == "device"


@pytest.mark.usefixtures("quick_tuning")
def test_collectives_over_the_mesh_are_timed_under_it(two, x):
    mesh = jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,), devices=two)

    def normed(x, *, squared):
        total = lax.psum(jnp.sum(x * x), "rows")
        gathered = lax.all_gather(x, "rows", tiled=True)
        return x / jnp.sqrt(total) if squared else x / jnp.sqrt(jnp.sum(gathered * gathered))

    function = tune_jax.tune(normed, {"squared": [True, False]}, progress=False)
    came = jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("rows"), out_specs=P("rows"), check_vma=False))(x)
    same(came, x / jnp.sqrt(jnp.sum(x * x)))
    assert not function.results.failures
    kernels = [kernel.name for row in function.results.rows for kernel in row.kernels]
    assert any("nccl" in name.lower() for name in kernels), kernels
