"""The kernels that each candidate launched."""

from __future__ import annotations

import pytest

from tune_jax._records import KernelTime
from tune_jax._report.kernels import merge_kernels, tabulate_kernels
from tune_jax._results import Row


def timed(id, *kernels, launches=2):
    return Row(id, {}, (100.0,) * launches, clock="device", kernels=kernels, slowdown=1.0)


def test_a_line_is_id_kernel_count_per_launch_and_share():
    table = tabulate_kernels([timed(3, KernelTime("dot", "a", 2, 300.0), KernelTime("add", "b", 4, 100.0))])
    assert table.lines == (("3", "dot", "1", "75.0%"), ("3", "add", "2", "25.0%"))


def test_the_longest_kernel_comes_first():
    table = tabulate_kernels([timed(0, KernelTime("short", "", 2, 1.0), KernelTime("long", "", 2, 9.0))])
    assert [line[1] for line in table.lines] == ["long", "short"]


def test_shares_add_up():
    kernels = [KernelTime(str(i), "", 2, 10.0) for i in range(4)]
    shares = [line[3] for line in tabulate_kernels([timed(0, *kernels)]).lines]
    assert sum(float(share.rstrip("%")) for share in shares) == pytest.approx(100.0)


def test_a_kernel_that_runs_in_some_launches_counts_in_part():
    table = tabulate_kernels([timed(0, KernelTime("rare", "", 1, 1.0), launches=4)])
    assert table.lines[0][2] == "0.25"


def test_kernels_of_one_name_are_one():
    kernels = [KernelTime("fusion", "a", 2, 10.0), KernelTime("fusion", "b", 1, 5.0)]
    assert merge_kernels(kernels) == [KernelTime("fusion", "a", 3, 15.0)]


def test_equal_times_go_by_name():
    kernels = [KernelTime("b", "", 1, 5.0), KernelTime("a", "", 1, 5.0)]
    assert [kernel.name for kernel in merge_kernels(kernels)] == ["a", "b"]


def test_a_long_name_is_cut_visibly():
    name = tabulate_kernels([timed(0, KernelTime("k" * 300, "", 2, 1.0))]).lines[0][1]
    assert (len(name), "…" in name) == (60, True)


def test_no_time_at_all_has_no_share():
    assert tabulate_kernels([timed(0, KernelTime("empty", "", 2, 0.0))]).lines[0][3] == ""


def test_a_row_without_kernels_has_no_line():
    table = tabulate_kernels([timed(0), timed(1, KernelTime("k", "", 2, 1.0))])
    assert [line[0] for line in table.lines] == ["1"]


def test_no_kernels_at_all_is_a_sentence():
    table = tabulate_kernels([timed(0), timed(1)])
    assert (table.lines, table.title) == ((), "Kernels: none were seen, so their times are not known.")


def test_rows_left_out_are_dots():
    rows = [timed(i, KernelTime("k", "", 2, 1.0)) for i in range(5)]
    assert [line[0] for line in tabulate_kernels(rows, head=1, tail=1).lines] == ["0", "...", "4"]
