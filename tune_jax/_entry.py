"""Ways into JAX's fast path: a jitted function that a call enters, and that makes the tuned call when traced.

The jit's own cache is what finds a call's program again, so a call that was made before costs little more than a
plain jitted one. `ByName` takes the arguments as they are and needs the static ones declared by name; `ByLeaf` takes
them apart first and can therefore take any.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax

from tune_jax._binding import make_call
from tune_jax._call import Call, Static, bind_arguments, make_static, select_leaves
from tune_jax._jax import Tracer
from tune_jax._primitive import HANDED, bind_call
from tune_jax._records import Tunable
from tune_jax._shardings import input_shardings, output_shardings

Args = Sequence[Any]
Kwargs = Mapping[str, Any]


class MustBeStatic(Exception):
    """Raised while tracing: an argument came as a tracer, but its value is part of the program."""


class Entry(Protocol):
    """A way into the fast path. `run` calls; `stage` gives the jitted function and the arguments it takes."""

    @property
    def run(self) -> Callable[..., Any]:
        """Call the function."""

    def stage(self, args: Args, kwargs: Kwargs) -> tuple[Any, Args, Kwargs]:
        """The jitted function behind a call, for `lower`, `trace` and `eval_shape`."""

    def widened(self, args: Args, kwargs: Kwargs) -> Entry | None:
        """An entry that takes these arguments, or None if this one should."""


def make_entry(tunable: Tunable) -> Entry:
    """Return the fastest entry that may do for a tuned function."""
    if tunable.in_shardings is not None or tunable.out_shardings is not None:
        return ByLeaf(tunable)
    return ByName(tunable, tunable.static_names)


class ByName:
    """A jit with the user's own signature; static parameters are declared by name."""

    def __init__(self, tunable: Tunable, static_names: frozenset[str]) -> None:
        self._tunable = tunable
        self._static_names = static_names
        named = _named(tunable, lambda *args, **kwargs: _trace_call(tunable, args, kwargs), tunable.signature)
        donated = tuple(tunable.donated_names)
        self.run: Callable[..., Any] = jax.jit(
            named, static_argnames=tuple(static_names), donate_argnames=donated or None
        )

    def stage(self, args: Args, kwargs: Kwargs) -> tuple[Any, Args, Kwargs]:
        """The jitted function, and the arguments as they are."""
        return self.run, args, kwargs

    def widened(self, args: Args, kwargs: Kwargs) -> Entry | None:
        """An entry with the parameters declared that these arguments make static; by leaf where names cannot say it."""
        call, _ = make_call(self._tunable, args, kwargs)
        needed = _static_parameters(call) - self._static_names
        if needed and _can_declare(call, needed):
            return ByName(self._tunable, self._static_names | needed)
        if needed or self._static_names & set(call.input_parameters):
            return ByLeaf(self._tunable)
        return None


