"""Traces written by hand: what the recorded ones do not show."""

from __future__ import annotations

import re

import pytest
from jax.profiler import ProfileData

from tune_jax._errors import ProfileError
from tune_jax._measure.xplane import read_launches
from tune_jax._records import KernelTime, LaunchTime

# name, start and end in ns, stats
Row = tuple[str, int, int, dict[str, str | int]]


def make_trace(planes: dict[str, dict[str, list[Row]]]) -> bytes:
    text = "".join(f'planes {{ name: "{name}" {make_plane(lines)} }}' for name, lines in planes.items())
    return bytes(ProfileData.text_proto_to_serialized_xspace(text))


def make_plane(lines: dict[str, list[Row]]) -> str:
    rows = [row for line in lines.values() for row in line]
    names = {name: index for index, name in enumerate(dict.fromkeys(row[0] for row in rows), 1)}
    stats = {name: index for index, name in enumerate(dict.fromkeys(stat for row in rows for stat in row[3]), 1)}
    written = [make_line(line, events, names, stats) for line, events in lines.items()]
    written += [make_metadata("event_metadata", name, key) for name, key in names.items()]
    written += [make_metadata("stat_metadata", name, key) for name, key in stats.items()]
    return " ".join(written)


def make_metadata(kind: str, name: str, key: int) -> str:
    return f'{kind} {{ key: {key} value {{ id: {key} name: "{name}" }} }}'


def make_line(name: str, rows: list[Row], names: dict[str, int], stats: dict[str, int]) -> str:
    events = []
    for event, start, end, own in rows:
        values = " ".join(make_stat(stats[stat], value) for stat, value in own.items())
        times = f"offset_ps: {start * 1000} duration_ps: {(end - start) * 1000}"
        events.append(f"events {{ metadata_id: {names[event]} {times} {values} }}")
    return f'lines {{ name: "{name}" timestamp_ns: 1000 {" ".join(events)} }}'


def make_stat(key: int, value: str | int) -> str:
    field = f'str_value: "{value}"' if isinstance(value, str) else f"int64_value: {value}"
    return f"stats {{ metadata_id: {key} {field} }}"


def kernel(module: str, name: str, start: int, end: int, /, **stats: str | int) -> Row:
    return (name, start, end, {"hlo_module": module, "hlo_op": f"{name}.1", **stats})


def make_gpu_trace(*devices: list[Row], line: str = "Stream #1(Compute)") -> bytes:
    planes = {f"/device:GPU:{index}": {line: rows} for index, rows in enumerate(devices)}
    return make_trace({**planes, "/host:CPU": {"Host Threads/1": [("cuLaunch", 0, 5, {})]}})


def busy(times: list[LaunchTime | None]) -> list[float | None]:
    return [time and time.busy_ns for time in times]


# GPU


def test_kernels_on_two_streams_count_once_where_they_overlap() -> None:
    streams = {
        "Stream #1(Compute)": [kernel("a", "x", 0, 10)],
        "Stream #2(Compute)": [kernel("a", "y", 5, 20)],
    }
    (time,) = read_launches(make_trace({"/device:GPU:0": streams}), ["a"])
    assert time == LaunchTime("a", 20.0, 20.0, (KernelTime("x", "x.1", 1, 10.0), KernelTime("y", "y.1", 1, 15.0)))


def test_kernels_come_in_order_of_first_appearance() -> None:
    rows = [kernel("a", "y", 20, 30), kernel("a", "x", 0, 10), kernel("a", "y", 40, 55)]
    (time,) = read_launches(make_gpu_trace(rows), ["a"])
    assert time is not None
    assert time.kernels == (KernelTime("x", "x.1", 1, 10.0), KernelTime("y", "y.1", 2, 25.0))


def test_the_slowest_device_counts_for_each_launch() -> None:
    first = [kernel("a", "x", 0, 10), kernel("b", "x", 20, 50)]
    second = [kernel("a", "x", 0, 15), kernel("b", "x", 20, 40)]
    assert busy(read_launches(make_gpu_trace(first, second), ["a", "b"])) == [15, 30]


def test_the_span_and_the_kernels_are_those_of_the_slowest_device() -> None:
    idle = [kernel("a", "x", 0, 1), kernel("a", "x", 99, 100)]
    (time,) = read_launches(make_gpu_trace(idle, [kernel("a", "y", 0, 7)]), ["a"])
    assert time == LaunchTime("a", 7.0, 7.0, (KernelTime("y", "y.1", 1, 7.0),))


def test_a_program_on_the_second_device_only_is_found_there() -> None:
    times = read_launches(make_gpu_trace([kernel("a", "x", 0, 10)], [kernel("b", "x", 20, 25)]), ["a", "b"])
    assert busy(times) == [10, 5]


def test_a_plane_without_our_events_beside_one_with_them_is_ignored() -> None:
    times = read_launches(make_gpu_trace([kernel("other", "x", 0, 90)], [kernel("a", "x", 0, 10)]), ["a"])
    assert busy(times) == [10]


