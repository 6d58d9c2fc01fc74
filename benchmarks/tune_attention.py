"""Make or complete the table of the fastest attention backends and tiles on this machine's device, by our tuner.

    python benchmarks/tune_attention.py
    python benchmarks/tune_attention.py --only "D128 causal" --minutes 5
    python benchmarks/tune_attention.py --out kernels/attention/tuned/NVIDIA_H200.json

`flash_attention` takes its defaults from the table: see `kernels/attention/tables.py` for what is in it. A key is a
call's shape and a pass. Each is tuned over the candidates of `flash_attention_space`; in the backward pass the walks
for the gradients of queries and of keys and values are timed apart in the same trace, so that each gets its own best
tiles. The file is written anew after each key, and keys that it has are passed over: the command can be stopped and
run again. Delete the file, or an entry, to measure again.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import os
import pathlib
import re
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from _attention import Shape, gradients
from _common import describe_host

from tune_jax import tune
from tune_jax.kernels import flash_attention, flash_attention_space
from tune_jax.kernels.attention import tables
from tune_jax.kernels.attention.checks import read_call

Tiles = dict[str, int]

FORWARD, BACKWARD = "forward", "backward"
# What the profiler calls the kernels of the backward pass contains these.
KERNELS = {"_dkv": "backward_keys", "_dq": "backward_queries"}


@dataclasses.dataclass(frozen=True)
class Key:
    """A row of the table to be."""

    walk: str
    shape: Shape

    @property
    def label(self) -> str:
        return f"{self.walk} {self.shape.label}"

    @property
    def situation(self) -> tables.Situation:
        """What the table knows it by."""
        arrays = jax.eval_shape(self.shape.draw)[:3]
        found: list[tables.Situation] = []
        jax.eval_shape(lambda *qkv: found.append(tables.Situation.of(*read_call(*qkv, **self.shape.masks))), *arrays)
        return found[0]


def _square(batch: int, length: int, heads: int, depth: int, causal: bool, **more: Any) -> Shape:
    return Shape(batch, length, length, heads, more.pop("kv_heads", heads), depth, causal, **more)


SHAPES = [
    _square(2, 4096, 16, 128, True),
    _square(2, 4096, 16, 128, False),
    _square(4, 4096, 16, 64, True),
    _square(4, 4096, 16, 64, False),
    _square(2, 4096, 8, 256, True),
    _square(2, 4096, 8, 256, False),
    _square(8, 1024, 16, 128, True),
    _square(1, 16384, 16, 128, True),
    _square(2, 8192, 32, 128, True, kv_heads=8),
    _square(1, 32768, 16, 128, True, window=1024),
]
FORWARD_SHAPES = [
    _square(8, 1024, 16, 128, False),
    _square(1, 16384, 16, 128, False),
    _square(8, 1024, 16, 64, True),
    _square(8, 1024, 8, 256, True),
    Shape(1, 1, 32768, 32, 8, 128),
    Shape(16, 1, 32768, 32, 8, 128),
]
KEYS = [
    *(Key(FORWARD, shape) for shape in (*SHAPES, *FORWARD_SHAPES)),
    *(Key(BACKWARD, shape) for shape in SHAPES),
]


def main() -> None:
    options = _read_options()
    started = time.monotonic()
    kind = jax.devices()[0].device_kind
    path = pathlib.Path(options.out or tables.FOLDER / tables.file_name(kind))
    table = _load(path, kind)
    wanted = [key for key in KEYS if re.search(options.only, key.label)]
    for number, key in enumerate(wanted, 1):
        if _is_in(table, key):
            print(f"{number}/{len(wanted)} {key.label}: there already", flush=True)
            continue
        if time.monotonic() - started > options.minutes * 60:
            print(f"{options.minutes:g} minutes are over; run this again for the rest", flush=True)
            break
        before = time.monotonic()
        try:
            table["entries"].append(_tune(key, table))
        except ValueError as error:  # no candidate runs: the other keys go on
            print(f"{number}/{len(wanted)} {key.label}: {error}", flush=True)
            continue
        _write(path, table)
        print(f"{number}/{len(wanted)} {_describe(key, table['entries'][-1], time.monotonic() - before)}", flush=True)
    print(f"{len(table['entries'])} entries in {path}")


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", help="the table; by default that of this device in the package")
    parser.add_argument("--only", default="", help="a pattern; keys whose label it is found in")
    parser.add_argument("--minutes", type=float, default=60, help="after these, no further key is begun")
    return parser.parse_args()


# The file


def _load(path: pathlib.Path, kind: str) -> dict[str, Any]:
    if not path.exists():
        made_by = {"command": "python benchmarks/tune_attention.py", **describe_host()}
        return {"format": tables.FORMAT, "device_kind": kind, "made_by": made_by, "entries": []}
    table = json.loads(path.read_text())
    if (table["format"], table["device_kind"]) != (tables.FORMAT, kind):
        raise SystemExit(f"{path} is of format {table['format']} and for {table['device_kind']}; this is {kind}")
    return table


def _write(path: pathlib.Path, table: Mapping[str, Any]) -> None:
    """Into a file of its own first: whoever reads meanwhile finds a whole one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    entries = ",\n".join(f"    {json.dumps(entry)}" for entry in table["entries"])
    head = json.dumps({**table, "entries": []}, indent=2).removesuffix("[]\n}")
    unfinished.write_text(f"{head}[\n{entries}\n  ]\n}}\n")
    unfinished.replace(path)