@dataclasses.dataclass(frozen=True)
class _Frame:
    """The static part of a call taken apart: the structure of its arguments and their static leaves."""

    tree: Any
    dynamic: tuple[int, ...]
    statics: tuple[tuple[int, Static], ...]

    def join(self, inputs: Sequence[Any]) -> tuple[Args, Kwargs]:
        """Put the arguments together again around `inputs`."""
        leaves: list[Any] = [None] * self.tree.num_leaves
        for index, value in [*zip(self.dynamic, inputs, strict=True), *((i, s.value) for i, s in self.statics)]:
            leaves[index] = value
        args, kwargs = jax.tree.unflatten(self.tree, leaves)
        return args, kwargs


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How calls with arguments of some structure and types are taken apart."""

    dynamic: tuple[int, ...]
    statics: tuple[int, ...]
    jitted: Any


class ByLeaf:
    """A jit over the leaves of the arguments, with all that is static in one hashable frame."""

    def __init__(self, tunable: Tunable) -> None:
        self._tunable = tunable
        self._plans: dict[Any, _Plan] = {}

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        jitted, parts, _ = self.stage(args, kwargs)
        return jitted(*parts)

    def stage(self, args: Args, kwargs: Kwargs) -> tuple[Any, Args, Kwargs]:
        """The jitted function, with the frame and the inputs as its arguments."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        key = (tree, *map(type, leaves))
        plan = self._plans.get(key) or self._plans.setdefault(key, self._make_plan(args, kwargs))
        statics = tuple((index, make_static(f"leaf {index}", leaves[index])) for index in plan.statics)
        frame = _Frame(tree, plan.dynamic, statics)
        return plan.jitted, (frame, *(leaves[index] for index in plan.dynamic)), {}

    def widened(self, args: Args, kwargs: Kwargs) -> Entry | None:
        """This entry, with more of such arguments' numbers static if these need it."""
        leaves, tree = jax.tree.flatten((args, kwargs))
        key = (tree, *map(type, leaves))
        fresh, known = self._make_plan(args, kwargs), self._plans.get(key)
        if known is not None and set(fresh.statics) <= set(known.statics):
            return None
        self._plans[key] = fresh
        return self

    def _make_plan(self, args: Args, kwargs: Kwargs) -> _Plan:
        call, _ = make_call(self._tunable, args, kwargs)
        leaves, tree = jax.tree.flatten((args, kwargs))
        places = select_leaves(call, *jax.tree.unflatten(tree, range(len(leaves))))
        dynamic = tuple(places[index] for index in call.dynamic_indices)
        statics = tuple(index for index in range(len(leaves)) if index not in dynamic)
        return _Plan(dynamic, statics, self._make_jit(call))

    def _make_jit(self, call: Call) -> Any:
        donated = self._tunable.donated_names
        shardings = input_shardings(call)
        options: dict[str, Any] = {"in_shardings": (*shardings,)} if any(s is not None for s in shardings) else {}
        if output_shardings(call) is not None:
            options["out_shardings"] = output_shardings(call)
        return jax.jit(
            _named(self._tunable, self._trace, inspect.signature(self._trace)),
            static_argnums=0,
            donate_argnums=tuple(1 + i for i, name in enumerate(call.input_parameters) if name in donated),
            **options,
        )

    def _trace(self, frame: _Frame, *inputs: Any) -> Any:
        return _trace_call(self._tunable, *frame.join(inputs))


def _trace_call(tunable: Tunable, args: Args, kwargs: Kwargs) -> Any:
    call, _ = make_call(tunable, *_concrete_arguments(args, kwargs))
    leaves = select_leaves(call, args, kwargs)
    static = [leaves[index] for index, _ in call.statics] + [
        _given(tunable, name, args, kwargs) for name, _ in call.fixed
    ]
    if any(isinstance(value, Tracer) for value in static):
        raise MustBeStatic
    return bind_call(call, [leaves[index] for index in call.dynamic_indices])


def _concrete_arguments(args: Args, kwargs: Kwargs) -> tuple[Args, Kwargs]:
    handed_args, handed_kwargs = HANDED.arguments or ((), None)
    return (args, kwargs) if handed_kwargs is None else (handed_args, handed_kwargs)


def _given(tunable: Tunable, name: str, args: Args, kwargs: Kwargs) -> Any:
    arguments = bind_arguments(tunable, args, kwargs)
    return arguments[name] if name in arguments else kwargs[name]


def _static_parameters(call: Call) -> frozenset[str]:
    owners = call.parameters
    return frozenset(owners[index] for index, _ in call.statics) | {name for name, _ in call.fixed}


def _can_declare(call: Call, names: frozenset[str]) -> bool:
    declarable = {
        parameter.name
        for parameter in call.tunable.signature.parameters.values()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    }
    whole = names.isdisjoint(call.input_parameters)
    return whole and names <= declarable and all(_is_hashable(static.value) for _, static in call.statics)


def _is_hashable(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _named(tunable: Tunable, function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    def tuned(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    tuned.__name__ = tuned.__qualname__ = tunable.name
    tuned.__signature__ = signature  # type: ignore[attr-defined]
    return tuned
