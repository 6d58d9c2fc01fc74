"""Reads device times from a profiler trace (one `.xplane.pb`): bytes in, records out.

What a trace holds differs by backend:

- GPU: a plane `/device:GPU:N` for each device, a line for each stream, an event for each kernel, copy or
  memset, with the program in the stat `hlo_module`. Nothing says which launch an event belongs to, so the
  known order of launches splits them. Kernels of a CUDA graph share one `hlo_op`.
- CPU: only the plane `/host:CPU`; op events lie on the lines of several threads, overlap, and nest (a
  loop holds its body). Each carries `hlo_module`, `run_id` (one for each launch) and `device_ordinal`.
- TPU: a plane `/device:TPU:N` for each core with a line "XLA Modules", one event for each launch, and a line
  "XLA Ops", whose events nest as on the CPU.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
import re
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from jax.profiler import ProfileData

from tune_jax._errors import ProfileError
from tune_jax._measure._alignment import Event, Launch, match_launches, split_by_order
from tune_jax._measure._intervals import Interval, credit_last_started, measure_durations, union_ns
from tune_jax._records import KernelTime, LaunchTime

_DEVICE_PLANE = re.compile(r"/device:(GPU|TPU):\d+")
_HOST_PLANE = "/host:CPU"
_RUNTIME_EVENTS = ("ThreadpoolListener::", "end: ")


@dataclasses.dataclass(frozen=True)
class _Device:
    """Launches of one device, by time, and how its kernels share the time that they overlap."""

    launches: Sequence[Launch]
    share_time: Callable[[Sequence[Interval]], list[float]]


def read_launches(
    trace: bytes, order: Sequence[str], *, kernel_filter: re.Pattern[str] | None = None
) -> list[LaunchTime | None]:
    """Read the device time of every launch from the bytes of one `.xplane.pb`.

    `order` names the HLO modules (`jit_candidate_0`) in the order they were launched, each launch waited for
    before the next. Programs that it does not name are ignored. The answer has one entry for each launch:
    nanoseconds on the slowest device, or None where the trace shows no event for it.

    `busy_ns` is the union of the kernels' intervals. Copies and memsets that carry the program's name are
    kernels too. `kernels` come in order of first appearance; on a GPU their times are plain sums of
    durations, so kernels that overlap can add up to more than `busy_ns`; on CPU and TPU, where a loop's event
    holds the events of its body, each instant is credited to the op that started last, and they add up to it.

    With `kernel_filter` only kernels whose name, HLO op or op path it matches count (`re.search`); a launch
    in which none matches has `busy_ns == 0` and no kernels.

    GPU launches are told apart by the order. Put another program between two launches of the same one:
    equal neighbours are split where the kernel names repeat, else at the largest idle gaps.

    Raises `ProfileError` if the trace is empty, cannot be parsed, has no device plane, or has no event of
    any program in `order`.
    """
    if not order:
        return []
    devices = _read_devices(_parse_trace(trace), order)
    columns = [
        [_time_launch(launch, device, kernel_filter) for launch in match_launches(device.launches, order)]
        for device in devices
    ]
    return [_pick_slowest(times) for times in zip(*columns, strict=True)]


def _parse_trace(trace: bytes) -> ProfileData:
    if not trace:
        raise ProfileError("The profiler's trace is empty (0 bytes).")
    try:
        return ProfileData.from_serialized_xspace(trace)
    except RuntimeError as error:
        raise ProfileError(
            f"The profiler's trace cannot be parsed; are its {len(trace)} bytes all there? {error}."
        ) from error


def _read_devices(profile: ProfileData, order: Sequence[str]) -> list[_Device]:
    """Devices that ran programs of the order; the CPU only counts if no other device did."""
    planes = {plane.name: plane for plane in profile.planes}
    accelerators = [plane for name, plane in planes.items() if _DEVICE_PLANE.fullmatch(name)]
    hosts = [plane for name, plane in planes.items() if name == _HOST_PLANE]
    if not accelerators and not hosts:
        raise ProfileError(
            "The profiler's trace has no device plane: expected /device:GPU:N, /device:TPU:N or /host:CPU, "
            f"found {sorted(planes)}. On the CPU, `host_tracer_level` must be at least 1."
        )
    wanted = frozenset(order)
    devices = [_read_tpu(plane, wanted) if _is_tpu(plane) else _read_gpu(plane, order) for plane in accelerators]
    if not any(device.launches for device in devices):
        devices = [device for plane in hosts for device in _read_host(plane, wanted)]
    if not any(device.launches for device in devices):
        raise ProfileError(
            f"The profiler's trace has no event of the launched programs ({_list_some(wanted)}), "
            f"only of: {_list_some(_name_programs([*accelerators, *hosts]))}."
        )
    return devices


def _is_tpu(plane: Any) -> bool:
    return bool(plane.name.startswith("/device:TPU:"))


def _name_programs(planes: Iterable[Any]) -> frozenset[str]:
    """All programs in a trace, for an error message."""
    lines = [line for plane in planes for line in plane.lines]
    modules = [_make_module_event(event).module for event in _list_events(lines, "XLA Modules")]
    stats = [stats for line in lines for _, stats in _read_stats(line.events)]
    return frozenset(modules + [str(each["hlo_module"]) for each in stats if "hlo_module" in each])


def _list_some(names: frozenset[str], limit: int = 5) -> str:
    listed = ", ".join(sorted(names)[:limit]) or "none"
    return listed if len(names) <= limit else f"{listed} and {len(names) - limit} more"


def _read_gpu(plane: Any, order: Sequence[str]) -> _Device:
    """Streams only: other lines would repeat the same time under other names."""
    streams = [line for line in plane.lines if line.name.startswith("Stream")]
    events = [event for event, _ in _read_own_events(streams, frozenset(order))]
    return _Device(split_by_order(sorted(events, key=_sort_key), order), measure_durations)


def _read_host(plane: Any, wanted: frozenset[str]) -> list[_Device]:
    """One device for each ordinal, one launch for each run id."""
    devices: dict[Any, dict[Any, list[Event]]] = {}
    for event, stats in _read_own_events(plane.lines, wanted):
        if "run_id" in stats:
            runs = devices.setdefault(stats.get("device_ordinal"), {})
            runs.setdefault((event.module, stats["run_id"]), []).append(event)
    return [_Device(_sort_launches(runs.values()), credit_last_started) for runs in devices.values()]


def _sort_launches(runs: Iterable[Sequence[Event]]) -> list[Launch]:
    launches = [Launch(run[0].module, sorted(run, key=_sort_key)) for run in runs]
    return sorted(launches, key=lambda launch: launch.events[0].start_ns)


def _read_tpu(plane: Any, wanted: frozenset[str]) -> _Device:
    """An op belongs to the module event that holds its start; a module event without ops counts as one op."""
    lines = list(plane.lines)
    events = [_make_module_event(event) for event in _list_events(lines, "XLA Modules")]
    modules = sorted((event for event in events if event.module in wanted), key=_sort_key)
    starts = [module.start_ns for module in modules]
    held: list[list[Event]] = [[] for _ in modules]
    for event, stats in _read_stats(_list_events(lines, "XLA Ops")):
        place = bisect.bisect_right(starts, event.start_ns) - 1
        if place >= 0 and event.start_ns < modules[place].end_ns:
            held[place].append(_make_event(event, stats, modules[place].module))
    runs = [ops or [module] for module, ops in zip(modules, held, strict=True)]
    return _Device(_sort_launches(runs), credit_last_started)


def _list_events(lines: Iterable[Any], name: str) -> Iterator[Any]:
    return (event for line in lines if line.name == name for event in line.events)


def _make_module_event(event: Any) -> Event:
    module = re.sub(r"\(\d+\)$", "", event.name)
    return Event(module, module, module, (module,), event.start_ns, event.start_ns + event.duration_ns)


def _read_own_events(lines: Iterable[Any], wanted: frozenset[str]) -> Iterator[tuple[Event, dict[str, Any]]]:
    for line in lines:
        for event, stats in _read_stats(line.events):
            module = str(stats.get("hlo_module", ""))
            if module in wanted:
                yield _make_event(event, stats, module), stats


def _sort_key(event: Event) -> tuple[float, float]:
    """By start, an outer event before what it holds."""
    return (event.start_ns, -event.end_ns)


def _read_stats(events: Iterable[Any]) -> Iterator[tuple[Any, dict[str, Any]]]:
    """Pair each event with its stats; bookkeeping events, most of a CPU trace, carry none that matter."""
    keep_stats_type()
    for event in events:
        if not event.name.startswith(_RUNTIME_EVENTS):
            yield event, dict(event.stats)


@functools.cache
def keep_stats_type() -> list[type]:
    """Hold on to the type of an event's stats, so that reading them later does not warn.

    Python makes that type when stats are read, frees it once nothing uses it, and makes it again; each time
    Python 3.12 raises a DeprecationWarning inside C++, which with warnings as errors ends the process.
    Making it once, on a trace of our own, keeps `catch_warnings`, which is not thread-safe, to a moment. That also
    makes Python forget which warnings it has shown, so a tuning does it before it may warn.
    """
    text = "planes { lines { events { } } }"
    profile = ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(text))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        events = (event for plane in profile.planes for line in plane.lines for event in line.events)
        return [type(event.stats) for event in events]


def _make_event(event: Any, stats: dict[str, Any], module: str) -> Event:
    name = _shorten_name(event.name)
    hlo_op = str(stats.get("hlo_op", ""))
    path = str(stats.get("name") or stats.get("tf_op") or "")
    if path.startswith("XlaModule:"):
        path = ""
    # All kernels of a CUDA graph carry the graph's op, `command_buffer_N`, which tells them apart by nothing.
    own_op = "" if hlo_op.startswith("command_buffer") else hlo_op
    start = event.start_ns
    return Event(module, name, path or own_op or name, (name, hlo_op, path), start, start + event.duration_ns)


def _shorten_name(name: str) -> str:
    """The op's name, where the trace has its whole HLO text: `%fusion.3 = f32[8]{0} fusion(...)`."""
    return name.partition(" = ")[0].removeprefix("%")


