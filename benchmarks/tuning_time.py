"""How long a tuning takes from call to return: ours against tune-jax 0.8.3, and where our time goes.

    python -m pip install --target PEER --no-deps tune-jax==0.8.3
    python benchmarks/tuning_time.py --case quickstart --peer PEER
    python benchmarks/tuning_time.py --case mha108 --peer PEER --repeats 2 --out tuning_time.json

Each tuning has a process of its own, alternately ours and the peer's, with JAX's compilation cache and the CUDA
driver's off. Imports and making the inputs are not counted; tracing, lowering, compiling, timing, and the first run
of the winner are. Both get the same function, grid and concrete inputs, each with its own defaults; both results are
checked against plain attention before a time is reported. Without `--peer` only ours is run.

Cases: `mha108` and `mha36` (JAX's in-tree Pallas-Triton attention; need a GPU), `quickstart` (the function and grid of
`examples/quickstart.py`, on whatever device JAX finds), `tiny` (a smoke test).

The breakdown comes from timing the tuner's inner functions from outside, without changing them:
- what the calling thread does in turn adds up to the whole: "before" (reading the call, one abstract trace),
  "inputs", "lowering" (every candidate, in Python), "waiting for compiles" (of the rest of the building), "first
  runs", "timing" (rounds of launches, reading traces included), "winner" (all that follows: the chosen candidate's
  lowering, compile and run in the call that was made) and "the rest";
- "compiling, all threads" is the sum over compiling threads, so it can be more than the whole.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

from _common import ROOT, cold_environment, describe_host, run_worker, verdict, write_report

# What to time inside our tuner: a label, a module, and the function's name there.
HOOKS = (
    ("session", "tune_jax._lookup", "run_session"),
    ("inputs", "tune_jax._session", "collect_inputs"),
    ("build", "tune_jax._session", "build"),
    ("lowering", "tune_jax._session", "lower_candidate"),
    ("attempt", "tune_jax._session", "attempt"),
    ("compiling", "tune_jax._build.threads", "compile_program"),
    ("timing", "tune_jax._session", "measure"),
    ("reading", "tune_jax._measure.timers", "read_launches"),
)
LIMITS = {"mha108": 0.40, "quickstart": 0.6}


def main() -> None:
    options = _read_options()
    if options.worker:
        _work(options.worker, options.case, options.peer, options.worker_out)
        return
    sides = ["ours", "peer"] if options.peer else ["ours"]
    runs: list[dict[str, Any]] = []
    for repeat in range(options.repeats):
        # Every other pair starts with the peer, so that neither side always finds the machine warmer.
        for side in sides if repeat % 2 == 0 else reversed(sides):
            runs.append(_run(side, options))
            _print_run(repeat, runs[-1])
    if len({run["candidates"] for run in runs}) > 1:
        raise SystemExit("the grid changed between runs: not comparable")
    _print_summary(options.case, runs)
    write_report(options.out, {"case": options.case, "host": describe_host(), "runs": runs})


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="quickstart", choices=["mha108", "mha36", "quickstart", "tiny"])
    parser.add_argument("--peer", type=os.path.abspath, help="folder with tune-jax 0.8.3 (pip install --target)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--timeout", type=float, default=600, help="seconds that one tuning may take")
    parser.add_argument("--out", help="file for the full numbers, as JSON")
    parser.add_argument("--worker", choices=["ours", "peer"], help=argparse.SUPPRESS)
    parser.add_argument("--worker-out", help=argparse.SUPPRESS)
    return parser.parse_args()


def _run(side: str, options: argparse.Namespace) -> dict[str, Any]:
    arguments = ["--worker", side, "--case", options.case]
    if options.peer:
        arguments += ["--peer", options.peer]
    environment = cold_environment()
    environment["PYTHONPATH"] = os.pathsep.join(_import_path(side, options.peer))
    return run_worker(os.path.abspath(__file__), arguments, environment, timeout_s=options.timeout)


def _import_path(side: str, peer: str | None) -> Iterator[str]:
    """The peer's folder comes first for the peer, our checkout never; for ours it is the other way round."""
    if side == "peer":
        assert peer is not None
        yield peer
    unwanted = str(ROOT) if side == "peer" else peer
    for folder in filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)):
        if os.path.abspath(folder) != unwanted:
            yield folder


# In the worker


def _work(side: str, case_name: str, peer: str | None, answer: str) -> None:
    import jax
    from _cases import load_case

    tune = _import_tuner(side, peer).tune
    case = load_case(case_name)
    spans = Spans()
    missing = spans.install() if side == "ours" else []
    tuned = tune(case.function, hyperparams=case.hyperparams)
    started = time.perf_counter()
    output = jax.block_until_ready(tuned(*case.inputs))
    ended = time.perf_counter()
    report = {
        "side": side,
        "wall_s": ended - started,
        "error": case.check(output),
        "candidates": case.size,
        "winner": tuned.optimal_hyperparams,
        "device": jax.devices()[0].device_kind,
    }
    if side == "ours":
        report |= _describe_ours(tuned.results)
        report |= {"missing_hooks": missing, "seconds": spans.break_down(started, ended)}
    else:
        report["timed"] = len(tuned.timing_results)
    pathlib.Path(answer).write_text(json.dumps(report, default=str))


