"""Our reading of profiler traces against CUPTI, NVIDIA's own profiling interface: sums of kernel durations.

    python benchmarks/trace_agreement.py
    python benchmarks/trace_agreement.py --only ours --programs graph loop --launches 5   # a smoke test on the CPU

Four programs: `triton` (one Pallas-Triton kernel), `multi` (several kernels, CUDA graphs turned off), `graph` (a chain
of small kernels, which XLA makes a CUDA graph of by default) and `loop` (a `fori_loop` whose number of steps is an
argument). Each measurement has a process of its own, because the two profilers in one process abort it; ours and
CUPTI's alternate, `--repeats` times each. Every process gives the median over its launches; the medians of these are
compared, and ours/CUPTI must be within 2 % of 1.

What is compared: the sum of the durations of the kernels of a launch. CUPTI's side, JAX's
`jax.experimental.mosaic.gpu.profiler.measure`, records kernels only, in milliseconds, so copies and memsets (events
named Memcpy... and Memset...) are left out of ours. Our launches are waited for one by one, with a tiny program
between them, as in a tuning; CUPTI's go out all at once without waiting (`iterations`), because starting CUPTI anew
before every launch leaves the device idle, which can slow down what comes next. `--isolated` does that nevertheless,
and so does a process in which CUPTI hands back the kernels of the launches in unlike orders (`measure` then raises).

The first launches are dropped on both sides. Programs return little, so that outputs that wait to be freed do not
push others out of the cache. The table also shows the kernels of a launch as each side counts them: where they differ,
a ratio says little. "CUDA graph" is the share of our trace's kernels that belong to one. The programs' results are
compared before their times.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import pathlib
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from _common import describe_host, run_worker, write_report

TOLERANCE = 0.02
DROPPED = 3
NO_GRAPHS = "--xla_gpu_enable_command_buffer="
SIDES = ("ours", "cupti")
PROGRAMS = ("triton", "multi", "graph", "loop")


def main() -> None:
    options = _read_options()
    if options.worker:
        answer = _measure(options.worker, options.programs[0], options.launches, isolated=options.isolated)
        pathlib.Path(options.worker_out).write_text(json.dumps(answer))
        return
    sides = [options.only] if options.only else list(SIDES)
    rows = [_compare(program, _run_all(program, sides, options)) for program in options.programs]
    report = {"host": describe_host(), "launches": options.launches, "programs": rows}
    write_report(options.out, report)
    if any(row["faults"] for row in rows):
        sys.exit(1)


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", nargs="+", default=list(PROGRAMS), choices=PROGRAMS)
    parser.add_argument("--repeats", type=int, default=3, help="processes of each side for each program")
    parser.add_argument("--launches", type=int, default=40, help="in each process")
    parser.add_argument("--isolated", action="store_true", help="start CUPTI anew for each launch")
    parser.add_argument("--only", choices=SIDES)
    parser.add_argument("--timeout", type=float, default=120, help="seconds that one process may take")
    parser.add_argument("--out", help="file for the full numbers, as JSON")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--worker-out", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run_all(program: str, sides: Sequence[str], options: argparse.Namespace) -> list[dict[str, Any]]:
    """All processes of a program, the sides in turn; one that fails is kept as its error."""
    runs = []
    for repeat in range(options.repeats):
        for side in sides if repeat % 2 == 0 else reversed(sides):
            try:
                runs.append(_run(side, program, options))
            except RuntimeError as error:
                print(error, file=sys.stderr, flush=True)
                runs.append({"side": side, "error": str(error)})
    return runs


def _run(side: str, program: str, options: argparse.Namespace) -> dict[str, Any]:
    arguments = ["--worker", side, "--programs", program, "--launches", str(options.launches)]
    arguments += ["--isolated"] if options.isolated else []
    environment = dict(os.environ)
    if program == "multi":
        environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {NO_GRAPHS}".strip()
    return run_worker(os.path.abspath(__file__), arguments, environment, timeout_s=options.timeout)


def _compare(program: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Print a program's line and return it with all that was measured."""
    good = {side: [run for run in runs if run["side"] == side and "error" not in run] for side in SIDES}
    faults = sum("error" in run for run in runs)
    results = [run["result"] for of in good.values() for run in of]
    if results and not all(math.isclose(one, results[0], rel_tol=1e-2) for one in results):
        raise SystemExit(f"{program}: the processes computed different results, {results}")
    medians = {side: statistics.median(run["median_ns"] for run in of) for side, of in good.items() if of}
    parts = [_describe(side, medians[side], good[side]) for side in medians]
    ratio = medians["ours"] / medians["cupti"] if len(medians) == len(SIDES) else None
    if ratio is not None:
        met = "met" if abs(ratio - 1) <= TOLERANCE else "MISSED"
        parts.append(f"ours/CUPTI {ratio:.4f} (within {TOLERANCE:.0%}: {met})")
    print(f"{program}: {'; '.join(parts) or 'nothing measured'}{f'; {faults} failed' if faults else ''}", flush=True)
    return {"program": program, "ratio": ratio, "medians_ns": medians, "faults": faults, "runs": runs}


def _describe(side: str, median_ns: float, runs: Sequence[Mapping[str, Any]]) -> str:
    low, high = min(run["median_ns"] for run in runs), max(run["median_ns"] for run in runs)
    kernels = "/".join(str(count) for count in sorted({run["kernels"] for run in runs}))
    graph = f", CUDA graph {runs[0]['graph_share']:.0%}" if side == "ours" else f", {runs[0]['mode']}"
    return f"{side} {median_ns / 1e3:.2f} us [{low / 1e3:.2f}, {high / 1e3:.2f}], {kernels} kernels{graph}"


