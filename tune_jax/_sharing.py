"""What equal tuned functions have in common, so that one made anew at each call is tuned once.

Only results are shared by it, never a traced or compiled program: two functions that should not have been taken for
equal would at worst run the winner of the other one's tuning.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Hashable, Sequence
from typing import Any

from tune_jax._call import Call, Hints, without_hints
from tune_jax._content import NotComparableError, Same, lasting_content_of
from tune_jax._failure import attempt
from tune_jax._jax import outside_traces
from tune_jax._leaves import Shown, Static
from tune_jax._outline import candidates_of, trace_candidate
from tune_jax._recording import Place
from tune_jax._records import Candidate, Tunable
from tune_jax._traced import TracedCandidate, digest_of, read_traced

# So many candidates stand for all of those of a function that can only be compared by what it computes.
_MOST_TRACED = 8

_OPTIONS = (
    "name",
    "where",
    "sample_num",
    "seed",
    "static_names",
    "donated_names",
    "compiler_options",
    "in_shardings",
    "out_shardings",
    "example_args",
    "example_kws",
    "kernel_filter",
    "keep_trace",
)


@dataclasses.dataclass(frozen=True)
class Kin:
    """Stands for a tunable and all that are equal to it, and keeps none of them alive."""

    name: str
    content: Hashable = dataclasses.field(repr=False)


def common_call(call: Call, avals: Sequence[Any]) -> Call:
    """Return what `call` is for every tuned function that is equal to its own; it keeps no function alive."""
    known: dict[Any, Call] = call.tunable.state.setdefault("common", {})
    key = (without_hints(call), tuple(avals))
    if key not in known:
        known[key] = dataclasses.replace(
            call,
            tunable=_kin_of(call, avals),
            statics=tuple((index, _common_static(static)) for index, static in call.statics),
            fixed=tuple((name, _common_static(static)) for name, static in call.fixed),
            hints=Hints(),
            traced=None,
        )
    return known[key]


def place_of(call: Call, avals: Sequence[Any]) -> Place:
    """The place in a program's text of a call with inputs of these abstract values."""
    return Place(common_call(call, avals), tuple(avals))


def is_common(call: Call) -> bool:
    """Whether what `common_call` made of a call holds nothing that is one tuned function's own."""
    statics = [static for _, static in (*call.statics, *call.fixed)]
    kin: Any = call.tunable
    own = isinstance(kin.content, Same) or not all(isinstance(static.value, Shown) for static in statics)
    return not own


def _common_static(static: Static) -> Static:
    try:
        return Static(Shown(repr(static.value)), lasting_content_of(static.value))
    except NotComparableError:
        return static


def _kin_of(call: Call, avals: Sequence[Any]) -> Any:
    tunable = call.tunable
    try:
        options = lasting_content_of(tuple(getattr(tunable, name) for name in _OPTIONS))
    except NotComparableError:
        return Kin(tunable.name, Same(tunable))
    return Kin(tunable.name, (options, _function_content(call, tunable, avals)))


def _function_content(call: Call, tunable: Tunable, avals: Sequence[Any]) -> Hashable:
    if call.traced is not None:
        return call.traced.digest()
    try:
        return lasting_content_of(tunable.function)
    except NotComparableError:
        return _digest_some(call, avals)


def _digest_some(call: Call, avals: Sequence[Any]) -> str:
    """Digest what some of the candidates compute: the first, the last, and evenly between."""
    candidates = candidates_of(call)
    step = max(1, -(-len(candidates) // _MOST_TRACED))
    chosen = dict.fromkeys([*range(0, len(candidates), step), len(candidates) - 1])
    with outside_traces():
        outcomes = [attempt("trace", functools.partial(_trace_alone, call, avals, candidates[i])) for i in chosen]
    return digest_of(outcomes)


def _trace_alone(call: Call, avals: Sequence[Any], candidate: Candidate) -> TracedCandidate:
    return read_traced(trace_candidate(call, avals, candidate), places={})
