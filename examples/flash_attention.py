"""Tune flash attention on this machine: `python examples/flash_attention.py`.

First 192 settings of one GPU kernel, as in the tables that people publish; then every backend that can do the call.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

from tune_jax import tabulate, tune
from tune_jax.kernels import flash_attention, flash_attention_space

ON_GPU = jax.default_backend() == "gpu"
SHAPE = (2, 4096, 16, 128) if ON_GPU else (1, 512, 4, 64)  # [batch, time, heads, head_dim]
DTYPE = jnp.bfloat16 if ON_GPU else jnp.float32

# None leaves a choice to the kernel: 4 warps and 3 stages. So some settings are the same program, compiled once.
TRITON_GRID = {
    "block_q": [16, 32, 64, 128],
    "block_k": [16, 32, 64, 128],
    "num_warps": [None, 4, 8],
    "num_stages": [None, 1, 2, 3],
}
# Elsewhere the backend for all devices stands in.
XLA_GRID = {"block_q": [None, 64, 128, 512], "block_k": [None, 64]}
IMPLEMENTATION, GRID = ("pallas_triton", TRITON_GRID) if ON_GPU else ("xla", XLA_GRID)


def main() -> None:
    """Tune twice and report."""
    q, k, v = (jax.random.normal(key, SHAPE, DTYPE) for key in jax.random.split(jax.random.key(0), 3))
    if not ON_GPU:
        print(f"No GPU here, so this tunes plain JAX on {jax.default_backend()}, and a smaller call.")
    one_backend = tune(functools.partial(flash_attention, implementation=IMPLEMENTATION), hyperparams=GRID)
    report(one_backend, q, k, v, causal=True)
    all_backends = tune(flash_attention, hyperparams=flash_attention_space)
    report(all_backends, q, k, v, causal=True)


def report(tuned, *arguments, **options) -> None:
    """Call a tuned function, which tunes it, and print the ends of its ranking."""
    jax.block_until_ready(tuned(*arguments, **options))
    print(tabulate(tuned, head=5, tail=5))
    best, slowest = tuned.results.timed[0], tuned.results.timed[-1]
    print(f"fastest: {best.hyperparams}, {best.median_s * 1e3:.3f} ms")
    print(f"{slowest.median_s / best.median_s:.1f} times as fast as the slowest, {slowest.hyperparams}\n")


if __name__ == "__main__":
    main()
