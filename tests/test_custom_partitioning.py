"""Tuned functions whose candidates ask the compiler how they are divided, as opaque kernels do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.custom_partitioning import custom_partitioning
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import tune_jax
from tune_jax.kernels import flash_attention, reference_attention

pytestmark = pytest.mark.usefixtures("quick_tuning")

X = np.arange(8.0, dtype=np.float32)


@custom_partitioning
def double(x: Any) -> Any:
    return x * 2


def _partition(mesh: Any, arguments: Any, result: Any) -> Any:
    rows = NamedSharding(mesh, P("a"))
    return mesh, lambda x: x * 2, rows, (rows,)


double.def_partition(
    partition=_partition,
    infer_sharding_from_operands=lambda mesh, arguments, result: NamedSharding(mesh, P("a")),
    sharding_rule="i -> i",
)


@pytest.fixture
def rows() -> NamedSharding:
    return NamedSharding(Mesh(np.array(jax.devices()[:4]), ("a",)), P("a"))


@pytest.fixture
def tuned() -> Any:
    return tune_jax.tune(lambda x, *, factor: double(x) * factor / factor, {"factor": [1, 2]}, progress=False)


@pytest.mark.parametrize("run", [lambda f: f, jax.jit, lambda f: jax.jit(lambda x: jax.jit(f)(x) + 0)])
def test_runs_on_one_device(tuned: Any, run: Any) -> None:
    np.testing.assert_array_equal(run(tuned)(X), 2 * X)


def test_runs_on_the_second_device(tuned: Any) -> None:
    out = tuned(jax.device_put(X, jax.devices()[1]))
    assert out.devices() == {jax.devices()[1]}


@pytest.mark.parametrize("run", [lambda f: f, jax.jit])
def test_keeps_a_sharding_without_gathering(tuned: Any, rows: NamedSharding, run: Any) -> None:
    x = jax.device_put(X, rows)
    out = run(tuned)(x)
    assert out.sharding == rows
    np.testing.assert_array_equal(out, 2 * X)
    assert "all-gather" not in jax.jit(tuned).lower(x).compile().as_text()


def test_a_pallas_kernel_is_tuned_eagerly_under_jit_and_for_its_gradient() -> None:
    q = jnp.asarray(np.random.default_rng(0).standard_normal((1, 16, 1, 16)), jnp.float32)
    attention = tune_jax.tune(
        lambda q, *, block_k: flash_attention(q, q, q, implementation="pallas_triton", block_q=16, block_k=block_k),
        {"block_k": [16, 32]},
        progress=False,
    )
    want = reference_attention(q, q, q)
    np.testing.assert_allclose(attention(q), want, atol=1e-5)
    np.testing.assert_allclose(jax.jit(attention)(q), want, atol=1e-5)
    got = jax.grad(lambda q: jnp.sin(attention(q)).sum())(q)
    np.testing.assert_allclose(got, jax.grad(lambda q: jnp.sin(reference_attention(q, q, q)).sum())(q), atol=1e-5)