def _time_launch(launch: Launch | None, device: _Device, kernel_filter: re.Pattern[str] | None) -> LaunchTime | None:
    if launch is None:
        return None
    events = [event for event in launch.events if kernel_filter is None or _matches(event, kernel_filter)]
    intervals = [(event.start_ns, event.end_ns) for event in events]
    kernels = _total_kernels(events, device.share_time(intervals))
    return LaunchTime(launch.module, union_ns(intervals), _measure_span(intervals), kernels)


def _matches(event: Event, kernel_filter: re.Pattern[str]) -> bool:
    return any(kernel_filter.search(label) for label in event.labels)


def _measure_span(intervals: Sequence[Interval]) -> float:
    if not intervals:
        return 0.0
    return max(0.0, max(end for _, end in intervals) - min(start for start, _ in intervals))


def _total_kernels(events: Sequence[Event], durations: Sequence[float]) -> tuple[KernelTime, ...]:
    totals: dict[tuple[str, str], list[float]] = {}
    for event, duration in zip(events, durations, strict=True):
        totals.setdefault((event.name, event.op_name), []).append(duration)
    return tuple(KernelTime(name, op, len(times), sum(times)) for (name, op), times in totals.items())


def _pick_slowest(times: Iterable[LaunchTime | None]) -> LaunchTime | None:
    return max((time for time in times if time is not None), key=lambda time: time.busy_ns, default=None)
