"""Correctness, then speed against torch, of Hopper's grouped products; needs an H200, jax 0.11 or newer, and torch.

    python benchmarks/hopper/grouped/bench.py OUT_FOLDER [check] [SHAPE ...]

`check` compares the cases of CHECKS in plan.py with float32 and runs each twice; a SHAPE is a label of SHAPES there.
Without either, everything runs. Group sizes are uneven; "even" is the rate with even groups. Our times are device times
from jax.profiler, in one trace a shape and pass: the median over interleaved rounds of calls, of the named kernel and
of the XLA kernels before it (the work list), which count. torch's, by CUDA events, come from torch_bench.py, which runs
while ours compiles; without torch the ratios are left out. A ratio is the other's time / ours.

A "no" variant is a probe: a kernel with that part left out, wrong on purpose. Every variant is compared with float32.
Lines are printed as they come and written to OUT_FOLDER/table.txt; torch's are in OUT_FOLDER/torch.txt.
"""

from __future__ import annotations

import os

os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"  # torch needs memory too
os.environ["XLA_FLAGS"] = " ".join(  # the float32 reference's
    [os.environ.get("XLA_FLAGS", ""), "--xla_gpu_autotune_level=0", "--xla_gpu_enable_triton_gemm=false"]
)

import argparse
import collections
import concurrent.futures
import json
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import unittest.mock

import jax
import jax.numpy as jnp
import kernel
import numpy as np
from plan import ALSO_EVEN, CHECKS, PROBES, SHAPES, VARIANTS, abstract, operands, program, sizes_of

ROUNDS, CALLS = 4, 5
LARGEST_ERROR = 4e-3
SECONDS_FOR_TORCH = 60  # after ours has compiled
PARTS = {"store": (kernel, "store_chunks"), "zero": (kernel.Outer, "zero")}  # what a probe leaves out


def drawing(shapes, end):
    """Normal inputs from a seed; rows of the ragged operands past `end` are not a number."""

    def draw(seed):
        keys = jax.random.split(jax.random.key(seed), 2)
        out = [jax.random.normal(key, shape, jnp.bfloat16) for key, shape in zip(keys, shapes, strict=True)]
        return [x.at[end:].set(jnp.nan) if x.ndim == 2 and end < x.shape[0] else x for x in out]

    return jax.jit(draw), (jax.ShapeDtypeStruct((), jnp.int32),)


def window_of(x, begin, window):
    start = jnp.minimum(begin, x.shape[0] - window)
    return start, jax.lax.dynamic_slice_in_dim(x, start, window).astype(jnp.float32)


def dot(a, b):
    return jnp.dot(a, b.astype(jnp.float32), precision="highest")


def mine(start, window, begin, end):
    row = start + jnp.arange(window)[:, None]
    return (row >= begin) & (row < end)


def rows_reference(lhs, rhs, sizes, *, window, transposed):
    """float32 forward or gradient for lhs, group by group over windows of `window` rows."""
    ends = jnp.cumsum(sizes)

    def step(out, x):
        matrix, begin, end = x
        start, part = window_of(lhs, begin, window)
        keep = mine(start, window, begin, end)
        old = jax.lax.dynamic_slice_in_dim(out, start, window)
        new = dot(jnp.where(keep, part, 0), matrix.T if transposed else matrix)
        return jax.lax.dynamic_update_slice_in_dim(out, jnp.where(keep, new, old), start, 0), None

    out = jnp.zeros((lhs.shape[0], rhs.shape[1 if transposed else 2]), jnp.float32)
    return jax.lax.scan(step, out, (rhs, ends - sizes, ends))[0]


def outer_reference(lhs, dout, sizes, *, window):
    """float32 gradient for rhs, likewise."""
    ends = jnp.cumsum(sizes)

    def step(_, x):
        (start, a), (_, b) = window_of(lhs, x[0], window), window_of(dout, x[0], window)
        keep = mine(start, window, *x)
        return None, dot(jnp.where(keep, a, 0).T, jnp.where(keep, b, 0))

    return jax.lax.scan(step, None, (ends - sizes, ends))[1]


def reference(which, window):
    if which == "rhs":
        return jax.jit(lambda lhs, dout, sizes: outer_reference(lhs, dout, sizes, window=window))
    return jax.jit(lambda lhs, rhs, sizes: rows_reference(lhs, rhs, sizes, window=window, transposed=which == "lhs"))