def test_a_missing_launch_is_none_and_shifts_no_other() -> None:
    rows = [
        kernel("a", "x", 0, 10),
        kernel("b", "x", 20, 25),
        kernel("b", "x", 60, 66),
        kernel("a", "x", 70, 79),
    ]
    rows[2:2] = [kernel("c", "x", 40, 43)]
    times = read_launches(make_gpu_trace(rows), ["a", "b", "c", "a", "b", "c", "a"])
    assert busy(times) == [10, 5, 3, None, 6, None, 9]


def test_equal_neighbours_are_separate_launches() -> None:
    rows = [kernel("a", name, start, start + 5) for start, name in enumerate_starts("xyxyxy")]
    assert busy(read_launches(make_gpu_trace(rows), ["a", "a", "a"])) == [10, 10, 10]


def enumerate_starts(names: str) -> list[tuple[int, str]]:
    return [(10 * place, name) for place, name in enumerate(names)]


def test_a_program_that_launches_nothing_is_none() -> None:
    rows = [kernel("a", "x", 0, 10), kernel("a", "x", 20, 31)]
    assert busy(read_launches(make_gpu_trace(rows), ["a", "noop", "a", "noop"])) == [10, None, 11, None]


def test_events_without_a_program_are_not_device_time() -> None:
    rows = [kernel("a", "x", 0, 10), ("MemcpyH2D", 12, 90, {"correlation_id": 3})]
    assert busy(read_launches(make_gpu_trace(rows), ["a"])) == [10]


def test_lines_that_are_no_streams_are_ignored() -> None:
    lines = {"Stream #1": [kernel("a", "x", 0, 10)], "XLA Ops": [kernel("a", "x", 0, 90)]}
    assert busy(read_launches(make_trace({"/device:GPU:0": lines}), ["a"])) == [10]


def test_a_kernel_goes_by_its_op_path_where_it_has_one() -> None:
    rows = [
        kernel("a", "x", 0, 1, name="jit(a)/dot", tf_op="XlaModule:"),
        kernel("a", "y", 1, 2, tf_op="jit(a)/add"),
        kernel("a", "z", 2, 3, tf_op="XlaModule:"),
        ("w", 3, 4, {"hlo_module": "a", "hlo_op": "command_buffer_2"}),
        ("v", 4, 5, {"hlo_module": "a"}),
    ]
    (time,) = read_launches(make_gpu_trace(rows), ["a"])
    assert time is not None
    assert [each.op_name for each in time.kernels] == ["jit(a)/dot", "jit(a)/add", "z.1", "w", "v"]


@pytest.mark.parametrize("end", [0, -5])
def test_zero_and_negative_durations_count_as_nothing(end: int) -> None:
    (time,) = read_launches(make_gpu_trace([kernel("a", "x", 0, end)]), ["a"])
    assert time == LaunchTime("a", 0.0, 0.0, (KernelTime("x", "x.1", 1, 0.0),))


def test_the_host_plane_is_no_device_when_a_gpu_ran_the_program() -> None:
    host = [kernel("a", "x", 0, 500, run_id=1, device_ordinal=0)]
    planes = {"/device:GPU:0": {"Stream #1": [kernel("a", "x", 0, 10)]}, "/host:CPU": {"pool": host}}
    assert busy(read_launches(make_trace(planes), ["a"])) == [10]


def test_a_cpu_program_is_read_though_the_trace_has_a_gpu() -> None:
    host = [kernel("a", "x", 0, 500, run_id=1, device_ordinal=0)]
    planes = {"/device:GPU:0": {"Stream #1": [kernel("b", "x", 0, 10)]}, "/host:CPU": {"pool": host}}
    assert busy(read_launches(make_trace(planes), ["a"])) == [500]


# CPU


def make_cpu_trace(**lines: list[Row]) -> bytes:
    return make_trace({"/host:CPU": lines})


def op(name: str, start: int, end: int, run_id: int, device: int = 0, module: str = "a") -> Row:
    return (
        name,
        start,
        end,
        {"hlo_module": module, "hlo_op": name, "run_id": run_id, "device_ordinal": device},
    )


def test_a_run_id_is_a_launch_whatever_its_value() -> None:
    trace = make_cpu_trace(pool=[op("x", 0, 10, -7), op("x", 20, 25, -9), op("x", 30, 33, 4)])
    assert busy(read_launches(trace, ["a", "a", "a"])) == [10, 5, 3]


def test_threads_of_one_launch_are_united() -> None:
    trace = make_cpu_trace(one=[op("x", 0, 10, 1)], two=[op("y", 4, 16, 1)])
    (time,) = read_launches(trace, ["a"])
    assert time == LaunchTime("a", 16.0, 16.0, (KernelTime("x", "x", 1, 4.0), KernelTime("y", "y", 1, 12.0)))


