"""Whole tunings: what is compiled, on which device and clock it is timed, and what stays as it was."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import logging
import os
import pathlib
import tempfile
import threading
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.profiler import ProfileData
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tune_jax import CONFIG, Results, tabulate, tune
from tune_jax._build import threads
from tune_jax._build.gate import Gate
from tune_jax._build.programs import Program
from tune_jax._errors import NoCandidateError, ProfileError
from tune_jax._lookup import SHARED
from tune_jax._measure import timers
from tune_jax._measure.xplane import read_launches
from tune_jax._records import LaunchTime

pytestmark = pytest.mark.usefixtures("quick_rounds")

X = jnp.ones((32, 32))


def loop(x: jax.Array, *, b: int) -> jax.Array:
    """As much work as `b` says."""
    return jax.lax.fori_loop(0, b, lambda _, y: y @ y / 32, x)


def scale(x: jax.Array, *, b: int) -> jax.Array:
    return x * b


def call_back(callback: Callable[[np.ndarray], np.ndarray], x: jax.Array) -> jax.Array:
    return jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def sleep(seconds: float, x: jax.Array) -> jax.Array:
    def pause(value: np.ndarray) -> np.ndarray:
        time.sleep(seconds)
        return value

    return call_back(pause, x)


def clocks(results: Results) -> set[str | None]:
    return {row.clock for row in results.timed}


@pytest.fixture
def programs(monkeypatch: pytest.MonkeyPatch) -> list[Program]:
    """The programs that tunings of a test compile."""
    made: list[Program] = []
    compile_program = threads.compile_program

    def note(lowering: Any, donated: Any) -> Program:
        made.append(compile_program(lowering, donated))
        return made[-1]

    monkeypatch.setattr(threads, "compile_program", note)
    return made


# What is compiled


def test_each_distinct_program_is_compiled_once(compiles: list[str]) -> None:
    tuned = tune(scale, {"b": [2, 3, 4]})
    tuned.tune(X)
    assert len([name for name in compiles if "scale" in name]) == 3
    assert len(set(compiles)) == len(compiles)


def test_a_call_compiles_the_winner_once_more_and_nothing_else(compiles: list[str]) -> None:
    x = jnp.ones((8, 8)).block_until_ready()
    compiles.clear()
    tune(scale, {"b": [2, 3, 4]})(x).block_until_ready()
    assert len(compiles) == 4


def test_identical_programs_are_compiled_once_and_shown_as_sharing(programs: list[Program]) -> None:
    results = tune(lambda x, *, b, c: x * b, {"b": [2, 3], "c": [0, 1, 2]}).tune(X)
    assert len(programs) == 2
    assert {row.id: row.shares_with for row in results.rows} == {
        0: (1, 2),
        1: (0, 2),
        2: (0, 1),
        3: (4, 5),
        4: (3, 5),
        5: (3, 4),
    }


def test_candidates_that_share_a_program_share_its_samples() -> None:
    results = tune(lambda x, *, c: x * 2, {"c": [0, 1]}).tune(X)
    assert results.rows[0].samples_ns == results.rows[1].samples_ns


@pytest.mark.parametrize("effect", ["pure", "io", "debug", "print"])
def test_programs_that_call_other_host_functions_are_not_shared(effect: str, programs: list[Program]) -> None:
    def calling(x: jax.Array, *, b: int) -> jax.Array:
        # All candidates have the same text, and do other things.
        if effect == "pure":
            return call_back(lambda v: v * np.float32(b), x)
        if effect == "io":
            return io_callback(lambda v: v * np.float32(b), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
        if effect == "debug":
            jax.debug.callback(lambda: b)
        else:
            jax.debug.print("" if b == 1 else " ")
        return x + 1

    results = tune(calling, {"b": [1, 2]}).tune(X)
    assert len(programs) == 2
    assert {row.shares_with for row in results.rows} == {()}


def test_the_winner_with_a_host_callback_is_what_runs() -> None:
    def calling(x: jax.Array, *, b: int) -> jax.Array:
        return sleep(0.01 * b, call_back(lambda v: v * np.float32(b), x))

    tuned = tune(calling, {"b": [3, 1, 2]})
    assert float(tuned(X)[0, 0]) == tuned.optimal_hyperparams["b"] == 1


def test_candidates_on_other_devices_do_not_share_a_program(programs: list[Program]) -> None:
    def spread(x: jax.Array, *, first: int) -> jax.Array:
        mesh = Mesh(np.array(jax.devices()[first : first + 2]), ("i",))
        spec = PartitionSpec("i")
        return jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)(x)

    results = tune(spread, {"first": [0, 2]}).tune(X)
    assert len(programs) == 2
    assert {row.shares_with for row in results.rows} == {()}


def test_the_executables_that_were_compiled_are_those_timed(
    programs: list[Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []
    launch = Program.launch

    def note(self: Program, inputs: Sequence[Any]) -> None:
        launched.append(id(self.compiled))
        launch(self, inputs)

    monkeypatch.setattr(Program, "launch", note)
    tune(scale, {"b": [2, 3]}).tune(X)
    assert set(launched) == {id(program.compiled) for program in programs}


def test_max_workers_bounds_the_compiles_at_once_and_loses_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    inside, most, lock = 0, 0, threading.Lock()
    compile_program = threads.compile_program

    def count(lowering: Any, donated: Any) -> Program:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        try:
            return compile_program(lowering, donated)
        finally:
            with lock:
                inside -= 1

    monkeypatch.setattr(threads, "compile_program", count)
    grid = {"b": list(range(6))}
    for max_workers in (1, 2, 32, None):
        most = 0
        results = tune(scale, grid, max_workers=max_workers).tune(X)
        assert most <= (max_workers or threads.usable_cores())
        assert sorted(row.id for row in results.timed) == list(range(6))


@pytest.mark.parametrize("max_workers", [0, -1, 1.5, True, "2"])
def test_max_workers_must_be_a_positive_whole_number(max_workers: Any) -> None:
    with pytest.raises(ValueError, match="max_workers is"):
        tune(scale, {"b": [1]}, max_workers=max_workers)


def test_tracing_happens_in_the_callers_thread() -> None:
    seen: set[threading.Thread] = set()

    def watched(x: jax.Array, *, b: int) -> jax.Array:
        seen.add(threading.current_thread())
        return x * b

    tune(watched, {"b": [1, 2, 3]}, max_workers=3)(X)
    assert seen == {threading.current_thread()}


def test_programs_run_first_one_at_a_time() -> None:
    inside, most, lock = 0, 0, threading.Lock()

    def watch(value: np.ndarray) -> np.ndarray:
        nonlocal inside, most
        with lock:
            inside += 1
            most = max(most, inside)
        time.sleep(0.005)
        with lock:
            inside -= 1
        return value

    tune(lambda x, *, b: call_back(watch, x) * b, {"b": [1, 2, 3, 4]}, max_workers=4).tune(X)
    assert most == 1


# The order of things


@pytest.mark.parametrize("order", list(itertools.permutations([200, 1, 50]))[:5])
def test_the_least_work_wins_on_the_cpu(order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONFIG, "profiling_samples", 5)
    results = tune(loop, {"b": list(order)}).tune(jnp.ones((64, 64)) / 64)
    medians = {row.hyperparams["b"]: row.median_s for row in results.timed}
    assert results.best.hyperparams == {"b": 1}
    assert medians[1] < medians[50] < medians[200]
    assert medians[200] / medians[1] > 20
    assert "device" in tabulate(results) or clocks(results) == {"device"}


def test_the_whole_output_is_waited_for() -> None:
    def nested(x: jax.Array, *, pause: float) -> Any:
        return x, {"y": sleep(pause, x), "n": 3}, None

    with force_host_clock():
        results = tune(nested, {"pause": [0.05, 0.1]}).tune(jnp.ones(4))
    fast, slow = (row.median_s for row in results.timed)
    assert results.best.hyperparams == {"pause": 0.05}
    assert fast >= 0.05
    assert 0.1 <= slow < 5.0  # seconds, not milliseconds or nanoseconds


def test_device_time_of_a_pause_is_in_seconds() -> None:
    results = tune(lambda x, *, pause: sleep(pause, x), {"pause": [0.05, 0.1]}).tune(jnp.ones(4))
    fast, slow = (row.median_s for row in results.timed)
    assert clocks(results) == {"device"}
    assert 0.05 <= fast < 0.1 <= slow or fast < slow


@pytest.mark.parametrize("host_clock", [False, True])
def test_a_function_without_outputs_is_not_timed_as_nothing(host_clock: bool) -> None:
    def silent(x: jax.Array, *, pause: float) -> None:
        io_callback(lambda value: time.sleep(pause), None, x)

    with force_host_clock() if host_clock else contextlib.nullcontext():
        results = tune(silent, {"pause": [0.04, 0.02]}).tune(X)
    assert results.best.hyperparams == {"pause": 0.02}
    assert all(row.median_s >= 0.02 for row in results.timed)


def test_a_function_that_does_nothing_has_a_row() -> None:
    results = tune(lambda x, *, b: x, {"b": [1, 2]}).tune(X)
    assert len(results.timed) == 2


def test_a_function_without_hyperparameters_is_timed() -> None:
    results = tune(lambda x: x @ x).tune(X)
    assert [row.hyperparams for row in results.timed] == [{}]


def test_no_round_of_slow_candidates_starts_after_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONFIG, "profiling_samples", 5)
    monkeypatch.setattr(CONFIG, "max_measure_s", 0.1)
    results = tune(lambda x, *, pause: sleep(pause, x), {"pause": [0.1, 0.12]}).tune(X)
    assert all(len(row.samples_ns) <= 2 for row in results.timed)
    assert any("time ran out" in note for note in results.warnings)


def test_a_jitted_function_keeps_its_compiler_options() -> None:
    jitted = jax.jit(scale, static_argnames="b", compiler_options={"xla_cpu_enable_fast_math": True})
    assert len(tune(jitted, {"b": [2, 3]}).tune(X).timed) == 2


# Clocks


@contextlib.contextmanager
def force_host_clock() -> Iterator[None]:
    """Time with the host's clock, as if the profiler wrote nothing."""
    with pytest.MonkeyPatch.context() as patched, pytest.warns(UserWarning, match="wall clock"):  # noqa: PT031
        patched.setattr(timers, "record_trace", record_nothing)
        yield