@jax.jit
def _distance(out, expected):
    out = out.astype(jnp.float32)
    far = jnp.sqrt(jnp.square(out - expected).sum() / jnp.maximum(jnp.square(expected).sum(), 1e-30))
    return jnp.where(jnp.isfinite(out).all(), far, jnp.inf)


def distance(out, expected):
    """Relative error in the 2-norm, infinite where something is not finite."""
    return float(_distance(out, expected))


def poison(shape):
    """Leave not-a-numbers in the memory that the next output of this shape is likely to get."""
    jnp.full(shape, jnp.nan, jnp.bfloat16).block_until_ready().delete()


def compile_all(jobs):
    """{key: compiled or the exception} of {key: (function, abstract arguments), or what is lowered already}."""

    def build(job):
        try:
            return (job[0].lower(*job[1]) if isinstance(job, tuple) else job).compile()
        except Exception as error:  # noqa: BLE001 - it stands in the table; the other programs go on
            return error

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(jobs, pool.map(build, jobs.values()), strict=True))


def check_jobs():
    jobs = {}
    for key, (which, (m, k, n), sizes, config) in CHECKS.items():
        shapes = operands(which, m, k, n, len(sizes))
        arguments = abstract(shapes, len(sizes))
        jobs["check", key] = program(which, config, "check"), arguments
        jobs["expect", key] = reference(which, min(m, max(sizes) + 8)), arguments
        jobs["draw", key] = drawing(shapes, sum(sizes))
    return jobs


def shape_jobs(where, which):
    shape = SHAPES[where]
    shapes = operands(which, *shape)
    arguments = abstract(shapes, shape[3])
    jobs = {
        ("draw", where, which): drawing(shapes, shape[0]),
        ("expect", where, which): (reference(which, int(sizes_of(where).max())), arguments),
    }
    variant, parts = PROBES.get((where, which), (None, ()))
    for part in parts:
        with unittest.mock.patch.object(*PARTS[part], lambda *_: None):
            probe = program(which, VARIANTS[where, which][variant], f"v_no{part}_x").lower(*arguments)
        jobs[where, which, f"no{part}"] = probe
    for name, config in VARIANTS[where, which].items():
        jobs[where, which, name] = program(which, config, f"v_{name}_x"), arguments
    return jobs


def device_events(folder):
    """[(start, duration, kernel name)] of the trace in a folder, in ns and in order."""
    [path] = pathlib.Path(folder).rglob("*.xplane.pb")
    return sorted(
        (event.start_ns, event.duration_ns, event.name)
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        if "GPU" in plane.name
        for line in plane.lines
        if "Stream" in line.name
        for event in line.events
    )


def trace(compiled, arguments, folder):
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    jax.profiler.start_trace(folder, profiler_options=options)
    for _ in range(ROUNDS):
        for function in compiled.values():
            for _ in range(CALLS):
                out = function(*arguments)
            out.block_until_ready()
    jax.profiler.stop_trace()


def measure(compiled, arguments):
    """{name: (median microseconds of the kernel, the same with the kernels before it, calls)} from one trace."""
    with tempfile.TemporaryDirectory(prefix="grouped-") as folder:
        trace(compiled, arguments, folder)
        events = device_events(folder)
    alone, together, before = collections.defaultdict(list), collections.defaultdict(list), 0
    for _, duration, event in events:
        before += duration
        if name := next((n for n in compiled if f"v_{n}_x" in event), None):
            alone[name].append(duration / 1e3)
            together[name].append(before / 1e3)
            before = 0
    median = statistics.median
    return {name: (median(alone[name]), median(together[name]), len(alone[name])) for name in alone}


def ratios(where, which, microseconds, torch_times):
    """Ratios to torch's times of this run, as far as there are any."""
    times = torch_times.get(where, {})
    peers = {"torch": times.get(f"{which} uneven"), "dense": times.get("dense")}
    return "".join(f"  {time / microseconds:5.3f} of {peer}" for peer, time in peers.items() if time)