def _import_tuner(side: str, peer: str | None) -> Any:
    """Import the tuner and make sure that it is the one meant: both packages have the same name."""
    tuner = importlib.import_module("tune_jax")
    found = pathlib.Path(tuner.__file__ or "").resolve()
    in_peer = peer is not None and found.is_relative_to(pathlib.Path(peer).resolve())
    if in_peer != (side == "peer"):
        raise SystemExit(f"meant to import {side}, found {found}; the peer's folder is {peer}")
    return tuner


def _describe_ours(results: Any) -> dict[str, int]:
    timed = [row for row in results.rows if row.failure is None]
    return {
        "timed": len(timed),
        "failed": len(results.failures),
        # Candidates that are one program each list the others.
        "programs": len({min([row.id, *row.shares_with]) for row in timed}),
    }


@dataclasses.dataclass(frozen=True)
class Span:
    """One call of a hooked function."""

    label: str
    start: float
    end: float

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclasses.dataclass
class Spans:
    """Calls of the hooked functions, as seen from outside."""

    calls: list[Span] = dataclasses.field(default_factory=list)

    def install(self) -> list[str]:
        """Wrap the functions of HOOKS and return the names of those that are not there (any more)."""
        missing = []
        for label, module_name, name in HOOKS:
            module = importlib.import_module(module_name)
            if hasattr(module, name):
                setattr(module, name, self._wrap(label, getattr(module, name)))
            else:
                missing.append(f"{module_name}.{name}")
        return missing

    def _wrap(self, label: str, function: Any) -> Any:
        @functools.wraps(function)
        def timed(*args: Any, **kwargs: Any) -> Any:
            started = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.calls.append(Span(label, started, time.perf_counter()))

        return timed

    def break_down(self, started: float, ended: float) -> dict[str, float]:
        """Seconds by part; see the module's docstring."""
        session, build = self._only("session"), self._only("build")
        if session is None or build is None:
            return {}
        lowering = _sum(self.calls, "lowering")
        # The tuner calls `attempt` for first runs and again for every timed launch; the former lie in the build.
        first_runs = _sum([call for call in self.calls if call.start < build.end], "attempt")
        parts = {
            "before": session.start - started,
            "inputs": _sum(self.calls, "inputs"),
            "lowering": lowering,
            "waiting for compiles": build.seconds - lowering - first_runs,
            "first runs": first_runs,
            "timing": _sum(self.calls, "timing"),
            "winner": ended - session.end,
        }
        parts["the rest"] = ended - started - sum(parts.values())
        return parts | {
            "of timing, reading traces": _sum(self.calls, "reading"),
            "compiling, all threads": _sum(self.calls, "compiling"),
        }

    def _only(self, label: str) -> Span | None:
        return next((call for call in self.calls if call.label == label), None)


def _sum(calls: list[Span], label: str) -> float:
    return sum(call.seconds for call in calls if call.label == label)


# Printing


def _print_run(repeat: int, run: Mapping[str, Any]) -> None:
    programs = f", {run['programs']} distinct programs" if "programs" in run else ""
    print(
        f"run {repeat + 1} {run['side']}: {run['wall_s']:.2f} s, {run['timed']} of {run['candidates']} candidates "
        f"timed{programs}, winner {run['winner']} on {run['device']}, largest error {run['error']:.1e}",
        flush=True,
    )


def _print_summary(case: str, runs: list[dict[str, Any]]) -> None:
    by_side = {side: [run for run in runs if run["side"] == side] for side in ("ours", "peer")}
    medians = {side: statistics.median(run["wall_s"] for run in of) for side, of in by_side.items() if of}
    _print_breakdown(by_side["ours"])
    for side, seconds in medians.items():
        print(f"{case}: {side} {seconds:.2f} s (median of {len(by_side[side])})")
    if "peer" in medians:
        ratio = medians["ours"] / medians["peer"]
        print(f"{case}: ours/peer {verdict(ratio, LIMITS[case]) if case in LIMITS else f'{ratio:.3f}'}")


def _print_breakdown(ours: list[dict[str, Any]]) -> None:
    for name in ours[0]["missing_hooks"]:
        print(f"not measured, because it is not there: {name}", file=sys.stderr)
    print("where our time goes, medians:")
    for part in ours[0]["seconds"]:
        print(f"  {part:26} {statistics.median(run['seconds'].get(part, 0.0) for run in ours):7.2f} s")


if __name__ == "__main__":
    main()
