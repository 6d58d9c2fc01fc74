"""Every backend on random data, masks, offsets and lengths against float64, with NaN wherever nobody may look."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tune_jax.kernels import flash_attention, reference_attention
from tune_jax.kernels.attention.backends import BACKENDS

TILES = {backend.name: backend.tiles for backend in BACKENDS}
DIFFERENTIABLE = ("bias", "sinks", "scale")


@dataclass(frozen=True)
class Setting:
    """What is compiled once and drawn for often: shapes, dtype, static arguments, and which arrays there are.

    `mask` and `bias` name the axes of "bhqk" that they have; along the others they are broadcast.
    """

    name: str
    lengths: tuple[int, int]
    heads: tuple[int, int] = (2, 2)
    depths: tuple[int, int] = (16, 16)
    dtype: str = "float32"
    causal: bool = False
    window: tuple[int | None, int | None] | None = None
    softcap: float | None = None
    arrays: tuple[str, ...] = ()
    mask: str | None = None
    bias: str | None = None
    return_lse: bool = True
    tiles: tuple[tuple[str, int], ...] = ()
    batch: int = 2

    @property
    def static(self) -> dict[str, Any]:
        return {"causal": self.causal, "window": self.window, "softcap": self.softcap}

    def on(self, backend: str) -> Setting:
        """The setting as the backend can take it."""
        if backend == "pallas_tpu":
            # Blocks of whole lanes, so longer arrays to have several; no float16.
            lengths = tuple(4 * length if length > 1 else 1 for length in self.lengths)
            tiles = tuple((name, 128) for name, _ in self.tiles)
            return replace(
                self,
                lengths=lengths,
                tiles=tiles,
                dtype=self.dtype.replace("bfloat16", "float16").replace("float16", "bfloat16"),
            )
        return replace(self, tiles=tuple(pair for pair in self.tiles if pair[0] in TILES.get(backend, ())))

    def shape(self, oracle: Any) -> Any:
        return oracle.Shape(*self.lengths, self.batch, *self.heads, *self.depths)


@dataclass(frozen=True)
class Draw:
    """What differs from call to call, in numbers that shrink well."""

    seed: int
    size: float
    poison: float
    q_offset: tuple[int, ...]
    q_lengths: tuple[int, ...]
    kv_lengths: tuple[int, ...]
    segments: int
    are_segments_sorted: bool
    density: float


@st.composite
def draws(draw: Any, setting: Setting) -> Draw:
    q_length, kv_length = setting.lengths

    def per_row(usual: int, low: int, high: int) -> Any:
        # Whole rows and empty ones come up often, and with them blocks that need no mask or no visit.
        return draw(st.tuples(*[st.sampled_from([usual, low, high]) | st.integers(low, high)] * setting.batch))

    return Draw(
        seed=draw(st.integers(0, 2**31)),
        size=draw(st.sampled_from([1.0, 0.01, 4.0])),
        poison=draw(st.sampled_from([np.nan, np.inf, -np.inf])),
        q_offset=per_row(0, -q_length, kv_length),
        q_lengths=per_row(q_length, 0, q_length),
        kv_lengths=per_row(kv_length, 0, kv_length),
        segments=draw(st.sampled_from([2, 1, 3, 4])),
        are_segments_sorted=draw(st.booleans()),
        density=draw(st.sampled_from([0.5, 0.05, 0.95, 0.0, 1.0])),
    )


def traced_arguments(setting: Setting, drawn: Draw, pairs: tuple[int, ...]) -> dict[str, Any]:
    """The arguments of `flash_attention` that are arrays, besides q, k and v."""
    rng = np.random.default_rng(drawn.seed)
    numbers = {name: np.array(getattr(drawn, name), np.int32) for name in ("q_offset", "q_lengths", "kv_lengths")}
    makers = {
        **{name: functools.partial(np.copy, value) for name, value in numbers.items()},
        "segment_ids": lambda: tuple(draw_segments(rng, drawn, setting.batch, length) for length in setting.lengths),
        "sinks": lambda: rng.normal(0, 2, setting.heads[0]).astype(np.float32),
        "scale": lambda: np.float32(rng.choice([0.3, -0.2, 1.0])),
    }
    arrays = {name: makers[name]() for name in setting.arrays}
    if setting.mask is not None:
        arrays["mask"] = rng.random(broadcast_shape(setting.mask, pairs)) < drawn.density
    if setting.bias is not None:
        shape = broadcast_shape(setting.bias, pairs)
        bias = rng.normal(0, drawn.size, shape)
        arrays["bias"] = np.where(rng.random(shape) < drawn.density / 4, -np.inf, bias).astype(setting.dtype)
    return arrays


def draw_segments(rng: np.random.Generator, drawn: Draw, batch: int, length: int) -> np.ndarray:
    segments = rng.integers(0, drawn.segments, (batch, length), dtype=np.int32)
    return np.sort(segments, axis=1) if drawn.are_segments_sorted else segments


def broadcast_shape(axes: str, pairs: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(size if axis in axes else 1 for axis, size in zip("bhqk", pairs, strict=True))


def spoil(arrays: dict[str, Any], call: dict[str, Any], seen: np.ndarray, poison: float) -> None:
    """Puts poison wherever no row of the call sees anything; in place."""
    blind_rows, unseen_keys = ~seen.any(3).swapaxes(1, 2), ~seen.any((1, 2))
    for name in ("q", "dout", "dlse"):
        arrays[name][blind_rows] = poison
    for name in ("k", "v"):
        arrays[name][unseen_keys] = poison
    if "bias" in call:
        shared = tuple(axis for axis, size in enumerate(call["bias"].shape) if size == 1)
        call["bias"][~seen.any(shared, keepdims=True)] = poison


def draw_call(oracle: Any, setting: Setting, drawn: Draw) -> tuple[dict[str, Any], dict[str, Any]]:
    """q, k, v and the cotangents, and the other arguments of the call."""
    shape = setting.shape(oracle)
    values = (*oracle.inputs(shape, setting.dtype, drawn.seed), oracle.cotangent(shape, setting.dtype, drawn.seed))
    arrays = {name: np.array(value) for name, value in zip(("q", "k", "v", "dout"), values, strict=True)}
    arrays["q"] *= np.asarray(drawn.size, setting.dtype)
    arrays["dlse"] = np.random.default_rng(drawn.seed).standard_normal(shape.q[:3], np.float32)
    call = traced_arguments(setting, drawn, shape.pairs)
    masks = {name: value for name, value in call.items() if name != "bias"}
    spoil(arrays, call, oracle.seen(shape, **setting.static, **masks), drawn.poison)
    return arrays, call


@functools.cache
def both_passes(backend: str, setting: Setting) -> Any:
    """All results of a call by name, as a function of its arrays."""
    if backend == "reference":
        attend = functools.partial(reference_attention, **setting.static)
    else:
        attend = functools.partial(flash_attention, implementation=backend, **setting.static, **dict(setting.tiles))

    def run(arrays: dict[str, Any], call: dict[str, Any]) -> dict[str, Any]:
        fixed = {name: value for name, value in call.items() if name not in DIFFERENTIABLE}

        def forward(operands: dict[str, Any]) -> Any:
            return attend(**operands, **fixed, return_lse=setting.return_lse)

        operands = {name: arrays[name] for name in ("q", "k", "v")}
        operands |= {name: call[name] for name in call if name in DIFFERENTIABLE}
        results, pull_back = jax.vjp(forward, operands)
        cotangents = (arrays["dout"], arrays["dlse"]) if setting.return_lse else arrays["dout"]
        gradients = {f"d{name}": value for name, value in pull_back(cotangents)[0].items()}
        named = dict(zip(("out", "lse"), results, strict=True)) if setting.return_lse else {"out": results}
        return named | gradients

    return run


def check(oracle: Any, run: Any, setting: Setting, drawn: Draw, leeway: float = 1) -> None:
    arrays, call = draw_call(oracle, setting, drawn)
    got = run(arrays, call)
    dlse = arrays["dlse"] if setting.return_lse else None
    inputs = (arrays[name] for name in ("q", "k", "v", "dout"))
    oracle.check(got, *inputs, dlse, leeway=leeway, **setting.static, **call)


# Interpreted and by XLA, on the CPU

SMALL = (("block_q", 16), ("block_k", 16))
WIDE = (("block_q", 16), ("block_k", 32), ("block_q_dkv", 32), ("block_k_dkv", 16))
TALL = (("block_q", 32), ("block_k", 16), ("block_q_dq", 16), ("block_k_dq", 32))

SETTINGS = [
    Setting("causal", (33, 40), causal=True, arrays=("q_offset", "kv_lengths"), tiles=WIDE),
    Setting(
        "window",
        (40, 50),
        heads=(4, 2),
        depths=(24, 8),
        dtype="bfloat16",
        window=(9, 3),
        arrays=("q_offset", "q_lengths", "kv_lengths"),
        tiles=SMALL,
    ),
    Setting(
        "segments",
        (50, 50),
        depths=(8, 24),
        causal=True,
        arrays=("segment_ids", "q_lengths", "sinks"),
        tiles=TALL,
    ),
    Setting("pairs", (36, 45), heads=(4, 1), dtype="float16", softcap=5.0, mask="bqk", bias="hqk", tiles=SMALL),
    Setting(
        "all",
        (35, 50),
        heads=(4, 2),
        causal=True,
        window=(20, None),
        softcap=3.0,
        arrays=("q_offset", "q_lengths", "kv_lengths", "segment_ids", "sinks", "scale"),
        mask="hk",
        bias="bk",
        tiles=WIDE,
    ),
    Setting(
        "decoding",
        (1, 70),
        heads=(8, 2),
        dtype="bfloat16",
        causal=True,
        arrays=("q_offset", "kv_lengths", "scale"),
        bias="hk",
        tiles=TALL,
    ),
]


LEFT_OUT = {"pallas_triton": ("causal", "segments"), "pallas_tpu": ("causal", "window", "segments", "pairs")}


def named(setting: Setting) -> str:
    return setting.name


ON_CPU = [
    pytest.param(backend, setting, id=f"{backend}-{setting.name}")
    for backend in ("reference", "xla", "pallas_triton", "pallas_tpu")
    for setting in SETTINGS
    # Interpreted kernels compile for long, and "all" holds what these have.
    if setting.name not in LEFT_OUT.get(backend, ())
]


@pytest.mark.parametrize(("backend", "setting"), ON_CPU)
@settings(max_examples=6)
@given(data=st.data())
def test_draws_agree_with_float64(oracle: Any, backend: str, setting: Setting, data: Any) -> None:
    setting = setting.on(backend)
    run = compile_for_the_cpu(oracle, backend, setting)
    check(oracle, run, setting, data.draw(draws(setting)))


@functools.cache
def compile_for_the_cpu(oracle: Any, backend: str, setting: Setting) -> Any:
    return oracle.jit(both_passes(backend, setting))


# On the GPU, 300 draws a backend

GPU_TILES = (("block_q", 64), ("block_k", 64), ("block_q_dkv", 32), ("block_k_dq", 32))

GPU_SETTINGS = [
    Setting("causal", (257, 300), depths=(64, 64), causal=True, arrays=("q_offset", "kv_lengths"), tiles=GPU_TILES),
    Setting(
        "window",
        (300, 200),
        heads=(4, 2),
        depths=(128, 128),
        dtype="bfloat16",
        window=(70, 3),
        arrays=("q_offset", "q_lengths", "kv_lengths"),
        tiles=GPU_TILES,
    ),
    Setting(
        "segments",
        (200, 200),
        depths=(40, 24),
        dtype="float16",
        causal=True,
        arrays=("segment_ids", "q_lengths", "sinks"),
        tiles=GPU_TILES,
    ),
    Setting("pairs", (129, 192), heads=(4, 1), depths=(64, 64), dtype="bfloat16", softcap=5.0, mask="bqk", bias="hqk"),
    Setting(
        "all",
        (135, 250),
        heads=(4, 2),
        depths=(64, 128),
        causal=True,
        window=(100, None),
        softcap=3.0,
        arrays=("q_offset", "q_lengths", "kv_lengths", "segment_ids", "sinks", "scale"),
        mask="hk",
        bias="bk",
        tiles=GPU_TILES,
    ),
    Setting(
        "decoding",
        (1, 1000),
        heads=(8, 2),
        depths=(128, 128),
        dtype="bfloat16",
        causal=True,
        arrays=("q_offset", "kv_lengths", "scale"),
        bias="hk",
    ),
]

CUDNN_SETTINGS = [
    Setting("full", (192, 256), heads=(4, 2), depths=(64, 64), dtype="bfloat16", return_lse=False),
    Setting("causal", (258, 258), depths=(128, 128), dtype="float16", causal=True, return_lse=False),
    Setting("window", (200, 200), depths=(64, 64), dtype="bfloat16", window=(70, 0), return_lse=False),
]


@pytest.mark.gpu
@pytest.mark.parametrize("setting", GPU_SETTINGS, ids=named)
@pytest.mark.parametrize("backend", ["xla", "pallas_triton"])
@settings(max_examples=50)
@given(data=st.data())
def test_draws_on_the_gpu(oracle: Any, backend: str, setting: Setting, data: Any) -> None:
    setting = setting.on(backend)
    check(oracle, compile_for_the_gpu(backend, setting), setting, data.draw(draws(setting)))


@pytest.mark.gpu
@pytest.mark.parametrize("setting", CUDNN_SETTINGS, ids=named)
@settings(max_examples=100)
@given(data=st.data())
def test_draws_with_cudnn(oracle: Any, setting: Setting, data: Any) -> None:
    # Its rounding is its own affair: more is granted than to our backends.
    check(oracle, compile_for_the_gpu("cudnn", setting), setting, data.draw(draws(setting)), leeway=2)


@functools.cache
def compile_for_the_gpu(backend: str, setting: Setting) -> Any:
    compiled = jax.jit(both_passes(backend, setting))

    def run(*arguments: Any) -> Any:
        stain(jax.eval_shape(compiled, *arguments))
        return compiled(*arguments)

    return run


def stain(results: Any) -> None:
    """Leaves NaN in freed memory, where the next results will likely lie: what a kernel does not write shows."""
    jax.block_until_ready(jax.tree.map(lambda x: jnp.full(x.shape, jnp.nan, x.dtype), results))
