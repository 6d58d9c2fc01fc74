"""Time and memory of `flash_attention` in plain JAX on a CPU, against `jax.nn.dot_product_attention` (xla).

    JAX_PLATFORMS=cpu python benchmarks/attention_cpu.py

Time, at `--length`: forward, and forward and backward together, each full and causal. Calls of the two take turns in
one process, and their medians are compared (at most 1.03). Both run at the defaults.

Memory, at `--memory-length`, forward and backward, causal: the temporary buffers that XLA plans for the compiled
program, and what a run adds to the resident memory at its peak, outputs included, each in a process of its own (at
most 0.25 each; reads /proc, so Linux only).

Arrays are float32, batch 1. Before times are taken the results of the two are compared.
"""

from __future__ import annotations

import argparse
import functools
import os
import pathlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from _common import describe_host, run_worker, verdict, write_report

from tune_jax.kernels import flash_attention

TIME_LIMIT, MEMORY_LIMIT = 1.03, 0.25
SIDES = ("ours", "peer")


def main() -> None:
    options = _read_options()
    if options.worker:
        write_report(options.worker_out, _measure_memory(options.worker, options))
        return
    times = [_compare_times(name, causal, options) for name in options.passes for causal in (False, True)]
    memory = _compare_memory(options)
    write_report(options.out, {"host": describe_host(), "times": times, "memory": memory})


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--memory-length", type=int, default=8192)
    parser.add_argument("--passes", nargs="+", default=list(PASSES), choices=PASSES, help="whose time is taken")
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=15, help="calls of each of the two")
    parser.add_argument("--out", help="file for the full numbers, as JSON")
    parser.add_argument("--worker", choices=SIDES, help=argparse.SUPPRESS)
    parser.add_argument("--worker-out", help=argparse.SUPPRESS)
    return parser.parse_args()


def _forward(attention: Callable[..., Any], *arrays: Any) -> Any:
    return attention(*arrays[:3])


def _both_passes(attention: Callable[..., Any], *arrays: Any) -> Any:
    out, pull_back = jax.vjp(attention, *arrays[:3])
    return out, pull_back(arrays[3])


PASSES = {"forward": _forward, "forward and backward": _both_passes}


def _compile(side: str, name: str, causal: bool, arrays: list[jax.Array]) -> Any:
    attention = {
        "ours": functools.partial(flash_attention, causal=causal, implementation="xla"),
        "peer": functools.partial(jax.nn.dot_product_attention, is_causal=causal, implementation="xla"),
    }[side]
    return jax.jit(functools.partial(PASSES[name], attention)).lower(*arrays).compile()


def _make_arrays(length: int, options: argparse.Namespace) -> list[jax.Array]:
    shape = (1, length, options.heads, options.head_dim)
    return [jax.random.normal(key, shape) for key in jax.random.split(jax.random.key(0), 4)]


def _compare_times(name: str, causal: bool, options: argparse.Namespace) -> dict[str, Any]:
    arrays = _make_arrays(options.length, options)
    programs = {side: _compile(side, name, causal, arrays) for side in SIDES}
    results = [program(*arrays) for program in programs.values()]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), *results)
    times_ms: dict[str, list[float]] = {side: [] for side in SIDES}
    for _ in range(options.repeats):
        for side, program in programs.items():
            started = time.perf_counter()
            jax.block_until_ready(program(*arrays))
            times_ms[side].append((time.perf_counter() - started) * 1e3)
    ours, peer = (statistics.median(times_ms[side]) for side in SIDES)
    print(
        f"{name}, {'causal' if causal else 'full'}, T {options.length}: ours {ours:.1f} ms, peer {peer:.1f} ms, "
        f"ours/peer {verdict(ours / peer, TIME_LIMIT)}",
        flush=True,
    )
    return {"pass": name, "causal": causal, "ratio": ours / peer, "times_ms": times_ms}


def _compare_memory(options: argparse.Namespace) -> dict[str, dict[str, int]]:
    arguments = [
        f"--{name}={getattr(options, name.replace('-', '_'))}" for name in ("memory-length", "heads", "head-dim")
    ]
    seen = {
        side: run_worker(os.path.abspath(__file__), ["--worker", side, *arguments], os.environ, timeout_s=600)
        for side in SIDES
    }
    for kind in ("temporary", "resident"):
        ours, peer = (seen[side][kind] for side in SIDES)
        print(
            f"{kind} memory, T {options.memory_length}: ours {ours / 2**20:.0f} MiB, peer {peer / 2**20:.0f} MiB, "
            f"ours/peer {verdict(ours / peer, MEMORY_LIMIT)}",
            flush=True,
        )
    return seen


def _measure_memory(side: str, options: argparse.Namespace) -> dict[str, int]:
    """Bytes that the program plans for, and bytes that a run adds to what the process holds."""
    arrays = jax.block_until_ready(_make_arrays(options.memory_length, options))
    program = _compile(side, "forward and backward", True, arrays)
    # The peak so far is that of the compiler: "5" makes Linux forget it.
    pathlib.Path("/proc/self/clear_refs").write_text("5")
    before = _read_status("VmRSS")
    jax.block_until_ready(program(*arrays))
    return {
        "temporary": program.memory_analysis().temp_size_in_bytes,
        "resident": _read_status("VmHWM") - before,
    }


def _read_status(name: str) -> int:
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


if __name__ == "__main__":
    main()
