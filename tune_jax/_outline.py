"""What a call returns, found by tracing its candidates in order until one traces. Nothing is compiled."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from tune_jax._call import Call
from tune_jax._errors import NoCandidateError
from tune_jax._failure import attempt, summarise
from tune_jax._jax import dynamic_grid_bounds, shaped, used_inputs
from tune_jax._records import Candidate, Failure
from tune_jax._space import list_candidates
from tune_jax._wrap import wrap

Describe = Callable[[frozenset[int]], tuple[Call, list[Any]]]


@dataclasses.dataclass(frozen=True)
class Outline:
    """The first candidate that traces: its result's structure, shapes and dtypes, and which inputs it reads."""

    first: Candidate
    tree: Any
    avals: tuple[Any, ...]
    effects: Any
    used: tuple[bool, ...]
    dynamic_bounds: int


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
    """
    known: dict[Any, Outline] = call.tunable.state.setdefault("outlines", {})
    key = (call, tuple(avals))
    if key not in known:
        known[key] = _trace_first(call, avals)
    return known[key]


def abstract_inputs(avals: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Abstract values as the structs that `jax.jit(...).trace` takes."""
    return [jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=getattr(a, "weak_type", False)) for a in avals]


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
    traced = attempt("trace", lambda: _trace(call, candidate, avals))
    return None if isinstance(traced, Failure) else _read_outline(candidate, traced)


def _trace_first(call: Call, avals: Sequence[Any]) -> Outline:
    failures: dict[int, Failure] = {}
    for candidate in candidates_of(call):
        traced = attempt("trace", functools.partial(_trace, call, candidate, avals))
        if not isinstance(traced, Failure):
            return _read_outline(candidate, traced)
        failures[candidate.id] = traced
    raise NoCandidateError(summarise(failures))


def _trace(call: Call, candidate: Candidate, avals: Sequence[Any]) -> Any:
    return jax.jit(wrap(call, candidate.hyperparams, name="outline")).trace(*abstract_inputs(avals))


def _read_outline(candidate: Candidate, traced: Any) -> Outline:
    return Outline(
        candidate,
        jax.tree.structure(traced.out_info),
        tuple(shaped(aval) for aval in traced.jaxpr.out_avals),
        traced.jaxpr.effects,
        used_inputs(traced.jaxpr),
        dynamic_grid_bounds(traced.jaxpr),
    )
