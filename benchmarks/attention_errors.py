"""How exact attention is: errors of output, log-sum-exp and gradients, ours over the peer's.

    python benchmarks/attention_errors.py --out errors.json
    JAX_PLATFORMS=cpu python benchmarks/attention_errors.py --quick     # a smoke test, without a GPU

Fresh normal data in each run (`--seed` repeats one). An error is the 2-norm of the difference from float64, over
the norm of float64's result, on the same rounded inputs. The peer is cuDNN through `jax.nn.dot_product_attention`
for bfloat16 and float16, and XLA through the same, at highest precision, for float32. A ratio above 1.2 is BAD, and
the command then ends with 1.
"""

from __future__ import annotations

import os

# Products in float64 need not be fast, and timing their kernels takes most of a minute.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"

import argparse
import concurrent.futures
import functools
import inspect
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from _common import describe_host, write_report

from tune_jax.kernels import flash_attention

LIMIT = 1.2
NAMES = ("out", "lse", "dq", "dk", "dv")
THREADS = 12

Results = dict[str, Any]


@dataclass(frozen=True)
class Case:
    dtype: str
    depth: int
    causal: bool
    length: int = 2048
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8

    @property
    def label(self) -> str:
        kind = "causal" if self.causal else "full"
        return f"{self.dtype} B{self.batch} T{self.length} H{self.heads}/{self.kv_heads} D{self.depth} {kind}"

    def arrays(self, seed: int) -> tuple[jax.Array, ...]:
        """q, k, v and the cotangent of the output."""
        q, k = ((self.batch, self.length, heads, self.depth) for heads in (self.heads, self.kv_heads))
        keys = jax.random.split(jax.random.key(seed), 4)
        shapes = zip(keys, (q, k, k, q), strict=True)
        return tuple(jax.random.normal(key, shape).astype(self.dtype) for key, shape in shapes)


CASES = [
    *(Case("bfloat16", depth, causal) for depth in (64, 128, 256) for causal in (False, True)),
    Case("bfloat16", 128, True, heads=16, kv_heads=4),
    Case("bfloat16", 128, True, length=1000),
    Case("float16", 64, False),
    Case("float16", 128, True),
    *(Case("float32", depth, depth != 64, length=1024) for depth in (64, 128, 256)),
    Case("float32", 64, True, length=1000, heads=16, kv_heads=4),
]
QUICK_CASES = [
    Case("float32", 64, False, length=200, heads=2, kv_heads=2),
    Case("float32", 64, True, length=600, heads=2, kv_heads=1),
]


def with_gradients(attend: Callable[..., tuple[Any, Any]]) -> Callable[..., Results]:
    """All results by name, of a function that returns output and log-sum-exp."""

    def run(q: Any, k: Any, v: Any, dout: Any) -> Results:
        out, pull_back, lse = jax.vjp(attend, q, k, v, has_aux=True)
        return dict(zip(NAMES, (out, lse, *pull_back(dout)), strict=True))

    return run


