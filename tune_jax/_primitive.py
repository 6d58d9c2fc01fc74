"""The tuned call as a JAX primitive: binding records the call, lowering tunes it and puts the winner in its place.

What a call really is (its batched shape, whether it sits in an inner jit that JAX traced long ago) is known only
when it is lowered; so that is when the winner is looked up. Differentiation alone needs a candidate earlier, because
what the forward pass keeps for the backward pass may differ by candidate.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from tune_jax import _jax
from tune_jax._call import Batch, Call, is_concrete, select_leaves, with_batch
from tune_jax._lookup import find_winner
from tune_jax._outline import outline
from tune_jax._records import Candidate
from tune_jax._wrap import wrap_flat

tuned_call_p = _jax.make_primitive("tuned_call")


def bind_call(call: Call, inputs: Sequence[Any]) -> Any:
    """Make the tuned call in the ambient trace and return its result."""
    avals = [_jax.shaped(jax.typeof(value)) for value in inputs]
    leaves = tuned_call_p.bind(*inputs, call=call)
    return jax.tree.unflatten(outline(call, avals).tree, leaves)


class _Handed(threading.local):
    """The arguments of the call that this thread is making, for the next tuned call that it lowers.

    `arguments` is `(args, kwargs)` as the user gave them, or `(inputs, None)`.
    """

    arguments: tuple[Sequence[Any], Mapping[str, Any] | None] | None = None


HANDED = _Handed()


def _take_inputs(call: Call, avals: Sequence[Any]) -> list[Any]:
    taken, HANDED.arguments = HANDED.arguments, None
    values = call.hints.values if taken is None else _read_inputs(call, *taken)
    if len(values) != len(avals):
        return [None] * len(avals)
    return [value if _fits(value, aval) else None for value, aval in zip(values, avals, strict=True)]


def _read_inputs(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any] | None) -> Sequence[Any]:
    if kwargs is None:
        return args
    leaves = select_leaves(call, args, kwargs)
    return [leaves[index] for index in call.dynamic_indices]


def _fits(value: Any, aval: Any) -> bool:
    if value is None or not is_concrete(value):
        return False
    came = jax.typeof(value)
    return bool(came.shape == aval.shape and came.dtype == aval.dtype)


def _run(*inputs: Any, call: Call) -> Any:
    if _jax.jit_is_disabled():
        avals = [_jax.shaped(jax.typeof(value)) for value in inputs]
        return _flat(call, find_winner(call, avals, inputs))(*inputs)
    jitted = _cached(call, None, lambda: jax.jit(functools.partial(tuned_call_p.bind, call=call)))
    before, HANDED.arguments = HANDED.arguments, (inputs, None)
    try:
        return jitted(*inputs)
    finally:
        HANDED.arguments = before


def _abstract(*avals: Any, call: Call) -> tuple[list[Any], Any]:
    found = outline(call, [_jax.shaped(aval) for aval in avals])
    return list(found.avals), found.effects


def _batch(axis: Any, inputs: Sequence[Any], dims: Sequence[int | None], *, call: Call) -> tuple[Any, list[int]]:
    batch = Batch(tuple(dims), axis.size, axis.name, axis.spmd_name)
    leaves = tuned_call_p.bind(*inputs, call=with_batch(call, batch))
    return leaves, [0] * len(leaves)


def _differentiate(primals: Sequence[Any], tangents: Sequence[Any], *, call: Call) -> tuple[Any, Any]:
    avals = [_jax.shaped(jax.typeof(value)) for value in primals]
    given = _take_inputs(call, avals)
    known = [value if is_concrete(value) else other for value, other in zip(primals, given, strict=True)]
    winner = _cached_jit(call, find_winner(call, avals, known))
    moving = [index for index, tangent in enumerate(tangents) if type(tangent) is not _jax.SymbolicZero]

    def along(*values: Any) -> tuple[Any, ...]:
        inputs = list(primals)
        for index, value in zip(moving, values, strict=True):
            inputs[index] = value
        return tuple(winner(*inputs))

    values, slopes = jax.jvp(along, tuple(primals[i] for i in moving), tuple(tangents[i] for i in moving))
    return list(values), list(slopes)


def _lower(context: Any, *inputs: Any, call: Call) -> Any:
    avals = [_jax.shaped(aval) for aval in context.avals_in]
    given = _take_inputs(call, avals)
    winner = find_winner(call, avals, given, platforms=_jax.lowering_platforms(context))
    return _jax.lower_inline(context, _flat(call, winner), inputs)


def _flat(call: Call, candidate: Candidate) -> Callable[..., Any]:
    return wrap_flat(call, candidate.hyperparams, name=call.tunable.name)


def _cached_jit(call: Call, candidate: Candidate) -> Any:
    return _cached(call, candidate.id, lambda: jax.jit(_flat(call, candidate), inline=True))


def _cached(call: Call, part: Any, make: Callable[[], Any]) -> Any:
    known = call.tunable.state.setdefault("jitted", {})
    if (call, part) not in known:
        known[call, part] = make()
    return known[call, part]


tuned_call_p.def_impl(_run)
tuned_call_p.def_effectful_abstract_eval(_abstract)
_jax.register_batching(tuned_call_p, _batch)
_jax.register_jvp(tuned_call_p, _differentiate)
_jax.register_lowering(tuned_call_p, _lower)
