"""What bench_backward.py checks and times."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from backward import KeyConfig

CHECKS = {  # (batch, tq, tk, heads, kv heads, d), masks
    "full": ((2, 512, 1024, 4, 4, 128), {}),
    "square": ((2, 1024, 1024, 4, 4, 128), {}),
    "causal": ((2, 1024, 1024, 4, 4, 128), {"causal": True}),
    "gqa": ((2, 640, 640, 8, 2, 128), {"causal": True}),
    "ragged": ((2, 333, 777, 4, 2, 128), {}),
    "offset": ((2, 300, 1000, 4, 1, 128), {"causal": True, "q_offset": 700}),
    "blind": ((1, 700, 500, 4, 4, 128), {"causal": True, "q_offset": -150}),
    "window": ((1, 1500, 1500, 4, 2, 128), {"causal": True, "window": 200}),
    "loud": ((2, 1024, 1024, 4, 4, 128), {"causal": True, "scale": 1.0}),
    "one row": ((3, 1, 777, 4, 2, 128), {"causal": True, "q_offset": 776}),
    "d64": ((2, 1111, 1111, 4, 2, 64), {"causal": True}),
    "d64 full": ((2, 512, 640, 4, 4, 64), {}),
    "d256": ((2, 600, 600, 4, 2, 256), {"causal": True}),
    "d256 window": ((1, 300, 700, 2, 2, 256), {"causal": True, "q_offset": 330, "window": 200}),
    "capped": ((2, 600, 700, 4, 2, 128), {"causal": True, "q_offset": 100, "softcap": 5.0}),
    "d64 capped": ((2, 512, 640, 4, 4, 64), {"softcap": 2.0}),
}

FIXED, FREE = {"deterministic": True}, {"key_config": KeyConfig(auto_barriers=False)}
LATE, D64_LATE = ({"key_config": KeyConfig(early=False, block_q=block_q)} for block_q in (64, 128))
SHAPES = {  # label: (batch, t, heads, kv heads, d), masks, {name: options}
    "8k": ((2, 8192, 16, 16, 128), {}, {"one": {}, "fixed": FIXED, "free": FREE, "late": LATE}),
    "8kcausal": ((2, 8192, 16, 16, 128), {"causal": True}, {"one": {}, "fixed": FIXED}),
    "d256causal": ((2, 4096, 8, 8, 256), {"causal": True}, {"one": {}}),
    "8kgqa": ((2, 8192, 32, 8, 128), {"causal": True}, {"one": {}}),
    "d64causal": ((4, 4096, 16, 16, 64), {"causal": True}, {"one": {}, "fixed": FIXED, "late": D64_LATE}),
    "2kcausal": ((8, 2048, 16, 16, 128), {"causal": True}, {"one": {}}),
    "16kcausal": ((1, 16384, 16, 16, 128), {"causal": True}, {"one": {}}),
    "window": ((1, 32768, 16, 16, 128), {"causal": True, "window": 1024}, {"one": {}}),
}
FORWARDS = {  # label: {name: options} of the forward alone
    "8kcausal": {"forward": {}, "forward_lse": {"with_lse": True}, "forward_cap": {"softcap": 30.0}},
    "d64causal": {"forward": {}, "forward_lse": {"with_lse": True}},
}


def abstract(batch, tq, tk, heads, kv_heads, d):
    q = jax.ShapeDtypeStruct((batch, tq, heads, d), jnp.bfloat16)
    k = jax.ShapeDtypeStruct((batch, tk, kv_heads, d), jnp.bfloat16)
    return q, k, k, q
