"""What bench.py times and checks, and inspect_sass.py compiles."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
from kernel import H200_MULTIPROCESSORS, TILE, Config, OuterConfig, grouped, grouped_outer
from prototype import ragged_dot

SHAPES = {  # M, K, N, groups; K and N as in the forward
    "s1": (8192, 7168, 2048, 32),
    "s2": (16384, 2048, 16384, 16),
    "mix": (8192, 4096, 14336, 8),
    "s3": (4096, 4096, 14336, 8),
    "n1408": (65536, 2048, 1408, 64),
    "ds": (32768, 7168, 2048, 256),
    "m512": (512, 4096, 14336, 8),
    "m64": (64, 4096, 14336, 8),
}
KINDS = ("uneven", "tiles", "even")  # of group sizes; "tiles": uneven multiples of 128 rows


def sizes_of(label, kind="uneven"):
    """Group sizes: even; uneven (multinomial over a Dirichlet(4) from a fixed seed); the same in multiples of 128."""
    m, _, _, groups = SHAPES[label]
    if kind == "even":
        return np.full(groups, m // groups, np.int32)
    rng = np.random.default_rng(7)
    sizes = rng.multinomial(m, rng.dirichlet(np.full(groups, 4.0)))
    if kind == "tiles":
        sizes = np.diff(np.round(np.append(0, sizes.cumsum()) / TILE)) * TILE
    return sizes.astype(np.int32)


def operands(which, m, k, n, groups):
    """Shapes of the two operands of a pass; K and N are the forward's."""
    return {"forward": ((m, k), (groups, k, n)), "lhs": ((m, n), (groups, k, n)), "rhs": ((m, k), (m, n))}[which]


FORWARD = {"whole": Config(), "cut40": Config(cut=40)}
RHS = {"turns": OuterConfig(), "counter": OuterConfig(deal="counter")}
FEW_ROWS = {"b128": Config(block_n=128, stages=6, deal="turns")}

VARIANTS = {  # (shape, pass): {name: configuration}; a dict is one of the prototype, with the best order it had before
    ("s1", "forward"): {"proto": {"tile_width": 16, "along": "n"}} | FORWARD,
    ("s2", "forward"): {"proto": {"tile_width": 16, "along": "m"}} | FORWARD,
    ("mix", "forward"): {"proto": {"tile_width": 4, "along": "n"}} | FORWARD,
    ("s3", "forward"): {"proto": {"tile_width": 4, "along": "n"}} | FORWARD,
    ("n1408", "forward"): {"whole": Config()},
    ("ds", "forward"): {"whole": Config()},
    ("s1", "lhs"): FORWARD,
    ("s2", "lhs"): FORWARD,
    ("mix", "lhs"): FORWARD,
    ("s1", "rhs"): RHS,
    ("s2", "rhs"): RHS,
    ("mix", "rhs"): RHS,
    ("m512", "forward"): FEW_ROWS,
    ("m64", "forward"): FEW_ROWS,
}

CHECKS = {  # pass, (M, K, N), sizes, configuration; rows past the sum are not a number
    "tail": ("forward", (1000, 512, 1024), (300, 1, 0, 128, 64, 407), Config()),
    "cuts": ("forward", (2048, 512, 2048), (5, 700, 0, 1, 0, 1342), Config(cut=50)),
    "short": ("forward", (300, 128, 640), (100, 0, 3, 1, 96), Config()),
    "turns": ("forward", (1000, 512, 1024), (300, 1, 0, 128, 64, 507), Config(deal="turns")),
    "lhs": ("lhs", (1000, 1024, 512), (300, 1, 0, 128, 64, 407), Config()),
    "lhs cuts": ("lhs", (1000, 1024, 512), (0, 300, 1, 0, 699, 0), Config(cut=9)),
    "all empty": ("forward", (520, 256, 512), (0, 0, 0), Config()),
    "few": ("forward", (13, 1024, 1024), (1, 0, 9, 2), FEW_ROWS["b128"]),
    "outer": ("rhs", (1000, 512, 1024), (300, 1, 0, 128, 64, 407), OuterConfig()),
    "outer few": ("rhs", (77, 256, 512), (1, 0, 9, 2), OuterConfig(deal="counter", along="n")),
    "outer many": (
        "rhs",
        (4096, 256, 512),
        tuple(int(x) for x in np.random.default_rng(3).multinomial(4000, np.full(64, 1 / 64))),
        OuterConfig(width=1),
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
