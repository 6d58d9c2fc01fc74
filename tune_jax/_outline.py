"""What a call returns, found by tracing its candidates in order until one traces. Nothing is compiled."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax

from tune_jax._call import Batch, Call, with_batch, without_hints
from tune_jax._errors import NoCandidateError
from tune_jax._failure import attempt, summarise
from tune_jax._jax import (
    Tracer,
    closed_over,
    dynamic_grid_bounds,
    placed_parts,
    shaped,
    struct_of,
    takes_cotangent,
    used_inputs,
)
from tune_jax._recording import lasting_context
from tune_jax._records import Candidate, Failure
from tune_jax._space import list_candidates
from tune_jax._wrap import mapped_outputs, single_aval, wrap

Describe = Callable[[frozenset[int]], tuple[Call, list[Any]]]

# Where a tunable's state has the last call of which no candidate could be traced.
UNTRACEABLE = "untraceable"

# What JAX raises where Python needs the value of a traced input, and how it says which inputs those are.
_NEEDS_A_VALUE = {
    "ConcretizationTypeError",
    "NonConcreteBooleanIndexError",
    "TracerBoolConversionError",
    "TracerIntegerConversionError",
}
_BLAME = re.compile(r"not available in Python because it depends on the values? of the arguments? (.*)")


@dataclasses.dataclass(frozen=True)
class Outline:
    """The first candidate that traces: its result's structure, shapes and dtypes, and which inputs it reads.

    `placed` holds its jaxpr if that says on which devices it runs, for JAX to find.
    """

    first: Candidate
    tree: Any
    avals: tuple[Any, ...]
    effects: Any
    used: tuple[bool, ...]
    dynamic_bounds: int
    placed: tuple[Any, ...]
    closes_over_tracers: bool


@dataclasses.dataclass(frozen=True)
class Untraceable:
    """A call of which no candidate can be traced."""

    call: Call
    avals: tuple[Any, ...]
    candidates: tuple[Candidate, ...]
    failures: Mapping[int, Failure]


def candidates_of(call: Call) -> list[Candidate]:
    """The candidates among which this call chooses."""
    asked = call.tunable
    return list_candidates(
        call.space, fixed=call.fixed_values, where=asked.where, sample_num=asked.sample_num, seed=asked.seed
    )


def outline(call: Call, avals: Sequence[Any]) -> Outline:
    """Return the outline of `call` for inputs of these abstract values.

    Raises:
      NoCandidateError: no candidate can be traced.
      RecursionError: the call is made while it is being traced itself.
    """
    known: dict[Any, Outline] = call.tunable.state.setdefault("outlines", {})
    key = (without_hints(call), tuple(avals), lasting_context())
    if key in known:
        return known[key]
    with _refusing_recursion(call, key):
        first, traced = _first_that_traces(call, avals, functools.partial(trace_candidate, call, avals))
    found = _read_outline(first, traced)
    if not found.closes_over_tracers:
        # Another time it may close over some.
        known[key] = found
    return found


class _Tracing(threading.local):
    """The calls that this thread is in the middle of tracing."""

    keys: frozenset[Any] = frozenset()


_TRACING = _Tracing()


@contextlib.contextmanager
def _refusing_recursion(call: Call, key: Any) -> Iterator[None]:
    """Raise RecursionError for a call inside itself: to trace every candidate at every depth would take for ever."""
    before = _TRACING.keys
    if key in before:
        raise RecursionError(f"{call.tunable.name} calls itself with arguments of the same shapes and static values")
    _TRACING.keys = before | {key}
    try:
        yield
    finally:
        _TRACING.keys = before


def first_can_be_traced(call: Call, avals: Sequence[Any]) -> bool:
    """Whether the first candidate can be traced here; a cheap question where the others will hardly differ."""
    candidate = candidates_of(call)[0]
    return not isinstance(attempt("trace", lambda: trace_candidate(call, avals, candidate)), Failure)


def batched_call(call: Call, batch: Batch, avals: Sequence[Any]) -> tuple[Call, tuple[bool, ...]]:
    """Return `call` with one more vmap around it, and which outputs then have the new axis.

    `avals` are those of the inputs, with the axis where `batch` says so.

    Raises:
      NoCandidateError: no candidate can be traced.
    """
    known: dict[Any, tuple[bool, ...]] = call.tunable.state.setdefault("mapped", {})
    key = (without_hints(call), batch, tuple(avals), lasting_context())
    if key not in known:
        structs = abstract_inputs(avals)
        _, known[key] = _first_that_traces(
            call,
            avals,
            lambda candidate: mapped_outputs(wrap(call, candidate.hyperparams, name="outline"), batch, structs),
        )
    return with_batch(call, dataclasses.replace(batch, mapped=known[key])), known[key]


def can_be_traced(call: Call, avals: Sequence[Any]) -> bool:
    """Whether any candidate of `call` can be traced; if none can, that is no failure of the call."""
    before = call.tunable.state.get(UNTRACEABLE)
    try:
        outline(call, avals)
    except NoCandidateError:
        call.tunable.state[UNTRACEABLE] = before
        return False
    return True


def program_avals(call: Call, avals: Sequence[Any]) -> list[Any]:
    """The abstract values that a candidate's program takes: the inputs', and cotangents if it goes backward too."""
    if not call.moving:
        return list(avals)
    results = outline(dataclasses.replace(call, moving=()), avals).avals
    return [*avals, *(single_aval(call, aval) for aval in results if takes_cotangent(aval))]


def abstract_inputs(avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Abstract values as the structs that `jax.jit(...).trace` takes."""
    return [struct_of(aval) for aval in avals]


