"""Which backend answers a call, on which device, and what is said where one cannot."""

from __future__ import annotations

import dataclasses
import importlib
import pathlib
import re
import sys
import types
import warnings
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax.kernels import flash_attention
from tune_jax.kernels.attention import backends, tables
from tune_jax.kernels.attention.backends import BACKENDS, Backend, choose, listed, refusal, supporting
from tune_jax.kernels.attention.call import Operands, Tiles
from tune_jax.kernels.attention.capabilities import capability_table
from tune_jax.kernels.attention.checks import read_call
from tune_jax.kernels.attention.choice import Choice, Route
from tune_jax.kernels.attention.device import Device, find_device
from tune_jax.kernels.attention.features import FEATURES, asked

DOCS = pathlib.Path(__file__).resolve().parents[3] / "docs" / "attention.md"
CPU, TPU = Device("cpu", "cpu"), Device("tpu", "TPU v5 lite")
H200, A100 = Device("gpu", "NVIDIA H200", 9.0), Device("gpu", "NVIDIA A100", 8.0)
V100, MI300 = Device("gpu", "NVIDIA V100", 7.0), Device("gpu", "AMD Instinct MI300X")
BY_NAME = {backend.name: backend for backend in BACKENDS}


def make(
    q_length: int = 64,
    kv_length: int = 64,
    depth: int = 64,
    dtype: str = "bfloat16",
    kv_heads: int = 4,
    batch: int = 2,
    **call: Any,
) -> tuple[Any, Any, bool]:
    """A checked call's parts; `v_depth` and `return_lse` may be among its arguments."""
    shapes = (
        (batch, q_length, 4, depth),
        (batch, kv_length, kv_heads, depth),
        (batch, kv_length, kv_heads, call.pop("v_depth", depth)),
    )
    return_lse = call.pop("return_lse", False)
    arrays = (jnp.zeros(shape, dtype) for shape in shapes)
    return *read_call(*arrays, **call), return_lse


def able(device: Device, **call: Any) -> list[str]:
    return [backend.name for backend in supporting(*make(**call), device)]


def why_not(name: str, device: Device, **call: Any) -> str | None:
    return refusal(BY_NAME[name], *make(**call), device)


@pytest.fixture(autouse=True)
def decide_anew() -> Iterator[None]:
    """Decisions are kept; these tests change what they rest on."""
    backends._decide.cache_clear()
    yield
    backends._decide.cache_clear()


@pytest.fixture
def on_device(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Makes calls believe that they are for a device, with a table that says `ranked` of each pass."""

    def pretend(device: Device, **ranked: tuple[str, ...]) -> None:
        monkeypatch.setattr(backends, "find_device", lambda *arrays: device)
        monkeypatch.setattr(backends, "rank_backends", lambda walk, *call: ranked.get(walk, ()))

    return pretend


@pytest.fixture
def no_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stands a named function in for each backend's module."""
    monkeypatch.setattr(Backend, "load", lambda backend: backend.name)


def chosen(implementation: str | None = None, **call: Any) -> tuple[str, str]:
    """The backends of a plain call, and of one that is differentiated; needs `no_modules`."""
    choice: Any = choose(implementation, *make(**call))
    return choice.plain.function, choice.trained.function


# What each can do


FEATURE_CALLS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "window": {"causal": True, "window": (3, None)},
    "window past the query": {"window": (None, 3)},
    "q_offset": {"q_offset": 3},
    "segment_ids": {"segment_ids": (np.zeros((2, 64), int),) * 2},
    "q_lengths": {"q_lengths": np.array([3, 4])},
    "kv_lengths": {"kv_lengths": np.array([3, 4])},
    "mask": {"mask": np.ones((64, 64), bool)},
    "bias": {"bias": np.ones((64, 64), np.float32)},
    "array scale": {"scale": np.array(2, np.float32)},
    "softcap": {"softcap": 3.0},
    "sinks": {"sinks": np.ones(4, np.float32)},
    "return_lse": {"return_lse": True},
    "deterministic": {"deterministic": True},
    "grouped heads": {"kv_heads": 2},
    "Dv other than D": {"v_depth": 32},
}


