"""How fast attention is, against cuDNN and JAX's own Pallas-Triton kernel, each pass by device time.

    python benchmarks/attention.py --out attention.json
    python benchmarks/attention.py --rows "training.*D128" --minutes 5
    python benchmarks/attention.py --defaults                    # without the grids
    JAX_PLATFORMS=cpu python benchmarks/attention.py --quick     # a smoke test

Rows are forward passes, forward and backward passes together ("training"), and decoding with one query. In each,
these are timed in one process, interleaved, by our tuner; the median counts:
- cudnn: `jax.nn.dot_product_attention(implementation="cudnn")`, and jax_xla: the same by XLA, in decoding and on a CPU;
- jax_triton: `jax.experimental.pallas.ops.gpu.attention.mha` over a grid of 36 settings forward and 18 backward,
  which has no grouped heads and no window;
- triton: our `pallas_triton` over the same grid; triton_default: with its default tiles;
- xla: our `xla`; default: what `flash_attention` takes when nothing is named.
Printed are TFLOP/s (decoding: GB/s of keys and values read) of the best setting of each, and two ratios of times:
jax_triton / triton, at least 1.00 (causal: 1.10), and the best of ours and of cuDNN / default, at least 0.97. Some rows
of each output, or of the gradient of q, are compared with plain attention in float32, and all that comes out with what
comes out of our `xla`; a wrong result is marked, and the command then ends with 1.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import functools
import itertools
import re
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from _attention import TOLERANCE, Function, Shape, distance, expect_rows, gradients, rows_of
from _common import describe_host, write_report

from tune_jax import CONFIG, tune
from tune_jax.kernels import flash_attention

BLOCKS = {"block_q": (64, 128), "block_k": (32, 64, 128), "num_warps": (4, 8), "num_stages": (2, 3, 4)}
BACKWARD_BLOCKS = {"block_q": (32, 64, 128), "block_k": (32, 64, 128), "num_warps": (4, 8)}
# Of the forward pass where a row of the backward pass comes alone.
FORWARD_SETTING = {"block_q": 128, "block_k": 64, "num_warps": 8, "num_stages": 2}
ROUNDS, SECONDS = 8, 8.0
BACKENDS = ("default", "xla", "triton", "triton_default", "cudnn")
RATIOS = {"jax_triton / triton": 1.0, "jax_triton / triton, causal": 1.1, "best / default": 0.97}

Setting = dict[str, int]


@dataclasses.dataclass(frozen=True)
class Row:
    """A shape, and what of it is timed."""

    kind: str
    shape: Shape

    @property
    def label(self) -> str:
        return f"{self.kind} {self.shape.label}"

    @property
    def has_backward(self) -> bool:
        return self.kind == "training"

    def rate(self, seconds: float) -> float:
        """TFLOP/s, of decoding GB/s."""
        if self.kind == "decoding":
            return self.shape.cache_bytes / seconds / 1e9
        return self.shape.forward_flops * (3.5 if self.has_backward else 1) / seconds / 1e12


def _square(batch: int, length: int, heads: int, depth: int, causal: bool, **more: Any) -> Shape:
    return Shape(batch, length, length, heads, more.pop("kv_heads", heads), depth, causal, **more)


_LONG = [_square(2, 8192, 16, 128, False), _square(2, 8192, 16, 128, True)]
_GROUPED = _square(2, 8192, 32, 128, True, kv_heads=8)
_WINDOWED = _square(1, 32768, 16, 128, True, window=1024)
_CAUSAL = [_square(1, 16384, 16, 128, True), _square(8, 2048, 16, 128, True)]
_HEADS = [_square(4, 4096, 16, 64, True), _square(2, 4096, 8, 256, True)]
_FULL = [_square(8, 2048, 16, 128, False), _square(4, 4096, 16, 64, False), _square(2, 4096, 8, 256, False)]
ROWS = [
    *(Row("forward", shape) for shape in (*_LONG, _GROUPED, *_CAUSAL, *_HEADS, *_FULL, _WINDOWED)),
    *(Row("training", shape) for shape in (*_LONG, _GROUPED, *_CAUSAL, *_HEADS, _WINDOWED)),
    *(
        Row("decoding", Shape(batch, 1, length, 32, 8, 128))
        for batch, length in ((1, 32768), (16, 32768), (64, 8192), (1, 131072))
    ),
]
QUICK_ROWS = [Row(kind, Shape(1, 40, 40, 2, 1, 16, True, dtype="float32")) for kind in ("forward", "training")]


def main() -> None:
    options = _read_options()
    rows = [row for row in (QUICK_ROWS if options.quick else ROWS) if re.search(options.rows, row.label)]
    started, reports, known = time.monotonic(), [], {}
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}", flush=True)
    for row in rows:
        if time.monotonic() - started > options.minutes * 60:
            print(f"{options.minutes:g} minutes are over", flush=True)
            break
        reports.append(_run(row, known, options.defaults))
        _print_row(row, reports[-1], time.monotonic() - started)
        write_report(options.out, {"host": describe_host(), "device": jax.devices()[0].device_kind, "rows": reports})
    _print_verdicts(reports)
    if any(_wrong(row, report) for row, report in zip(rows, reports, strict=False)):
        raise SystemExit(1)


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", default="", help="a pattern; rows whose label it is found in")
    parser.add_argument("--quick", action="store_true", help="tiny rows, also without a GPU")
    parser.add_argument("--defaults", action="store_true", help="leave out the grids, and with them jax_triton")
    parser.add_argument("--minutes", type=float, default=60, help="after these, no further row is begun")
    parser.add_argument("--out", help="file for the full numbers, as JSON")
    return parser.parse_args()


# What is timed


def _programs(row: Row, known: Mapping[Any, Setting]) -> dict[str, tuple[Function, Setting]]:
    """Attention by label, "name" or "name setting", with the setting."""
    masks = row.shape.masks
    programs: dict[str, tuple[Function, Setting]] = {
        "default": (functools.partial(flash_attention, **masks), {}),
        "xla": (functools.partial(flash_attention, implementation="xla", **masks), {}),
    }
    if row.kind == "decoding" or jax.default_backend() == "cpu":
        programs["jax_xla"] = (functools.partial(_jax_attention, masks, "xla"), {})
    if jax.default_backend() == "gpu":
        programs["cudnn"] = (functools.partial(_jax_attention, masks, "cudnn"), {})
        programs["triton_default"] = (functools.partial(flash_attention, implementation="pallas_triton", **masks), {})
        for name, make in (("triton", _our_triton), ("jax_triton", _jax_triton)):
            if name == "triton" or (row.shape.heads == row.shape.kv_heads and row.shape.window is None):
                for setting in _settings(row, known.get((name, row.shape), FORWARD_SETTING)):
                    text = " ".join(f"{key}={value}" for key, value in setting.items())
                    programs[f"{name} {text}"] = (make(row.shape, setting), setting)
    return programs


def _settings(row: Row, forward: Setting) -> Iterator[Setting]:
    """The grid of a row's pass; training keeps the forward pass at what was best there."""
    if row.kind == "decoding":
        grid = BLOCKS | {"block_q": (16,), "block_k": (32, 64, 128), "num_warps": (2, 4)}
    else:
        grid = BACKWARD_BLOCKS if row.has_backward else BLOCKS
    for values in itertools.product(*grid.values()):
        setting = dict(zip(grid, values, strict=True))
        if not row.has_backward:
            yield setting
        else:
            yield forward | _mirrored(**setting)


