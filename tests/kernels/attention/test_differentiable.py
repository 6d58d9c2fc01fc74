"""The rule that all backends share, around kernels that do no more than the contract asks."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from tune_jax.kernels import reference_attention
from tune_jax.kernels.attention.checks import read_call
from tune_jax.kernels.attention.differentiable import LSE_NAME, OUT_NAME, attend

FLOATS = ("q", "k", "v", "bias", "sinks", "scale")


@pytest.fixture(scope="module")
def attention(plain_kernels: Any) -> Callable[..., tuple[Any, Any]]:
    def attention(q: Any, k: Any, v: Any, **call: Any) -> tuple[Any, Any]:
        return attend(plain_kernels, *read_call(q, k, v, **call))

    return attention


@pytest.fixture(scope="module")
def qkv(oracle: Any) -> tuple[Any, Any, Any]:
    return oracle.inputs(oracle.Shape(7, 9, heads=4, kv_heads=2, depth=8, v_depth=5))


def call_with_everything() -> tuple[dict[str, Any], dict[str, Any]]:
    """Floating-point arguments, and the others; batch row 1 has two queries that see nothing."""
    rng = np.random.default_rng(1)
    floats = {
        "bias": jnp.asarray(rng.standard_normal((1, 4, 7, 9)), jnp.float32),
        "sinks": jnp.asarray(rng.standard_normal(4), jnp.float32),
        "scale": jnp.float32(0.4),
    }
    others = {
        "causal": True,
        "window": (3, None),
        "softcap": 2.0,
        "q_offset": np.array([1, 0]),
        "q_lengths": np.array([7, 5]),
        "kv_lengths": np.array([8, 6]),
        "segment_ids": (np.ones((2, 7), int), np.ones((2, 9), int)),
        "mask": rng.random((2, 1, 7, 9)) < 0.9,
    }
    return floats, others


def loss(function: Any, which: str, call: dict[str, Any], arrays: dict[str, Any]) -> Any:
    """A number made from the output, the log-sum-exp or both."""
    out, lse = function(**arrays, **call)
    of_lse = jnp.cos(jnp.where(jnp.isfinite(lse), lse, 0)).sum()
    of_out = jnp.sin(out.astype(jnp.float32) + 0.3).sum()
    return {"out": of_out, "lse": of_lse, "both": of_out + of_lse}[which]


def assert_close(got: Any, want: Any, tolerance: float = 2e-5) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=tolerance, rtol=tolerance), got, want)


# Gradients


@pytest.mark.parametrize("which", ["out", "lse", "both"])
def test_all_gradients_agree_with_those_of_the_reference(attention: Any, oracle: Any, qkv: Any, which: str) -> None:
    floats, others = call_with_everything()
    arrays = dict(zip("qkv", qkv, strict=True)) | floats
    plain = functools.partial(reference_attention, return_lse=True)
    got, want = (oracle.jit(jax.grad(functools.partial(loss, f, which, others)))(arrays) for f in (attention, plain))
    assert set(got) == set(FLOATS)
    assert_close(got, want)


@pytest.mark.parametrize("axes", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)])
def test_the_bias_gradient_is_summed_over_broadcast_axes(
    attention: Any, oracle: Any, qkv: Any, axes: tuple[int, ...]
) -> None:
    shape = [1 if axis in axes else size for axis, size in enumerate((2, 4, 7, 9))]
    bias = jnp.asarray(np.random.default_rng(0).standard_normal(shape), jnp.float32)
    got, want = (
        oracle.jit(jax.grad(lambda bias, f=f: jnp.cos(f(*qkv, bias=bias, causal=True)[0]).sum()))(bias)
        for f in (attention, functools.partial(reference_attention, return_lse=True))
    )
    assert got.shape == bias.shape
    assert_close(got, want)


def test_gradients_have_the_dtypes_of_their_operands(attention: Any, qkv: Any) -> None:
    floats, others = call_with_everything()
    arrays = dict(zip("qkv", (x.astype(jnp.bfloat16) for x in qkv), strict=True)) | floats
    arrays["bias"] = arrays["bias"].astype(jnp.float16)
    grads = jax.eval_shape(jax.grad(functools.partial(loss, attention, "both", others)), arrays)
    assert {name: x.dtype for name, x in grads.items()} == {name: x.dtype for name, x in arrays.items()}


def test_whole_numbers_and_masks_have_no_gradient(plain_kernels: Any, qkv: Any) -> None:
    floats, others = call_with_everything()
    spec, operands = read_call(*qkv, **floats, **others)
    (out, lse), pull_back = jax.vjp(jax.jit(functools.partial(attend, plain_kernels, spec)), operands)
    grads = pull_back((out, lse))[0]
    for name, operand, grad in zip(operands._fields, operands, grads, strict=True):
        assert grad.dtype == (operand.dtype if name in FLOATS else jax.dtypes.float0), name


@pytest.mark.parametrize("scale", [0.3, jnp.float32(0.3)], ids=["number", "array"])
def test_rows_that_see_nothing_take_no_part_whatever_they_hold(attention: Any, oracle: Any, scale: Any) -> None:
    q, k, v = oracle.inputs(oracle.Shape(6, 6))
    poison = jnp.where(jnp.arange(6) < 4, 0.0, jnp.nan)[None, :, None, None]
    call = {"q_lengths": np.array([4, 4]), "sinks": jnp.ones(2)}

    def pull_back(q: Any, dout: Any, dlse: Any) -> Any:
        return jax.vjp(lambda q, k, v, scale: attention(q, k, v, scale=scale, **call), q, k, v, scale)[1]((dout, dlse))

    run = oracle.jit(pull_back)
    got = run(q + poison, v + poison, jnp.ones((2, 6, 2)) + poison[..., 0])
    assert_close(got, run(q, v, jnp.ones((2, 6, 2))))
    assert np.array_equal(got[0][:, 4:], np.zeros((2, 2, 2, 16)))


def test_a_bias_that_is_not_differentiated_costs_no_walk(attention: Any, oracle: Any, qkv: Any) -> None:
    bias = jnp.ones((1, 1, 7, 9))

    def text(wanted: int) -> str:
        run = jax.grad(lambda q, bias: attention(q, *qkv[1:], bias=bias)[0].sum(), wanted)
        return str(oracle.jit(run).lower(qkv[0], bias).compile().as_text())

    assert "bias_walk" not in text(0)
    assert "bias_walk" in text(1)


# Empty arrays


@pytest.mark.parametrize(
    "shapes",
    [((2, 0, 2, 8), (2, 5, 2, 8)), ((2, 3, 2, 8), (2, 0, 2, 8)), ((0, 3, 2, 8), (0, 5, 2, 8))],
    ids=["queries", "keys", "batch"],
)
def test_without_elements_the_output_is_zero_and_so_are_gradients(attention: Any, shapes: Any) -> None:
    q_shape, k_shape = shapes
    arrays = (jnp.ones(q_shape), jnp.ones(k_shape), jnp.ones((*k_shape[:3], 4)))
    (out, lse), pull_back = jax.vjp(functools.partial(attention, sinks=jnp.zeros(2)), *arrays)
    assert np.array_equal(out, np.zeros((*q_shape[:3], 4)))
    assert np.array_equal(lse, np.full(q_shape[:3], -np.inf))
    assert_close(pull_back((out, lse)), tuple(map(np.zeros_like, arrays)))


def test_values_without_elements_leave_the_log_sum_exp(attention: Any, qkv: Any) -> None:
    q, k, v = qkv
    out, lse = attention(q, k, v[..., :0])
    assert out.shape == (2, 7, 4, 0)
    assert_close(lse, attention(q, k, v)[1])


# Transformations


def sum_of_cosines(function: Any, q: Any, k: Any, v: Any) -> Any:
    return jnp.cos(function(q, k, v)[0]).sum()


def scanned(function: Any) -> Any:
    """The same function of queries, keys and values as the second step of a loop."""

    def run(q: Any, k: Any, v: Any) -> Any:
        def step(carry: Any, used: Any) -> Any:
            return carry + used * function(q, k, v), None

        return jax.lax.scan(step, 0.0, jnp.array([0.0, 1.0]))[0]

    return run


def mapped(function: Any) -> Any:
    def run(q: Any, k: Any, v: Any) -> Any:
        return jax.vmap(function, (0, None, None))(jnp.stack([q, q + 1]), k, v)[0]

    return run


@pytest.mark.parametrize("transform", [jax.jit, jax.checkpoint, scanned, mapped])
def test_gradients_pass_through(attention: Any, oracle: Any, qkv: Any, transform: Any) -> None:
    plain = functools.partial(reference_attention, return_lse=True)
    run = transform(functools.partial(sum_of_cosines, attention))
    got = oracle.jit(jax.grad(run, (0, 1, 2)))(*qkv)
    assert_close(got, oracle.jit(jax.grad(functools.partial(sum_of_cosines, plain), (0, 1, 2)))(*qkv))


def test_keys_on_every_device_get_the_sum_of_gradients(attention: Any, oracle: Any, qkv: Any) -> None:
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    heads = P(None, None, "x")
    q, k, v = qkv[0], qkv[1][:, :, :1], qkv[2][:, :, :1]

    def run(*qkv: Any) -> Any:
        local = jax.shard_map(attention, mesh=mesh, in_specs=(heads, P(), P()), out_specs=(heads, heads))
        return sum_of_cosines(local, *qkv)

    got = oracle.jit(jax.grad(run, (0, 1, 2)))(q, k, v)
    assert_close(got, oracle.jit(jax.grad(functools.partial(sum_of_cosines, attention), (0, 1, 2)))(q, k, v))


@pytest.mark.parametrize("names", [(), (OUT_NAME,), (OUT_NAME, LSE_NAME)])
def test_a_checkpoint_that_keeps_both_names_walks_forward_once(
    attention: Any, oracle: Any, qkv: Any, names: tuple[str, ...]
) -> None:
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    run = jax.checkpoint(functools.partial(sum_of_cosines, attention), policy=policy)
    text = oracle.jit(jax.grad(run, (0, 1, 2))).lower(*qkv).compile().as_text()
    walks_again = re.search(r"rematted_computation[^\"]*forward_walk", text) is not None
    assert walks_again == (len(names) < 2)


def test_x64_mode_changes_nothing(attention: Any, oracle: Any, qkv: Any) -> None:
    floats, others = call_with_everything()
    others["mask"] = jnp.asarray(others["mask"])
    arrays = dict(zip("qkv", qkv, strict=True)) | floats
    run = jax.value_and_grad(functools.partial(loss, attention, "both", others))
    want = jax.eval_shape(run, arrays)
    with jax.enable_x64(True):
        assert jax.eval_shape(run, arrays) == want


# What it has no rule for

SECOND = {
    "jvp of grad": lambda f, q: jax.jvp(jax.grad(f), (q,), (q,)),
    "grad of grad": lambda f, q: jax.grad(lambda q: jax.grad(f)(q).sum())(q),
    "hessian": lambda f, q: jax.hessian(f)(q),
}
FORWARD = {
    "jvp": lambda f, q: jax.jvp(f, (q,), (q,)),
    "jvp in jit": lambda f, q: jax.jit(lambda q: jax.jvp(f, (q,), (q,)))(q),
    "linearize": lambda f, q: jax.linearize(f, q)[1](q),
    "jacfwd": lambda f, q: jax.jacfwd(f)(q),
}


@pytest.fixture(scope="module", params=["plain", "jit", "checkpoint"])
def of_q(attention: Any, qkv: Any, request: pytest.FixtureRequest) -> Any:
    wrap = {"plain": lambda f: f, "jit": jax.jit, "checkpoint": jax.checkpoint}[request.param]
    return wrap(lambda q: attention(q, *qkv[1:])[0].sum())


@pytest.mark.parametrize("differentiate", SECOND.values(), ids=SECOND)
def test_second_derivatives_name_the_reference(of_q: Any, qkv: Any, differentiate: Any) -> None:
    with pytest.raises(NotImplementedError, match=r"cannot be differentiated twice; use reference_attention"):
        differentiate(of_q, qkv[0])


@pytest.mark.parametrize("differentiate", [FORWARD[name] for name in FORWARD if name != "jacfwd"])
def test_forward_mode_names_the_reference(of_q: Any, qkv: Any, differentiate: Any) -> None:
    with pytest.raises(TypeError, match=r"forward-mode \(jvp, .*reference_attention"):
        differentiate(of_q, qkv[0])


def test_forward_mode_by_vmap_raises(of_q: Any, qkv: Any) -> None:
    # Under jit it is JAX that notices first.
    with pytest.raises(TypeError, match="forward-mode"):
        FORWARD["jacfwd"](of_q, qkv[0])


def test_tangents_known_to_be_zero_are_no_forward_mode(attention: Any, oracle: Any, qkv: Any) -> None:
    """A rule of the caller's own may hand over zeros for arrays that are not differentiated."""

    @jax.custom_jvp
    def project(q: Any, k: Any) -> Any:
        return q * 2.0, k * 3.0

    project.defjvp(lambda primals, tangents: (project(*primals), (tangents[0] * 2.0, tangents[1] * 3.0)))

    def run(q: Any) -> Any:
        q, k = project(q, qkv[1])
        return attention(q, k, qkv[2])[0].sum()

    got, want = (
        oracle.jit(jax.grad(f))(qkv[0]) for f in (run, lambda q: attention(2 * q, 3 * qkv[1], qkv[2])[0].sum())
    )
    assert_close(got, want)
