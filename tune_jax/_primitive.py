"""The tuned call as a JAX primitive: binding records the call, lowering tunes it and puts the winner in its place.

What a call really is (its batched shape, whether it sits in an inner jit that JAX traced long ago) is known only
when it is lowered; so that is when the winner is looked up. Differentiation alone needs a candidate earlier, because
what the forward pass keeps for the backward pass may differ by candidate.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tune_jax import _jax
from tune_jax._call import Batch, Call, select_leaves, without_hints
from tune_jax._hoist import hoist
from tune_jax._leaves import is_concrete
from tune_jax._lookup import find_winner
from tune_jax._outline import abstract_inputs, batched_call, can_be_traced, outline
from tune_jax._recording import Place, current_recording
from tune_jax._records import Candidate
from tune_jax._sharing import place_of
from tune_jax._wrap import along, wrap_flat

tuned_call_p = _jax.make_primitive("tuned_call")

# Returns its inputs. Left in a recorded program where differentiation put a candidate in a tuned call's place.
placed_call_p = _jax.make_primitive("placed_call")


def bind_call(call: Call, inputs: Sequence[Any]) -> Any:
    """Make the tuned call in the ambient trace and return its result."""
    call, inputs = hoist(call, inputs)
    return jax.tree.unflatten(outline(call, _avals(inputs)).tree, _bind(call, inputs))


def _bind(call: Call, inputs: Sequence[Any]) -> Any:
    placed = outline(call, _avals(inputs)).placed
    return tuned_call_p.bind(*inputs, call=call, **({"placed": placed} if placed else {}))


def _avals(inputs: Sequence[Any]) -> list[Any]:
    return [jax.typeof(value) for value in inputs]


class _Handed(threading.local):
    """The arguments of the call that this thread is making, `(args, kwargs)`, for the tuned call that it lowers."""

    arguments: tuple[Sequence[Any], Mapping[str, Any]] | None = None


HANDED = _Handed()


def _take_inputs(call: Call) -> Sequence[Any]:
    """The inputs' values as far as they are known."""
    taken, HANDED.arguments = HANDED.arguments, None
    if taken is None:
        return call.hints.values
    leaves = [*select_leaves(call, *taken), *[None] * call.closed_over_count]
    return [leaves[index] for index in call.dynamic_indices]


def _keep_fitting(values: Sequence[Any], avals: Sequence[Any]) -> list[Any]:
    if len(values) != len(avals):
        return [None] * len(avals)
    return [value if _fits(value, aval) else None for value, aval in zip(values, avals, strict=True)]


def _fits(value: Any, aval: Any) -> bool:
    if value is None or isinstance(value, _jax.Tracer):
        return False
    came = jax.typeof(value)
    return bool(came.shape == aval.shape and came.dtype == aval.dtype)


def _run(*inputs: Any, call: Call, placed: Any = ()) -> Any:
    return _placed_winner(call, inputs)(*inputs)


def _abstract(*avals: Any, call: Call, placed: Any = ()) -> tuple[list[Any], Any]:
    found = outline(call, avals)
    return list(found.avals), found.effects


def _batch(
    axis: Any, inputs: Sequence[Any], dims: Sequence[int | None], *, call: Call, placed: Any = ()
) -> tuple[Any, list[int | None]]:
    if not _jax.is_named(axis) and all(dim is None for dim in dims):
        leaves = _bind(call, inputs)
        return leaves, [None] * len(leaves)
    batch = Batch(tuple(dims), axis.size, axis.name, axis.spmd_name)
    batched, mapped = batched_call(call, batch, _avals(inputs))
    return _bind(batched, inputs), [0 if moves else None for moves in mapped]


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call, placed: Any = ()) -> tuple[Any, Any]:
    moving = [index for index, tangent in enumerate(tangents) if type(tangent) is not _jax.SymbolicZero]
    winner = _placed_winner(call, primals, moving=moving)
    return _push_forward(
        along(winner, primals, moving), [primals[index] for index in moving], [tangents[index] for index in moving]
    )


