"""One tuning: a straight walk from a call to its results."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import logging
import operator
import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tune_jax._build.gate import GATE
from tune_jax._build.programs import Program, lower_candidate
from tune_jax._build.threads import Built, build, usable_cores
from tune_jax._call import Call
from tune_jax._config import CONFIG
from tune_jax._errors import ProfileError
from tune_jax._failure import attempt
from tune_jax._inputs import collect_inputs, known_values, make_value
from tune_jax._jax import outside_traces
from tune_jax._key import describe_arguments, device_of, on_device
from tune_jax._measure.rounds import Effort, measure
from tune_jax._measure.timers import DeviceTimer, HostTimer, Launchable, Timer
from tune_jax._measure.xplane import keep_stats_type
from tune_jax._outline import advise, candidates_of, outline, program_avals
from tune_jax._progress import progress_bar
from tune_jax._rank import is_usable
from tune_jax._recording import unrecorded
from tune_jax._records import Candidate, Failure, Samples
from tune_jax._results import Results, make_results
from tune_jax._shardings import layout_options, mesh_shardings, output_shardings, placed_inputs, trial_shardings
from tune_jax._warn import warn_user

logger = logging.getLogger("tune_jax")

_session_numbers = itertools.count()


@dataclasses.dataclass(frozen=True)
class Measured:
    """Samples of the distinct programs, failures found on the way, and what the reader must know."""

    samples: Mapping[int, Samples]
    failures: Mapping[int, Failure]
    warnings: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Session:
    """A tuning whose candidates are built and have run once each; they are not timed yet."""

    call: Call
    avals: Sequence[Any]
    candidates: Sequence[Candidate]
    inputs: Sequence[Any]
    device: Any
    built: Built
    started_s: float


def run_session(call: Call, avals: Sequence[Any], given: Sequence[Any]) -> Results:
    """Compile, run, time and rank every candidate of `call`. `given` holds the inputs that are known, else None.

    In the results all rows may be failures.

    Raises:
      NoCandidateError: no candidate can be traced.
      ExampleError: the example arguments do not fit the call.
    """
    return finish_session(start_session(call, avals, given, candidates_of(call)))


def start_session(call: Call, avals: Sequence[Any], given: Sequence[Any], candidates: Sequence[Candidate]) -> Session:
    """Compile these candidates and run each once. Raises as `run_session` does."""
    started_s = time.perf_counter()
    keep_stats_type()
    with outside_traces(), unrecorded():
        values = known_values(call, avals, given)
        shardings = trial_shardings(call, avals, values)
        device = device_of(shardings)
        with on_device(device):
            inputs = collect_inputs(call, avals, values, shardings) + _make_cotangents(call, avals)
            built = _build_all(call, avals, candidates, inputs)
    return Session(call, avals, candidates, inputs, device, built, started_s)


def finish_session(session: Session) -> Results:
    """Time and rank what has been built."""
    call, built, device = session.call, session.built, session.device
    with outside_traces(), unrecorded(), on_device(device):
        measured = _measure_all(call, built, session.inputs, device.platform)
    for program_id, failure in measured.failures.items():
        built.fail(program_id, failure)
    results = make_results(
        function=call.tunable.name,
        call=describe_arguments(call, session.avals),
        candidates=session.candidates,
        samples={key: sample for key, sample in measured.samples.items() if key not in built.failures},
        failures=built.failures,
        groups=built.groups,
        device_kind=device.device_kind,
        wall_s=time.perf_counter() - session.started_s,
        separation=CONFIG.separation,
        warnings=measured.warnings,
    )
    _log(results)
    return results


def _make_cotangents(call: Call, avals: Sequence[Any]) -> list[Any]:
    """What the backward pass starts from, if it belongs to the call."""
    cotangents = program_avals(call, avals)[len(avals) :]
    places = enumerate(zip(cotangents, mesh_shardings(call, cotangents), strict=True), len(avals))
    return [make_value(aval, seed=seed, sharding=sharding) for seed, (aval, sharding) in places]


def _build_all(call: Call, avals: Sequence[Any], candidates: Sequence[Candidate], inputs: Sequence[Any]) -> Built:
    asked = call.tunable
    expected = outline(call, avals)
    donated = donated_inputs(call) + (False,) * (len(inputs) - len(avals))
    taken = program_avals(call, avals)
    options = jit_options(call, donated) | layout_options(taken, donated)
    abstract = placed_inputs(taken, inputs)
    prefix = f"tune{next(_session_numbers)}_{re.sub(r'[^A-Za-z0-9_]', '_', asked.name)}"

    def lower(candidate: Candidate) -> Any:
        return lower_candidate(call, candidate, expected, abstract, options, f"{prefix}_{candidate.id}")

    def first_run(program: Program) -> Failure | None:
        return attempt("run", lambda: program.launch(_lay_out(program, inputs)))

    with progress_bar(f"compiling {asked.name}", len(candidates), wanted=asked.progress) as advance:
        built = build(
            candidates,
            lower,
            donated=donated,
            first_run=first_run,
            max_workers=asked.max_workers or usable_cores(),
            on_done=lambda: advance(1),
        )
    built.failures = {key: advise(call, avals, failure) for key, failure in built.failures.items()}
    return built


def _measure_all(call: Call, built: Built, inputs: Sequence[Any], platform: str) -> Measured:
    asked = call.tunable
    failures: dict[int, Failure] = {}
    programs = [_launchable(built, program, inputs, failures) for program in built.programs]
    device_timer = DeviceTimer(platform, asked.kernel_filter, asked.keep_trace)
    with GATE.measuring(), progress_bar(f"timing {asked.name}", len(programs), wanted=asked.progress) as advance:
        try:
            samples = _run_rounds(call, programs, device_timer, advance)
            _check_seen(call, samples, failures)
            notes: tuple[str, ...] = ()
        except ProfileError as error:
            if not CONFIG.allow_fallback_timing:
                raise
            notes = (f"device time cannot be had ({error}), so times are the host's wall clock",)
            warn_user(f"{asked.name}: {notes[0]}")
            samples = _run_rounds(call, programs, HostTimer(), advance)
    unseen = {key: _unseen(call, sample) for key, sample in samples.items() if not is_usable(sample)}
    return Measured(samples, unseen | failures, notes + _note_shortage(samples))


def _note_shortage(samples: Mapping[int, Samples]) -> tuple[str, ...]:
    """Say so if there was no time for the rounds that every candidate should get."""
    most = max((len(sample.durations_ns) for sample in samples.values()), default=CONFIG.profiling_samples)
    wanted = min(CONFIG.profiling_samples, CONFIG.max_rounds)
    if most >= wanted:
        return ()
    return (f"time ran out after {most} of {wanted} rounds; raise CONFIG.max_measure_s ({CONFIG.max_measure_s} s)",)


def _run_rounds(
    call: Call, programs: Sequence[Launchable], timer: Timer, advance: Callable[[int], object]
) -> dict[int, Samples]:
    effort = Effort(
        CONFIG.profiling_samples,
        CONFIG.max_rounds,
        CONFIG.max_measure_s,
        CONFIG.separation,
        CONFIG.tie_tolerance,
    )
    return measure(programs, timer, effort, seed=call.tunable.seed, on_round=advance)


def _launchable(built: Built, program: Program, inputs: Sequence[Any], failures: dict[int, Failure]) -> Launchable:
    # Before the clock runs: what the copies take is not the program's.
    placed = _lay_out(program, inputs)

    def launch() -> None:
        if program.id in failures:
            return
        outcome = attempt("run", lambda: program.launch(placed))
        if isinstance(outcome, Failure):
            failures[program.id] = outcome

    has_failed = functools.partial(operator.contains, failures, program.id)
    return Launchable(program.id, program.module, launch, has_failed, built.first_run_ns[program.id])


def _lay_out(program: Program, inputs: Sequence[Any]) -> Sequence[Any]:
    return program.laid_out(inputs) if CONFIG.find_optimal_layouts_automatically else inputs


def _check_seen(call: Call, samples: Mapping[int, Samples], failures: Mapping[int, Failure]) -> None:
    """Raise ProfileError if the trace has times for no program, which no filter explains."""
    ran = [sample for key, sample in samples.items() if key not in failures]
    if ran and call.tunable.kernel_filter is None and not any(map(is_usable, ran)):
        raise ProfileError("the profiler's trace shows no device time for any candidate")


def _unseen(call: Call, samples: Samples) -> Failure:
    pattern = call.tunable.kernel_filter
    if pattern is not None and not samples.kernels:
        message = f"event_filter_regex {pattern.pattern!r} matches none of its kernels; loosen it, or leave it out."
    else:
        message = "the profiler's trace shows no device time for it."
    return Failure("run", "NoDeviceTime", message)


def donated_inputs(call: Call) -> tuple[bool, ...]:
    """Which inputs of `call` the tuned function donates."""
    return tuple(name in call.tunable.donated_names for name in call.input_parameters)


def jit_options(call: Call, donated: Sequence[bool]) -> dict[str, Any]:
    """The options of `jax.jit` for a function of the call's inputs."""
    options: dict[str, Any] = {"donate_argnums": tuple(i for i, gives in enumerate(donated) if gives)}
    if call.tunable.compiler_options:
        options["compiler_options"] = dict(call.tunable.compiler_options)
    if output_shardings(call) is not None:
        options["out_shardings"] = output_shardings(call)
    return options


def _log(results: Results) -> None:
    fastest = results.timed[0] if results.timed else None
    logger.info(
        "tuned %s(%s) on %s: %d candidates, %d failed, %.1f s; fastest %s",
        results.function,
        results.call,
        results.device_kind,
        len(results.rows),
        len(results.failures),
        results.wall_s,
        dict(fastest.hyperparams) if fastest else None,
    )
