"""Correctness, then speed against cuDNN, of Hopper's backward attention, and what log-sum-exp costs the forward.

    python benchmarks/hopper/attention/bench_backward.py OUT_FOLDER [check] [SHAPE ...]

Needs an H200 and jax 0.11 or newer. `check` compares CHECKS of plan_backward.py with float64, next to cuDNN's error
where cuDNN takes the case, and runs each twice; a SHAPE is a label of SHAPES there. Without either, everything runs.
Times are device times from jax.profiler, by program and kernel: medians over interleaved rounds, one trace a shape. A
program runs forward and backward; kernels named after a forward count as the forward, all others as the backward.
Lines are printed as they come and written to OUT_FOLDER/table.txt.
"""

from __future__ import annotations

import collections
import pathlib
import statistics
import tempfile
import time
import traceback

import bench  # first: it sets XLA's flags
import float64
import jax
import jax.numpy as jnp
import numpy as np
from backward import attention_gradients, default_key_config
from kernel import attention
from plan_backward import CHECKS, FORWARDS, SHAPES, abstract

ROUNDS, CALLS = 6, 4
LARGEST_ERROR = 8e-3
FORWARD_NAMES = "forward", "fprop"


def draw(seed, *shape):
    """q, k, v and the output's gradient."""
    return *bench.draw(seed, *shape), bench.draw(seed + 1, *shape)[0]


def drawn(shape):
    return jax.jit(lambda seed: draw(seed, *shape)), (jax.ShapeDtypeStruct((), jnp.int32),)


def named(function, name):
    function.__name__ = name
    return jax.jit(function)


def ours(masks, name, **options):
    """(output, lse, dq, dk, dv)."""

    def both(q, k, v, do):
        out, lse = attention(q, k, v, with_lse=True, **masks)
        return out, lse, *attention_gradients(q, k, v, out, lse, do, **masks, **options)

    return named(both, name)


def cudnn(masks, name="cudnn"):
    def both(q, k, v, do):
        def forward(q, k, v):
            return jax.nn.dot_product_attention(
                q,
                k,
                v,
                scale=masks.get("scale"),
                is_causal=masks.get("causal", False),
                local_window_size=(masks["window"] - 1, 0) if masks.get("window") else None,
                implementation="cudnn",
            )

        out, pull = jax.vjp(forward, q, k, v)
        return out, None, *pull(do)

    return named(both, name)


def forward(masks, options, name):
    return named(lambda q, k, v, do: attention(q, k, v, **masks, **options), name)


def cudnn_takes(shape, masks):
    return shape[1] == shape[2] and shape[1] % 2 == 0 and not masks.get("q_offset")


def times_by_program(folder):
    """{program: {kernel: [ns]}} of the trace in a folder."""
    [path] = pathlib.Path(folder).rglob("*.xplane.pb")
    times = collections.defaultdict(lambda: collections.defaultdict(list))
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        for line in plane.lines if "GPU" in plane.name else ():
            for event in line.events if "Stream" in line.name else ():
                program = dict(event.stats).get("hlo_module", "?").removeprefix("jit_")
                times[program][event.name].append(event.duration_ns)
    return times


def measure(programs, arguments):
    """({program: (forward, backward) microseconds of a call}, {program: {kernel: microseconds}})."""
    for program in programs.values():
        jax.block_until_ready(program(*arguments))
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level = options.python_tracer_level = 0
    with tempfile.TemporaryDirectory(prefix="attention-") as folder:
        jax.profiler.start_trace(folder, profiler_options=options)
        for _ in range(ROUNDS):
            for program in programs.values():
                for _ in range(CALLS):
                    out = program(*arguments)
                jax.block_until_ready(out)
        jax.profiler.stop_trace()
        times = times_by_program(folder)
    kernels = {
        program: {
            kernel: statistics.median(x) * len(x) / (ROUNDS * CALLS) / 1e3 for kernel, x in times[program].items()
        }
        for program in programs
    }
    sums = {}
    for program, parts in kernels.items():
        first = sum(us for kernel, us in parts.items() if any(name in kernel for name in FORWARD_NAMES))
        sums[program] = first, sum(parts.values()) - first
    return sums, kernels


def poisoned(program, arguments):
    """The results, after memory of their shapes was filled with not-a-numbers."""
    results = program(*arguments)
    shapes = [(x.shape, x.dtype) for x in results if x is not None]
    del results
    for shape, dtype in shapes:
        bench.poison(shape, dtype)
    return program(*arguments)


def same_bits(a, b):
    return all(bool((x == y).all()) for x, y in zip(a, b, strict=True))


def check_lines(key, compiled):
    """Errors of out, lse, dq, dk, dv for each way to dq, and cuDNN's; of out and lse with a softcap."""
    masks = CHECKS[key][1]
    inputs = compiled["drawcheck", key](np.int32(time.time_ns() % 2**31))
    exact = float64.attention(*inputs, **masks)
    lines = []
    for way in ("forward", "fixed", "one pass", "cudnn"):
        program = compiled.get((way, key))
        if program is None or isinstance(program, Exception):
            lines += [] if program is None else [f"check {key:12} {way:9} FAILED {str(program)[:200]}"]
            continue
        results = poisoned(program, inputs)
        errors = [np.nan if x is None else float64.distance(x, y) for x, y in zip(results, exact, strict=False)]
        text = " ".join(f"{name} {e:.1e}" for name, e in zip(("out", "lse", "dq", "dk", "dv"), errors, strict=False))
        if way != "cudnn":
            again, loose = program(*inputs), (2,) if way == "one pass" else ()
            same = [same_bits([x], [y]) for i, (x, y) in enumerate(zip(results, again, strict=True)) if i not in loose]
            good = max(errors) < LARGEST_ERROR and errors[1] < 1e-5 and all(same)
            text += f" {'ok' if good else 'WRONG'} repeat {all(same)}"
        lines.append(f"check {key:12} {way:9} {text}")
    return lines


