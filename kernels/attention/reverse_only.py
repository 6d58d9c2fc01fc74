"""A clear error where forward-mode differentiation meets a rule that only has a reverse mode."""

from __future__ import annotations

from typing import Any

import jax
from jax.custom_derivatives import SymbolicZero
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir


@jax.custom_jvp
def reverse_only(arrays: Any) -> Any:
    """The arrays as they are; who differentiates what is made from them can do so in reverse mode.

    Reverse mode transposes the part of a program that deals with tangents and never runs it; forward mode does.
    """
    return arrays


def _differentiate(primals: Any, tangents: Any) -> Any:
    leaves, tree = jax.tree.flatten(tangents[0])
    some = iter(_tangents_p.bind(*(leaf for leaf in leaves if not isinstance(leaf, SymbolicZero))))
    return primals[0], tree.unflatten(leaf if isinstance(leaf, SymbolicZero) else next(some) for leaf in leaves)


reverse_only.defjvp(_differentiate, symbolic_zeros=True)


def _refuse(*_: Any) -> Any:
    raise TypeError(
        "flash_attention cannot be differentiated in forward-mode (jvp, jacfwd, linearize); use reverse-mode (grad, "
        "vjp, jacrev), or reference_attention, which takes the same arguments and can be differentiated in both "
        "modes, in memory that grows with Tq x Tk."
    )


_tangents_p = Primitive("flash_attention_tangents")
_tangents_p.multiple_results = True
_tangents_p.def_abstract_eval(lambda *tangents: tangents)
_tangents_p.def_impl(_refuse)
mlir.register_lowering(_tangents_p, _refuse)
ad.deflinear2(_tangents_p, lambda cotangents, *tangents: cotangents)
batching.primitive_batchers[_tangents_p] = lambda tangents, axes: (_tangents_p.bind(*tangents), axes)