@pytest.mark.parametrize("feature", FEATURES)
def test_a_call_asks_for_what_it_names_and_nothing_else(feature: str) -> None:
    got = set(asked(*make(**FEATURE_CALLS[feature])))
    implied = {"window": {"causal"}, "window past the query": {"window"}}.get(feature, set())
    assert got == {feature} | implied


def test_lacks_are_features() -> None:
    assert {name for backend in BACKENDS for name in backend.lacks} <= set(FEATURES)


def test_xla_does_everything_everywhere() -> None:
    for device in (CPU, TPU, H200, V100, MI300, Device("other", "new")):
        for dtype in ("float32", "float16"):
            assert all(why_not("xla", device, dtype=dtype, **call) is None for call in FEATURE_CALLS.values())


@pytest.mark.parametrize(
    ("device", "names"),
    [
        (CPU, ["xla"]),
        (TPU, ["pallas_tpu", "xla"]),
        (H200, ["cudnn", "pallas_triton", "xla"]),
        (A100, ["cudnn", "pallas_triton", "xla"]),
        (V100, ["xla"]),
        (MI300, ["xla"]),
    ],
)
def test_backends_of_a_device(device: Device, names: list[str]) -> None:
    assert able(device) == names


@pytest.mark.parametrize("feature", BY_NAME["cudnn"].lacks)
def test_cudnn_names_the_feature_that_it_lacks(feature: str) -> None:
    assert why_not("cudnn", H200, **FEATURE_CALLS[feature]) == f"has no {feature}"


@pytest.mark.parametrize(
    ("device", "call", "words"),
    [
        (H200, {"dtype": "float32"}, "does not take float32, only bfloat16 and float16"),
        (H200, {"depth": 20}, "multiples of 8 up to 256, not 20"),
        (A100, {"depth": 136}, "multiples of 8 up to 128, not 136"),
        (H200, {"kv_length": 0}, "no arrays without elements"),
        (
            H200,
            {"kv_length": 8, "causal": True, "window": (8, 0)},
            "no more queries than keys, not 64 and 8",
        ),
        (H200, {"causal": True, "window": (8, 0), "kv_lengths": np.array([3, 4])}, "makes NaN of rows whose window"),
        (H200, {"window": (8, None)}, "has no window past the query"),
        (
            H200,
            {"batch": 70_000, "q_length": 2, "kv_length": 2, "depth": 8},
            "takes batches and heads up to 65535, not 70000",
        ),
        (H200, {"softcap": 1.0, "return_lse": True}, "has no softcap, no return_lse"),
    ],
)
def test_limits_of_cudnn(device: Device, call: dict[str, Any], words: str) -> None:
    reason = why_not("cudnn", device, **call)
    assert reason is not None
    assert words in reason


@pytest.mark.parametrize(
    ("name", "device", "words"),
    [
        ("pallas_triton", V100, "needs compute capability 8.0, and the NVIDIA V100 has 7.0"),
        ("pallas_triton", MI300, "runs on NVIDIA GPUs, and the call is for AMD Instinct MI300X (gpu)"),
        ("pallas_triton", TPU, "runs on GPUs, and the call is for TPU v5 lite (tpu)"),
        ("pallas_tpu", H200, "runs on TPUs, and the call is for NVIDIA H200 (gpu)"),
        ("cudnn", CPU, "runs on GPUs, and the call is for cpu"),
    ],
)
def test_devices_that_a_backend_does_not_run_on(name: str, device: Device, words: str) -> None:
    assert why_not(name, device) == words


@pytest.mark.parametrize("name", ["pallas_triton", "pallas_tpu"])
def test_a_cpu_interprets_what_is_named_and_only_that(name: str) -> None:
    assert why_not(name, CPU, dtype="float32") is None
    assert name not in able(CPU, dtype="float32")


def test_a_part_of_jax_that_is_gone_is_named() -> None:
    gone = dataclasses.replace(BY_NAME["pallas_triton"], needs="jax.experimental.nowhere.triton")
    assert refusal(gone, *make(), H200) == (
        "needs jax.experimental.nowhere.triton, which this version of JAX does not have"
    )


# Which one answers