def _push_forward(
    function: Callable[..., Sequence[Any]], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """As `jax.jvp`, but outputs that do not move keep symbolic zeros, which a zero array is not the same as.

    A zero array times the infinite slope of, say, a square root further on would be NaN.
    """
    moved: set[int] = set()

    @jax.custom_jvp
    def note(*outputs: Any) -> tuple[Any, ...]:
        return outputs

    def note_slopes(outputs: Any, slopes: Any) -> tuple[Any, Any]:
        zero = jax.custom_derivatives.SymbolicZero
        moved.update(index for index, slope in enumerate(slopes) if not isinstance(slope, zero))
        return outputs, slopes

    note.defjvp(note_slopes, symbolic_zeros=True)
    values, slopes = jax.jvp(lambda *inputs: note(*function(*inputs)), tuple(primals), tuple(tangents))
    pairs = enumerate(zip(values, slopes, strict=True))
    return list(values), [slope if i in moved else _jax.zero_tangent(value) for i, (value, slope) in pairs]


def _transpose(cotangents: Sequence[Any], *inputs: Any, call: Call, placed: Any = ()) -> list[Any]:
    linear = [index for index, value in enumerate(inputs) if _jax.is_linear_input(value)]
    avals = [value.aval if index in linear else jax.typeof(value) for index, value in enumerate(inputs)]
    given = [None if index in linear or not is_concrete(value) else value for index, value in enumerate(inputs)]
    winner = _cached_jit(call, find_winner(call, [_jax.shaped(aval) for aval in avals], given))
    back = jax.linear_transpose(along(winner, inputs, linear), *abstract_inputs([avals[index] for index in linear]))
    found = dict(zip(linear, back([_jax.instantiate(cotangent) for cotangent in cotangents]), strict=True))
    return [found.get(index) for index in range(len(inputs))]


def _lower(context: Any, *inputs: Any, call: Call, placed: Any = ()) -> Any:
    avals = [_jax.shaped(aval) for aval in context.avals_in]
    given = _keep_fitting(_take_inputs(call), avals)
    winner = find_winner(
        call,
        avals,
        given,
        platforms=_jax.lowering_platforms(context),
        devices=_jax.lowering_devices(context),
    )
    return _jax.lower_inline(context, _flat(call, winner), inputs)


def _placed_winner(call: Call, inputs: Sequence[Any], *, moving: Sequence[int] = ()) -> Any:
    """The winner for inputs that are here, tracers or not, as a jitted function; `moving` ones are differentiated."""
    avals = [_jax.shaped(jax.typeof(value)) for value in inputs]
    hints = _keep_fitting(call.hints.values, avals)
    known = [value if is_concrete(value) else hint for value, hint in zip(inputs, hints, strict=True)]
    whole = _with_vjp(call, avals, moving)
    winner = _cached_jit(call, find_winner(whole, avals, known))
    return winner if current_recording() is None else _marked(winner, place_of(whole, avals))


def _marked(winner: Callable[..., Any], place: Place) -> Callable[..., Any]:
    """The winner with a mark on its inputs, which stays where the winner's own equations are moved or run again."""
    return lambda *inputs: winner(*placed_call_p.bind(*inputs, call=place.call, avals=place.avals))


def find_place(equation: Any) -> Place | None:
    """The tuned call that an equation of a recorded program makes or is part of, if it is one."""
    if equation.primitive is tuned_call_p:
        return place_of(equation.params["call"], [_jax.shaped(variable.aval) for variable in equation.invars])
    return Place(**equation.params) if equation.primitive is placed_call_p else None


def _with_vjp(call: Call, avals: Sequence[Any], moving: Sequence[int]) -> Call:
    """The call with its backward pass, if that is asked for and some candidate has one."""
    inexact = tuple(index for index in moving if _jax.takes_cotangent(avals[index]))
    if not call.tunable.with_vjp or not inexact:
        return call
    whole = dataclasses.replace(call, moving=inexact)
    return whole if can_be_traced(whole, avals) else call


def _flat(call: Call, candidate: Candidate) -> Callable[..., Any]:
    return wrap_flat(call, candidate.hyperparams, name=call.tunable.name)


def _cached_jit(call: Call, candidate: Candidate) -> Any:
    known = call.tunable.state.setdefault("jitted", {})
    key = (without_hints(call), candidate.id)
    if key not in known:
        known[key] = jax.jit(_flat(without_hints(call), candidate), inline=True)
    return known[key]


tuned_call_p.def_impl(_run)
tuned_call_p.def_effectful_abstract_eval(_abstract)
_jax.register_batching(tuned_call_p, _batch)
_jax.register_jvp(tuned_call_p, _differentiate)
_jax.register_transpose(tuned_call_p, _transpose)
_jax.register_lowering(tuned_call_p, _lower)
_jax.hold_weakly(Call)

placed_call_p.def_impl(lambda *inputs, **params: list(inputs))
placed_call_p.def_abstract_eval(lambda *avals, **params: list(avals))
_jax.register_batching(
    placed_call_p, lambda axis, inputs, dims, **params: (placed_call_p.bind(*inputs, **params), dims)
)
_jax.register_jvp(placed_call_p, lambda inputs, slopes, **params: (placed_call_p.bind(*inputs, **params), slopes))
_jax.register_lowering(placed_call_p, lambda context, *inputs, **params: list(inputs))
