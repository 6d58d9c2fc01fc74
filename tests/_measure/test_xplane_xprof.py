"""xprof reads the same traces on its own; its kernel times must be ours. It leaves copies and memsets out."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from tune_jax._measure.xplane import read_launches

raw_to_tool_data = pytest.importorskip("xprof.convert.raw_to_tool_data", exc_type=ImportError)

TRACES = Path(__file__).parents[1] / "data" / "traces"
MANIFEST = json.loads((TRACES / "manifest.json").read_text())["traces"]


def sum_with_xprof(trace: bytes, folder: Path) -> tuple[Counter[str], Counter[str]]:
    path = folder / "host.xplane.pb"
    path.write_bytes(trace)
    data, _ = raw_to_tool_data.xspace_to_tool_data([str(path)], "kernel_stats", {})
    table = json.loads(data)
    places = {column["id"]: place for place, column in enumerate(table["cols"])}
    total_ns: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for row in table["rows"]:
        name = row["c"][places["kernel_name"]]["v"]
        total_ns[name] += row["c"][places["total_duration_us"]]["v"] * 1000
        counts[name] += int(row["c"][places["occurrences"]]["v"])
    return total_ns, counts


def sum_with_ours(trace: bytes, order: list[str]) -> tuple[Counter[str], Counter[str]]:
    total_ns: Counter[str] = Counter()
    counts: Counter[str] = Counter()
    for launch in read_launches(trace, order):
        for kernel in launch.kernels if launch else ():
            if not kernel.name.startswith(("Memcpy", "Memset")):
                total_ns[kernel.name] += kernel.total_ns
                counts[kernel.name] += kernel.count
    return total_ns, counts


@pytest.mark.parametrize("name", sorted(MANIFEST))
def test_xprof_sums_every_kernel_to_our_time_and_count(name: str, tmp_path: Path) -> None:
    trace = (TRACES / f"{name}.xplane.pb").read_bytes()
    their_ns, their_counts = sum_with_xprof(trace, tmp_path)
    our_ns, our_counts = sum_with_ours(trace, [f"jit_{program}" for program in MANIFEST[name]["launches"]])
    assert our_counts == their_counts
    assert our_ns == pytest.approx(their_ns, rel=1e-3)
    assert sum(our_ns.values()) == pytest.approx(sum(their_ns.values()), rel=1e-3)