@pytest.mark.usefixtures("no_modules")
@pytest.mark.parametrize(
    ("device", "call", "name"),
    [
        (CPU, {}, "xla"),
        (TPU, {}, "pallas_tpu"),
        (TPU, {"dtype": "float16"}, "xla"),
        (H200, {}, "cudnn"),
        (H200, {"softcap": 2.0}, "pallas_triton"),
        (H200, {"dtype": "float32"}, "pallas_triton"),
        (V100, {}, "xla"),
    ],
)
def test_without_a_table_a_rule_decides(on_device: Any, device: Device, call: dict[str, Any], name: str) -> None:
    on_device(device)
    assert chosen(**call) == (name, name)


@pytest.mark.usefixtures("no_modules")
def test_the_table_decides_for_each_pass(on_device: Any) -> None:
    on_device(H200, forward=("xla", "cudnn"), backward=("pallas_triton", "cudnn"))
    assert chosen() == ("xla", "pallas_triton")


@pytest.mark.usefixtures("no_modules")
def test_the_fastest_that_can_do_the_call_is_taken(on_device: Any) -> None:
    on_device(H200, forward=("cudnn", "xla", "pallas_triton"))
    assert chosen(softcap=1.0) == ("xla", "pallas_triton")


@pytest.mark.usefixtures("no_modules")
def test_a_name_in_the_table_that_is_no_backend_is_passed_over(on_device: Any) -> None:
    on_device(H200, forward=("retired", "xla"))
    assert chosen()[0] == "xla"


@pytest.mark.usefixtures("no_modules")
def test_what_cannot_be_differentiated_answers_plain_calls_only(
    on_device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_device(H200)
    quick = Backend("quick", platforms=("gpu",), backward_limits=lambda *_: "has no backward pass")
    monkeypatch.setattr(backends, "BACKENDS", (quick, *BACKENDS))
    assert chosen() == ("quick", "cudnn")


@pytest.mark.usefixtures("no_modules")
def test_cudnn_answers_odd_lengths_without_a_backward_pass(on_device: Any) -> None:
    on_device(H200)
    spec, operands, return_lse = make(q_length=33)
    choice: Any = choose(None, spec, operands, return_lse)
    assert (choice.plain.function, choice.trained.function) == ("cudnn", "pallas_triton")
    named: Any = choose("cudnn", spec, operands, return_lse)
    assert named.plain.function == "cudnn"
    with pytest.raises(ValueError, match=r"'cudnn' has a backward pass for even lengths only, not for 33 queries"):
        named.trained.attend(operands)


@pytest.mark.usefixtures("no_modules")
def test_a_log_sum_exp_that_nobody_asks_for_is_dropped() -> None:
    q = jnp.ones((1, 8, 2, 16))
    spec, operands = read_call(q, q, q)
    plain, trained = (Route(lambda *_, lse=lse: (q, lse), spec, False) for lse in (None, q[..., 0]))
    out = jax.vjp(Choice(plain, trained).attend, operands)[0]
    assert out[1] is None


@pytest.mark.usefixtures("no_modules")
def test_a_warning_that_comes_with_a_backend_is_hushed_at_each_call_once(on_device: Any) -> None:
    on_device(H200)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        before = len(warnings.filters)
        choose("cudnn", *make())
        assert len(warnings.filters) == before
        for _ in range(2):
            choose("pallas_triton", *make())
        assert len(warnings.filters) == before + 1
        warnings.warn("The Pallas Triton backend is deprecated and more", DeprecationWarning, stacklevel=1)
        with pytest.raises(DeprecationWarning):
            warnings.warn("another", DeprecationWarning, stacklevel=1)


@pytest.mark.usefixtures("no_modules")
def test_a_named_one_answers_both(on_device: Any) -> None:
    on_device(H200, forward=("cudnn",), backward=("cudnn",))
    assert chosen("pallas_triton") == ("pallas_triton", "pallas_triton")


@pytest.mark.usefixtures("no_modules")
def test_given_hyperparameters_rule_out_those_that_do_not_take_them(on_device: Any) -> None:
    on_device(H200, forward=("cudnn", "xla"), backward=("cudnn", "xla"))
    spec, operands, return_lse = make()
    tiles = dataclasses.replace(spec.tiles, num_warps=4)
    choice: Any = choose(None, dataclasses.replace(spec, tiles=tiles), operands, return_lse)
    assert choice.plain.function == choice.trained.function == "pallas_triton"
    assert choice.plain.spec.tiles.num_warps == 4


def test_equal_calls_are_decided_once() -> None:
    for value in (1.0, 2.0):
        flash_attention(*[jnp.full((1, 8, 2, 16), value)] * 3)
    assert backends._decide.cache_info().misses == 1


# What is said


def fails(message: str, implementation: str | None, **call: Any) -> None:
    q = jnp.zeros((1, 16, 2, 16), jnp.bfloat16)
    with pytest.raises(ValueError, match=re.escape(message)):
        flash_attention(q, q, q, implementation=implementation, **call)


def test_an_error_names_the_backend_the_reason_and_who_can(on_device: Any) -> None:
    on_device(H200)
    fails(
        "implementation 'cudnn' has no softcap; 'pallas_triton' and 'xla' can do this call.",
        "cudnn",
        softcap=2.0,
    )


def test_a_hyperparameter_that_is_not_taken_is_an_error_that_names_what_is(on_device: Any) -> None:
    on_device(H200)
    fails(
        "implementation 'cudnn' takes no block_q, nor any other hyperparameter; 'pallas_triton' and 'xla' can",
        "cudnn",
        block_q=64,
    )
    fails(
        "implementation 'xla' takes no num_warps, only block_q and block_k; 'pallas_triton' can do this call.",
        "xla",
        num_warps=4,
    )


def test_where_none_can_each_says_why(on_device: Any) -> None:
    on_device(CPU)
    fails("no implementation can do this call on cpu: 'cudnn' takes no num_warps", None, num_warps=4)
    fails("'pallas_triton' is interpreted here, if named; ", None, num_warps=4)
    fails(
        "'cudnn' takes no num_warps, no block_k_dq, nor any other hyperparameter; 'pallas_triton' can do",
        "cudnn",
        num_warps=4,
        block_k_dq=16,
    )


@pytest.mark.parametrize("name", ["tirton", ["xla"], 3])
def test_unknown_implementation_names_those_there_are(name: Any) -> None:
    available = "'cudnn', 'pallas_tpu', 'pallas_triton', 'xla', or None for the best one."
    fails(f"implementation {name!r} is unknown; available: {available}", name)


@pytest.mark.parametrize(("names", "text"), [([], ""), (["a"], "a"), (["a", "b"], "a and b"), ("abc", "a, b and c")])
def test_lists_in_words(names: Any, text: str) -> None:
    assert listed(names) == text


# The device


def abstract_device(kind: str, platform: str) -> Any:
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), (), abstract_device=device))


