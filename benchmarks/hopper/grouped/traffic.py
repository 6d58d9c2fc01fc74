"""A model on the CPU of the forward's tile orders: makespan, L2 misses and time, for shapes of plan.py.

    JAX_PLATFORMS=cpu python benchmarks/hopper/grouped/traffic.py [SHAPE ...]

Walks the lists of `schedule`. Every block goes at one rate: a step of a whole tile costs 1, of half a tile HALF_COST,
of a pair twice that, an epilogue EPILOGUE steps. Operand chunks of 8 steps go through one LRU cache of L2 bytes. Time
is the larger of the makespan at RATE, and the misses and writes at BANDWIDTH. Latency, power and the bandwidth of the
L2 are not in it; docs/kernels/grouped.md compares it with what was measured. `pairs` is how many pairs the block with
the most of them has, of how many rounds.
"""

from __future__ import annotations

import argparse
import collections
import heapq

import jax
import jax.numpy as jnp
import numpy as np
from kernel import H200_MULTIPROCESSORS, Config, schedule
from plan import SHAPES, sizes_of

RATE, BANDWIDTH, L2, CHUNK = 815e12, 4.3e12, 40e6, 8
HALF_COST, EPILOGUE = 0.55, 1.5
DEPTH, ITEM_BYTES = 64, 2
ORDERS = (
    *(("n", width) for width in (2, 4, 8, 16, 32)),
    *(("m", width) for width in (1, 2, 6)),
)


def dimensions(label, which):
    """(contraction, columns) of a pass."""
    _, k, n, _ = SHAPES[label]
    return (k, n) if which == "forward" else (n, k)


def lists(label, which, config, even=False):
    """Tiles of each block in order, blocks of a cluster side by side, and the number of rounds."""
    units = H200_MULTIPROCESSORS // config.cluster
    blocks = dimensions(label, which)[1] // config.block_n // config.cluster
    compiled = jax.jit(schedule, static_argnums=(1, 2, 3, 4))
    work, count = compiled(jnp.asarray(sizes_of(label, even)), SHAPES[label][0], blocks, units, config)
    rounds = int(count[0])
    work = np.asarray(work)[:rounds]
    tiles = [
        [(g, f, b, e, c * config.cluster + rank, p * config.cluster) for g, f, b, e, c, p in work[:, u] if b < e]
        for u in range(units)
        for rank in range(config.cluster)
    ]
    return tiles, rounds


def cost(tile):
    """Steps of a whole tile that one step of this one takes."""
    _, first, begin, end, _, pair = tile
    if pair:
        return 2 * HALF_COST
    halves = int(begin < first + 64) + int(end > first + 64)
    return 1 if halves == 2 else HALF_COST


def operands_of(tile, chunk, block_n):
    """[(what, bytes)] of a chunk of steps."""
    group, first, _, _, n, pair = tile
    depth = CHUNK * DEPTH * ITEM_BYTES
    columns = (n, n + pair) if pair else (n,)
    return [(("lhs", first, chunk), 128 * depth), *((("rhs", group, c, chunk), block_n * depth) for c in columns)]


class Cache:
    """Least recently used goes first; counts missed bytes."""

    def __init__(self, size):
        self.size, self.held, self.missed = size, 0, 0
        self.entries = collections.OrderedDict()

    def touch(self, key, size):
        if key in self.entries:
            self.entries.move_to_end(key)
            return
        self.entries[key] = size
        self.held, self.missed = self.held + size, self.missed + size
        while self.held > self.size:
            self.held -= self.entries.popitem(last=False)[1]


def walk(tiles, steps, block_n):
    """(steps until the last block is through, bytes missed)."""
    heap = [(0.0, u, 0, 0) for u in range(len(tiles)) if tiles[u]]
    heapq.heapify(heap)
    cache, end = Cache(L2), 0.0
    while heap:
        now, u, index, chunk = heapq.heappop(heap)
        tile = tiles[u][index]
        for key, size in operands_of(tile, chunk, block_n):
            cache.touch(key, size)
        now += CHUNK * cost(tile)
        chunk += 1
        if chunk * CHUNK >= steps:
            now, index, chunk = now + EPILOGUE, index + 1, 0
        end = max(end, now)
        if index < len(tiles[u]):
            heapq.heappush(heap, (now, u, index, chunk))
    return end, cache.missed


def model(label, which, config, even=False):
    """Microseconds of compute and of memory, gigabytes missed, predicted rate, and the most pairs of a block."""
    m, (depth, columns) = SHAPES[label][0], dimensions(label, which)
    tiles, rounds = lists(label, which, config, even)
    end, missed = walk(tiles, depth // DEPTH, config.block_n)
    compute = end * 2 * 128 * config.block_n * DEPTH / (RATE / H200_MULTIPROCESSORS)
    memory = (missed + ITEM_BYTES * m * columns) / BANDWIDTH
    tflops = 2 * m * depth * columns / max(compute, memory) / 1e12
    pairs = max(sum(1 for tile in block if tile[5]) for block in tiles)
    return (
        f"compute {compute * 1e6:6.0f} us, memory {memory * 1e6:6.0f} us, missed {missed / 1e9:5.2f} GB, "
        f"{tflops:4.0f} TFLOP/s, pairs {pairs} of {rounds} rounds"
    )


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", metavar="SHAPE", help="s1, s2, mix and s3 without")
    options = parser.parse_args()
    if unknown := set(options.shapes) - set(SHAPES):
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    for label in options.shapes or ("s1", "s2", "mix", "s3"):
        for which in ("forward", "lhs"):
            for along, width in ORDERS:
                for extra in ({}, {"pair": False, "split": False}):
                    found = model(label, which, Config(along=along, width=width, **extra))
                    kind = "plain" if extra else "paired"
                    print(f"{label:4} {which:8}{along} {width:2} {kind:7}{found}", flush=True)


if __name__ == "__main__":
    main()