def plain(case: Case, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Attention by its definition, in the dtype of its inputs and at highest precision."""
    k, v = (jnp.repeat(x, case.heads // case.kv_heads, axis=2) for x in (k, v))
    product = functools.partial(jnp.einsum, precision="highest")
    scores = product("bqhd,bkhd->bhqk", q, k) * case.depth**-0.5
    if case.causal:
        scores = jnp.where(jnp.tri(case.length, dtype=bool), scores, -jnp.inf)
    out = product("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return out, jax.nn.logsumexp(scores, axis=-1).swapaxes(1, 2)


def peer(case: Case, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    """What ours is compared with, by JAX."""
    if case.dtype == "float32":
        with jax.default_matmul_precision("highest"):
            out = jax.nn.dot_product_attention(q, k, v, is_causal=case.causal, implementation="xla")
        return out, plain(case, q, k, v)[1]
    attend = functools.partial(jax.nn.dot_product_attention, is_causal=case.causal, implementation="cudnn")
    if "return_residual" in inspect.signature(attend).parameters:
        return attend(q, k, v, return_residual=True)
    return attend(q, k, v), plain(case, *(x.astype(jnp.float32) for x in (q, k, v)))[1]


def ours(case: Case, backend: str, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
    return flash_attention(q, k, v, causal=case.causal, implementation=backend, return_lse=True)


def programs(case: Case, backends: Sequence[str]) -> dict[str, Any]:
    """What a case runs, by name, lowered: float64 as "exact", the peer, and our backends."""
    attends = {"peer": functools.partial(peer, case)}
    attends |= {backend: functools.partial(ours, case, backend) for backend in backends}
    arrays = jax.eval_shape(functools.partial(case.arrays, 0))
    lowered = {name: jax.jit(with_gradients(attend)).lower(*arrays) for name, attend in attends.items()}
    with jax.enable_x64(True):
        doubles = [jax.ShapeDtypeStruct(x.shape, jnp.float64) for x in arrays]
        return {"exact": jax.jit(with_gradients(functools.partial(plain, case))).lower(*doubles), **lowered}


def measure(case: Case, compiled: Mapping[str, Any], seed: int) -> list[dict[str, Any]]:
    """A row for each backend: its errors, the peer's, and their ratios."""
    arrays = case.arrays(seed)
    with jax.enable_x64(True):
        exact = compiled["exact"](*(x.astype(jnp.float64) for x in arrays))

    def errors_of(name: str) -> dict[str, float]:
        results = compiled[name](*arrays)
        with jax.enable_x64(True):
            return {name: relative_error(results[name], exact[name]) for name in NAMES}

    peers = errors_of("peer")
    rows = []
    for backend in (name for name in compiled if name not in ("exact", "peer")):
        errors = errors_of(backend)
        ratios = {name: errors[name] / max(peers[name], 1e-30) for name in NAMES}
        rows.append({**asdict(case), "label": case.label, "backend": backend, "errors": errors, "peer": peers})
        rows[-1] |= {"ratios": ratios, "is_good": all(ratio <= LIMIT for ratio in ratios.values())}
    return rows


def relative_error(got: jax.Array, want: jax.Array) -> float:
    """In the 2-norm; NaN, which no limit allows, where something is not a number."""
    difference = got.reshape(want.shape).astype(want.dtype) - want
    return float(jnp.linalg.norm(difference.ravel()) / jnp.linalg.norm(want.ravel()))


def show(row: dict[str, Any]) -> None:
    cells = "".join(f"{row['errors'][name]:>11.2e} ({row['ratios'][name]:.2f})" for name in NAMES)
    print(f"{row['label']:36} {row['backend']:14}{cells}  {'OK' if row['is_good'] else 'BAD'}", flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="two small float32 cases by xla alone, for any device")
    parser.add_argument("--backends", nargs="+", help="ours to compare; pallas_triton and xla if left out")
    parser.add_argument("--seed", type=int, help="of the data; another one in each run if left out")
    parser.add_argument("--out", metavar="FILE", help="write the full numbers there, as JSON")
    options = parser.parse_args(arguments)
    seed = secrets.randbelow(2**31) if options.seed is None else options.seed
    cases = QUICK_CASES if options.quick else CASES
    backends = options.backends or (["xla"] if options.quick else ["pallas_triton", "xla"])
    print(f"errors of ours (and their ratio to the peer's) of {', '.join(NAMES)}")
    rows = []
    # Most of the time goes into compiling, which threads can share; cuDNN wants its first calls one by one.
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        lowered = [programs(case, backends) for case in cases]
        waiting = [{name: pool.submit(each.compile) for name, each in of_case.items()} for of_case in lowered]
        for case, of_case in zip(cases, waiting, strict=True):
            new = measure(case, {name: each.result() for name, each in of_case.items()}, seed)
            rows += new
            for row in new:
                show(row)
    bad = sum(not row["is_good"] for row in rows)
    print(f"seed {seed}: {len(rows) - bad} OK, {bad} BAD (ratio above {LIMIT})")
    write_report(options.out, {**describe_host(), "device": jax.devices()[0].device_kind, "seed": seed, "rows": rows})
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