def test_device_of_an_array_comes_before_the_default() -> None:
    array = jax.device_put(jnp.ones(3), jax.devices("cpu")[1])
    assert find_device(array) == CPU
    with jax.default_device(jax.devices("cpu")[2]):
        assert find_device(None, array) == find_device() == CPU


def test_default_device_may_be_a_platform() -> None:
    with jax.default_device("cpu"):
        assert find_device(jax.ShapeDtypeStruct((3,), jnp.float32)) == CPU


def test_traced_arrays_lie_nowhere() -> None:
    seen: list[Device] = []
    jax.eval_shape(lambda x: seen.append(find_device(x)), jnp.ones(3))
    assert seen == [CPU]


def test_an_abstract_device_comes_before_arrays() -> None:
    with abstract_device("NVIDIA H200", "gpu"):
        assert find_device(jnp.ones(3)) == Device("gpu", "NVIDIA H200")
        assert able(find_device()) == ["cudnn", "pallas_triton", "xla"]


# Routes


@pytest.fixture
def two_backends(monkeypatch: pytest.MonkeyPatch, on_device: Any) -> Iterator[list[str]]:
    """Backends that return q plus 1 or 2, and note each trace; the first answers plain calls, the second others."""
    traces: list[str] = []

    def add(name: str, number: int) -> None:
        def attend(spec: Any, operands: Any) -> Any:
            traces.append(name)
            return operands.q * operands.k.mean() + number, operands.q[..., 0]

        module = types.ModuleType(name)
        module.attend = attend  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"{backends.__package__}.{name}", module)

    add("first", 1)
    add("second", 2)
    monkeypatch.setattr(backends, "BACKENDS", (Backend("first"), Backend("second")))
    on_device(CPU, forward=("first",), backward=("second",))
    return traces