def record_nothing(run: Callable[[], None], **_: Any) -> bytes:
    run()
    raise ProfileError("the profiler wrote no trace.")


def make_text_trace(text: str) -> bytes:
    return bytes(ProfileData.text_proto_to_serialized_xspace(text))


OTHER_EVENTS = make_text_trace("""planes { name: "/device:TPU:0"
  event_metadata { key: 1 value { id: 1 name: "jit_somebody_else(1)" } }
  lines { name: "XLA Modules" events { metadata_id: 1 duration_ps: 5000 } } }""")


@pytest.mark.parametrize(
    ("trace", "reason"),
    [
        (None, "wrote no trace"),
        (b"", "empty"),
        (b"\x0a\xff\xffbroken", "cannot be parsed"),
        (make_text_trace('planes { name: "Task Environment" }'), "no device plane"),
        (OTHER_EVENTS, "no event of the launched programs"),
    ],
    ids=["no file", "empty file", "truncated", "no device plane", "without our events"],
)
def test_a_trace_that_says_nothing_ends_in_the_host_clock_with_one_warning(
    trace: bytes | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def record(run: Callable[[], None], **_: Any) -> bytes:
        run()
        if trace is None:
            raise ProfileError("the profiler wrote no trace.")
        return trace

    monkeypatch.setattr(timers, "record_trace", record)
    with pytest.warns(UserWarning, match=reason) as caught:
        results = tune(scale, {"b": [2, 3]}).tune(X)
    assert len(caught) == 1
    assert "wall clock" in str(caught[0].message)
    assert clocks(results) == {"host"}
    assert len(results.timed) == 2
    assert any(reason in warning for warning in results.warnings)


def test_without_fallback_a_missing_trace_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CONFIG, "allow_fallback_timing", False)
    monkeypatch.setattr(timers, "record_trace", record_nothing)
    with pytest.raises(RuntimeError, match="profiler wrote no trace"):
        tune(scale, {"b": [2, 3]}).tune(X)