def bench_shape(where, which, compiled, torch_times):
    """The lines of one shape and pass."""
    m, k, n, _ = SHAPES[where]
    compiled = dict(compiled)
    draw, expect = compiled.pop("draw"), compiled.pop("expect")
    arguments = *draw(np.int32(time.time_ns() % 2**31)), jnp.asarray(sizes_of(where))
    good = {name: f for name, f in compiled.items() if not isinstance(f, Exception)}
    expected, errors = expect(*arguments), {}
    for name, function in good.items():
        poison(expected.shape)
        errors[name] = distance(function(*arguments), expected)
    del expected
    times, evens = measure(good, arguments), {}
    if which == "forward" and where in ALSO_EVEN:
        evens = measure(good, (*arguments[:2], jnp.asarray(sizes_of(where, even=True))))
    lines = []
    for name in compiled:
        if name not in times:
            lines.append(f"{where:5}{which:8}{name:10} FAILED {str(compiled[name])[:200]}")
            continue
        alone, whole, count = times[name]
        line = (
            f"{where:5}{which:8}{name:10}{whole:9.1f} us (kernel {alone:8.1f}, {count} calls) "
            f"{2 * m * k * n / whole / 1e6:6.1f} TFLOP/s  error {errors[name]:.1e}"
        )
        if name in evens:
            line += f"  even {2 * m * k * n / evens[name][1] / 1e6:6.1f}"
        lines.append(line + ratios(where, which, whole, torch_times))
    return lines


def check(key, compiled):
    """Error of one case against the reference, and whether two runs are equal."""
    sizes = CHECKS[key][2]
    if problem := next((f for f in compiled.values() if isinstance(f, Exception)), None):
        raise problem
    arguments = *compiled["draw"](np.int32(time.time_ns() % 2**31)), jnp.asarray(sizes, jnp.int32)
    expected = compiled["expect"](*arguments)
    poison(expected.shape)
    out = compiled["check"](*arguments)
    error = distance(out, expected)
    same = bool((out == compiled["check"](*arguments)).all())
    return f"check {key:12} error {error:.1e} {'ok' if error < LARGEST_ERROR and same else 'WRONG'} repeat {same}"


def check_line(key, compiled):
    try:
        return check(key, {part: compiled[part, key] for part in ("check", "expect", "draw")})
    except Exception as error:  # noqa: BLE001 - it stands in the table; the other cases go on
        return f"check {key:12} FAILED {str(error)[:300]}"


def shape_lines(where, which, compiled, torch_times):
    ours = {key[2]: function for key, function in compiled.items() if key[:2] == (where, which)}
    ours |= {part: compiled[part, where, which] for part in ("draw", "expect")}
    try:
        return bench_shape(where, which, ours, torch_times)
    except Exception:  # noqa: BLE001 - it stands in the table; the other shapes go on
        return [f"{where} {which} FAILED {traceback.format_exc()[-600:]}"]


def times_of_torch(process, folder):
    """{shape: {what: microseconds}} once torch_bench.py is through; empty where it failed."""
    try:
        process.wait(SECONDS_FOR_TORCH)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return json.loads((folder / "torch.json").read_text()) if process.returncode == 0 else {}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path, metavar="OUT_FOLDER", help="for the tables; made if there is none")
    parser.add_argument("wanted", nargs="*", metavar="NAME", help=f"check, {', '.join(SHAPES)}")
    options = parser.parse_args()
    wanted = options.wanted or ["check", *SHAPES]
    if unknown := set(wanted) - {"check", *SHAPES}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    options.out.mkdir(parents=True, exist_ok=True)
    started = time.time()
    peers = subprocess.Popen([sys.executable, pathlib.Path(__file__).with_name("torch_bench.py"), options.out])
    chosen = [key for key in VARIANTS if key[0] in wanted]
    jobs = check_jobs() if "check" in wanted else {}
    for key in chosen:
        jobs |= shape_jobs(*key)
    compiled = compile_all(jobs)
    seconds = time.time() - started
    print(f"{jax.devices()[0]} jax {jax.__version__}: {len(compiled)} compiled in {seconds:.0f} s", flush=True)
    torch_times = times_of_torch(peers, options.out)
    lines = []
    for key in CHECKS if "check" in wanted else ():
        lines.append(check_line(key, compiled))
        print(lines[-1], flush=True)
    for key in chosen:
        new = shape_lines(*key, compiled, torch_times)
        print("\n".join(new), f"[{time.time() - started:.0f} s]", flush=True)
        lines += new
    (options.out / "table.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
