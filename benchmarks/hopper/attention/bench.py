"""Correctness, then speed against cuDNN, of Hopper's forward attention; needs an H200 and jax 0.11 or newer.

    python benchmarks/hopper/attention/bench.py OUT_FOLDER [check] [SHAPE ...]

`check` compares the cases of CHECKS in plan.py with float32 and runs each twice; a SHAPE is a label of SHAPES there.
Without either, everything runs. Times are device times from jax.profiler: the median by kernel over the calls of
interleaved rounds, one trace a shape. Every timed variant is compared with float32 on 256 rows and with cuDNN on all.
Lines are printed as they come and written to OUT_FOLDER/table.txt.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_autotune_level=0"  # the float32 reference's

import argparse
import collections
import concurrent.futures
import pathlib
import statistics
import tempfile
import time
import traceback

import jax
import jax.numpy as jnp
import numpy as np
from kernel import attention
from plan import CHECKS, SHAPES, abstract

ROUNDS, CALLS = 4, 5
LARGEST_ERROR = 6e-3


def draw(seed, batch, tq, tk, heads, kv_heads, d, dtype=jnp.bfloat16):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = (batch, tq, heads, d), (batch, tk, kv_heads, d), (batch, tk, kv_heads, d)
    return [jax.random.normal(key, shape, jnp.float32).astype(dtype) for key, shape in zip(keys, shapes, strict=True)]


@jax.jit(static_argnames=("causal", "window", "q_offset", "scale"))
def reference(q, k, v, row, *, causal=False, window=None, q_offset=0, scale=None):
    """float32 attention of query rows that begin at `row`, one batch item."""
    group = q.shape[1] // k.shape[1]
    k, v = (jnp.repeat(x, group, axis=1).astype(jnp.float32) for x in (k, v))
    high = jax.lax.Precision.HIGHEST
    logits = jnp.einsum("qhd,khd->hqk", q.astype(jnp.float32), k, precision=high)
    logits *= 1 / np.sqrt(q.shape[-1]) if scale is None else scale
    behind = row + jnp.arange(q.shape[0])[:, None] + q_offset - jnp.arange(k.shape[0])[None]
    keep = jnp.ones_like(behind, bool)
    if causal:
        keep &= behind >= 0
    if window is not None:
        keep &= behind < window
    logits = jnp.where(keep, logits, -jnp.inf)
    top = logits.max(axis=-1, keepdims=True)
    weights = jnp.exp(logits - jnp.where(jnp.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    return jnp.einsum("hqk,khd->qhd", weights / jnp.where(total == 0, 1, total), v, precision=high)


@jax.jit
def _distance(out, expected):
    out, expected = out.astype(jnp.float32), expected.astype(jnp.float32)
    far = jnp.sqrt(jnp.square(out - expected).sum() / jnp.maximum(jnp.square(expected).sum(), 1e-30))
    return jnp.where(jnp.isfinite(out).all(), far, jnp.inf)


def distance(out, expected):
    """Relative error in the 2-norm, infinite where something is not finite."""
    return float(_distance(out, expected))


def poison(shape, dtype):
    """Leave not-a-numbers in the memory that the next output of this shape is likely to get."""
    jnp.full(shape, jnp.nan, dtype).block_until_ready().delete()


def visible_pairs(t, causal, window):
    rows = np.arange(t, dtype=np.int64)
    seen = rows + 1 if causal else np.full(t, t)
    return int((np.minimum(seen, window) if window else seen).sum())


def flops(shape, masks):
    """The convention of the targets: halved when causal, visible pairs with a window."""
    batch, t, heads, _, d = shape
    if masks.get("window"):
        return 4 * batch * heads * d * visible_pairs(t, True, masks["window"])
    return 4 * batch * heads * d * t * t // (2 if masks.get("causal") else 1)


def ours(masks, config, name):
    return jax.jit(lambda q, k, v: attention(q, k, v, config=config, name=name, **masks))


def cudnn(masks):
    window = (masks["window"] - 1, 0) if masks.get("window") else None
    return jax.jit(
        lambda q, k, v: jax.nn.dot_product_attention(
            q, k, v, is_causal=masks.get("causal", False), local_window_size=window, implementation="cudnn"
        )
    )


def compile_all(jobs):
    """{key: compiled or the exception} of {key: (function, abstract arguments)}."""

    def build(job):
        try:
            return job[0].lower(*job[1]).compile()
        except Exception as error:  # noqa: BLE001 - it stands in the table; the other programs go on
            return error

    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(zip(jobs, pool.map(build, jobs.values()), strict=True))


def whole_reference(masks):
    return jax.jit(lambda q, k, v: jnp.stack([reference(q[b], k[b], v[b], 0, **masks) for b in range(q.shape[0])]))


def drawn(shape):
    return jax.jit(lambda seed: draw(seed, *shape)), (jax.ShapeDtypeStruct((), jnp.int32),)


def check(compiled, expect, drawing):
    """Error of one compiled case against the reference, and whether two runs are equal bit for bit."""
    q, k, v = drawing(np.int32(time.time_ns() % 2**31))
    poison(q.shape, q.dtype)
    out = compiled(q, k, v)
    same = bool((out.view(jnp.uint16) == compiled(q, k, v).view(jnp.uint16)).all())
    return distance(out, expect(q, k, v)), same


def device_times(folder):
    """{kernel name: [ns]} of the trace in a folder."""
    [path] = pathlib.Path(folder).rglob("*.xplane.pb")
    times = collections.defaultdict(list)
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if "GPU" not in plane.name:
            continue
        for line in plane.lines:
            if "Stream" in line.name:
                for event in line.events:
                    times[event.name].append(event.duration_ns)
    return times


def measure(compiled, arguments):
    """({name: median device microseconds of a call}, {name: wall}); cuDNN's kernels are summed under 'cudnn'."""
    with tempfile.TemporaryDirectory(prefix="attention-") as folder:
        wall = trace(compiled, arguments, folder)
        times = device_times(folder)
    calls, result, unclaimed = ROUNDS * CALLS, {}, {}
    for kernel, durations in times.items():
        name = next((n for n in sorted(compiled, key=len, reverse=True) if f"v_{n}_x" in kernel), None)
        if name is None and ("fprop" in kernel or "cudnn" in kernel or "flash" in kernel):
            name = "cudnn"
        if name is None:
            if len(durations) >= calls:
                unclaimed[kernel[:60]] = statistics.median(durations) / 1e3
            continue
        result[name] = result.get(name, 0) + statistics.median(durations) / 1e3 * len(durations) / calls
    print("   unclaimed:", unclaimed)
    return result, {name: statistics.median(x) for name, x in wall.items()}