def _mirrored(block_q: int, block_k: int, num_warps: int) -> Setting:
    """Tiles of the backward pass of which those for queries mirror those for keys; JAX's kernel needs that."""
    dkv = {"block_q_dkv": block_q, "block_k_dkv": block_k, "num_warps_dkv": num_warps, "num_stages_dkv": 2}
    return dkv | {"block_q_dq": block_k, "block_k_dq": block_q, "num_warps_dq": num_warps, "num_stages_dq": 2}


def _our_triton(shape: Shape, setting: Setting) -> Function:
    return functools.partial(flash_attention, implementation="pallas_triton", **shape.masks, **setting)


def _jax_triton(shape: Shape, setting: Setting) -> Function:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # the module says on import that it will go
        from jax.experimental.pallas.ops.gpu import attention
    blocks = {"block_q": setting["block_q"], "block_k": setting["block_k"]}
    for ours, theirs in (
        ("block_q_dkv",) * 2,
        ("block_k_dkv", "block_kv_dkv"),
        ("block_q_dq",) * 2,
        ("block_k_dq", "block_kv_dq"),
    ):
        if ours in setting:
            blocks[theirs] = setting[ours]

    def mha(q: Any, k: Any, v: Any) -> Any:
        return attention.mha(
            q,
            k,
            v,
            None,
            sm_scale=shape.depth**-0.5,
            causal=shape.causal,
            block_sizes=attention.BlockSizes(**blocks),
            # One number for both passes there.
            num_warps=setting.get("num_warps_dkv", setting["num_warps"]),
            num_stages=setting["num_stages"],
        )

    return mha


def _jax_attention(masks: Mapping[str, Any], implementation: str, q: Any, k: Any, v: Any) -> Any:
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=masks["causal"], local_window_size=masks["window"], implementation=implementation
    )


# A row


