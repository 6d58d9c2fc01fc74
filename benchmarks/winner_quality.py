"""How good the winners are: several tunings in a row, and each winner against the fastest of all programs.

    python benchmarks/winner_quality.py --case mha108
    python benchmarks/winner_quality.py --case tiny --tunings 2 --launches 20     # a smoke test on the CPU

Tunes the case's function anew several times. Then every distinct program of the last tuning is compiled again,
apart from the tuner, and timed by device time in rounds: each round launches every program once, in a new random
order. For each tuning it prints the winner's median over the lowest median of all programs; the worst of these
ratios must be at most 1.01. Cases as in `tuning_time.py`; `mha108` and `mha36` need a GPU.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import random
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from _cases import CASES, Case, load_case
from _common import describe_host, verdict, write_report

from tune_jax import tune
from tune_jax._measure.rounds import draw_order
from tune_jax._measure.timers import DeviceTimer, Launchable

LIMIT = 1.01
# Launches in one trace: a trace is read in memory, and a bad one costs only its own.
LAUNCHES_A_TRACE = 2000


def main() -> None:
    options = _read_options()
    case = load_case(options.case)
    tunings = [_tune(case, seed) for seed in range(options.tunings)]
    groups = _group(tunings[-1])
    started = time.perf_counter()
    programs = _compile(case, sorted(set(groups.values())))
    medians = _time(programs, options.launches)
    print(f"{len(programs)} distinct programs timed anew, {time.perf_counter() - started:.1f} s")
    ratios = _compare(tunings, groups, medians)
    print(f"{options.case}: worst winner/fastest of {len(ratios)} tunings {verdict(max(ratios), LIMIT)}")
    report = {"case": options.case, "host": describe_host(), "device": jax.devices()[0].device_kind, "ratios": ratios}
    write_report(options.out, report | {"medians_ns": medians, "tunings": [result.to_dict() for result in tunings]})


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--case", default="mha108", choices=CASES)
    parser.add_argument("--tunings", type=int, default=5)
    parser.add_argument("--launches", type=int, default=200, help="of each distinct program, for the comparison")
    parser.add_argument("--out", help="file for the full numbers, as JSON")
    return parser.parse_args()


def _tune(case: Case, seed: int) -> Any:
    """Tune a tuned function that, its seed being another, knows of no earlier tuning."""
    tuned = tune(case.function, hyperparams=case.hyperparams, seed=seed)
    error = case.check(jax.block_until_ready(tuned(*case.inputs)))
    best = tuned.results.best
    print(
        f"tuned in {tuned.results.wall_s:.2f} s: {best.hyperparams}, {best.median_s * 1e6:.2f} us by the "
        f"{best.clock}'s clock, {len(best.samples_ns)} launches, largest error {error:.1e}",
        flush=True,
    )
    return tuned.results


def _group(results: Any) -> dict[int, int]:
    """Each timed candidate's id to the lowest id of those that are the same program."""
    return {row.id: min([row.id, *row.shares_with]) for row in results.rows if row.failure is None}


def _compile(case: Case, ids: Sequence[int]) -> list[Launchable]:
    settings = case.settings()
    lowered = {key: _jit(case, key, settings[key]).lower(*case.inputs) for key in ids}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        compiled = dict(zip(ids, pool.map(lambda key: lowered[key].compile(), ids), strict=True))
    # The profiler names a program after its function, with "jit_" in front.
    return [Launchable(key, f"jit_program_{key}", _launch(compiled[key], case.inputs)) for key in ids]


def _jit(case: Case, key: int, setting: Mapping[str, Any]) -> Any:
    def program(*inputs: jax.Array) -> jax.Array:
        return case.function(*inputs, **setting)

    program.__name__ = program.__qualname__ = f"program_{key}"
    return jax.jit(program)


def _launch(compiled: Any, inputs: Sequence[jax.Array]) -> Any:
    def launch() -> None:
        jax.block_until_ready(compiled(*inputs))

    return launch


def _time(programs: Sequence[Launchable], launches: int) -> dict[int, float]:
    """Median device time of each program, nanoseconds, over rounds in random order."""
    timer, shuffle = DeviceTimer(jax.default_backend()), random.Random(1)
    times: dict[int, list[float]] = {program.id: [] for program in programs}
    rounds_a_trace = max(1, LAUNCHES_A_TRACE // len(programs))
    for first in range(0, launches, rounds_a_trace):
        order = draw_order(programs, min(rounds_a_trace, launches - first), shuffle)
        for program, launch in zip(order, timer.time(order), strict=True):
            if launch is not None:
                times[program.id].append(launch.busy_ns)
    unseen = launches * len(programs) - sum(map(len, times.values()))
    if unseen:
        print(f"{unseen} launches are missing in the traces", file=sys.stderr)
    return {key: statistics.median(of) for key, of in times.items()}


def _compare(tunings: Sequence[Any], groups: Mapping[int, int], medians: Mapping[int, float]) -> list[float]:
    fastest = min(medians, key=lambda key: medians[key])
    ratios = []
    for number, results in enumerate(tunings, 1):
        winner = groups[results.best.id]
        ratios.append(medians[winner] / medians[fastest])
        print(
            f"tuning {number}: winner's program {winner} {medians[winner] / 1e3:.2f} us, fastest {fastest} "
            f"{medians[fastest] / 1e3:.2f} us, ratio {ratios[-1]:.4f}"
        )
    return ratios


if __name__ == "__main__":
    main()
