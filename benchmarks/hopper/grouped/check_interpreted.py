"""Hopper's grouped products in Pallas' GPU interpreter, with its check for races: no GPU needed, jax 0.11 or newer.

    NPROC=16 python -m pytest --import-mode=prepend benchmarks/hopper/grouped/check_interpreted.py

`-k "outer and not few"` picks cases. The interpreter checks barriers, indices and masks; the products are plain dots
there, so it says nothing about products in flight or proxy fences. It has no counter that blocks share: tiles go by
turns here, and the two views of rhs's buffers are two memories. Without NPROC, which says
how many threads the interpreter may use, waiting warpgroups can starve it on a machine with few cores, and it hangs;
an exception in one of its threads also shows as a hang.
"""

from __future__ import annotations

import os

os.environ.setdefault("NPROC", "16")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel import Config, OuterConfig, grouped, grouped_outer, outer_schedule, schedule


def draw(seed, *shapes):
    keys = jax.random.split(jax.random.key(seed), len(shapes))
    return [
        jax.random.normal(key, shape, jnp.float32).astype(jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)
    ]


def bounds(sizes):
    ends = np.cumsum(sizes)
    return list(zip(ends - sizes, ends, strict=True))


def reference(lhs, rhs, sizes, transpose_rhs):
    lhs, rhs = (np.asarray(x, np.float64) for x in (lhs, rhs))
    rhs = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    out = np.zeros((lhs.shape[0], rhs.shape[2]))
    for (begin, end), matrix in zip(bounds(sizes), rhs, strict=True):
        out[begin:end] = lhs[begin:end] @ matrix
    return out


def far(out, expected):
    out = np.asarray(out, np.float64)
    assert np.isfinite(out).all()
    return np.linalg.norm(out - expected) / max(np.linalg.norm(expected), 1e-30)


LARGEST_ERROR = 4e-3  # relative, in the 2-norm
INTERPRET = plgpu.InterpretGPUParams(detect_races=True)
FORWARD = {
    "plain": ([100, 61, 0, 223], 384, False, Config(deal="turns")),
    "transposed": ([100, 61, 0, 223], 384, True, Config(deal="turns")),
    "cut": ([3, 130, 1, 250], 384, False, Config(deal="turns", cut=5, stages=3, chunks=4)),
    "unused rows": ([3, 2, 1, 120], 256, True, Config(deal="turns", cut=99)),
    "few rows": ([3, 0, 1, 20], 24, False, Config(deal="turns", block_n=128)),
    "odd blocks": ([70, 0, 61, 5], 136, False, Config(deal="turns"), 384),
    "float16": ([70, 66], 136, True, Config(deal="turns")),
}


@pytest.mark.parametrize("name", FORWARD)
def test_forward(name, capfd):
    sizes, m, transpose_rhs, config, *n = FORWARD[name]
    n = n[0] if n else 512
    lhs, rhs = draw(len(name), (m, 128), (len(sizes), n, 128) if transpose_rhs else (len(sizes), 128, n))
    if name == "float16":
        lhs, rhs = lhs.astype(jnp.float16), rhs.astype(jnp.float16)
    end = sum(sizes)
    lhs = lhs.at[end:].set(jnp.nan)
    out = grouped(
        lhs,
        rhs,
        jnp.array(sizes, jnp.int32),
        transpose_rhs=transpose_rhs,
        config=config,
        interpret=INTERPRET,
        sms=2,
    )
    assert far(out, reference(lhs.at[end:].set(0), rhs, sizes, transpose_rhs)) < LARGEST_ERROR
    assert "RACE" not in "".join(capfd.readouterr())


OUTER = {
    "plain": ([100, 61, 0, 63], 232, OuterConfig()),
    "two stages": ([3, 130, 1, 2], 136, OuterConfig(stages=2, width=1)),
    "few rows": ([3, 0, 1, 20], 24, OuterConfig(along="n")),
}


@pytest.mark.parametrize("name", OUTER)
def test_outer(name, capfd):
    sizes, m, config = OUTER[name]
    lhs, dout = draw(len(name), (m, 128), (m, 512))
    end = sum(sizes)
    lhs, dout = lhs.at[end:].set(jnp.nan), dout.at[end:].set(jnp.inf)
    out = grouped_outer(lhs, dout, jnp.array(sizes, jnp.int32), config=config, interpret=INTERPRET, sms=2)
    wide = [np.asarray(x, np.float64) for x in (lhs, dout)]
    expected = np.stack([wide[0][b:e].T @ wide[1][b:e] for b, e in bounds(sizes)])
    assert far(out, expected) < LARGEST_ERROR
    assert "RACE" not in "".join(capfd.readouterr())


def test_outer_keeps_to_its_group(capfd):
    """Not-a-numbers of one group stay out of the gradients of its neighbours, which share its 64-row steps."""
    sizes = np.array([61, 7, 60])
    lhs, dout = draw(5, (128, 128), (128, 256))
    bad = (lhs.at[61:68].set(jnp.nan), dout.at[61:68].set(jnp.inf))
    out = grouped_outer(*bad, jnp.array(sizes, jnp.int32), interpret=INTERPRET, sms=2)
    for group in (0, 2):
        begin, end = bounds(sizes)[group]
        a, b = (np.asarray(x[begin:end], np.float64) for x in (lhs, dout))
        assert far(out[group], a.T @ b) < LARGEST_ERROR
    assert "RACE" not in "".join(capfd.readouterr())


@pytest.mark.parametrize("seed", range(16))
def test_schedule(seed):
    """Every row of every half column block exactly once, with its own group; then the end, once for every unit."""
    rng = np.random.default_rng(seed)
    groups, rows, halves, units = (int(rng.integers(*x)) for x in ((1, 9), (2, 120), (1, 17), (1, 20)))
    rows *= 8
    sizes = rng.multinomial(int(rng.integers(0, rows + 1)), rng.dirichlet(np.full(groups, 0.7)))
    cut = 0 if halves % 2 else (0, 3, 1000)[seed % 3]
    compiled = jax.jit(schedule, static_argnums=(1, 2, 3, 4))
    work = np.asarray(compiled(jnp.array(sizes, jnp.int32), rows, halves, units, cut))
    owner = np.append(np.repeat(np.arange(groups), sizes), np.full(rows - sizes.sum(), groups))
    times = np.zeros((rows, halves))
    count = int((work[:, 0] >= 0).sum())
    assert (work[count:, 0] < 0).all()
    assert len(work) >= count + units
    for group, begin, end, place in work[:count]:
        assert (owner[begin:end] == group).all()
        assert begin < end <= begin // 8 * 8 + 128
        times[begin:end, place // 2 : place // 2 + 2 - place % 2] += 1
    assert (times == 1).all()


@pytest.mark.parametrize("along", ["k", "n"])
def test_outer_schedule(along):
    """Every block of every group once, the empty one's too."""
    sizes, blocks = np.array([3, 0, 9]), (5, 6)
    config = OuterConfig(along=along, width=4)
    work = np.asarray(outer_schedule(jnp.array(sizes), blocks, 7, config))
    count = sizes.size * blocks[0] * blocks[1]
    assert (work[count:, 0] < 0).all()
    assert len(work) == count + 7
    ends = sizes.cumsum()
    assert {tuple(x) for x in work[:count]} == {
        (g, ends[g] - sizes[g], ends[g], place) for g in range(3) for place in range(blocks[0] * blocks[1])
    }
