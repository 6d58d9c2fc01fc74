"""Tuned functions on two GPUs: sharded inputs, collectives, the second device, and two processes.

    python benchmarks/two_gpus.py
    XLA_FLAGS=--xla_force_host_platform_device_count=2 JAX_PLATFORMS=cpu python benchmarks/two_gpus.py --size 256

The second command is a smoke test on two CPU devices. Each line says what was tuned and whether results are right.
For sharded inputs the mean time that the tuner found (each launch's slowest device) is compared with the trace that it
left, read here on its own: the kernels of the winner summed on each device, and the larger of the two. Both are within
2 % where one device is the slower one all along. In the last case two processes with a GPU each tune together, though
every candidate but the last is slowed down on the second one: both must hold what the first one found.
"""

from __future__ import annotations

import argparse
import collections
import json
import os
import pathlib
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from typing import Any

from _common import describe_host, write_report

LIMIT = 0.02
COPY = re.compile(r"memcpy|memset", re.IGNORECASE)


def main() -> None:
    options = _read_options()
    if options.process is not None:
        return _work(options)
    # Before this process takes the devices' memory.
    together = _check_processes(options)
    cases = [*_check_sharded(options), *_check_collectives(options), _check_second(options), together]
    for case in cases:
        print("  ".join([f"{case['case']:32}", *(f"{name} {value}" for name, value in case.items() if name != "case")]))
    write_report(options.out, {"host": describe_host(), "cases": cases})


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=8192, help="rows and columns of the matrices")
    parser.add_argument("--out", help="file for the lines, as JSON")
    parser.add_argument("--process", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--port", help=argparse.SUPPRESS)
    return parser.parse_args()


# Sharded inputs


def _check_sharded(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    import jax

    for kind in ("Auto", "Explicit"):
        mesh = _make_mesh(kind)
        with jax.set_mesh(mesh):
            yield _check_trace(f"{kind} axes", options, jax.NamedSharding(mesh, jax.P("rows")))
    rows = jax.NamedSharding(_make_mesh("Auto"), jax.P("rows"))
    yield _check_trace("in_shardings", options, None, in_shardings=rows)


def _make_mesh(kind: str) -> Any:
    import jax

    return jax.make_mesh((2,), ("rows",), axis_types=(jax.sharding.AxisType[kind],), devices=jax.devices()[:2])


def _rows(options: argparse.Namespace) -> Any:
    import jax

    return jax.random.normal(jax.random.key(0), (options.size, options.size // 4))


def _row_sums(x: Any, *, repeats: int) -> Any:
    import jax
    import jax.numpy as jnp

    w = jnp.eye(x.shape[1], dtype=x.dtype)
    return jax.lax.fori_loop(0, repeats, lambda _, a: jnp.tanh(a @ w), x)


def _check_trace(case: str, options: argparse.Namespace, sharding: Any, **more: Any) -> dict[str, Any]:
    import jax
    import numpy as np

    from tune_jax import tune

    x = _rows(options)
    with tempfile.TemporaryDirectory() as folder:
        grid = {"repeats": [8, 16]}
        function = tune(_row_sums, grid, keep_trace=folder, progress=False, **more)
        came = function(x if sharding is None else jax.device_put(x, sharding))
        best = function.results.best
        seen = _read_kernels(pathlib.Path(folder), f"_row_sums_{best.id}")
    expected = _row_sums(x, **best.hyperparams)
    ours = float(np.mean(best.samples_ns))
    counts = {kernel.name: kernel.count / len(best.samples_ns) for kernel in best.kernels}
    largest = max((_sum_launch(kernels, counts) for kernels in seen.values()), default=float("nan"))
    return {
        "case": f"sharded by {case}",
        "devices": len(came.sharding.device_set),
        "planes": len(seen),
        "right": bool(np.allclose(came, expected, rtol=1e-4, atol=1e-4)),
        "ours / larger sum": f"{ours / largest:.4f}",
        "within": abs(ours / largest - 1) <= LIMIT,
    }


def _read_kernels(folder: pathlib.Path, module: str) -> dict[str, dict[str, list[float]]]:
    """Nanoseconds of each kernel of a module, by device and name, over all traces in a folder; none on a CPU."""
    import jax

    seen: dict[str, dict[str, list[float]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for path in folder.rglob("*.xplane.pb"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
                for line in plane.lines if plane.name.startswith("/device:") else ():
                    for event in line.events:
                        if str(dict(event.stats).get("hlo_module", "")).endswith(module):
                            seen[plane.name][event.name].append(event.duration_ns)
    return seen


def _sum_launch(kernels: dict[str, list[float]], counts: dict[str, float]) -> float:
    """What the kernels of one launch take on a device; copies, which the tuner does not count as kernels, apart.

    There are more launches in a trace than those that count, since some wake the device up.
    """
    return sum(statistics.mean(kernels[name]) * count for name, count in counts.items() if not COPY.search(name))


# Collectives


def _check_collectives(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    import jax
    import jax.numpy as jnp
    import numpy as np

    from tune_jax import tune

    def normed(x: Any, *, gather: bool) -> Any:
        if gather:
            whole = jax.lax.all_gather(x, "rows", tiled=True)
            return x / jnp.sqrt(jnp.sum(whole * whole))
        return x / jnp.sqrt(jax.lax.psum(jnp.sum(x * x), "rows"))

    mesh = _make_mesh("Auto")
    x = _rows(options)
    for name, around in {"jit": jax.jit, "eager": lambda f: f}.items():
        function = tune(normed, {"gather": [True, False]}, progress=False)
        came = around(jax.shard_map(function, mesh=mesh, in_specs=jax.P("rows"), out_specs=jax.P("rows")))(x)
        kernels = {kernel.name for row in function.results.rows for kernel in row.kernels}
        yield {
            "case": f"collectives in shard_map, {name}",
            "timed": len(function.results.timed),
            "right": bool(np.allclose(came, x / jnp.sqrt(jnp.sum(x * x)), rtol=1e-4)),
            "winner": function.optimal_hyperparams,
            "collective kernels": sorted(k for k in kernels if re.search("nccl|reduce|gather|permute", k, re.I))[:4],
        }


# The second device


def _check_second(options: argparse.Namespace) -> dict[str, Any]:
    import jax
    import numpy as np

    from tune_jax import tune

    first, second = jax.devices()[:2]
    x = jax.block_until_ready(jax.device_put(np.asarray(_rows(options)), second))
    before = _allocations(first)
    function = tune(_row_sums, {"repeats": [8, 16]}, progress=False)
    came = jax.block_until_ready(function(x))
    return {
        "case": "inputs on the second device",
        "there": came.devices() == {second},
        "clock": function.results.clock,
        "allocations on the first": _allocations(first) - before,
    }


def _allocations(device: Any) -> int:
    return (device.memory_stats() or {}).get("num_allocs", 0)


# Two processes


def _check_processes(options: argparse.Namespace) -> dict[str, Any]:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = str(free.getsockname()[1])
    workers = [_start(options, process, port) for process in range(2)]
    printed = [worker.communicate(timeout=240)[0].decode() for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], "\n".join(printed)
    first, second = (json.loads(line) for text in printed for line in text.splitlines() if line.startswith("{"))
    return {
        "case": "two processes",
        "same results": first["results"] == second["results"],
        "winner": first["winner"],
        "tunings": [first["tunings"], second["tunings"]],
        "right": first["right"] and second["right"],
    }


def _start(options: argparse.Namespace, process: int, port: str) -> Any:
    command = [sys.executable, __file__, "--process", str(process), "--port", port, "--size", str(options.size)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": str(process), "XLA_FLAGS": ""}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def _work(options: argparse.Namespace) -> None:
    """One of two processes: tune with the other, and print what was found."""
    import jax
    import numpy as np

    jax.distributed.initialize(f"localhost:{options.port}", 2, options.process, local_device_ids=[0])
    from tune_jax import tune

    def slowed(x: Any, *, repeats: int) -> Any:
        # What is slow in the second process only: the order of candidates is another one there.
        extra = 64 if os.environ["CUDA_VISIBLE_DEVICES"] == "1" and repeats < 16 else 0
        return _row_sums(x, repeats=repeats) + 0 * _row_sums(x, repeats=extra)

    x = _rows(options)
    function = tune(slowed, {"repeats": [4, 8, 16]}, progress=False)
    came = jax.jit(lambda x: function(x) + function(x))(x)
    best = function.optimal_hyperparams
    answer = {
        "winner": best,
        "results": function.results.to_dict(),
        "tunings": len(function._tunable.state["memory"].results),
        "right": bool(np.allclose(came, 2 * _row_sums(x, **best), rtol=1e-4, atol=1e-4)),
    }
    print(json.dumps(answer, default=str))


if __name__ == "__main__":
    main()
