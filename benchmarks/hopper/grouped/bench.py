"""Correctness, then speed against torch, of Hopper's grouped products; needs an H200, jax 0.11 or newer, and torch.

    python benchmarks/hopper/grouped/bench.py OUT_FOLDER [check] [SHAPE ...]

`check` compares the cases of CHECKS in plan.py with float32 and runs each twice; a SHAPE is a label of SHAPES there.
Without either, everything runs. Times are device times from jax.profiler, in one trace a shape, pass and kind of group
sizes, ours and torch's in it, in an order that changes from round to round: ours the median of the named kernel and the
XLA kernels before it (the work list), which count; torch's the sum of its kernels, per call. Without torch the ratios
are left out. A ratio is the other's time / ours. Every variant is compared with float32 on uneven sizes.

Lines are printed as they come and written to OUT_FOLDER/table.txt.
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
import functools
import pathlib
import statistics
import tempfile
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np

try:
    import peers
except ImportError:
    peers = None
from plan import CHECKS, KINDS, SHAPES, VARIANTS, abstract, operands, program, sizes_of

ROUNDS, CALLS = 4, 5
LARGEST_ERROR = 4e-3


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
    """{key: compiled or the exception} of {key: (function, abstract arguments)}."""

    def build(job):
        try:
            return job[0].lower(*job[1]).compile()
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
    for name, config in VARIANTS[where, which].items():
        jobs[where, which, name] = program(which, config, f"v_{name}_x"), arguments
    return jobs


def device_events(folder):
    """[(start, duration, kernel name, stream)] of the trace in a folder, in ns and in order."""
    [path] = pathlib.Path(folder).rglob("*.xplane.pb")
    return sorted(
        (event.start_ns, event.duration_ns, event.name, line.name)
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes
        if "GPU" in plane.name
        for line in plane.lines
        if "Stream" in line.name
        for event in line.events
    )


def trace(calls, rounds=ROUNDS):
    """Device events of {name: function}, CALLS of each a round, the order turned by one from round to round."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="grouped-") as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        for i in range(rounds):
            for function in [*calls.values()][i:] + [*calls.values()][:i]:
                for _ in range(CALLS):
                    out = function()
                jax.block_until_ready(out)
                if peers:
                    peers.wait()
        jax.profiler.stop_trace()
        return device_events(folder)


def warm(function):
    function()
    peers.wait()
    return function


@functools.cache
def dense_of(where):
    """The dense product of a shape, and the names of its kernels."""
    function = warm(peers.dense(where))
    return function, {event[2] for event in trace({"dense": function}, 1)}


def measure(compiled, arguments, where, which, kind):
    """{name: (microseconds of the kernel, the same with the kernels before it)}, "torch" and "dense" among them."""
    calls = {name: functools.partial(function, *arguments) for name, function in compiled.items()}
    if peers:
        dense, dense_names = dense_of(where)
        others = {"torch": warm(peers.grouped(where, which, kind, arguments[:2])), "dense": dense}
    events = trace(calls | others if peers else calls)
    streams = {event[3] for event in events if any(f"v_{name}_x" in event[2] for name in compiled)}
    alone, together, before, sums = (
        collections.defaultdict(list),
        collections.defaultdict(list),
        0,
        collections.Counter(),
    )
    for _, duration, event, stream in events:
        if stream not in streams:
            sums["dense" if event in dense_names else "torch"] += duration / 1e3 / ROUNDS / CALLS
            continue
        before += duration
        if name := next((n for n in compiled if f"v_{n}_x" in event), None):
            alone[name].append(duration / 1e3)
            together[name].append(before / 1e3)
            before = 0
    median = statistics.median
    ours = {name: (median(alone[name]), median(together[name])) for name in alone}
    return ours | {name: (time, time) for name, time in sums.items()}


def line_of(where, which, name, times):
    """Rate, list and ratio to dense and torch for each kind of sizes."""
    m, k, n, _ = SHAPES[where]
    line = f"{where:5}{which:8}{name:9}"
    for kind, found in times.items():
        alone, whole = found[name]
        line += f"| {kind} {whole:7.1f} us (list {whole - alone:4.1f}) {2 * m * k * n / whole / 1e6:4.0f}"
        line += "".join(f" {found[peer][1] / whole:5.3f}" for peer in ("dense", "torch") if peer in found)
    return line


def bench_shape(where, which, compiled):
    """The lines of one shape and pass."""
    compiled = dict(compiled)
    draw, expect = compiled.pop("draw"), compiled.pop("expect")
    operands = draw(np.int32(time.time_ns() % 2**31))
    arguments = {kind: (*operands, jnp.asarray(sizes_of(where, kind))) for kind in KINDS}
    good = {name: f for name, f in compiled.items() if not isinstance(f, Exception)}
    expected, errors = expect(*arguments["uneven"]), {}
    for name, function in good.items():
        poison(expected.shape)
        errors[name] = distance(function(*arguments["uneven"]), expected)
    del expected
    times = {kind: measure(good, arguments[kind], where, which, kind) for kind in KINDS}
    failed = [f"{where:5}{which:8}{name:9} FAILED {str(compiled[name])[:200]}" for name in compiled if name not in good]
    lines = [
        line_of(where, which, name, times) + (f" | error {errors[name]:.1e}" if name in good else "")
        for name in times["uneven"]
    ]
    return failed + lines


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


def shape_lines(where, which, compiled):
    ours = {key[2]: function for key, function in compiled.items() if key[:2] == (where, which)}
    ours |= {part: compiled[part, where, which] for part in ("draw", "expect")}
    try:
        return bench_shape(where, which, ours)
    except Exception:  # noqa: BLE001 - it stands in the table; the other shapes go on
        return [f"{where} {which} FAILED {traceback.format_exc()[-600:]}"]


def copy_line():
    copy = warm(peers.copy())
    seconds = sum(event[1] for event in trace({"copy": copy}, 1)) / CALLS / 1e9
    return f"copy {2 * peers.COPIED_BYTES / seconds / 1e12:.2f} TB/s"


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
    chosen = [key for key in VARIANTS if key[0] in wanted]
    jobs = check_jobs() if "check" in wanted else {}
    for key in chosen:
        jobs |= shape_jobs(*key)
    compiled = compile_all(jobs)
    seconds = time.time() - started
    print(f"{jax.devices()[0]} jax {jax.__version__}: {len(compiled)} compiled in {seconds:.0f} s", flush=True)
    lines = [copy_line()] if peers else []
    print(*lines)
    for key in CHECKS if "check" in wanted else ():
        lines.append(check_line(key, compiled))
        print(lines[-1], flush=True)
    for key in chosen:
        new = shape_lines(*key, compiled)
        print("\n".join(new), f"[{time.time() - started:.0f} s]", flush=True)
        lines += new
    (options.out / "table.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
