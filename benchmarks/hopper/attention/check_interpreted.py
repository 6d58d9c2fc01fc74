"""Hopper's attention in Pallas' GPU interpreter, with its check for races: no GPU needed, jax 0.11 or newer.

    NPROC=16 python -m pytest --import-mode=prepend benchmarks/hopper/attention/check_interpreted.py

`-k "causal and not static"` picks cases. The interpreter checks barriers, indices and masks; the products are plain
dots there, so it says nothing about the overlap of products and softmax. Without NPROC, which says how many threads
the interpreter may use, four waiting warpgroups can starve it on a machine with few cores, and it hangs; an exception
in one of its threads also shows as a hang.
"""

from __future__ import annotations

import os

os.environ.setdefault("NPROC", "16")

import functools

import float64
import jax
import jax.numpy as jnp
import pytest
from backward import KeyConfig, attention_gradients
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel import Config, attention


def draw(seed, batch, tq, tk, heads, kv_heads, d, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = (batch, tq, heads, d), (batch, tk, kv_heads, d), (batch, tk, kv_heads, d)
    return [jax.random.normal(key, shape, jnp.float32).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


LARGEST_ERROR, LARGEST_LSE_ERROR = 6e-3, 1e-5  # relative, in the 2-norm

CASES = {  # (batch, tq, tk, heads, kv heads, d), masks, config
    "full": ((1, 128, 256, 1, 1, 64), {}, Config()),
    "static": ((2, 256, 256, 2, 1, 64), {}, Config(dealing="static")),
    "pairs": ((4, 256, 128, 2, 1, 64), {}, Config(dealing="pairs", block_k=64)),
    "always rescale": ((1, 128, 256, 1, 1, 64), {}, Config(tolerance=0.0)),
    "shared output": ((1, 512, 256, 1, 1, 64), {}, Config(own_output=False, dealing="static")),
    "three stages": ((1, 128, 512, 1, 1, 64), {}, Config(stages=3)),
    "grouped heads": ((2, 128, 128, 4, 2, 64), {}, Config(block_k=64)),
    "causal": ((1, 256, 256, 1, 1, 64), {"causal": True}, Config()),
    "causal, small blocks": ((1, 256, 256, 1, 1, 64), {"causal": True}, Config(block_k=64, stages=3)),
    "causal, static": ((1, 512, 512, 2, 1, 64), {"causal": True}, Config(dealing="static", block_k=64)),
    "causal, pairs": ((1, 512, 512, 3, 1, 64), {"causal": True}, Config(dealing="pairs")),
    "causal, more keys": ((1, 128, 320, 1, 1, 64), {"causal": True, "q_offset": 192}, Config(block_k=64)),
    "causal, blind rows": ((1, 256, 192, 1, 1, 64), {"causal": True, "q_offset": -70}, Config(block_k=64)),
    "window": ((1, 384, 384, 1, 1, 64), {"causal": True, "window": 100}, Config(block_k=64)),
    "window, static": ((1, 384, 384, 1, 1, 64), {"causal": True, "window": 40}, Config(block_k=64, dealing="static")),
    "window alone": ((1, 256, 256, 1, 1, 64), {"window": 70}, Config(block_k=64)),
    "ragged": ((1, 200, 300, 1, 1, 64), {}, Config()),
    "ragged causal": ((1, 77, 77, 2, 1, 64), {"causal": True}, Config(block_k=64)),
    "three warpgroups": (
        (1, 256, 256, 1, 1, 64),
        {"causal": True},
        Config(compute=3, registers=160, loader_registers=32, block_k=64),
    ),
    "three, tiles from before the first row": ((1, 320, 320, 1, 1, 64), {"causal": True}, None),
    "single": ((1, 384, 384, 1, 1, 64), {"causal": True}, Config(dealing="single")),
    "d 128": ((1, 128, 128, 1, 1, 128), {"causal": True}, Config(block_k=64)),
    "d 256": ((1, 128, 128, 1, 1, 256), {}, Config(block_k=64, own_output=False)),
    "softcap": ((1, 128, 200, 2, 1, 64), {"causal": True, "q_offset": 40, "softcap": 2.0}, Config(block_k=64)),
}

GRADIENTS = {  # (batch, tq, tk, heads, kv heads, d), masks, options
    "one pass": ((1, 256, 256, 1, 1, 128), {}, {}),
    "one pass, late": ((1, 200, 300, 2, 1, 128), {}, {"key_config": KeyConfig(early=False)}),
    "one pass, causal": ((1, 256, 384, 2, 1, 64), {"causal": True}, {}),
    "one pass, blind rows": ((1, 333, 200, 2, 1, 128), {"causal": True, "q_offset": -70}, {}),
    "one pass, window": ((1, 384, 384, 2, 1, 128), {"causal": True, "window": 100}, {}),
    "two passes": ((1, 200, 300, 2, 1, 128), {}, {"deterministic": True}),
    "two passes, causal": ((1, 333, 200, 2, 1, 128), {"causal": True, "q_offset": -70}, {"deterministic": True}),
    "two passes, window": ((1, 300, 384, 1, 1, 64), {"causal": True, "window": 150}, {"deterministic": True}),
    "d 256": ((1, 128, 192, 1, 1, 256), {}, {}),
    "d 256, causal": ((1, 200, 130, 2, 1, 256), {"causal": True, "q_offset": -30}, {}),
}


INTERPRETED = {"interpret": plgpu.InterpretGPUParams(detect_races=True), "multiprocessor_count": 2}


@pytest.mark.parametrize("name", CASES)
def test_forward(name, capfd):
    shape, masks, config = CASES[name]
    inputs = draw(len(name), *shape)
    out, lse = attention(*inputs, config=config, with_lse=True, **INTERPRETED, **masks)
    expected, expected_lse = float64.attention(*inputs, **masks)
    assert float64.distance(out, expected) < LARGEST_ERROR
    assert float64.distance(lse, expected_lse) < LARGEST_LSE_ERROR
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("name", GRADIENTS)
def test_gradients(name, capfd):
    shape, masks, options = GRADIENTS[name]
    inputs, do = draw(len(name), *shape), draw(len(name) + 1, *shape)[0]
    out, lse, *expected = float64.attention(*inputs, do, **masks)
    out, lse = jnp.asarray(out, do.dtype), jnp.asarray(lse, jnp.float32)
    backward = jax.jit(functools.partial(attention_gradients, **INTERPRETED, **masks, **options))
    gradients = backward(*inputs, out, lse, do)
    assert max(map(float64.distance, gradients, expected)) < LARGEST_ERROR
    assert "RACE" not in "".join(capfd.readouterr())