def trace(compiled, arguments, folder):
    """Record the calls of all programs in turn; {name: wall microseconds of a call, by round}."""
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = 0
    options.python_tracer_level = 0
    wall = collections.defaultdict(list)
    for function in compiled.values():
        function(*arguments).block_until_ready()
    jax.profiler.start_trace(folder, profiler_options=options)
    for _ in range(ROUNDS):
        for name, function in compiled.items():
            start = time.perf_counter()
            for _ in range(CALLS):
                out = function(*arguments)
            out.block_until_ready()
            wall[name].append((time.perf_counter() - start) / CALLS * 1e6)
    jax.profiler.stop_trace()
    return wall


def bench_shape(label, shape, masks, compiled, drawing):
    t = shape[1]
    q, k, v = drawing(np.int32(time.time_ns() % 2**31))
    good = {name: f for name, f in compiled.items() if not isinstance(f, Exception)}
    row = t // 2 + 37
    expected = reference(q[-1, row : row + 256], k[-1], v[-1], row, **masks)
    peer = good["cudnn"](q, k, v)
    errors = {}
    for name, function in good.items():
        poison(q.shape, q.dtype)
        out = function(q, k, v)
        errors[name] = (distance(out[-1, row : row + 256], expected), distance(out, peer))
    device, wall = measure(good, (q, k, v))
    lines = []
    for name in compiled:
        if name not in good:
            lines.append(f"{label:10} {name:14} FAILED {str(compiled[name])[:150]}")
            continue
        us = device.get(name, float("nan"))
        tflops = flops(shape, masks) / us / 1e6
        ratio = device.get("cudnn", float("nan")) / us
        lines.append(
            f"{label:10} {name:14} {us:9.1f} us {tflops:6.0f} TFLOP/s {ratio:6.3f} of cuDNN   wall {wall[name]:8.1f}"
            f"   error {errors[name][0]:.1e} to cuDNN {errors[name][1]:.1e}"
        )
    return lines