def test_a_loop_gets_what_its_body_leaves() -> None:
    trace = make_cpu_trace(pool=[op("while", 0, 100, 1), op("dot", 10, 40, 1), op("dot", 50, 90, 1)])
    (time,) = read_launches(trace, ["a"])
    assert time is not None
    assert time.kernels == (KernelTime("while", "while", 1, 30.0), KernelTime("dot", "dot", 2, 70.0))
    assert time.busy_ns == 100


def test_a_filtered_loop_keeps_its_whole_time() -> None:
    trace = make_cpu_trace(pool=[op("while", 0, 100, 1), op("dot", 10, 40, 1)])
    (time,) = read_launches(trace, ["a"], kernel_filter=re.compile("while"))
    assert time == LaunchTime("a", 100.0, 100.0, (KernelTime("while", "while", 1, 100.0),))


def test_cpu_devices_are_told_apart_and_the_slowest_counts() -> None:
    trace = make_cpu_trace(one=[op("x", 0, 10, 1, 0), op("x", 20, 50, 2, 1)], two=[op("x", 0, 15, 1, 1)])
    assert busy(read_launches(trace, ["a", "a"])) == [15, 30]


def test_host_events_without_a_program_are_not_device_time() -> None:
    dispatch: list[Row] = [("PjitFunction(a)", 0, 900, {}), ("ThunkExecutor::Execute", 0, 900, {"run_id": 1})]
    assert busy(read_launches(make_cpu_trace(python=dispatch, pool=[op("x", 0, 10, 1)]), ["a"])) == [10]


# TPU


def make_tpu_trace(modules: list[Row], ops: list[Row], plane: str = "/device:TPU:0") -> bytes:
    return make_trace({plane: {"Steps": [("1", 0, 999, {})], "XLA Modules": modules, "XLA Ops": ops}})


def test_tpu_ops_belong_to_the_module_event_that_holds_them() -> None:
    modules: list[Row] = [("jit_a(123)", 0, 50, {}), ("jit_b(45)", 60, 90, {}), ("jit_a(123)", 100, 150, {})]
    ops: list[Row] = [("x", 0, 20, {}), ("y", 30, 40, {}), ("x", 60, 75, {}), ("x", 100, 121, {})]
    times = read_launches(make_tpu_trace(modules, ops), ["jit_a", "jit_b", "jit_a"])
    assert times[0] == LaunchTime("jit_a", 30.0, 40.0, (KernelTime("x", "x", 1, 20.0), KernelTime("y", "y", 1, 10.0)))
    assert busy(times) == [30, 15, 21]


def test_tpu_ops_outside_our_modules_are_ignored() -> None:
    modules: list[Row] = [("jit_a(1)", 0, 50, {}), ("jit_other(2)", 60, 90, {})]
    ops: list[Row] = [("x", 0, 20, {}), ("x", 60, 80, {}), ("x", 95, 99, {})]
    assert busy(read_launches(make_tpu_trace(modules, ops), ["jit_a"])) == [20]


def test_equal_neighbours_on_a_tpu_need_no_guess() -> None:
    modules: list[Row] = [("jit_a(1)", 0, 50, {}), ("jit_a(1)", 60, 90, {})]
    ops: list[Row] = [("x", 0, 20, {}), ("y", 25, 26, {}), ("x", 60, 69, {})]
    assert busy(read_launches(make_tpu_trace(modules, ops), ["jit_a", "jit_a"])) == [21, 9]


def test_nested_tpu_ops_share_the_time_without_counting_twice() -> None:
    ops: list[Row] = [("%while.1 = (s32[]) while(%t)", 0, 40, {}), ("%dot.2 = f32[8]{0} dot(%x)", 5, 35, {})]
    (time,) = read_launches(make_tpu_trace([("jit_a(1)", 0, 50, {})], ops), ["jit_a"])
    assert time is not None
    assert time.kernels == (KernelTime("while.1", "while.1", 1, 10.0), KernelTime("dot.2", "dot.2", 1, 30.0))


def test_tpu_ops_go_by_their_op_path() -> None:
    ops: list[Row] = [("x", 0, 20, {"tf_op": "jit(a)/dot_general"})]
    (time,) = read_launches(make_tpu_trace([("jit_a(1)", 0, 50, {})], ops), ["jit_a"])
    assert time is not None
    assert time.kernels == (KernelTime("x", "jit(a)/dot_general", 1, 20.0),)


def test_a_tpu_module_event_without_ops_counts_whole() -> None:
    (time,) = read_launches(make_tpu_trace([("jit_a(1)", 0, 50, {})], []), ["jit_a"])
    assert time == LaunchTime("jit_a", 50.0, 50.0, (KernelTime("jit_a", "jit_a", 1, 50.0),))


def test_planes_of_other_cores_of_a_tpu_are_no_devices() -> None:
    trace = make_tpu_trace([("jit_a(1)", 0, 50, {})], [], plane="/device:TPU:0 SparseCore 1")
    with pytest.raises(ProfileError, match="no device plane"):
        read_launches(trace, ["jit_a"])