def test_a_tuning_that_had_no_clock_can_be_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned = tune(scale, {"b": [2, 3]})
    with monkeypatch.context() as patched:
        patched.setattr(CONFIG, "allow_fallback_timing", False)
        patched.setattr(timers, "record_trace", record_nothing)
        with pytest.raises(ProfileError):
            tuned(X)
    assert tuned.results is None
    assert tuned(X).shape == X.shape
    assert clocks(tuned.results) == {"device"}


def replace_durations(monkeypatch: pytest.MonkeyPatch, durations_ns: dict[int, float | None]) -> None:
    """Let the trace say, for each candidate of `scale`, what the test wants."""

    def read(trace: bytes, order: Sequence[str], **_: Any) -> list[LaunchTime | None]:
        times = [durations_ns[int(name.rpartition("_")[2])] for name in order]
        return [None if t is None else LaunchTime(n, t, t, ()) for n, t in zip(order, times, strict=True)]

    monkeypatch.setattr(timers, "read_launches", read)


def test_impossible_times_never_win(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_durations(monkeypatch, {0: 0.0, 1: float("nan"), 2: 1e4, 3: None, 4: float("inf"), 5: -3.0})
    results = tune(scale, {"b": [1, 2, 3, 4, 5, 6]}).tune(X)
    assert results.best.id == 2
    assert [row.id for row in results.timed] == [2]
    assert sorted(row.id for row in results.failures) == [0, 1, 3, 4, 5]
    assert {row.failure.stage for row in results.failures} == {"run"}
    assert all("no device time" in row.failure.message for row in results.failures)


@pytest.mark.parametrize("nothing", [0.0, None, float("nan")])
def test_times_of_which_none_is_possible_end_in_the_host_clock(
    nothing: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_durations(monkeypatch, {0: nothing, 1: nothing})
    with pytest.warns(UserWarning, match="wall clock"):
        results = tune(scale, {"b": [1, 2]}).tune(X)
    assert clocks(results) == {"host"}
    assert len(results.timed) == 2


def test_the_callers_own_trace_ends_in_the_host_clock_with_one_warning(tmp_path: pathlib.Path) -> None:
    tuned = tune(scale, {"b": [2, 3]})
    reason = r"profiler does not start.*wall clock"
    with jax.profiler.trace(str(tmp_path)), pytest.warns(UserWarning, match=reason) as caught:
        tuned(X)
    assert len(caught) == 1
    assert clocks(tuned.results) == {"host"}


def test_the_callers_own_trace_goes_on_after_a_tuning(tmp_path: pathlib.Path) -> None:
    @jax.jit
    def afterwards(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    jax.profiler.start_trace(str(tmp_path))
    with pytest.warns(UserWarning, match="wall clock"):
        tune(scale, {"b": [2, 3]})(X)
    afterwards(X).block_until_ready()
    jax.profiler.stop_trace()
    (trace,) = tmp_path.rglob("*.xplane.pb")
    assert read_launches(trace.read_bytes(), ["jit_afterwards"])[0] is not None


def test_a_tuning_after_the_callers_own_trace_has_the_device_clock(tmp_path: pathlib.Path) -> None:
    with jax.profiler.trace(str(tmp_path)):
        pass
    assert clocks(tune(scale, {"b": [2, 3]}).tune(X)) == {"device"}


def test_an_event_filter_counts_only_what_it_matches() -> None:
    def two(x: jax.Array, *, b: int) -> jax.Array:
        return jnp.sort(sleep(0.03, x)) * b

    everything = tune(two, {"b": [2, 3]}).tune(X)
    some = tune(two, {"b": [2, 3]}, event_filter_regex="sort").tune(X)
    assert all(row.median_s >= 0.03 for row in everything.timed)
    assert len(some.timed) == 2
    assert all(row.median_s < 0.03 for row in some.timed)
    assert all("sort" in f"{kernel.name} {kernel.op_name}" for row in some.timed for kernel in row.kernels)


def test_an_event_filter_that_matches_nothing_says_so() -> None:
    with pytest.raises(NoCandidateError, match=r"event_filter_regex 'no_such_kernel' matches none of its kernels"):
        tune(scale, {"b": [2, 3]}, event_filter_regex="no_such_kernel").tune(X)


def test_an_event_filter_that_matches_nothing_of_one_candidate_fails_that_one() -> None:
    def either(x: jax.Array, *, b: int) -> jax.Array:
        return jnp.sort(x) if b else x @ x

    results = tune(either, {"b": [0, 1]}, event_filter_regex="^sort").tune(X)
    assert [row.id for row in results.timed] == [1]
    assert "matches none" in results.failures[0].failure.message


def test_two_tunings_at_the_same_time_both_have_the_device_clock(
    background: concurrent.futures.Executor,
) -> None:
    start = threading.Barrier(4, timeout=30)

    def run(size: int) -> Results:
        start.wait()
        return tune(loop, {"b": [1, 3, 9]}).tune(jnp.ones((size, size)))

    tunings = [background.submit(run, size) for size in (8, 16, 24, 32)]
    for tuning in tunings:
        assert clocks(tuning.result(60)) == {"device"}
        assert tuning.result().failures == ()


def _overlaps(spans: list[tuple[str, int, float, float]]) -> list[tuple[str, str]]:
    """What went on in another thread while something was timed."""
    timed = [span for span in spans if span[0] == "timed"]
    return [(a[0], b[0]) for a in timed for b in spans if a[1] != b[1] and a[2] < b[3] and b[2] < a[3]]


@pytest.mark.filterwarnings("ignore:.*device time cannot be had")
@pytest.mark.parametrize("gate", ["kept", "taken away"])
def test_tunings_in_several_threads_do_not_disturb_each_others_clocks(
    gate: str, monkeypatch: pytest.MonkeyPatch, background: concurrent.futures.Executor
) -> None:
    spans: list[tuple[str, int, float, float]] = []

    def noted(kind: str, action: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            started = time.perf_counter()
            time.sleep(0.05)
            result = action(*args)
            spans.append((kind, threading.get_ident(), started, time.perf_counter()))
            return result

        return run

    monkeypatch.setattr(timers.DeviceTimer, "time", noted("timed", timers.DeviceTimer.time))
    monkeypatch.setattr(threads, "compile_program", noted("compiled", threads.compile_program))
    if gate == "taken away":
        monkeypatch.setattr(Gate, "measuring", lambda self: contextlib.nullcontext())
    start = threading.Barrier(4, timeout=30)

    def run(index: int) -> Results:
        start.wait()
        return tune(lambda x, *, b: x * b + index, {"b": [1, 3, 9]}, max_workers=1).tune(X)

    results = [tuning.result(60) for tuning in [background.submit(run, index) for index in range(4)]]
    assert sum(kind == "timed" for kind, *_ in spans) >= 4
    if gate == "kept":
        assert _overlaps(spans) == []
        assert all(clocks(result) == {"device"} for result in results)
    else:
        # Without what keeps them apart they do meet, or the test would see nothing.
        assert _overlaps(spans) != []


# Nested tunings


def test_an_inner_tuning_measures_only_after_outer_compiles_are_done(monkeypatch: pytest.MonkeyPatch) -> None:
    from tune_jax import _session

    log: list[tuple[str, str, float, float]] = []
    compile_program, measure = threads.compile_program, _session.measure

    def slow_compile(lowering: Any, donated: Any) -> Program:
        started = time.perf_counter()
        if "outer" in lowering.module:
            time.sleep(0.2)
        program = compile_program(lowering, donated)
        log.append(("compile", lowering.module, started, time.perf_counter()))
        return program

    def note_measure(*args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        samples = measure(*args, **kwargs)
        log.append(("measure", "", started, time.perf_counter()))
        return samples

    monkeypatch.setattr(threads, "compile_program", slow_compile)
    monkeypatch.setattr(_session, "measure", note_measure)
    inner = tune(scale, {"b": [2, 3]})

    def outer(x: jax.Array, *, rows: int) -> jax.Array:
        return x.at[:rows].set(inner(x[:rows]))

    results = tune(outer, {"rows": [4, 8, 16]}, max_workers=2).tune(X)
    assert len(results.timed) == 3
    compiles = [(begin, end) for kind, _, begin, end in log if kind == "compile"]
    measures = [(begin, end) for kind, _, begin, end in log if kind == "measure"]
    assert len(measures) == 4
    assert not [1 for a, b in compiles for c, d in measures if a < d and c < b]


def test_a_tuned_function_inside_a_tuned_function_inside_another() -> None:
    first = tune(scale, {"b": [2, 3]})
    second = tune(lambda x, *, c: first(x) + c, {"c": [0, 1]})
    third = tune(lambda x, *, d: second(x) - d, {"d": [0, 1]})
    assert third(X).shape == X.shape
    assert all(tuned.results is not None for tuned in (first, second, third))


def test_a_host_callback_may_call_a_tuned_function(run_python: Callable[..., Any]) -> None:
    done = run_python("""
        import faulthandler
        faulthandler.dump_traceback_later(60, exit=True)
        import jax, jax.numpy as jnp, numpy as np
        from tune_jax import CONFIG, tune
        CONFIG.profiling_samples, CONFIG.max_rounds = 1, 1
        inner = tune(lambda x, *, b: x * b / b, {"b": [2, 3]})

        def outer(x, *, c):
            shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
            return jax.pure_callback(lambda v: np.asarray(inner(np.asarray(v))), shape, x) * c / c

        print(tune(outer, {"c": [1, 2]})(jnp.ones(2)).tolist())
    """)
    assert done.stdout.strip() == "[1.0, 1.0]"


def test_a_tuned_function_that_calls_itself_with_less() -> None:
    @tune(hyperparams={"b": [1, 2]})
    def half(x: jax.Array, *, b: int) -> jax.Array:
        return x * b / b if x.shape[0] == 1 else jnp.concatenate([half(x[: x.shape[0] // 2])] * 2)

    assert half(jnp.ones(4)).tolist() == [1, 1, 1, 1]


# Devices


def test_inputs_on_another_device_are_tuned_and_run_there(programs: list[Program]) -> None:
    there = jax.devices()[1]
    tuned = tune(scale, {"b": [2, 3, 4]}, max_workers=3)
    assert tuned(jax.device_put(X, there)).devices() == {there}
    assert {device for p in programs for device in p.compiled.output_shardings.device_set} == {there}
    assert clocks(tuned.results) == {"device"}


def test_a_function_without_arguments_is_tuned_on_the_default_device(programs: list[Program]) -> None:
    there = jax.devices()[1]
    tuned = tune(lambda *, b: jnp.arange(8.0) * b, {"b": [2, 3, 4]}, max_workers=3)
    with jax.default_device(there):
        assert tuned().devices() == {there}
    assert {device for p in programs for device in p.compiled.output_shardings.device_set} == {there}


def test_trial_runs_are_on_the_default_device() -> None:
    there, seen = jax.devices()[1], set[Any]()
    launch = Program.launch

    def note(self: Program, inputs: Sequence[Any]) -> None:
        seen.update(device for output in jax.tree.leaves(self.compiled(*inputs)) for device in output.devices())
        launch(self, inputs)

    with jax.default_device(there), pytest.MonkeyPatch.context() as patched:
        patched.setattr(Program, "launch", note)
        tune(scale, {"b": [2, 3]}).tune(jax.ShapeDtypeStruct((8, 8), jnp.float32))
    assert seen == {there}


def test_a_mesh_of_another_device_in_context_is_where_candidates_run(programs: list[Program]) -> None:
    there = jax.devices()[1]
    mesh = Mesh(np.array([there]), ("i",))
    with jax.set_mesh(mesh):
        x = jax.device_put(X, NamedSharding(mesh, PartitionSpec("i")))
        assert tune(scale, {"b": [2, 3]})(x).devices() == {there}
    assert {device for p in programs for device in p.compiled.output_shardings.device_set} == {there}


def test_nothing_stays_on_the_first_device_after_a_tuning_on_another() -> None:
    there = jax.devices()[1]
    x = jax.device_put(X, there).block_until_ready()
    before = len([a for a in jax.live_arrays() if jax.devices()[0] in a.devices()])
    tune(scale, {"b": [2, 3]}).tune(x)
    assert len([a for a in jax.live_arrays() if jax.devices()[0] in a.devices()]) <= before


# Donation


def check_untouched(x: jax.Array, before: np.ndarray) -> None:
    assert not x.is_deleted()
    assert np.array_equal(np.asarray(x), before)


def test_tuning_leaves_donated_arguments_alone() -> None:
    x = jnp.arange(8.0)
    jitted = jax.jit(lambda x, b: x * b, static_argnames="b", donate_argnames="x")
    results = tune(jitted, {"b": [2, 3, 4]}).tune(x)
    assert len(results.timed) == 3
    check_untouched(x, np.arange(8.0))


def test_a_call_donates_as_the_jitted_function_does() -> None:
    x = jnp.arange(8.0)
    tuned = tune(jax.jit(lambda x, b: x * b, static_argnames="b", donate_argnames="x"), {"b": [2, 3, 4]})
    out = tuned(x)
    assert out.tolist() == (np.arange(8.0) * tuned.optimal_hyperparams["b"]).tolist()
    assert len(tuned.results.timed) == 3
    assert x.is_deleted()


def test_a_jit_inside_that_donates_leaves_the_callers_array_alone() -> None:
    x = jnp.arange(8.0)
    tuned = tune(lambda x, *, b: jax.jit(lambda y: y * b, donate_argnums=0)(x), {"b": [1, 2, 3]})
    out = tuned(x)
    check_untouched(x, np.arange(8.0))
    assert len(tuned.results.timed) == 3
    assert out.tolist() == (np.arange(8.0) * tuned.optimal_hyperparams["b"]).tolist()


def add_one_in_place(x: jax.Array) -> jax.Array:
    def kernel(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[...] + 1

    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return pl.pallas_call(kernel, out_shape=shape, input_output_aliases={0: 0}, interpret=True)(x)


def test_a_kernel_that_writes_in_place_leaves_the_callers_array_alone() -> None:
    x = jnp.arange(8.0)
    tuned = tune(lambda x, *, b: add_one_in_place(x), {"b": [1, 2, 3]})
    out = tuned(x)
    check_untouched(x, np.arange(8.0))
    assert len(tuned.results.timed) == 3
    assert out.tolist() == (np.arange(8.0) + 1).tolist()


def test_a_kernel_that_writes_into_a_keyword_argument_leaves_it_alone() -> None:
    x, y = jnp.ones(8), jnp.arange(8.0)
    tuned = tune(lambda x, *, y, b: add_one_in_place(y) * x * b, {"b": [1, 2, 3]})
    out = tuned(x, y=y)
    check_untouched(y, np.arange(8.0))
    assert out.tolist() == ((np.arange(8.0) + 1) * tuned.optimal_hyperparams["b"]).tolist()


# The caller's settings


def test_outputs_that_are_not_numbers_do_not_end_a_tuning_under_debug_nans() -> None:
    with jax.debug_nans(True):
        results = tune(lambda x, *, b: jnp.log(x - 5) * b, {"b": [2, 3]}).tune(X)
    assert len(results.timed) == 2


def test_infinite_outputs_do_not_end_a_tuning_under_debug_infs() -> None:
    with jax.debug_infs(True):
        results = tune(lambda x, *, b: b / (x - 1), {"b": [2, 3]}).tune(X)
    assert len(results.timed) == 2


def test_debug_nans_still_finds_them_in_the_callers_own_call() -> None:
    tuned = tune(lambda x, *, b: jnp.log(x - 5) * b, {"b": [2, 3]})
    with jax.debug_nans(True), pytest.raises(FloatingPointError):
        tuned(X)
    assert len(tuned.results.timed) == 2


def test_disable_jit_does_not_end_a_tuning() -> None:
    tuned = tune(scale, {"b": [2, 3]})
    with jax.disable_jit():
        out = tuned(X)
    assert float(out[0, 0]) == tuned.optimal_hyperparams["b"]
    assert clocks(tuned.results) == {"device"}


def test_a_transfer_guard_finds_nothing_to_object_to() -> None:
    tuned = tune(scale, {"b": [2, 3]})
    with jax.transfer_guard("disallow"):
        out = tuned(X)
        made_up = tuned.tune(jax.ShapeDtypeStruct((4, 4), jnp.float32))
    assert float(out[0, 0]) == tuned.results_for(X).best.hyperparams["b"]
    assert len(made_up.timed) == 2


def test_matmul_precision_is_kept_in_every_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    texts: list[str] = []
    compile_program = threads.compile_program

    def note(lowering: Any, donated: Any) -> Program:
        texts.append(lowering.text)
        return compile_program(lowering, donated)

    monkeypatch.setattr(threads, "compile_program", note)
    with jax.default_matmul_precision("highest"):
        tune(lambda x, *, b: x @ x * b, {"b": [2, 3, 4]}, max_workers=3).tune(X)
    assert len(texts) == 3
    assert all("HIGHEST" in text for text in texts)


def test_matmul_precision_is_part_of_the_key() -> None:
    tuned = tune(lambda x, *, b: x @ x * b, {"b": [2, 3]})
    first = tuned.tune(X)
    with jax.default_matmul_precision("highest"):
        assert tuned.results_for(X) is None
        second = tuned.tune(X)
    assert second is not first
    assert tuned.results_for(X) is first


@pytest.mark.parametrize("failing", [False, True])
def test_settings_are_as_before_afterwards(failing: bool) -> None:
    names = ("jax_debug_nans", "jax_debug_infs", "jax_disable_jit", "jax_default_matmul_precision", "jax_enable_x64")

    def maybe(x: jax.Array, *, b: int) -> jax.Array:
        if failing:
            raise ValueError
        return x * b

    with jax.debug_nans(True), jax.debug_infs(True), jax.default_matmul_precision("highest"):
        before = {name: getattr(jax.config, name) for name in names}
        with contextlib.suppress(NoCandidateError):
            tune(maybe, {"b": [1, 2]}).tune(X)
        assert {name: getattr(jax.config, name) for name in names} == before


# What is left behind, and said


def test_kept_traces_lie_where_tensorboard_looks(tmp_path: pathlib.Path) -> None:
    tune(scale, {"b": [2, 3]}, keep_trace=str(tmp_path / "traces")).tune(X)
    kept = list((tmp_path / "traces").glob("*/plugins/profile/*/*.xplane.pb"))
    assert kept
    assert len({path.parents[3] for path in kept}) == len(kept)


def test_a_path_is_taken_as_the_folder_for_traces(tmp_path: pathlib.Path) -> None:
    tune(scale, {"b": [2, 3]}, keep_trace=tmp_path).tune(X)
    assert list(tmp_path.rglob("*.xplane.pb"))


def test_no_trace_outlives_a_tuning(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    tune(scale, {"b": [2, 3]}).tune(X)
    assert os.listdir(tmp_path) == []


def test_a_temporary_folder_that_is_gone_ends_in_the_host_clock(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.warns(UserWarning, match=r"no folder for the trace can be made.*wall clock"):
        assert clocks(tune(scale, {"b": [2, 3]}).tune(X)) == {"host"}


def test_one_line_is_logged_at_info(caplog: pytest.LogCaptureFixture) -> None:
    def picky(x: jax.Array, *, b: int) -> jax.Array:
        if b == 3:
            raise ValueError("no")
        return x * b

    with caplog.at_level(logging.INFO, logger="tune_jax"):
        tune(picky, {"b": [2, 3]})(X)
    (record,) = [record for record in caplog.records if record.name.startswith("tune_jax")]
    line = record.getMessage()
    assert record.levelno == logging.INFO
    for part in ("picky", "float32[32,32]", jax.devices()[0].device_kind, "2 candidates", "1 failed", " s", "'b': 2"):
        assert part in line


def test_nothing_is_logged_for_a_call_that_was_tuned_before(caplog: pytest.LogCaptureFixture) -> None:
    tuned = tune(scale, {"b": [2, 3]})
    tuned(X)
    with caplog.at_level(logging.DEBUG, logger="tune_jax"):
        tuned(X)
    assert [record for record in caplog.records if record.name.startswith("tune_jax")] == []


def test_a_tuning_warns_of_nothing() -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        tune(loop, {"b": [1, 2]})(X)
    assert caught == []


def test_results_do_not_hang_on_to_programs_or_inputs() -> None:
    import gc
    import weakref

    x = jnp.ones((5, 5))
    tuned = tune(scale, {"b": [2, 3]})
    results = tuned.tune(x)
    held = weakref.ref(x)
    del x
    gc.collect()
    assert held() is None
    assert len(results.timed) == 2


def test_the_seed_decides_the_order_of_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    orders: list[list[str]] = []

    def read(trace: bytes, order: Sequence[str], **_: Any) -> list[LaunchTime | None]:
        orders.append([name.rpartition("_")[2] for name in order])
        return [LaunchTime(n, 100.0 * (1 + int(n.rpartition("_")[2])), 1.0, ()) for n in order]

    def first_round(seed: int) -> list[str]:
        orders.clear()
        SHARED.clear()
        tune(scale, {"b": [1, 2, 3, 4]}, seed=seed).tune(X)
        # Behind the warm-up; how many rounds follow in this trace depends on the first runs.
        return orders[0][timers.WARM_UP :][:4]

    monkeypatch.setattr(timers, "read_launches", read)
    rounds = [first_round(seed) for seed in (5, 5, 6, 7, 8, 9)]
    assert rounds[0] == rounds[1]
    assert len({tuple(each) for each in rounds}) > 1
