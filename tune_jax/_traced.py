"""Candidates as the programs that they were traced to, where the function itself must not be kept.

A function that closes over traced values holds what is to be gone when the trace around it ends. Its programs hold
no tracer: what it closed over has become inputs.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import inspect
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tune_jax._failure import FailedBeforeError
from tune_jax._jax import Tracer, closed_over, eval_closed, inner_jaxprs, says_what_varies
from tune_jax._leaves import describe_aval, make_static
from tune_jax._records import Failure

_ADDRESS = re.compile(r"0x[0-9a-f]+")
_MOST_HASHED = 1 << 12


@dataclasses.dataclass(frozen=True, eq=False)
class TracedCandidate:
    """A candidate's jaxpr and the structure of its result.

    The jaxpr takes `constants`, then the call's own inputs. A constant is a value, or the `Place` of a traced one.
    """

    jaxpr: Any
    constants: tuple[Any, ...]
    tree: Any

    def run(self, own: Sequence[Any], hoisted: Sequence[Any]) -> Any:
        """The candidate's result for the call's own inputs and the values of the tracers that it closed over."""
        constants = [hoisted[c.index] if isinstance(c, Place) else c for c in self.constants]
        return jax.tree.unflatten(self.tree, eval_closed(self.jaxpr, [*constants, *own]))

    def describe(self) -> str:
        """All that the candidate computes, as text; objects that JAX shows by address are left open."""
        constants = [*self.constants, *self.jaxpr.consts]
        inner = map(_describe_inner, _tuned_calls(self.jaxpr.jaxpr))
        return "\n".join([_ADDRESS.sub("0x", str(self.jaxpr)), *map(_describe_constant, constants), *inner])


@dataclasses.dataclass(frozen=True)
class Place:
    """Stands for a traced value that was closed over: its place among the call's inputs of that kind."""

    index: int


@dataclasses.dataclass(frozen=True, eq=False)
class TracedCall:
    """What each candidate of one call was traced to, or why it could not be; equal only to itself.

    `avals` are those of the traced values closed over, which go behind the call's own inputs.
    """

    outcomes: Mapping[Hashable, TracedCandidate | Failure]
    avals: tuple[Any, ...]

    def run(self, hyperparams: Mapping[str, Any], inputs: Sequence[Any]) -> Any:
        """Run the candidate of these hyperparameters.

        Raises:
          FailedBeforeError: it could not be traced.
        """
        outcome = self.outcomes[choice_key(hyperparams)]
        if isinstance(outcome, Failure):
            raise FailedBeforeError(outcome)
        split = len(inputs) - len(self.avals)
        return outcome.run(inputs[:split], inputs[split:])

    @functools.cached_property
    def says_what_varies(self) -> bool:
        """Whether JAX checked what varies over the mesh around when the candidates were traced."""
        return any(says_what_varies(o.jaxpr) for o in self.outcomes.values() if not isinstance(o, Failure))

    def digest(self) -> str:
        """Hexadecimal digest of what every candidate computes."""
        return digest_of(self.outcomes.values())


def digest_of(outcomes: Any) -> str:
    """Hexadecimal digest of what these candidates compute."""
    words = [o.first_line if isinstance(o, Failure) else o.describe() for o in outcomes]
    return hashlib.sha256("\n\n".join(words).encode()).hexdigest()


def read_traced(traced: Any, places: Mapping[int, int]) -> TracedCandidate:
    """Read what `jax.jit(...).trace` returns; `places` are those of the tracers that it closed over, by id."""
    constants = [Place(places[id(value)]) if isinstance(value, Tracer) else value for value in closed_over(traced)]
    return TracedCandidate(traced.jaxpr, tuple(constants), jax.tree.structure(traced.out_info))


def choice_key(hyperparams: Mapping[str, Any]) -> Hashable:
    """What a candidate's hyperparameters are found again by."""
    return tuple((name, make_static(name, hyperparams[name]).key) for name in sorted(hyperparams))


def _tuned_calls(jaxpr: Any) -> Iterator[Any]:
    """The tuned calls in a program, which its text has by their names only."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "tuned_call":
            yield equation.params["call"]
        for inner in inner_jaxprs(equation)[0]:
            yield from _tuned_calls(inner)


def _describe_inner(call: Any) -> str:
    """What a tuned call does: its programs, or as much as its function's own code tells."""
    if call.traced is not None:
        return str(call.traced.digest())
    code = getattr(inspect.unwrap(call.tunable.function), "__code__", None)
    parts = code and (code.co_code.hex(), code.co_names, code.co_consts)
    return _ADDRESS.sub("0x", repr(parts))


def _describe_constant(value: Any) -> str:
    """Small ones by value, because group sizes and the like say how much work there is."""
    if isinstance(value, Place):
        return f"closed-over {value.index}"
    aval = jax.typeof(value)
    if aval.size > _MOST_HASHED or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return describe_aval(aval)
    return f"{describe_aval(aval)} {hashlib.sha256(np.asarray(jax.device_get(value)).tobytes()).hexdigest()}"
