"""What answers a call: one backend, or one for a plain call and another where the call is differentiated."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from .call import Array, Operands, Spec
from .reverse_only import reverse_only

Attended = tuple[Array, "Array | None"]
Attend = Callable[[Spec, Operands], Attended]


@dataclass(frozen=True)
class Route:
    """A backend's function, and the call with that backend's tiles."""

    function: Attend
    spec: Spec
    return_lse: bool

    def attend(self, operands: Operands) -> Attended:
        """Output, and log-sum-exp or None, differentiable as the backend is."""
        out, lse = self.function(self.spec, operands)
        return out, lse if self.return_lse else None


@dataclass(frozen=True)
class Choice:
    """The route of a plain call, and that of one that is differentiated, which the call itself cannot know."""

    plain: Route
    trained: Route
    hushed: tuple[str, ...] = ()  # warnings of JAX's that come with it

    def attend(self, operands: Operands) -> Attended:
        """Output, and log-sum-exp or None."""
        if self.plain == self.trained:
            return self.plain.attend(operands)
        return _attend_apart(self, reverse_only(operands))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend_apart(choice: Choice, operands: Operands) -> Attended:
    return choice.plain.attend(operands)


def _forward(choice: Choice, operands: Operands) -> tuple[Attended, Any]:
    # JAX asks for this rule under differentiation alone: here the other route does both passes.
    attended, pull_back = jax.vjp(choice.trained.attend, operands)
    return attended, pull_back


def _backward(choice: Choice, pull_back: Any, cotangents: Attended) -> Any:
    return pull_back(cotangents)


_attend_apart.defvjp(_forward, _backward)