def _is_in(table: Mapping[str, Any], key: Key) -> bool:
    return any((e.walk, e.situation) == (key.walk, key.situation) for e in tables.parse_table(table))


def _describe(key: Key, entry: Mapping[str, Any], seconds: float) -> str:
    times = ", ".join(f"{name} {found['relative']:.2f}" for name, found in entry["backends"].items())
    return f"{key.label}: {entry['fastest']} {entry['median_us']:.0f} us ({times}), {seconds:.0f} s"


# A key


def _tune(key: Key, table: Mapping[str, Any]) -> dict[str, Any]:
    arrays = jax.block_until_ready(key.shape.draw())
    best = _tune_forward(key, arrays[:3]) if key.walk == FORWARD else _tune_backward(key, arrays, table)
    fastest_s = min(seconds for seconds, _ in best.values())
    ranked = sorted(best.items(), key=lambda item: item[1][0])
    return {
        "walk": key.walk,
        **dataclasses.asdict(key.situation),
        "fastest": ranked[0][0],
        "median_us": round(fastest_s * 1e6, 2),
        "backends": {
            name: {"relative": round(seconds / fastest_s, 4), "tiles": tiles} for name, (seconds, tiles) in ranked
        },
    }


Best = dict[str, tuple[float, Tiles]]


def _tune_forward(key: Key, arrays: Sequence[Any]) -> Best:
    def attention(q: Any, k: Any, v: Any, *, implementation: str, **tiles: int) -> Any:
        return flash_attention(q, k, v, implementation=implementation, **key.shape.masks, **tiles)

    return _best_of_each(_time(attention, _grids(key, arrays), arrays))


def _tune_backward(key: Key, arrays: Sequence[Any], table: Mapping[str, Any]) -> Best:
    """Both walks at once over mirrored tiles; then the best of each together against the best pair and the others."""
    forward_tiles = _known_forward_tiles(key, table)

    def training(q: Any, k: Any, v: Any, dout: Any, *, implementation: str, **tiles: int) -> Any:
        fixed = forward_tiles if implementation == "pallas_triton" else {}
        options = {"implementation": implementation, **key.shape.masks, **fixed, **tiles}
        return gradients(functools.partial(flash_attention, **options))(q, k, v, dout)

    rows = _time(training, _grids(key, arrays[:3]), arrays)
    best = _best_of_each(rows)
    joined = _join_walks(rows)
    if joined and joined != best["pallas_triton"][1]:
        settings = [{"implementation": name, **tiles} for name, (_, tiles) in best.items()]
        settings.append({"implementation": "pallas_triton", **joined})
        best = _best_of_each(_time(training, [{n: [v] for n, v in each.items()} for each in settings], arrays))
    return best


def _known_forward_tiles(key: Key, table: Mapping[str, Any]) -> Tiles:
    entry = tables.nearest(tables.parse_table(table), FORWARD, key.situation, "pallas_triton")
    return {} if entry is None else dict(entry.tiles["pallas_triton"])


def _grids(key: Key, arrays: Sequence[Any]) -> list[dict[str, list[Any]]]:
    """The space of the call; of the backend for all devices its defaults alone, which take long enough to compile."""
    space = flash_attention_space(*arrays, tune_pass=key.walk, **key.shape.masks)
    others = [grid for grid in space if grid["implementation"] != ["xla"]]
    return [*others, {"implementation": ["xla"]}]


def _time(function: Any, grids: Sequence[Mapping[str, Any]], arrays: Sequence[Any]) -> Sequence[Any]:
    results = tune(function, hyperparams=list(grids), progress=False).tune(*arrays)
    if results.failures:
        reasons = {f"{row.failure.error_type}: {row.failure.message}"[:120] for row in results.failures}
        print(f"  {len(results.failures)} of {len(results)} failed: {'; '.join(sorted(reasons)[:3])}", flush=True)
    return results.timed


def _best_of_each(rows: Iterable[Any]) -> Best:
    """Seconds and tiles of each implementation's fastest row; rows come fastest first."""
    best: Best = {}
    for row in rows:
        tiles = {name: value for name, value in row.hyperparams.items() if name != "implementation"}
        best.setdefault(row.hyperparams["implementation"], (row.median_s, tiles))
    return best


def _join_walks(rows: Iterable[Any]) -> Tiles:
    """The tiles of each walk of the row in which that walk's kernel alone was the fastest; none if none is found."""
    joined: Tiles = {}
    for walk, kernel in KERNELS.items():
        timed = [(_kernel_ns(row, kernel), row) for row in rows if row.hyperparams["implementation"] == "pallas_triton"]
        timed = [(ns, row) for ns, row in timed if ns is not None]
        if not timed:
            return {}
        row = min(timed, key=lambda pair: pair[0])[1]
        joined |= {name: value for name, value in row.hyperparams.items() if name.endswith(walk)}
    return joined


def _kernel_ns(row: Any, name: str) -> float | None:
    """Mean duration of the kernels with that name."""
    found = [kernel for kernel in row.kernels if name in kernel.name]
    return float(np.sum([k.total_ns for k in found]) / np.sum([k.count for k in found])) if found else None


if __name__ == "__main__":
    main()
