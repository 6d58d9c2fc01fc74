"""Traces recorded here and now on the CPU."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tune_jax._measure.xplane import read_launches
from tune_jax._records import LaunchTime

pytestmark = pytest.mark.skipif(jax.default_backend() != "cpu", reason="reads CPU traces")


def candidate_0(x: jax.Array) -> jax.Array:
    return jnp.sin(x @ x).sum()


def candidate_1(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 3, lambda _, y: jnp.tanh(y @ x), x)


def candidate_2(x: jax.Array) -> jax.Array:
    return jax.lax.fori_loop(0, 60, lambda _, y: jnp.tanh(y @ x), x)


def record(folder: Path, functions: Sequence[Callable[..., Any]], *arguments: Any) -> bytes:
    """Compile, then trace one launch of each, waited for."""
    jitted = {function: jax.jit(function) for function in functions}
    for function in functions:
        jax.block_until_ready(jitted[function](*arguments))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    options.host_tracer_level = 1
    options.enable_hlo_proto = False
    with jax.profiler.trace(folder, profiler_options=options):
        for function in functions:
            jax.block_until_ready(jitted[function](*arguments))
    (path,) = folder.rglob("*.xplane.pb")
    return path.read_bytes()


ORDER = [candidate_0, candidate_1, candidate_2, candidate_2, candidate_0, candidate_1, candidate_0]
NAMES = [f"jit_{function.__name__}" for function in ORDER]


@pytest.fixture(scope="module")
def trace(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return record(tmp_path_factory.mktemp("trace"), ORDER, jnp.ones((128, 128)))


@pytest.fixture(scope="module")
def times(trace: bytes) -> list[LaunchTime]:
    return [time for time in read_launches(trace, NAMES) if time is not None]


def test_every_launch_is_found_in_order(times: list[LaunchTime]) -> None:
    assert [time.program for time in times] == NAMES


def test_busy_is_positive_and_within_the_span(times: list[LaunchTime]) -> None:
    assert all(0 < time.busy_ns <= time.span_ns for time in times)


def test_kernels_share_the_busy_time_without_a_rest(times: list[LaunchTime]) -> None:
    for time in times:
        assert sum(kernel.total_ns for kernel in time.kernels) == pytest.approx(time.busy_ns)


def test_a_long_loop_takes_longer_than_a_short_one(times: list[LaunchTime]) -> None:
    best = {name: min(time.busy_ns for time in times if time.program == name) for name in NAMES}
    assert best["jit_candidate_2"] > 2 * best["jit_candidate_1"]


def test_every_iteration_of_a_loop_is_counted(times: list[LaunchTime]) -> None:
    for time in times:
        if time.program == "jit_candidate_2":
            assert max(kernel.count for kernel in time.kernels) == 60


def test_a_program_not_launched_is_none_and_shifts_nothing(trace: bytes, times: list[LaunchTime]) -> None:
    order = [*NAMES[:2], "jit_never", *NAMES[2:]]
    assert read_launches(trace, order) == [*times[:2], None, *times[2:]]


def test_other_programs_in_the_trace_are_ignored(trace: bytes, times: list[LaunchTime]) -> None:
    wanted = [time for time in times if time.program == "jit_candidate_0"]
    assert read_launches(trace, ["jit_candidate_0"] * 3) == wanted


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_a_program_on_two_devices_is_one_launch(tmp_path: Path) -> None:
    sharding = NamedSharding(Mesh(jax.devices()[:2], ("a",)), PartitionSpec("a"))
    x = jax.device_put(jnp.ones((128, 128)), sharding)
    trace = record(tmp_path, [candidate_0, candidate_1, candidate_0], x)
    times = read_launches(trace, ["jit_candidate_0", "jit_candidate_1", "jit_candidate_0"])
    assert all(time is not None and time.busy_ns > 0 for time in times)
    counts = [max(kernel.count for kernel in time.kernels) for time in times if time]
    assert counts[0] == counts[2] == 1


@pytest.mark.skipif(jax.device_count() < 2, reason="needs two devices")
def test_the_slowest_device_counts_launch_by_launch(tmp_path: Path) -> None:
    mesh = Mesh(jax.devices()[:2], ("a",))
    split, whole = (NamedSharding(mesh, spec) for spec in (PartitionSpec("a"), PartitionSpec()))

    def spin(counts: jax.Array, x: jax.Array) -> jax.Array:
        return jax.lax.fori_loop(0, counts[0], lambda _, y: jnp.tanh(y @ x), x)

    def candidate(counts: jax.Array, x: jax.Array) -> jax.Array:
        specs = (split.spec, whole.spec)
        return jax.shard_map(spin, mesh=mesh, in_specs=specs, out_specs=split.spec)(counts, x)

    jitted, x = jax.jit(candidate), jax.device_put(jnp.ones((64, 64)), whole)
    counts = [jax.device_put(jnp.array(pair), split) for pair in ([1, 300], [300, 1], [1, 1])]
    trace = record(tmp_path, [functools.partial(jitted, each, x) for each in counts])
    first, second, neither = read_launches(trace, ["jit_candidate"] * 3)
    assert first is not None
    assert second is not None
    assert neither is not None
    assert min(first.busy_ns, second.busy_ns) > 5 * neither.busy_ns
    # The kernels of the slow device alone: its loop, not both.
    assert all(max(kernel.count for kernel in time.kernels) in (300, 301) for time in (first, second))


def test_a_program_on_a_later_device_is_found(tmp_path: Path) -> None:
    x = jax.device_put(jnp.ones((64, 64)), jax.devices()[-1])
    assert None not in read_launches(record(tmp_path, [candidate_0], x), ["jit_candidate_0"])
