"""Tune attention on this machine and print what was learned: `python examples/quickstart.py`."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from tune_jax import tabulate, tune
from tune_jax.kernels import flash_attention

ON_CPU = jax.default_backend() == "cpu"
LENGTH = 1024 if ON_CPU else 4096
SHAPE = (1, LENGTH, 8, 64) if ON_CPU else (4, LENGTH, 16, 128)  # [batch, time, heads, head_dim]
DTYPE = jnp.float32 if ON_CPU else jnp.bfloat16

# None leaves the choice to flash_attention: it is what runs without tuning.
SIZES = [None, 64, 128, 512, LENGTH] if ON_CPU else [None, 512, 1024, 2048, LENGTH]
UNTUNED = {"block_q": None, "block_k": None}


@tune(hyperparams={"block_q": SIZES, "block_k": SIZES})
def attention(q, k, v, *, block_q=None, block_k=None):
    """Causal attention, computed over blocks of `block_q` queries and `block_k` keys."""
    # Fails for one candidate, on purpose: the table shows it with its error, and the others go on.
    if block_q == block_k == LENGTH:
        raise ValueError(f"one block would hold the whole {LENGTH} x {LENGTH} score matrix")
    # In plain JAX, which takes blocks of any size on any device.
    return flash_attention(q, k, v, causal=True, implementation="xla", block_q=block_q, block_k=block_k)


def main() -> None:
    """Call the tuned function, which tunes it, and report."""
    q, k, v = (jax.random.normal(key, SHAPE, DTYPE) for key in jax.random.split(jax.random.key(0), 3))
    jax.block_until_ready(attention(q, k, v))  # later calls for these shapes run the winner at once
    print(tabulate(attention))

    timed = [row for row in attention.results.rows if row.failure is None]
    best = attention.results.best
    slowest = max(timed, key=lambda row: row.median_s)
    untuned = next(row for row in timed if row.hyperparams == UNTUNED)
    print(f"winner: {attention.optimal_hyperparams}, {best.median_s * 1e3:.3f} ms")
    print(f"{slowest.median_s / best.median_s:.2f} times as fast as the slowest, {slowest.hyperparams}")
    print(f"{untuned.median_s / best.median_s:.2f} times as fast as the untuned default")


if __name__ == "__main__":
    main()
