"""Hopper's forward attention in Pallas' GPU interpreter, with its check for races: no GPU needed, jax 0.11 or newer.

    NPROC=16 python -m pytest --import-mode=prepend benchmarks/hopper/attention/check_interpreted.py

`-k "causal and not static"` picks cases. The interpreter checks barriers, indices and masks; the products are plain
dots there, so it says nothing about the overlap of products and softmax. Without NPROC, which says how many threads
the interpreter may use, four waiting warpgroups can starve it on a machine with few cores, and it hangs; an exception
in one of its threads also shows as a hang.
"""

from __future__ import annotations

import os

os.environ.setdefault("NPROC", "16")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel import Config, attention


def reference(q, k, v, *, causal=False, window=None, q_offset=0):
    """float64 attention; rows without keys give 0."""
    q, k, v = (np.asarray(x, np.float64) for x in (q, k, v))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(x, group, axis=2) for x in (k, v))
    logits = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(q.shape[-1])
    behind = np.arange(q.shape[1])[:, None] + q_offset - np.arange(k.shape[1])[None]
    keep = np.ones_like(behind, bool)
    if causal:
        keep &= behind >= 0
    if window is not None:
        keep &= behind < window
    logits = np.where(keep, logits, -np.inf)
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", weights / np.where(total == 0, 1, total), v)


def draw(seed, batch, tq, tk, heads, kv_heads, d, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = (batch, tq, heads, d), (batch, tk, kv_heads, d), (batch, tk, kv_heads, d)
    return [jax.random.normal(key, shape, jnp.float32).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


LARGEST_ERROR = 6e-3  # relative, in the 2-norm

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
}


@pytest.mark.parametrize("name", CASES)
def test_interpreted(name, capfd):
    shape, masks, config = CASES[name]
    q, k, v = draw(len(name), *shape)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    out = attention(q, k, v, config=config, interpret=interpret, multiprocessor_count=2, **masks)
    expected = reference(q, k, v, **masks)
    error = np.linalg.norm(np.asarray(out, np.float64) - expected) / np.linalg.norm(expected)
    assert error < LARGEST_ERROR
    assert "RACE" not in "".join(capfd.readouterr())
