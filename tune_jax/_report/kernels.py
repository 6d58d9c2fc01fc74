"""The kernels that each candidate launched."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from tune_jax._records import KernelTime
from tune_jax._results import Row, Table, pick_ends, shorten

_LONGEST_NAME = 60
_HEADERS = ("id", "kernel", "per launch", "share")


def tabulate_kernels(rows: Sequence[Row], *, head: int | None = None, tail: int | None = None) -> Table:
    """A line for each kernel of each timed row: how often per launch, and its share of the summed time."""
    if not any(row.kernels for row in rows):
        return Table("Kernels: none were seen, so their times are not known.")
    lines: list[tuple[str, ...]] = []
    for row in pick_ends(rows, head=head, tail=tail):
        lines.extend([("...",) * len(_HEADERS)] if row is None else _list_lines(row))
    title = "Kernels: how often in one launch, and share of the summed kernel time"
    return Table(title, _HEADERS, tuple(lines), ("right", "left", "right", "right"))


def merge_kernels(kernels: Sequence[KernelTime]) -> list[KernelTime]:
    """One entry a kernel name, the longest time first: a kernel can serve several operations."""
    merged: dict[str, KernelTime] = {}
    for kernel in kernels:
        seen = merged.get(kernel.name, dataclasses.replace(kernel, count=0, total_ns=0.0))
        count, total_ns = seen.count + kernel.count, seen.total_ns + kernel.total_ns
        merged[kernel.name] = dataclasses.replace(seen, count=count, total_ns=total_ns)
    return sorted(merged.values(), key=lambda kernel: (-kernel.total_ns, kernel.name))


def _list_lines(row: Row) -> list[tuple[str, ...]]:
    kernels, launches = merge_kernels(row.kernels), len(row.samples_ns)
    whole_ns = sum(kernel.total_ns for kernel in kernels)
    return [
        (
            str(row.id),
            shorten(kernel.name, _LONGEST_NAME),
            f"{kernel.count / launches:.4g}",
            f"{100 * kernel.total_ns / whole_ns:.1f}%" if whole_ns else "",
        )
        for kernel in kernels
    ]
