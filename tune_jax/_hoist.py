"""Functions that close over traced values: these become inputs, and the function gives way to its programs.

What is traced inside `jax.jit`, `jax.grad` or `jax.vmap` may be known to a function that is tuned there without being
an argument of it. A candidate is then no function of its arguments alone, and cannot be compiled. So every candidate
is traced where it stands, which tells what it closes over; what is bound in its place holds neither the function nor
any tracer.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterable, Sequence
from typing import Any

import jax

from tune_jax._call import CLOSED_OVER, Call, Hints
from tune_jax._closures import holds_tracer
from tune_jax._failure import attempt
from tune_jax._jax import Tracer, closed_over
from tune_jax._leaves import Shown, Static
from tune_jax._outline import candidates_of, outline, trace_candidate
from tune_jax._records import Failure, Tunable
from tune_jax._traced import TracedCall, choice_key, read_traced

# Stands for a default that holds a traced value; like one it is an input by its type, which no call adds by itself.
_SOME_INPUT = 0.0


def hoist(call: Call, inputs: Sequence[Any]) -> tuple[Call, Sequence[Any]]:
    """Return a call that closes over no traced value and does the same, and its inputs.

    Raises:
      NoCandidateError: no candidate can be traced.
    """
    avals = [jax.typeof(value) for value in inputs]
    if not may_hold_tracer(call) and not outline(call, avals).closes_over_tracers:
        return call, inputs
    candidates = candidates_of(call)
    traced = [attempt("trace", functools.partial(trace_candidate, call, avals, each)) for each in candidates]
    hoisted = _tracers_of(traced)
    places = {id(tracer): index for index, tracer in enumerate(hoisted)}
    outcomes = {
        choice_key(candidate.hyperparams): found if isinstance(found, Failure) else read_traced(found, places)
        for candidate, found in zip(candidates, traced, strict=True)
    }
    programs = TracedCall(outcomes, tuple(jax.typeof(tracer) for tracer in hoisted))
    return _without_function(call, programs), [*inputs, *hoisted]


def may_hold_tracer(call: Call) -> bool:
    """Whether a tracer is within reach of a call's function or of its static values."""
    return holds_tracer([call.tunable.function, *(static.value for _, static in (*call.statics, *call.fixed))])


def _tracers_of(traced: Iterable[Any]) -> list[Any]:
    """The tracers that any candidate closes over, each once, in the order in which candidates meet them."""
    programs = [found for found in traced if not isinstance(found, Failure)]
    met = [value for program in programs for value in closed_over(program) if isinstance(value, Tracer)]
    return list({id(value): value for value in met}.values())


def _without_function(call: Call, programs: TracedCall) -> Call:
    """The call of `programs`, with the values closed over as its last inputs."""
    count = len(programs.avals)
    part = jax.tree.structure((0,) * count)
    return dataclasses.replace(
        call,
        tunable=_without_code(call.tunable),
        names=(*call.names, CLOSED_OVER),
        tree=jax.tree_util.treedef_tuple((*call.tree.children(), part)),
        paths=(*call.paths, *(f"{CLOSED_OVER} {index + 1}" for index in range(count))),
        statics=tuple((index, _without_tracers(static)) for index, static in call.statics),
        hints=Hints((*call.hints.values, *[None] * count)),
        traced=programs,
    )


def _without_code(tunable: Tunable) -> Tunable:
    """What the user asked for, without the function; what is found out shows at the same place."""
    shown = {name: known for name, known in tunable.state.items() if name in ("memory", "warned")}
    signature = _without_traced_defaults(tunable.signature)
    return dataclasses.replace(tunable, function=_refuse, signature=signature, state=shown)


def _without_traced_defaults(signature: inspect.Signature) -> inspect.Signature:
    parameters = [
        parameter.replace(default=_SOME_INPUT) if holds_tracer([parameter.default]) else parameter
        for parameter in signature.parameters.values()
    ]
    return signature.replace(parameters=parameters)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise AssertionError("a call with traced candidates runs these")


def _without_tracers(static: Static) -> Static:
    if not holds_tracer([static.value]):
        return static
    return Static(Shown(type(static.value).__name__), Shown)
