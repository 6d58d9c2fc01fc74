"""`flash_attention` as a caller meets it: names, defaults and what it says about bad input."""

from __future__ import annotations

import inspect
import subprocess
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tune_jax.kernels
from tune_jax.kernels import flash_attention
from tune_jax.kernels.attention.call import Tiles


def zeros(*shape: int, dtype: Any = jnp.float32) -> jax.Array:
    return jnp.zeros(shape, dtype)


Q = (2, 8, 4, 16)


def call(q: Any = Q, k: Any = Q, v: Any = Q, **options: Any) -> Any:
    return flash_attention(*(zeros(*x) if isinstance(x, tuple) else x for x in (q, k, v)), **options)


def test_public_names() -> None:
    assert tune_jax.kernels.__all__ == [
        "flash_attention",
        "flash_attention_space",
        "merge_attention",
        "reference_attention",
    ]
    for name in tune_jax.kernels.__all__:
        assert isinstance(getattr(tune_jax.kernels, name), types.FunctionType)


def test_options_come_by_keyword_and_are_off_by_default() -> None:
    parameters = list(inspect.signature(flash_attention).parameters.values())
    assert [parameter.name for parameter in parameters[:3]] == ["q", "k", "v"]
    assert all(parameter.kind is parameter.KEYWORD_ONLY for parameter in parameters[3:])
    off = (None, False, 0)
    assert all(parameter.default in off for parameter in parameters[3:])


def test_hyperparameters_are_those_of_the_tiles() -> None:
    names = list(inspect.signature(flash_attention).parameters)
    assert names[names.index("implementation") + 1 :] == list(Tiles.__dataclass_fields__)


def test_kernels_do_not_import_the_tuner() -> None:
    code = (
        "import sys, types\n"
        "import importlib.util as u\n"
        "import tune_jax.kernels as k\n"
        "root = k.__path__[0]\n"
        "names = [n for n in sys.modules if n.startswith('tune_jax')]\n"
        "[sys.modules.pop(n) for n in names]\n"
        "spec = u.spec_from_file_location('lone', root + '/__init__.py', submodule_search_locations=[root])\n"
        "module = u.module_from_spec(spec); sys.modules['lone'] = module\n"
        "spec.loader.exec_module(module)\n"
        "import jax.numpy as jnp\n"
        "module.flash_attention(*[jnp.ones((1, 4, 1, 4))] * 3)\n"
        "print([n for n in sys.modules if n.startswith('tune_jax')])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_defaults(oracle: Any) -> None:
    q, k, v = oracle.inputs(oracle.Shape(300, 270))
    oracle.check_forward(flash_attention(q, k, v), q, k, v)


@pytest.mark.parametrize("implementation", ["xla", None])
def test_the_portable_backend_answers_by_name_and_by_default(oracle: Any, implementation: str | None) -> None:
    q, k, v = oracle.inputs(oracle.Shape(33, 33))
    out = flash_attention(q, k, v, causal=True, implementation=implementation, block_q=16, block_k=16)
    oracle.check_forward(out, q, k, v, causal=True)


@pytest.mark.parametrize("block", [np.int32(16), np.int64(1), 10**6])
def test_any_whole_number_is_a_block(block: Any) -> None:
    assert call(block_q=block, block_k=block).shape == Q


@pytest.mark.parametrize("scale", [2, 0.5, np.float32(0.5), np.array(0.5), jnp.array(1), np.float64(2)])
def test_any_real_scalar_is_a_scale(scale: Any) -> None:
    assert call(scale=scale).dtype == jnp.float32


SHAPE_ERRORS = [
    ({"q": (8, 4, 16)}, r"q must have 4 axes, .* got shape \(8, 4, 16\); add an axis"),
    ({"v": (1, 2, 8, 4, 16)}, r"v must have 4 axes.*jax.vmap"),
    ({"q": (1, 8, 4, 16)}, r"same batch \(axis 0\), got q \(1, 8, 4, 16\), k \(2, 8, 4, 16\).*broadcast"),
    ({"v": (2, 9, 4, 16)}, r"k and v must have the same time and heads.*v \(2, 9, 4, 16\)"),
    ({"v": (2, 8, 2, 16)}, r"k and v must have the same time and heads"),
    ({"k": (2, 8, 4, 32)}, r"q and k must have the same head_dim.*only v may"),
    ({"q": (2, 8, 4, 0), "k": (2, 8, 4, 0)}, r"head_dim \(axis 3\), at least 1"),
    ({"k": (2, 8, 3, 16), "v": (2, 8, 3, 16)}, r"4 is not a multiple of 3.*may be swapped"),
    ({"k": (2, 8, 8, 16), "v": (2, 8, 8, 16)}, r"4 is not a multiple of 8"),
    ({"k": (2, 8, 0, 16), "v": (2, 8, 0, 16)}, r"must be a multiple of k's"),
]


@pytest.mark.parametrize(("arrays", "message"), SHAPE_ERRORS)
def test_shapes_that_do_not_fit(arrays: dict[str, tuple[int, ...]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(**arrays)
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda: call(**arrays))


@pytest.mark.parametrize(
    ("dtypes", "message"),
    [
        ((jnp.int32,) * 3, "out of float32, bfloat16, float16, got int32, int32, int32; cast"),
        ((jnp.float32, jnp.bfloat16, jnp.float32), "got float32, bfloat16, float32"),
        ((jnp.complex64,) * 3, "got complex64"),
        ((jnp.float8_e4m3fn,) * 3, "got float8_e4m3fn"),
    ],
)
def test_dtypes_that_no_backend_takes(dtypes: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        call(*(zeros(*Q, dtype=dtype) for dtype in dtypes))


def test_float64_is_refused_rather_than_rounded() -> None:
    with jax.enable_x64(True), pytest.raises(TypeError, match="got float64, float64, float64"):
        call(*(zeros(*Q, dtype=jnp.float64) for _ in range(3)))


@pytest.mark.parametrize("name", ["block_q", "block_k"])
@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, r"0 \(int\)"),
        (-64, r"-64 \(int\)"),
        (64.0, r"64.0 \(float\)"),
        (True, r"True \(bool\)"),
        ("64", r"'64' \(str\)"),
        ((64,), r"\(64,\) \(tuple\)"),
    ],
)
def test_blocks_that_are_not_positive_whole_numbers(name: str, value: Any, shown: str) -> None:
    message = rf"{name} must be a positive whole number or None, got {shown}; try a power of two"
    with pytest.raises(ValueError, match=message):
        call(**{name: value})


def test_a_traced_block_says_static() -> None:
    with pytest.raises(ValueError, match="make it static under jit"):
        jax.jit(lambda block: call(block_q=block))(64)


@pytest.mark.parametrize("causal", [1, None, "yes"])
def test_causal_that_is_not_a_bool(causal: Any) -> None:
    with pytest.raises(TypeError, match="causal must be True or False, got"):
        call(causal=causal)


def test_traced_causal_says_static() -> None:
    with pytest.raises(TypeError, match="under jit, make it static"):
        jax.jit(lambda causal: call(causal=causal))(True)


@pytest.mark.parametrize("scale", ["0.1", 1j, True, jnp.ones(2), jnp.array(1j)])
def test_scale_that_is_not_a_real_scalar(scale: Any) -> None:
    with pytest.raises(TypeError, match="scale must be a finite real scalar or None, got"):
        call(scale=scale)