Q = jnp.ones((1, 4, 2, 8))


def test_a_backend_is_added_by_its_row_in_the_table(two_backends: list[str]) -> None:
    assert float(flash_attention(Q, Q, Q, implementation="second").mean()) == 3
    assert two_backends == ["second"]


def test_a_plain_call_takes_the_one_and_differentiation_the_other(two_backends: list[str]) -> None:
    assert float(flash_attention(Q, Q, Q).mean()) == 2
    assert two_backends == ["first"]
    lengths = np.array([4])
    out, grads = jax.value_and_grad(lambda q: flash_attention(q, Q, Q, kv_lengths=lengths).mean())(Q)
    assert float(out) == 3
    np.testing.assert_allclose(grads, 1 / Q.size)


def test_both_outputs_are_differentiated_through_the_other(two_backends: list[str]) -> None:
    def loss(q: Any) -> Any:
        out, lse = flash_attention(q, Q, Q, return_lse=True)
        return out.sum() + 3 * lse.sum()

    for transform in (jax.jit, jax.checkpoint, lambda function: function):
        grads = jax.grad(transform(loss))(Q)
        np.testing.assert_allclose(grads[..., 0], 4)
        np.testing.assert_allclose(grads[..., 1:], 1)


def test_two_routes_work_under_vmap(two_backends: list[str]) -> None:
    many = jnp.stack([Q, 2 * Q])
    out, grads = jax.vmap(jax.value_and_grad(lambda q: flash_attention(q, Q, Q).mean()))(many)
    np.testing.assert_allclose(out, [3, 4])
    np.testing.assert_allclose(grads, 1 / Q.size)


# Tiles


def backward_program(name: str, tiles: Tiles) -> str:
    """What differentiation adds to a forward pass, traced."""
    spec, operands, _ = make(600, 600, tiles=tiles)
    arrays = operands.q, operands.k, operands.v
    kernels = importlib.import_module(f"tune_jax.kernels.attention.{name}")
    _, pull_back = jax.eval_shape(lambda *qkv: jax.vjp(lambda *x: kernels.attend(spec, Operands(*x))[0], *qkv), *arrays)
    program = str(jax.make_jaxpr(lambda pull_back, dout: pull_back(dout))(pull_back, arrays[0]))
    # Parameters of the program name the tiles that were asked for.
    return re.sub(r"Tiles\([^)]*\)", "", program)


@pytest.mark.parametrize(("name", "is_shared"), [("xla", True), ("pallas_tpu", True), ("pallas_triton", False)])
def test_which_backward_passes_take_the_blocks_of_the_forward_pass(name: str, is_shared: bool) -> None:
    assert (backward_program(name, Tiles(block_q=128)) != backward_program(name, Tiles())) == is_shared


@pytest.mark.parametrize("name", ["pallas_tpu", "pallas_triton"])
def test_blocks_of_the_backward_passes_own_come_first(name: str) -> None:
    own = Tiles(block_q_dkv=256, block_q_dq=256)
    assert backward_program(name, dataclasses.replace(own, block_q=128)) == backward_program(name, own)


# The docs


def test_the_docs_table_is_what_the_code_says() -> None:
    assert capability_table() in DOCS.read_text(), f"put this into docs/attention.md:\n{capability_table()}"


def test_the_docs_table_has_a_column_a_backend_and_a_row_a_feature() -> None:
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capability_table().splitlines()]
    assert rows[0][1:] == [f"`{name}`" for name in backends.IMPLEMENTATIONS]
    cells = {row[0]: dict(zip(backends.IMPLEMENTATIONS, row[1:], strict=True)) for row in rows[2:]}
    assert cells["softcap"] == {"cudnn": "no", "pallas_tpu": "yes", "pallas_triton": "yes", "xla": "yes"}
    assert set(FEATURES) <= set(cells)


def test_no_table_is_read_for_devices_that_have_none() -> None:
    assert tables.read_table("cpu") == ()
