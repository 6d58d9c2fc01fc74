"""A model on the CPU of how tiles are dealt: time on uneven sizes over time on even ones, for shapes of plan.py.

    JAX_PLATFORMS=cpu python benchmarks/hopper/grouped/dealing.py [SHAPE ...]

Walks the lists of `schedule`, by turns or by a counter. A step of a tile costs what its products cost, or what its
bytes cost at PORT bytes a clock of a multiprocessor, whichever is more; a whole step of products is 1. An epilogue
costs EPILOGUE steps. The L2, latency and power are not in it.
"""

from __future__ import annotations

import argparse
import heapq

import jax
import jax.numpy as jnp
import numpy as np
from kernel import DEPTH, H200_MULTIPROCESSORS, HALF, Config, schedule
from plan import KINDS, SHAPES, sizes_of

PORT, EPILOGUE = 64, 2.0
ITEM_BYTES, CLOCKS = 2, 1024  # of a whole step: 128 x 256 x 64 at 4096 operations a clock
CONFIGS = {"turns": Config(deal="turns"), "counter": Config(), "cut40": Config(cut=40), "cut66": Config(cut=66)}


def dimensions(label, which):
    """(contraction, columns) of a pass."""
    _, k, n, _ = SHAPES[label]
    return (k, n) if which == "forward" else (n, k)


def tiles_of(label, which, config, kind):
    work = jax.jit(schedule, static_argnums=(1, 2, 3, 4))(
        jnp.asarray(sizes_of(label, kind)),
        SHAPES[label][0],
        2 * dimensions(label, which)[1] // config.block_n,
        H200_MULTIPROCESSORS,
        config.cut,
    )
    return [tile for tile in np.asarray(work) if tile[0] >= 0]


def cost(tile, config):
    """Of a step, in whole steps."""
    _, begin, end, place = (int(x) for x in tile)
    first, columns = begin // 8 * 8, config.block_n // (1 + place % 2)
    halves = int(begin < first + HALF) + int(end > first + HALF)
    products = halves * columns / (2 * 256)
    return max(products, (halves * HALF + columns) * DEPTH * ITEM_BYTES / PORT / CLOCKS)


def makespan(label, which, config, kind):
    """Steps until the last multiprocessor is through."""
    steps = dimensions(label, which)[0] // DEPTH
    costs = [steps * cost(tile, config) + EPILOGUE for tile in tiles_of(label, which, config, kind)]
    if config.deal == "turns":
        return max(sum(costs[u::H200_MULTIPROCESSORS]) for u in range(H200_MULTIPROCESSORS))
    busy = [0.0] * H200_MULTIPROCESSORS
    for one in costs:
        heapq.heapreplace(busy, busy[0] + one)
    return max(busy)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help="s1, s2, mix and s3 without")
    options = parser.parse_args()
    if unknown := set(options.shapes) - set(SHAPES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    for label in options.shapes or ("s1", "s2", "mix", "s3"):
        for which in ("forward", "lhs"):
            even = makespan(label, which, CONFIGS["turns"], "even")
            for name, config in CONFIGS.items():
                found = [makespan(label, which, config, kind) / even for kind in KINDS]
                print(f"{label:4} {which:8}{name:8}uneven {found[0]:.3f}  tiles {found[1]:.3f}  even {found[2]:.3f}")


if __name__ == "__main__":
    main()
