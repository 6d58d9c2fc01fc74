"""Traces recorded on an H200, checked against sums made by a plain loop over their events."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from tune_jax._measure.xplane import read_launches
from tune_jax._records import LaunchTime

TRACES = Path(__file__).parents[1] / "data" / "traces"
MANIFEST = json.loads((TRACES / "manifest.json").read_text())["traces"]
ORDERS = {name: [f"jit_{program}" for program in entry["launches"]] for name, entry in MANIFEST.items()}

# trace, program, launches, events, kinds of event, sum of durations, union of intervals (ns)
TABLE = [
    ("attention3", "jit_candidate_0", 2, 2, 1, 38433, 38433),
    ("attention3", "jit_candidate_1", 2, 2, 1, 40096, 40096),
    ("attention3", "jit_candidate_2", 2, 2, 1, 42976, 42976),
    ("cudnn_and_xla", "jit_candidate_0", 2, 8, 2, 32544, 32544),
    ("cudnn_and_xla", "jit_candidate_1", 2, 14, 6, 156768, 149472),
    ("fori", "jit__lambda", 2, 124, 3, 417889, 417889),
    ("graphs_and_noop", "jit_candidate_0", 2, 14, 7, 29728, 28960),
    ("graphs_and_noop", "jit_candidate_1", 2, 4, 2, 25664, 25664),
    ("graphs_and_noop", "jit_candidate_2", 2, 2, 1, 2784, 2784),
    ("graphs_and_noop", "jit_candidate_3", 2, 2, 1, 4448, 4448),
    ("host_callback", "jit_candidate_0", 2, 8, 4, 483776, 483776),
    ("host_callback", "jit_candidate_1", 2, 4, 2, 24512, 24512),
    ("loops_and_cond", "jit_candidate_0", 2, 34, 4, 39039, 39039),
    ("loops_and_cond", "jit_candidate_1", 2, 106, 4, 123486, 123486),
    ("loops_and_cond", "jit_candidate_2", 2, 8, 4, 9344, 9344),
    ("mosaic_two", "jit_candidate_0", 2, 2, 1, 15328, 15328),
    ("mosaic_two", "jit_candidate_1", 2, 2, 1, 10817, 10817),
    ("multi_lean", "jit__lambda", 3, 21, 7, 42946, 41410),
    ("triton_three_rounds", "jit_candidate_0", 3, 3, 1, 58048, 58048),
    ("triton_three_rounds", "jit_candidate_1", 3, 3, 1, 60317, 60317),
    ("triton_three_rounds", "jit_candidate_2", 3, 3, 1, 50208, 50208),
]


def load(name: str) -> bytes:
    return (TRACES / f"{name}.xplane.pb").read_bytes()


def read(name: str, kernel_filter: re.Pattern[str] | None = None) -> list[LaunchTime]:
    times = read_launches(load(name), ORDERS[name], kernel_filter=kernel_filter)
    return [time for time in times if time is not None]


def test_the_table_covers_every_trace() -> None:
    assert {row[0] for row in TABLE} == {path.name.partition(".")[0] for path in TRACES.glob("*.xplane.pb")}


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_every_launch_is_found_in_its_place(name: str) -> None:
    assert [time.program for time in read(name)] == ORDERS[name]


@pytest.mark.parametrize("row", TABLE, ids=lambda row: f"{row[0]}-{row[1]}")
def test_sums_and_unions_are_those_of_the_table(row: tuple[str, str, int, int, int, int, int]) -> None:
    name, program, launches, events, kinds, sum_ns, union_ns = row
    times = [time for time in read(name) if time.program == program]
    kernels = [kernel for time in times for kernel in time.kernels]
    assert len(times) == launches
    assert sum(kernel.count for kernel in kernels) == events
    assert len({kernel.name for kernel in kernels}) == kinds
    assert sum(kernel.total_ns for kernel in kernels) == sum_ns
    assert sum(time.busy_ns for time in times) == union_ns


@pytest.mark.parametrize("name", sorted(ORDERS))
def test_launches_of_one_program_have_equal_kernels(name: str) -> None:
    counts: dict[str, set[tuple[tuple[str, str, int], ...]]] = {}
    for launch in read(name):
        kernels = tuple((kernel.name, kernel.op_name, kernel.count) for kernel in launch.kernels)
        counts.setdefault(launch.program, set()).add(kernels)
    assert {len(kinds) for kinds in counts.values()} == {1}


def test_a_host_callback_counts_in_the_span_but_not_as_busy() -> None:
    with_callback = [time for time in read("host_callback") if time.program == "jit_candidate_0"]
    assert [round(time.span_ns) for time in with_callback] == [24186872, 21785750]
    assert all(time.busy_ns < 300_000 and time.span_ns > 20e6 for time in with_callback)


def test_copies_that_carry_the_program_are_kernels_with_their_op() -> None:
    launch = read("host_callback")[0]
    assert [(kernel.name, kernel.op_name) for kernel in launch.kernels] == [
        ("gemm_fusion_dot_general_2", "jit(candidate_0)/dot_general"),
        ("MemcpyD2H", "jit(candidate_0)/pure_callback"),
        ("MemcpyH2D", "jit(candidate_0)/pure_callback"),
        ("gemm_fusion_dot_general_3", "jit(candidate_0)/dot_general"),
    ]


def test_a_program_that_returns_its_input_is_one_copy() -> None:
    launch = read("graphs_and_noop")[2]
    assert [(kernel.name, kernel.op_name, kernel.count) for kernel in launch.kernels] == [("MemcpyD2D", "copy.1", 1)]


def test_kernels_of_a_graph_go_by_their_own_names() -> None:
    kernels = read("graphs_and_noop")[0].kernels
    assert [kernel.op_name for kernel in kernels] == [kernel.name for kernel in kernels]
    assert kernels[1].name == "gemm_fusion_dot_general_1"


def test_kernels_of_a_loop_are_counted_for_each_launch() -> None:
    counts = {kernel.name: kernel.count for kernel in read("loops_and_cond")[1].kernels}
    assert counts["gemm_fusion_dot"] == 17


def test_one_launch_has_the_time_of_its_own_events() -> None:
    first = read("triton_three_rounds")[0]
    assert (first.busy_ns, first.span_ns, first.kernels[0].total_ns) == (19360, 19360, 19360)


def test_programs_that_the_order_does_not_name_are_ignored() -> None:
    times = read_launches(load("triton_three_rounds"), ["jit_candidate_1"] * 3)
    assert [time and time.program for time in times] == ["jit_candidate_1"] * 3
    assert sum(time.busy_ns for time in times if time) == 60317


def test_a_program_that_launched_nothing_shifts_no_other() -> None:
    order = [name for program in ORDERS["mosaic_two"] for name in (program, "jit_nothing")]
    times = read_launches(load("mosaic_two"), order)
    assert times[::2] == read("mosaic_two")
    assert times[1::2] == [None] * 4


def test_the_filter_keeps_kernels_by_name() -> None:
    launch = read("host_callback", re.compile("^gemm"))[0]
    assert [kernel.name for kernel in launch.kernels] == [
        "gemm_fusion_dot_general_2",
        "gemm_fusion_dot_general_3",
    ]
    assert launch.busy_ns == sum(kernel.total_ns for kernel in launch.kernels) < 20_000


@pytest.mark.parametrize("pattern", [r"pure_callback\.1", "/pure_callback"])
def test_the_filter_keeps_kernels_by_hlo_op_and_op_path(pattern: str) -> None:
    launch = read("host_callback", re.compile(pattern))[0]
    assert [kernel.name for kernel in launch.kernels] == ["MemcpyD2H", "MemcpyH2D"]


def test_the_filter_finds_kernels_inside_a_graph() -> None:
    launch = read("cudnn_and_xla", re.compile("gemm_fusion_dot_5"))[1]
    assert [(kernel.name, kernel.count) for kernel in launch.kernels] == [("gemm_fusion_dot_5", 1)]
    assert launch.busy_ns == launch.span_ns == 24160


def test_the_filter_does_not_see_the_program_name() -> None:
    launch = read("graphs_and_noop", re.compile("jit_candidate"))[0]
    assert launch.kernels == ()


def test_a_filter_that_matches_nothing_is_not_a_missing_launch() -> None:
    times = read_launches(load("mosaic_two"), ["jit_candidate_0", "jit_nothing"], kernel_filter=re.compile("no"))
    assert times == [LaunchTime("jit_candidate_0", 0.0, 0.0, ()), None]


def test_a_trace_of_150_events_is_read_in_milliseconds() -> None:
    trace, order = load("loops_and_cond"), ORDERS["loops_and_cond"]
    seconds = []
    for _ in range(5):
        start = time.perf_counter()
        read_launches(trace, order)
        seconds.append(time.perf_counter() - start)
    assert min(seconds) < 0.05
