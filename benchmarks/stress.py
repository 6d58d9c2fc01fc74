"""Random JAX programs around tuned functions: right results, one tuning for each key, no leaked tracer.

    JAX_PLATFORMS=cpu python benchmarks/stress.py --programs 200 --seed 0

Each program is drawn by `_programs.py` and run with its functions tuned and untuned. What must hold:

- results have the same structure, shapes, dtypes and weak types, and the same values within what the dtype allows;
- the keys that were tuned are those that follow from how the program was put together, and each was tuned once;
- running it again, eagerly and inside a fresh `jax.jit`, and in threads, agrees too and tunes nothing;
- no tracer is leaked (`jax.checking_leaks`), and every setting of JAX is as it was.

A program that fails is printed with its number; `--only NUMBER` runs it alone, with `--seed` as it was.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import os
import time
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

if "xla_force_host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()

import _programs
import jax
import jax.numpy as jnp
import numpy as np
from _common import describe_host, write_report

import tune_jax
from tune_jax._lookup import memory_of

THREADS = 3

# Of the largest value that was expected, by the dtype that a program computes in; tuned candidates are compiled whole,
# which rounds less often.
TOLERANCES = {"bfloat16": 6e-2, "float16": 1e-2}
DEFAULT_TOLERANCE = 1e-4

Tune = Callable[..., Any]


class StressError(AssertionError):
    """A program does not do what it must."""


@dataclasses.dataclass
class Watch:
    """The tuned functions of one program by label, and a line for each tuning that ended."""

    tune: Tune
    functions: dict[str, Any] = dataclasses.field(default_factory=dict)
    tunings: list[str] = dataclasses.field(default_factory=list)

    def make(self, label: str, function: Callable[..., Any]) -> Any:
        """Tune a function over a factor that does not change what it computes."""
        own = function if label == _programs.MADE_ANEW else _copy_apart(function)
        tuned = self.tune(own, hyperparams={"factor": [1, 2]}, progress=False)
        if label != _programs.MADE_ANEW:
            self.functions[label] = tuned
        return tuned

    def note(self, line: str) -> None:
        """Note a tuning by the line that it left in the log."""
        if not line.startswith(f"tuned {_programs.MADE_ANEW}("):
            self.tunings.append(line)

    def keys(self) -> collections.Counter[Any]:
        """What was tuned, as `Program.keys` has it."""
        return collections.Counter(
            (label, *_describe_key(key))
            for label, function in self.functions.items()
            for key in memory_of(function._tunable).results
        )


_copies = itertools.count()


def _copy_apart(function: Any) -> Any:
    """A copy that is like no other: equal functions may share what they were tuned for."""
    name = f"{function.__name__}{next(_copies)}"
    copy = types.FunctionType(
        function.__code__, function.__globals__, name, function.__defaults__, function.__closure__
    )
    copy.__kwdefaults__ = function.__kwdefaults__
    return copy


def _describe_key(key: Any) -> tuple[Any, Any]:
    """A key's inputs without the axes of the vmaps around them, and those vmaps; where the axes lie is left out."""
    shapes = [list(aval.shape) for aval in key.avals]
    for batch in reversed(key.call.batches):
        for shape, dim in zip(shapes, batch.dims, strict=True):
            if dim is not None:
                del shape[dim]
    inputs = tuple((tuple(shape), str(aval.dtype)) for shape, aval in zip(shapes, key.avals, strict=True))
    return inputs, tuple((batch.size, tuple(dim is not None for dim in batch.dims)) for batch in key.call.batches)


def check(program: _programs.Program, tune: Tune = tune_jax.tune) -> int:
    """Check one program and return how many tunings it took.

    Raises:
      StressError: it does not do what it must, or raises.
    """
    watch, tolerance = Watch(tune), TOLERANCES.get(program.spec.x.dtype, DEFAULT_TOLERANCE)
    expected = _run(program, program.build(lambda label, function: function))
    with _counting(watch), warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        warnings.filterwarnings("ignore", ".*has no value while tuning, so random integers")
        tuned = program.build(watch.make)
        before = _settings()
        with jax.checking_leaks():
            _compare("the first run", _run(program, tuned), expected, tolerance)
        _check_keys(program, watch)
        count = len(watch.tunings)
        for way, function in {"run again": tuned, "inside a fresh jit": _in_fresh_jit(tuned)}.items():
            _compare(way, _run(program, function), expected, tolerance)
            if len(watch.tunings) != count:
                raise StressError(f"{way}, it tuned {watch.tunings[count:]}")
        if changed := [name for name, value in _settings().items() if before[name] != value]:
            raise StressError(f"settings are not as they were: {', '.join(changed)}")
    return count


def _in_fresh_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    return jax.jit(lambda x, y: function(x, y))


def _run(program: _programs.Program, function: Callable[..., Any]) -> list[Any]:
    """The program's results in its context, one for each thread."""
    if program.context != "threads":
        return [_run_here(program, function)]
    with concurrent.futures.ThreadPoolExecutor(THREADS) as pool:
        futures = [pool.submit(_run_here, program, function) for _ in range(THREADS)]
        return [future.result() for future in futures]


def _run_here(program: _programs.Program, function: Callable[..., Any]) -> Any:
    with _enter(program.context):
        return jax.block_until_ready(function(*program.arguments()))


