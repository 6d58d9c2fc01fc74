"""What bench.py checks and times, and inspect_sass.py compiles."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from kernel import H200_MULTIPROCESSORS, Config, attention, default_config

BEST = Config()
D64, D256 = default_config(64), default_config(256)
DEEP = Config(own_output=False, stages=3)

CHECKS = {  # (batch, tq, tk, heads, kv heads, d), masks, config
    "full": ((2, 512, 1024, 4, 4, 128), {}, BEST),
    "loud": ((2, 512, 4096, 4, 4, 128), {"scale": 1.0}, BEST),
    "loud causal": ((2, 2048, 2048, 4, 4, 128), {"causal": True, "scale": 2.0}, BEST),
    "static causal": ((4, 1111, 1111, 32, 8, 64), {"causal": True}, D64),
    "offset": ((2, 300, 1000, 4, 1, 128), {"causal": True, "q_offset": 700}, BEST),
    "blind": ((1, 700, 500, 4, 4, 128), {"causal": True, "q_offset": -150}, DEEP),
    "window": ((2, 1500, 1500, 16, 4, 128), {"causal": True, "window": 200}, BEST),
    "window d64": ((1, 1000, 1000, 2, 2, 64), {"causal": True, "window": 130}, D64),
    "ragged": ((3, 333, 777, 4, 2, 128), {}, BEST),
    "one row": ((3, 1, 777, 4, 2, 128), {"causal": True, "q_offset": 776}, BEST),
    "d256": ((2, 600, 601, 4, 2, 256), {"causal": True}, D256),
    "d256 window": ((2, 600, 601, 4, 2, 256), {"causal": True, "window": 77}, D256),
    "many": ((8, 2048, 2048, 16, 4, 128), {"causal": True}, BEST),
}

SHAPES = {  # label: (batch, t, heads, kv heads, d), masks, {name: config}
    "8k": ((2, 8192, 16, 16, 128), {}, {"best": BEST, "deep": DEEP, "loose": Config(tolerance=16.0)}),
    "8kcausal": (
        (2, 8192, 16, 16, 128),
        {"causal": True},
        {
            "best": BEST,
            "deep": DEEP,
            "section12": Config(section_bytes=12 * 2**20),
            "section40": Config(section_bytes=40 * 2**20),
            "tail35": Config(tail=0.35),
            "tail70": Config(tail=0.7),
        },
    ),
    "8kgqa": ((2, 8192, 32, 8, 128), {"causal": True}, {"best": BEST}),
    "16kcausal": ((1, 16384, 16, 16, 128), {"causal": True}, {"best": BEST}),
    "2k": ((8, 2048, 16, 16, 128), {}, {"best": BEST, "deep": DEEP}),
    "2kcausal": ((8, 2048, 16, 16, 128), {"causal": True}, {"best": BEST, "deep": DEEP, "tail70": Config(tail=0.7)}),
    "d64": ((4, 4096, 16, 16, 64), {}, {"best": D64, "two": BEST}),
    "d64causal": (
        (4, 4096, 16, 16, 64),
        {"causal": True},
        {
            "best": D64,
            "deep": Config(compute=3, registers=160, loader_registers=32, stages=4),
        },
    ),
    "d256": ((2, 4096, 8, 8, 256), {}, {"best": D256}),
    "d256causal": ((2, 4096, 8, 8, 256), {"causal": True}, {"best": D256}),
    "window": (
        (1, 32768, 16, 16, 128),
        {"causal": True, "window": 1024},
        {"best": BEST, "deep": DEEP, "k64": Config(block_k=64, stages=4)},
    ),
}


def abstract(batch, tq, tk, heads, kv_heads, d):
    q = jax.ShapeDtypeStruct((batch, tq, heads, d), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((batch, tk, kv_heads, d), jnp.bfloat16)
    return q, k, k


def variants():
    """{"label/name": function that lowers it for CUDA, which needs no GPU} of all that is timed."""
    return {
        f"{label}/{name}": functools.partial(_lower, shape, masks, config)
        for label, (shape, masks, configs) in SHAPES.items()
        for name, config in configs.items()
    }


def _lower(shape, masks, config):
    batch, t, heads, kv_heads, d = shape

    def call(q, k, v):
        return attention(q, k, v, config=config, multiprocessor_count=H200_MULTIPROCESSORS, **masks)

    return jax.jit(call).trace(*abstract(batch, t, t, heads, kv_heads, d)).lower(lowering_platforms=("cuda",))