def _run(row: Row, known: dict[Any, Setting], defaults: bool) -> dict[str, Any]:
    """Times all and checks the best of each name; `known` takes the best settings of forward passes."""
    programs = {label: program for label, program in _programs(row, known).items() if not (defaults and program[1])}
    arrays = jax.block_until_ready(row.shape.draw())
    timed, failures = _time({label: _whole(row, program) for label, (program, _) in programs.items()}, arrays)
    best: dict[str, str] = {}
    for label in sorted(timed, key=timed.__getitem__):
        best.setdefault(label.split()[0], label)
    seconds = {name: timed[label] for name, label in best.items()}
    if row.kind == "forward":
        known |= {(name, row.shape): programs[label][1] for name, label in best.items()}
    return {
        "row": row.label,
        "unit": "GB/s" if row.kind == "decoding" else "TFLOP/s",
        "seconds": seconds,
        "rates": {name: row.rate(value) for name, value in seconds.items()},
        "settings": {name: programs[label][1] for name, label in best.items()},
        "ratios": _ratios(row, seconds),
        "errors": _check(row, {name: _whole(row, programs[label][0]) for name, label in best.items()}, arrays),
        "all_seconds": timed,
        "failures": failures,
    }


def _whole(row: Row, attention: Function) -> Function:
    """What a row times, from (q, k, v, dout)."""
    return gradients(attention) if row.has_backward else lambda q, k, v, dout: attention(q, k, v)


def _time(programs: Mapping[str, Function], arrays: Any) -> tuple[dict[str, float], dict[str, str]]:
    """Median seconds by label, and the failures; compiled in parallel, launched in turns."""

    def run(q: Any, k: Any, v: Any, dout: Any, *, program: str) -> Any:
        return programs[program](q, k, v, dout)

    CONFIG.profiling_samples, CONFIG.max_measure_s = ROUNDS, SECONDS
    results = tune(run, hyperparams={"program": list(programs)}, progress=False).tune(*arrays)
    failures = {each.hyperparams["program"]: str(each.failure.message)[:200] for each in results.failures}
    return {each.hyperparams["program"]: each.median_s for each in results.timed}, failures


def _check(row: Row, programs: Mapping[str, Function], arrays: Any) -> dict[str, float]:
    """The largest error of each."""
    lowered = {name: jax.jit(program).lower(*arrays) for name, program in programs.items()}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = dict(zip(lowered, pool.map(lambda each: each.compile(), lowered.values()), strict=True))
    # One by one: cuDNN may fail where its first calls come from several threads at once.
    outs = {name: program(*arrays) for name, program in compiled.items()}
    expected = expect_rows(row.shape, arrays, of_gradient=row.has_backward)
    errors = {}
    for name, out in outs.items():
        of_rows = distance(rows_of(row.shape, jax.tree.leaves(out)[0]), expected)
        pairs = zip(jax.tree.leaves(out), jax.tree.leaves(outs["xla"]), strict=True)
        errors[name] = max(of_rows, *(distance(a, b) for a, b in pairs))
    return errors


def _ratios(row: Row, seconds: Mapping[str, float]) -> dict[str, float]:
    best = min(value for name, value in seconds.items() if name in BACKENDS)
    ratios = {"best / default": best / seconds["default"]}
    if {"triton", "jax_triton"} <= set(seconds):
        causal = ", causal" if row.shape.causal else ""
        ratios[f"jax_triton / triton{causal}"] = seconds["jax_triton"] / seconds["triton"]
    return ratios


# Printing


def _wrong(row: Row, report: Mapping[str, Any]) -> list[str]:
    return [name for name, error in report["errors"].items() if not error <= TOLERANCE[row.shape.dtype]]


def _print_row(row: Row, report: Mapping[str, Any], seconds: float) -> None:
    rates = ", ".join(f"{name} {rate:.4g}" for name, rate in sorted(report["rates"].items(), key=lambda item: -item[1]))
    ratios = ", ".join(f"{name} {ratio:.3f}" for name, ratio in report["ratios"].items())
    print(f"{report['row']}: {rates} {report['unit']}; {ratios}; largest error {max(report['errors'].values()):.1e}")
    if _wrong(row, report):
        print(f"  WRONG: {', '.join(_wrong(row, report))}")
    if report["failures"]:
        print(f"  {len(report['failures'])} failed, such as {next(iter(report['failures'].items()))}")
    print(f"  [{seconds:.0f} s]", flush=True)


def _print_verdicts(reports: list[dict[str, Any]]) -> None:
    for name, least in RATIOS.items():
        ratios = [report["ratios"][name] for report in reports if name in report["ratios"]]
        if ratios:
            worst = min(ratios)
            verdict = "met" if worst >= least else "MISSED"
            print(f"{name}: worst of {len(ratios)} rows {worst:.3f} (at least {least:g}: {verdict})")


if __name__ == "__main__":
    main()