@jax.jit(static_argnames=("causal", "window"))
def head_reference(q, k, v, do, *, causal=False, window=None):
    """float32 gradients of one batch item and one key head with its query heads."""
    value, pull = jax.vjp(lambda *x: bench.reference(*x, 0, causal=causal, window=window), q, k, v)
    return pull(do.astype(value.dtype))


def head_errors(results, inputs, masks):
    """Errors of dq, dk, dv against float32 for the last batch item and key head."""
    q, k, v, do = inputs
    group = q.shape[2] // k.shape[2]
    expected = head_reference(q[-1, :, -group:], k[-1, :, -1:], v[-1, :, -1:], do[-1, :, -group:], **masks)
    parts = results[2][-1, :, -group:], results[3][-1, :, -1:], results[4][-1, :, -1:]
    return [bench.distance(x, y) for x, y in zip(parts, expected, strict=True)]


def bench_shape(label, compiled):
    shape, masks, _ = SHAPES[label]
    mine = {name: x for (where, name), x in compiled.items() if where == label}
    good = {name: x for name, x in mine.items() if not isinstance(x, Exception)}
    batch, t, heads, kv_heads, d = shape
    inputs = compiled["draw", label](np.int32(time.time_ns() % 2**31))
    errors, peer = {}, good["cudnn"](*inputs)
    for name, program in good.items():
        if not name.startswith("forward"):
            results = poisoned(program, inputs)
            away = max(bench.distance(x, y) for x, y in zip(results[2:], peer[2:], strict=True))
            errors[name] = " ".join(f"{e:.1e}" for e in head_errors(results, inputs, masks)) + f" to cuDNN {away:.1e}"
            del results
    del peer
    sums, kernels = measure(good, inputs)
    work = bench.flops((batch, t, heads, kv_heads, d), masks) * 2.5
    first, then = sums["cudnn"]
    lines = []
    for name in mine:
        if name not in good:
            lines.append(f"{label:10} {name:13} FAILED {str(mine[name])[:150]}")
            continue
        forward_us, backward_us = sums[name]
        line = f"{label:10} {name:13} forward {forward_us:8.1f} us {first / forward_us:6.3f} of cuDNN"
        if backward_us:
            total = forward_us + backward_us
            line += f", backward {backward_us:8.1f} us {work / backward_us / 1e6:4.0f} TFLOP/s"
            line += f" {then / backward_us:6.3f}, both {(first + then) / total:6.3f}   dq dk dv {errors[name]}"
        lines.append(line)
        print("   ", name, {kernel[:48]: round(us, 1) for kernel, us in kernels[name].items()})
    return lines


def jobs_of(wanted):
    """{key: (function, abstract arguments)} of all programs that the wanted checks and shapes take."""
    jobs = {}
    for key, (shape, masks) in CHECKS.items() if "check" in wanted else ():
        jobs["drawcheck", key] = drawn(shape)
        if masks.get("softcap"):
            jobs["forward", key] = forward(masks, {"with_lse": True}, "forward"), abstract(*shape)
            continue
        jobs["fixed", key] = ours(masks, "fixed", deterministic=True), abstract(*shape)
        if default_key_config(shape[-1]).with_dq:
            jobs["one pass", key] = ours(masks, "one"), abstract(*shape)
        if cudnn_takes(shape, masks):
            jobs["cudnn", key] = cudnn(masks), abstract(*shape)
    for label, (shape, masks, variants) in SHAPES.items():
        if label in wanted:
            whole = shape[0], shape[1], *shape[1:]
            jobs["draw", label] = drawn(whole)
            jobs[label, "cudnn"] = cudnn(masks), abstract(*whole)
            for name, options in variants.items():
                jobs[label, name] = ours(masks, name, **options), abstract(*whole)
            for name, options in FORWARDS.get(label, {}).items():
                jobs[label, name] = forward(masks, options, name), abstract(*whole)
    return jobs


def attempt(function, *arguments):
    try:
        return function(*arguments)
    except Exception:  # noqa: BLE001 - it stands in the table; the others go on
        return [f"{arguments[0]} FAILED {traceback.format_exc()[-600:]}"]


def main():
    out, wanted = bench.read_options(__doc__, SHAPES)
    started, lines = time.time(), []
    compiled = bench.compile_all(jobs_of(wanted))
    print(f"{jax.devices()[0]} jax {jax.__version__}: {len(compiled)} compiled in {time.time() - started:.0f} s")
    for work, names in ((check_lines, CHECKS if "check" in wanted else ()), (bench_shape, SHAPES)):
        for name in names:
            if work is check_lines or name in wanted:
                new = attempt(work, name, compiled)
                print("\n".join(new), f"[{time.time() - started:.0f} s]", flush=True)
                lines += new
                (out / "table.txt").write_text("\n".join(lines) + "\n")
    print("\n".join(["", *lines]))


if __name__ == "__main__":
    main()