def static_numbers(describe: Describe, numbers: frozenset[int]) -> frozenset[int]:
    """Return which of these leaves, Python numbers, the function needs as numbers rather than as inputs.

    A number is static if the first candidate cannot be traced without its value, does not read it as an input, or
    computes a kernel's grid from it. `describe` makes the call with a set of leaves static.
    """
    quick = _try_first(describe, frozenset())
    if quick is not None and quick.dynamic_bounds == 0:
        return numbers - _used_leaves(describe, frozenset(), quick)
    known = _try_first(describe, numbers)
    if known is None:
        return numbers
    static = numbers
    for leaf in sorted(numbers):
        fewer = static - {leaf}
        tried = _try_first(describe, fewer)
        if tried and tried.dynamic_bounds <= known.dynamic_bounds and leaf in _used_leaves(describe, fewer, tried):
            static = fewer
    return static


def _used_leaves(describe: Describe, static: frozenset[int], known: Outline) -> frozenset[int]:
    call, _ = describe(static)
    return frozenset(leaf for leaf, used in zip(call.dynamic_indices, known.used, strict=True) if used)


def _try_first(describe: Describe, static: frozenset[int]) -> Outline | None:
    call, values = describe(static)
    avals = [shaped(jax.typeof(value)) for value in values]
    candidate = candidates_of(call)[0]
    traced = attempt("trace", lambda: trace_candidate(call, avals, candidate))
    return None if isinstance(traced, Failure) else _read_outline(candidate, traced)


def advise(call: Call, avals: Sequence[Any], failure: Failure) -> Failure:
    """Say first which numbers to declare static where a candidate failed because Python needs their values."""
    blamed = _BLAME.search(failure.message)
    if blamed is None and failure.error_type not in _NEEDS_A_VALUE:
        return failure
    inputs = zip(call.input_names, call.input_parameters, avals, strict=True)
    numbers = {i: name for i, (name, parameter, aval) in enumerate(inputs) if name == parameter and aval.shape == ()}
    places = [int(place) for place in re.findall(r"inputs\[(\d+)\]", blamed[1])] if blamed else list(numbers)
    names = [numbers[place] for place in places if place in numbers]
    if not names:
        return failure
    advice = f"it needs the value of {' and '.join(names)} while it is traced; pass static_argnames={names} to tune"
    return dataclasses.replace(failure, message=f"{advice}\n{failure.message}")


def _first_that_traces(call: Call, avals: Sequence[Any], trace: Callable[[Candidate], Any]) -> tuple[Candidate, Any]:
    failures: dict[int, Failure] = {}
    candidates = candidates_of(call)
    for candidate in candidates:
        traced = attempt("trace", functools.partial(trace, candidate))
        if not isinstance(traced, Failure):
            return candidate, traced
        failures[candidate.id] = advise(call, avals, traced)
    call.tunable.state[UNTRACEABLE] = Untraceable(without_hints(call), tuple(avals), tuple(candidates), failures)
    raise NoCandidateError(summarise(failures))


def trace_candidate(call: Call, avals: Sequence[Any], candidate: Candidate) -> Any:
    """Trace a candidate for inputs of these abstract values, in the ambient trace."""
    function = wrap(call, candidate.hyperparams, name="outline")
    return jax.jit(function).trace(*abstract_inputs(program_avals(call, avals)))


def _read_outline(candidate: Candidate, traced: Any) -> Outline:
    constants = closed_over(traced)
    return Outline(
        candidate,
        jax.tree.structure(traced.out_info),
        tuple(traced.jaxpr.out_avals),
        traced.jaxpr.effects,
        used_inputs(traced.jaxpr)[len(constants) :],
        dynamic_grid_bounds(traced.jaxpr),
        placed_parts(traced.jaxpr),
        any(isinstance(value, Tracer) for value in constants),
    )
