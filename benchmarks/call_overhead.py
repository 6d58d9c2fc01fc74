"""What a call of a tuned function costs on a cache hit, against a plain `jax.jit` call of the same function.

    JAX_PLATFORMS=cpu python benchmarks/call_overhead.py

Four kinds of arguments: `arrays` (2 arrays; at most 1.5 times the plain call), `pytree` (a dict of 50 arrays, all
used; at most 1.3), `string` (2 arrays and a static string) and `nested` (arrays next to strings and bools inside one
pytree). The plain call runs the winner's hyperparameters; `string` is static in it by `static_argnames`. `jax.jit`
takes no strings inside a pytree, so for `nested` the plain function has them built in and gets the arrays alone: that
ratio includes reading the statics at every call, which a plain call cannot do.

Arrays are tiny, so that a call is nearly all overhead. Short bursts of both are timed in turn, and the medians of the
bursts are compared. Before that, results are compared, and so is the text that each lowers to inside `jax.jit`:
calling the tuned function there must give the same program as calling the winner directly.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _common import describe_host, verdict, write_report

from tune_jax import tune

LIMITS = {"arrays": 1.5, "pytree": 1.3}


@dataclasses.dataclass(frozen=True)
class Pair:
    """The tuned call and the plain call of the same function, each ready to be made without arguments."""

    tuned: Callable[[], Any]
    plain: Callable[[], Any]
    lowered: tuple[str, str]


def main() -> None:
    options = _read_options()
    rows = [_compare(kind, options.bursts, options.calls) for kind in options.kinds]
    device = jax.devices()[0].device_kind
    write_report(options.out, {"host": describe_host(), "device": device, "kinds": rows})
    if not all(row["same_lowering"] for row in rows):
        raise SystemExit("inside jax.jit the tuned call lowers to another program than the winner called directly")


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=KINDS)
    parser.add_argument("--bursts", type=int, default=300, help="of each of the two")
    parser.add_argument("--calls", type=int, default=100, help="in a burst")
    parser.add_argument("--out", help="file for the full numbers, as JSON")
    return parser.parse_args()


def _compare(kind: str, bursts: int, calls: int) -> dict[str, Any]:
    pair = KINDS[kind]()
    np.testing.assert_allclose(pair.tuned(), pair.plain(), rtol=1e-6)
    tuned_us, plain_us = _time_in_turn([pair.tuned, pair.plain], bursts, calls)
    ratio = statistics.median(tuned_us) / statistics.median(plain_us)
    same = pair.lowered[0] == pair.lowered[1]
    print(
        f"{kind}: tuned {statistics.median(tuned_us):.2f} us, plain {statistics.median(plain_us):.2f} us, tuned/plain "
        f"{verdict(ratio, LIMITS[kind]) if kind in LIMITS else f'{ratio:.4f}'}; lowered inside jit: "
        f"{'the same' if same else 'DIFFERENT'}",
        flush=True,
    )
    return {"kind": kind, "ratio": ratio, "same_lowering": same, "tuned_us": tuned_us, "plain_us": plain_us}


def _time_in_turn(functions: list[Callable[[], Any]], bursts: int, calls: int) -> list[list[float]]:
    """Microseconds a call in each burst of each function; the first bursts, which warm up, are dropped."""
    times: list[list[float]] = [[] for _ in functions]
    gc.collect()
    gc.disable()
    try:
        for burst in range(bursts + 2):
            for function, of in zip(functions, times, strict=True):
                elapsed = _time_burst(function, calls)
                if burst >= 2:
                    of.append(elapsed / calls * 1e6)
    finally:
        gc.enable()
    return times


def _time_burst(function: Callable[[], Any], calls: int) -> float:
    started = time.perf_counter()
    for _ in range(calls):
        output = function()
    elapsed = time.perf_counter() - started
    # What is still running must not disturb the next burst.
    jax.block_until_ready(output)
    return elapsed


# The four kinds


def _arrays() -> Pair:
    def add(x, y, *, factor):
        return x * factor + y

    inputs = jnp.arange(8.0), jnp.ones(8)
    tuned, winner = _tune(add, {"factor": [2.0, 3.0]}, *inputs)
    plain = jax.jit(functools.partial(add, **winner))
    return Pair(lambda: tuned(*inputs), lambda: plain(*inputs), _lower(tuned, functools.partial(add, **winner), inputs))


def _pytree() -> Pair:
    def total(leaves, *, halves):
        values = list(leaves.values())
        return sum(values) if halves == 1 else sum(values[:25]) + sum(values[25:])

    leaves = {f"leaf{i}": jnp.full(8, float(i)) for i in range(50)}
    tuned, winner = _tune(total, {"halves": [1, 2]}, leaves)
    plain = jax.jit(functools.partial(total, **winner))
    direct = functools.partial(total, **winner)
    return Pair(lambda: tuned(leaves), lambda: plain(leaves), _lower(tuned, direct, (leaves,)))


def _string() -> Pair:
    def combine(x, y, how, *, factor):
        return x * factor + y if how == "add" else x * factor - y

    x, y = jnp.arange(8.0), jnp.ones(8)
    tuned, winner = _tune(combine, {"factor": [2.0, 3.0]}, x, y, "add")
    plain = jax.jit(functools.partial(combine, **winner), static_argnames="how")
    lowered = _lower(lambda x, y: tuned(x, y, "add"), lambda x, y: combine(x, y, "add", **winner), (x, y))
    return Pair(lambda: tuned(x, y, "add"), lambda: plain(x, y, "add"), lowered)


def _nested() -> Pair:
    def layer(options, *, factor):
        value = options["x"] * factor + options["more"]["bias"]
        value = jnp.tanh(value) if options["more"]["activation"] == "tanh" else value
        return -value if options["negate"] else value

    arrays = {"x": jnp.arange(8.0), "bias": jnp.ones(8)}

    def nest(arrays):
        more = {"bias": arrays["bias"], "activation": "tanh"}
        return {"x": arrays["x"], "negate": True, "more": more}

    options = nest(arrays)
    tuned, winner = _tune(layer, {"factor": [2.0, 3.0]}, options)
    direct = jax.jit(lambda arrays: layer(nest(arrays), **winner))
    lowered = _lower(lambda arrays: tuned(nest(arrays)), lambda arrays: layer(nest(arrays), **winner), (arrays,))
    return Pair(lambda: tuned(options), lambda: direct(arrays), lowered)


KINDS: dict[str, Callable[[], Pair]] = {"arrays": _arrays, "pytree": _pytree, "string": _string, "nested": _nested}


def _tune(function: Callable[..., Any], grid: dict[str, list[Any]], *arguments: Any) -> tuple[Any, dict[str, Any]]:
    """Tune, so that later calls hit; returns the tuned function and the winner."""
    tuned = tune(function, hyperparams=grid)
    jax.block_until_ready(tuned(*arguments))
    return tuned, dict(tuned.optimal_hyperparams)


def _lower(tuned: Callable[..., Any], direct: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, str]:
    """What both lower to inside a jitted function of the same name."""
    return _lower_one(tuned, arguments), _lower_one(direct, arguments)


def _lower_one(function: Callable[..., Any], arguments: tuple[Any, ...]) -> str:
    def program(*values: Any) -> Any:
        return function(*values)

    return jax.jit(program).lower(*arguments).as_text()


if __name__ == "__main__":
    main()
