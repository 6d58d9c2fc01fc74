"""A program, unrun -> the tuned calls in it: which, where in the user's code, how often, and how much work each is."""

from __future__ import annotations

import collections
import dataclasses
import functools
import inspect
import math
import os
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tune_jax._failure import attempt, pick_own
from tune_jax._jax import inner_jaxprs, is_jitted, outside_traces, restored, source_frames
from tune_jax._outline import abstract_inputs, program_avals
from tune_jax._primitive import find_place, tuned_call_p
from tune_jax._recording import Note, Place, recording
from tune_jax._records import Failure
from tune_jax._wrap import wrap

# None for a call whose own equation does not say where in the user's code it is.
Site = str | None
Counts = collections.Counter[tuple[Site, Place]]


@dataclasses.dataclass(frozen=True)
class Program:
    """A function and the arguments that it is to be traced with."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The function's name."""
        function = _bare(self).function
        return str(getattr(function, "__name__", type(function).__name__))


@dataclasses.dataclass(frozen=True)
class FoundCall:
    """A tuned call: how often the program makes it at each place in the user's code, and how much work one run is.

    `work` is in floating-point operations as XLA counts them, or in bytes of inputs and outputs where it counts none.
    """

    note: Note
    sites: Mapping[str, int]
    work: float

    @property
    def total_work(self) -> float:
        """The work of all its runs."""
        return self.work * sum(self.sites.values())


@dataclasses.dataclass(frozen=True)
class _Stand:
    """What the candidate is that stands in for a call: its jaxpr, if it can be had, and the work of one run."""

    parts: tuple[Any, ...]
    work: float


def survey(program: Program) -> dict[Any, FoundCall]:
    """Trace and lower a program without tuning or running anything, and return the tuned calls in it by key."""
    with recording() as record, jax.disable_jit(False):
        traced = _trace(program)
        traced.lower()
    notes = record.notes
    stands = {key: _study(note) for key, note in notes.items()}
    counts = _count(traced.jaxpr.jaxpr, {notes[key].place: stand.parts for key, stand in stands.items()}, {})
    sites = _share_out(notes, counts)
    return {key: FoundCall(note, sites[key], stands[key].work) for key, note in notes.items()}


def _share_out(notes: Mapping[Any, Note], counts: Counts) -> dict[Any, dict[str, int]]:
    """Which sites make each call; of calls that look the same, each has those where it was met."""
    met = {key: [_find_site(source) for source in note.sources] for key, note in notes.items()}
    shared: dict[Any, dict[str, int]] = {key: {} for key in notes}
    for (site, place), count in counts.items():
        alike = [key for key, note in notes.items() if note.place == place]
        for key in [key for key in alike if site in met[key]] or alike[:1]:
            shared[key][site or _definition(notes[key])] = count
    # What is transposed, or was run while tracing, leaves no equation.
    return {key: sites or {met[key][0] or _definition(notes[key]): 1} for key, sites in shared.items()}


def _bare(program: Program) -> Program:
    """The program with partials and bound methods opened: a jitted function inside has static arguments of its own."""
    function = program.function
    if isinstance(function, functools.partial):
        args, kwargs = (*function.args, *program.args), {**function.keywords, **program.kwargs}
        return _bare(Program(function.func, args, kwargs))
    if isinstance(function, types.MethodType):
        return _bare(Program(function.__func__, (function.__self__, *program.args), program.kwargs))
    return program


def _trace(program: Program) -> Any:
    """Trace as a call would: a jitted function by its own rules, any other one as if `jax.jit` were around it.

    What `jax.jit` does not take stays as it is, as do numbers where the jit is another library's.
    """
    bare = _bare(program)
    if is_jitted(bare.function):
        return bare.function.trace(*bare.args, **bare.kwargs)  # type: ignore[attr-defined]
    if hasattr(bare.function, "lower"):
        return _trace_inputs(bare, _is_array)
    return _trace_inputs(program, _is_input)


def _trace_inputs(program: Program, is_input: Callable[[Any], bool]) -> Any:
    leaves, tree = jax.tree.flatten((program.args, program.kwargs))
    moved = [index for index, leaf in enumerate(leaves) if is_input(leaf)]

    def run(*inputs: Any) -> Any:
        joined = list(leaves)
        for index, value in zip(moved, inputs, strict=True):
            joined[index] = value
        args, kwargs = jax.tree.unflatten(tree, joined)
        # The result may hold what jit cannot return.
        return [leaf for leaf in jax.tree.leaves(program.function(*args, **kwargs)) if isinstance(leaf, jax.Array)]

    return jax.jit(run).trace(*(leaves[index] for index in moved))


def _is_array(leaf: Any) -> bool:
    if isinstance(leaf, np.ndarray):
        return leaf.dtype.kind not in "OSUMm"
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct)


def _is_input(leaf: Any) -> bool:
    return _is_array(leaf) or isinstance(leaf, bool | int | float | complex | np.number | np.bool_)


def _study(note: Note) -> _Stand:
    function = wrap(note.call, note.stand_in.hyperparams, name="study")
    with recording(), restored(note.around), outside_traces():
        inputs = abstract_inputs(program_avals(note.call, note.avals))
        traced = attempt("trace", lambda: jax.jit(function).trace(*inputs))
        if isinstance(traced, Failure):
            return _Stand((), _count_bytes(note.avals))
        costs = attempt("compile", lambda: traced.lower().cost_analysis())
    operations = costs.get("flops", 0.0) if isinstance(costs, Mapping) else 0.0
    work = operations if operations > 0 else _count_bytes([*inputs, *traced.jaxpr.out_avals])
    return _Stand((traced.jaxpr.jaxpr,), work)


def _count_bytes(avals: Sequence[Any]) -> float:
    return float(sum(math.prod(aval.shape) * aval.dtype.itemsize for aval in avals))


def _count(jaxpr: Any, inside: Mapping[Place, Sequence[Any]], known: dict[int, Counts]) -> Counts:
    """How often each call site makes each call; `inside` has what calls are made of."""
    if id(jaxpr) in known:
        return known[id(jaxpr)]
    counts: Counts = collections.Counter()
    for equation in jaxpr.eqns:
        parts, times = inner_jaxprs(equation)
        place = find_place(equation)
        if place is None and not parts:
            continue
        site = _find_site(equation.source_info)
        if place is not None:
            counts[site, place] += 1
            parts = inside.get(place, ()) if equation.primitive is tuned_call_p else ()
        for part in parts:
            for (inner, found), count in _count(part, inside, known).items():
                counts[inner or site, found] += times * count
    known[id(jaxpr)] = counts
    return counts


def _find_site(source_info: Any) -> Site:
    """The innermost place in the user's own code: `model.py:12 in Layer.__call__`."""
    own = pick_own(source_frames(source_info))
    return _write_site(*own[0]) if own else None


def _definition(note: Note) -> str:
    """Where the tuned function is defined, for a call that JAX itself makes, as in `jax.jit(tuned)`."""
    tunable = note.call.tunable
    code = getattr(inspect.unwrap(tunable.function), "__code__", None)
    return _write_site(code.co_filename, code.co_firstlineno, tunable.name) if code else tunable.name


def _write_site(path: str, line: int, function: str) -> str:
    return f"{_short_path(path)}:{line} in {function.rpartition('<locals>.')[2]}"


def _short_path(path: str) -> str:
    inside = os.path.relpath(path)
    return path if inside.startswith(os.pardir) else inside
