"""What bench.py and torch_bench.py time, bench.py checks, and inspect_sass.py compiles."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from kernel import H200_MULTIPROCESSORS, Config, OuterConfig, grouped, grouped_outer
from prototype import ragged_dot

SHAPES = {  # M, K, N, groups; K and N as in the forward
    "s1": (8192, 7168, 2048, 32),
    "s2": (16384, 2048, 16384, 16),
    "mix": (8192, 4096, 14336, 8),
    "s3": (4096, 4096, 14336, 8),
    "m512": (512, 4096, 14336, 8),
    "m64": (64, 4096, 14336, 8),
}
ALSO_EVEN = {"s1", "s2", "mix", "s3", "m512"}  # shapes whose forward is timed with even groups as well


def sizes_of(label, even=False):
    """Group sizes: even, or multinomial over a Dirichlet(4) from a fixed seed."""
    m, _, _, groups = SHAPES[label]
    if even:
        return np.full(groups, m // groups, np.int32)
    rng = np.random.default_rng(7)
    return rng.multinomial(m, rng.dirichlet(np.full(groups, 4.0))).astype(np.int32)


def operands(which, m, k, n, groups):
    """Shapes of the two operands of a pass; K and N are the forward's."""
    return {"forward": ((m, k), (groups, k, n)), "lhs": ((m, n), (groups, k, n)), "rhs": ((m, k), (m, n))}[which]


N8 = Config(along="n", width=8)
DEEP = Config(along="n", width=8, stages=3, chunks=4)
CLUSTER = Config(along="n", width=8, cluster=2)
K8 = OuterConfig(along="k", width=8)
FEW = OuterConfig(along="k", width=8, stages=4, chunks=2)
FEW_ROWS = {
    "b256": Config(pair=False, split=False, along="n", width=64),
    "b128": Config(block_n=128, stages=6, pair=False, split=False, along="n", width=128),
    "b64": Config(block_n=64, stages=8, pair=False, split=False, along="n", width=256),
}

VARIANTS = {  # (shape, pass): {name: configuration}; a dict is one of the prototype, with the best order it had before
    ("s1", "forward"): {
        "proto": {"tile_width": 16, "along": "n"},
        "nosplit": Config(split=False),
        "n8": N8,
        "deep_n8": DEEP,
        "clus_n8": CLUSTER,
    },
    ("s2", "forward"): {
        "proto": {"tile_width": 16, "along": "m"},
        "n8": N8,
        "m2": Config(along="m", width=2),
        "deep_n8": DEEP,
        "clus_n8": CLUSTER,
    },
    ("mix", "forward"): {
        "proto": {"tile_width": 4, "along": "n"},
        "n8": N8,
        "deep_n8": DEEP,
        "clus_n8": CLUSTER,
    },
    ("s3", "forward"): {"proto": {"tile_width": 4, "along": "n"}, "n8": N8, "clus_n8": CLUSTER},
    ("s1", "lhs"): {"n8": N8, "m6": Config(along="m", width=6), "clus_n4": Config(along="n", width=4, cluster=2)},
    ("s2", "lhs"): {"n8": N8, "clus_n4": Config(along="n", width=4, cluster=2)},
    ("mix", "lhs"): {"n16": Config(along="n", width=16), "clus_n4": Config(along="n", width=4, cluster=2)},
    ("s1", "rhs"): {"k8": K8, "n8": OuterConfig(along="n", width=8), "few_k8": FEW},
    ("s2", "rhs"): {"k8": K8, "few_k8": FEW},
    ("mix", "rhs"): {"k8": K8, "few_k8": FEW},
    ("m512", "forward"): FEW_ROWS,
    ("m64", "forward"): FEW_ROWS,
}
PROBES = {  # (shape, pass): variant, parts left out one at a time: results are wrong, the time says what a part costs
    ("s2", "forward"): ("n8", ("store",)),
    ("s1", "rhs"): ("k8", ("store", "zero")),
}

CHECKS = {  # pass, (M, K, N), sizes, configuration; rows past the sum are not a number
    "tail": ("forward", (1000, 512, 1024), (300, 1, 0, 128, 64, 407), Config()),
    "cuts": ("forward", (2048, 512, 2048), (5, 700, 0, 1, 0, 1342), Config(along="m", width=2)),
    "cluster": ("forward", (1000, 512, 1024), (300, 1, 0, 128, 64, 507), Config(cluster=2)),
    "lhs": ("lhs", (1000, 1024, 512), (300, 1, 0, 128, 64, 407), Config(width=4)),
    "lhs cluster": ("lhs", (1000, 1024, 512), (0, 300, 1, 0, 699, 0), Config(cluster=2, along="m")),
    "all empty": ("forward", (520, 256, 512), (0, 0, 0), Config()),
    "few": ("forward", (13, 1024, 1024), (1, 0, 9, 2), Config(block_n=128, stages=6, pair=False, split=False)),
    "outer": ("rhs", (1000, 512, 1024), (300, 1, 0, 128, 64, 407), OuterConfig()),
    "outer few": ("rhs", (77, 256, 512), (1, 0, 9, 2), OuterConfig(stages=4, chunks=2)),
    "outer many": (
        "rhs",
        (4096, 256, 512),
        tuple(int(x) for x in np.random.default_rng(3).multinomial(4000, np.full(64, 1 / 64))),
        OuterConfig(along="n"),
    ),
}


def program(which, config, name, **options):
    """The pass as a function of two operands and the group sizes; `name` is its kernel's in profiles."""
    if isinstance(config, dict):
        return jax.jit(functools.partial(ragged_dot, name=name, **config, **options))
    if which == "rhs":
        return jax.jit(functools.partial(grouped_outer, config=config, name=name, **options))
    return jax.jit(functools.partial(grouped, config=config, name=name, transpose_rhs=which == "lhs", **options))


def abstract(shapes, groups):
    return *(jax.ShapeDtypeStruct(x, jnp.bfloat16) for x in shapes), jax.ShapeDtypeStruct((groups,), jnp.int32)


def variants():
    """{"shape/pass/name": function that lowers it for CUDA, which needs no GPU} of all that is timed."""
    return {
        f"{where}/{which}/{name}": functools.partial(_lower, where, which, config)
        for (where, which), configs in VARIANTS.items()
        for name, config in configs.items()
    }


def _lower(where, which, config):
    shape = SHAPES[where]
    call = program(which, config, "grouped", sms=H200_MULTIPROCESSORS)
    return call.trace(*abstract(operands(which, *shape), shape[3])).lower(lowering_platforms=("cuda",))