# In the worker


def _measure(side: str, name: str, launches: int, *, isolated: bool) -> dict[str, Any]:
    import jax
    import jax.numpy as jnp

    function, inputs = make_program(name)
    function.__name__ = function.__qualname__ = "program"
    compiled = jax.jit(function).lower(*inputs).compile()
    result = float(jnp.mean(jnp.abs(compiled(*inputs).astype(jnp.float32))))
    if side == "ours":
        answer = _measure_ours(compiled, inputs, launches)
    else:
        answer = _measure_cupti(compiled, inputs, launches, isolated=isolated)
    per_launch, kernels = answer.pop("sums_ns"), answer.pop("counts")
    return answer | {
        "side": side,
        "result": result,
        "median_ns": statistics.median(per_launch),
        "kernels": statistics.median_low(kernels),
        "sums_ns": per_launch,
    }


def _measure_ours(compiled: Any, inputs: Sequence[Any], launches: int) -> dict[str, Any]:
    import jax

    from tune_jax._measure.profiler import record_trace
    from tune_jax._measure.xplane import read_launches

    def between(x):
        return x + 1

    small = jax.numpy.ones(8)
    spacer = jax.jit(between).lower(small).compile()
    jax.block_until_ready(spacer(small))

    def run() -> None:
        for _ in range(launches + DROPPED):
            jax.block_until_ready(compiled(*inputs))
            jax.block_until_ready(spacer(small))

    trace = record_trace(run, platform=jax.default_backend(), keep=None)
    times = read_launches(trace, ["jit_program", "jit_between"] * (launches + DROPPED))[::2][DROPPED:]
    if None in times:
        raise RuntimeError(f"{times.count(None)} of {launches} launches are missing in the trace")
    kernels = [[kernel for kernel in launch.kernels if not _is_copy(kernel.name)] for launch in times]
    return {
        "sums_ns": [sum(kernel.total_ns for kernel in of) for of in kernels],
        "counts": [sum(kernel.count for kernel in of) for of in kernels],
        "graph_share": _graph_share(trace),
    }


def _is_copy(name: str) -> bool:
    return name.startswith(("Memcpy", "Memset"))


def _graph_share(trace: bytes) -> float:
    """The share of the program's kernels in a trace that were nodes of a CUDA graph."""
    import warnings

    from jax.profiler import ProfileData

    profile = ProfileData.from_serialized_xspace(trace)
    with warnings.catch_warnings():
        # Reading `stats` for the first time warns, about the binding and not about this use of it.
        warnings.simplefilter("ignore", DeprecationWarning)
        events = [dict(event.stats) for plane in profile.planes for line in plane.lines for event in line.events]
    ours = [stats for stats in events if stats.get("hlo_module") == "jit_program"]
    return sum(bool(stats.get("cuda_graph_id")) for stats in ours) / max(1, len(ours))


def _measure_cupti(compiled: Any, inputs: Sequence[Any], launches: int, *, isolated: bool) -> dict[str, Any]:
    from jax.experimental.mosaic.gpu import profiler

    mode = "isolated" if isolated else "back to back"
    if not isolated:
        try:
            _, timings = profiler.measure(compiled, aggregate=False, iterations=launches + DROPPED)(*inputs)
        except RuntimeError as error:
            mode = f"isolated, since back to back: {error}"
    if mode != "back to back":
        once = profiler.measure(compiled, aggregate=False)
        timings = [once(*inputs)[1] for _ in range(launches + DROPPED)]
    if not timings or not all(timings):
        raise RuntimeError("CUPTI saw no kernel")
    kept = timings[DROPPED:]
    return {
        "sums_ns": [sum(milliseconds for _, milliseconds in of) * 1e6 for of in kept],
        "counts": [len(of) for of in kept],
        "names": [name for name, _ in kept[0]],
        "mode": mode,
    }


# The programs


def make_program(name: str) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A program to measure and its inputs; large enough on a GPU that the clock's resolution does not matter.

    No matrix products in the XLA programs: XLA chooses their kernels by timing them, not the same in each process.
    """
    import jax

    if name == "triton":
        return _make_triton()
    size = 2048 if jax.default_backend() == "gpu" else 64
    x = jax.random.normal(jax.random.key(0), (size, size))
    return {"multi": (_sort, (x,)), "graph": (_chain, (x,)), "loop": (_loop, (x, jax.numpy.int32(20)))}[name]


def _make_triton() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from _cases import load_case

    case = load_case("mha108")

    def attention(q, k, v):
        return case.function(q, k, v, block_q=128, block_k=64, num_warps=8, num_stages=2)

    return attention, case.inputs


def _sort(x):
    import jax
    import jax.numpy as jnp

    weights = jax.nn.softmax(x)
    return (jnp.sort(x, axis=1) * weights.mean(axis=0)).sum(axis=0)


def _chain(x):
    import jax.numpy as jnp

    # Means along alternating axes cannot be fused into one kernel.
    for step in range(8):
        x = jnp.sin(x - x.mean(axis=step % 2, keepdims=True))
    return x.sum(axis=0)


def _loop(x, steps):
    import jax
    import jax.numpy as jnp

    return jax.lax.fori_loop(0, steps, lambda _, v: jnp.sin(v - v.mean(axis=0, keepdims=True)), x).sum(axis=0)


if __name__ == "__main__":
    main()