def jobs_of(wanted):
    """{key: (function, abstract arguments)} of all programs that the wanted checks and shapes take."""
    jobs = {}
    for key, (shape, masks, config) in CHECKS.items() if "check" in wanted else ():
        jobs["check", key] = ours(masks, config, "check"), abstract(*shape)
        jobs["reference", key] = whole_reference(masks), abstract(*shape)
        jobs["drawcheck", key] = drawn(shape)
    for label, (shape, masks, variants) in SHAPES.items():
        if label in wanted:
            batch, t, heads, kv_heads, d = shape
            whole = batch, t, t, heads, kv_heads, d
            jobs["draw", label] = drawn(whole)
            jobs[label, "cudnn"] = cudnn(masks), abstract(*whole)
            for name, config in variants.items():
                jobs[label, name] = ours(masks, config, f"v_{name}_x"), abstract(*whole)
    return jobs


def check_line(key, compiled):
    try:
        if isinstance(compiled["check", key], Exception):
            raise compiled["check", key]
        error, same = check(compiled["check", key], compiled["reference", key], compiled["drawcheck", key])
    except Exception as error:  # noqa: BLE001 - it stands in the table; the other cases go on
        return f"check {key:24} FAILED {str(error)[:200]}"
    return f"check {key:24} error {error:.1e} {'ok' if error < LARGEST_ERROR and same else 'WRONG'} repeat {same}"


def shape_lines(label, compiled):
    shape, masks, _ = SHAPES[label]
    mine = {name: function for (where, name), function in compiled.items() if where == label}
    try:
        return bench_shape(label, shape, masks, mine, compiled["draw", label])
    except Exception:  # noqa: BLE001 - it stands in the table; the other shapes go on
        return [f"{label} FAILED {traceback.format_exc()[-600:]}"]


def read_options(description, shapes):
    """The folder for the results, made if there is none, and the names of what is to be run, by default all."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=pathlib.Path, metavar="OUT_FOLDER", help="for table.txt; made if there is none")
    parser.add_argument("wanted", nargs="*", metavar="NAME", help=f"check, {', '.join(shapes)}")
    options = parser.parse_args()
    wanted = options.wanted or ["check", *shapes]
    if unknown := set(wanted) - {"check", *shapes}:
        parser.error(f"unknown: {', '.join(sorted(unknown))}")
    options.out.mkdir(parents=True, exist_ok=True)
    return options.out, wanted


def main():
    out, wanted = read_options(__doc__, SHAPES)
    started = time.time()
    compiled = compile_all(jobs_of(wanted))
    seconds = time.time() - started
    print(f"{jax.devices()[0]} jax {jax.__version__}: {len(compiled)} compiled in {seconds:.0f} s", flush=True)
    lines = []
    for key in CHECKS if "check" in wanted else ():
        lines.append(check_line(key, compiled))
        print(lines[-1], flush=True)
    for label in SHAPES:
        if label in wanted:
            new = shape_lines(label, compiled)
            print("\n".join(new), f"[{time.time() - started:.0f} s]", flush=True)
            lines += new
    (out / "table.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