def _enter(name: str) -> contextlib.AbstractContextManager[Any]:
    contexts: dict[str, Callable[[], contextlib.AbstractContextManager[Any]]] = {
        "x64": lambda: jax.enable_x64(True),
        "no_jit": jax.disable_jit,
        "debug_nans": lambda: jax.debug_nans(True),
        "precise": lambda: jax.default_matmul_precision("highest"),
        "other_device": lambda: jax.default_device(jax.devices()[3]),
    }
    return contexts[name]() if name in contexts else contextlib.nullcontext()


@contextlib.contextmanager
def _counting(watch: Watch) -> Iterator[None]:
    handler = logging.Handler()
    handler.emit = lambda record: watch.note(record.getMessage())  # type: ignore[method-assign]
    before = tune_jax.logger.level
    tune_jax.logger.addHandler(handler)
    tune_jax.logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        tune_jax.logger.removeHandler(handler)
        tune_jax.logger.setLevel(before)


def _settings() -> dict[str, str]:
    return {name: repr(getattr(jax.config, name, None)) for name in jax.config.values}


def _check_keys(program: _programs.Program, watch: Watch) -> None:
    found = watch.keys()
    if set(found) != program.keys:
        raise StressError(
            f"keys that should have been tuned: {_lines(program.keys - set(found))}\n"
            f"keys that should not: {_lines(set(found) - program.keys)}"
        )
    if len(watch.tunings) != found.total():
        raise StressError(f"{found.total()} keys, but {len(watch.tunings)} tunings: {_lines(watch.tunings)}")
    if repeated := [key for key, count in found.items() if count > 1]:
        raise StressError(f"tuned for several layouts of one axis: {_lines(repeated)}")


def _lines(items: Any) -> str:
    return "".join(f"\n  {item}" for item in sorted(map(str, items))) or " none"


def _compare(way: str, came: list[Any], expected: list[Any], tolerance: float) -> None:
    if jax.tree.structure(came) != jax.tree.structure(expected):
        raise StressError(f"{way}: the structure is {jax.tree.structure(came)}, not {jax.tree.structure(expected)}")
    for one, other in zip(jax.tree.leaves(came), jax.tree.leaves(expected), strict=True):
        types = jax.typeof(one), jax.typeof(other)
        if [(t.shape, t.dtype, t.weak_type) for t in types[:1]] != [(t.shape, t.dtype, t.weak_type) for t in types[1:]]:
            raise StressError(f"{way}: {types[0]} came, {types[1]} was expected")
        if not _is_close(one, other, tolerance):
            raise StressError(f"{way}: values differ: {one} came, {other} was expected")


def _is_close(one: Any, other: Any, tolerance: float) -> bool:
    if other.size == 0:
        # jax 0.10 cannot hand over an array without elements that lies on several devices.
        return True
    if not jnp.issubdtype(other.dtype, jnp.inexact):
        return bool(np.array_equal(one, other))
    wide = np.complex128 if jnp.issubdtype(other.dtype, jnp.complexfloating) else np.float64
    came, wanted = np.asarray(one).astype(wide), np.asarray(other).astype(wide)
    scale = max(1.0, float(np.max(np.abs(wanted), initial=0.0)))
    return bool(np.all(np.abs(came - wanted) <= tolerance * scale))


def main() -> None:
    """Check as many programs as asked for; exits with 1 if one fails."""
    options = _read_options()
    _measure_little()
    numbers = [options.only] if options.only is not None else range(options.first, options.first + options.programs)
    kinds = (*_programs.LAYERS, *[_programs.closure] * 3) if options.closures else _programs.LAYERS
    started, tunings, failures = time.perf_counter(), 0, {}
    for number in numbers:
        program = _programs.draw(options.seed, number, kinds)
        if options.verbose:
            print(f"{number}: {program}", flush=True)
        try:
            tunings += check(program)
        except Exception as error:  # noqa: BLE001  what a program may raise is what this looks for
            text = str(error) if isinstance(error, StressError) else traceback.format_exc()
            failures[number] = f"{program}\n{text}"
            print(f"--only {number} --seed {options.seed}\n{failures[number]}\n", flush=True)
        # Hundreds of compiled programs otherwise stay in memory.
        jax.clear_caches()
    seconds = time.perf_counter() - started
    print(
        f"{len(numbers)} programs (seed {options.seed}), {tunings} tunings, {len(failures)} failures"
        f"{' ' * bool(failures)}{sorted(failures) or ''}, {seconds:.0f} s on jax {jax.__version__}"
    )
    report = {"host": describe_host(), "seed": options.seed, "tunings": tunings, "failures": failures}
    write_report(options.out, {**report, "seconds": seconds})
    if failures:
        raise SystemExit(1)


def _measure_little() -> None:
    tune_jax.CONFIG.profiling_samples = 1
    tune_jax.CONFIG.max_rounds = 1


def _read_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--programs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first program")
    parser.add_argument("--only", type=int, help="number of the one program to run")
    parser.add_argument("--closures", action="store_true", help="with functions that close over traced values")
    parser.add_argument("--verbose", action="store_true", help="print each program before it runs")
    parser.add_argument("--out", help="file for the full numbers, as JSON")
    return parser.parse_args()


if __name__ == "__main__":
    main()
