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
from tune_jax._call import Call, bind_arguments, select_leaves
from tune_jax._errors import ArgumentError
from tune_jax._jax import Tracer
from tune_jax._leaves import Static, make_static
from tune_jax._primitive import HANDED, bind_call
from tune_jax._records import Tunable
from tune_jax._shardings import asked_shardings, output_shardings

Args = Sequence[Any]
Kwargs = Mapping[str, Any]


class WrongEntryError(Exception):
    """Raised while tracing: part of the program came as a tracer, or an input was declared to be part of it."""


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
    placed = tunable.in_shardings is not None or tunable.out_shardings is not None
    if placed or not tunable.static_names | tunable.donated_names <= _declarable(tunable):
        return ByLeaf(tunable)
    return ByName(tunable, tunable.static_names)


class ByName:
    """A jit with the user's own signature; static parameters are declared by name."""

    def __init__(self, tunable: Tunable, static_names: frozenset[str]) -> None:
        self._tunable = tunable
        self._static_names = static_names
        named = _named(tunable, self._trace, tunable.signature)
        donated = tuple(tunable.donated_names)
        self.run: Callable[..., Any] = jax.jit(
            named,
            static_argnames=tuple(static_names),
            donate_argnames=donated or None,
            compiler_options=dict(tunable.compiler_options) or None,
        )

    def stage(self, args: Args, kwargs: Kwargs) -> tuple[Any, Args, Kwargs]:
        """The jitted function, and the arguments as they are."""
        return self.run, args, kwargs

    def widened(self, args: Args, kwargs: Kwargs) -> Entry | None:
        """An entry with the parameters declared that these arguments make static; by leaf where names cannot say it."""
        call, _ = make_call(self._tunable, args, kwargs)
        given = bind_arguments(self._tunable, args, kwargs)
        passed = {*given, *call.fixed_values}
        needed = self._static_names | (_static_parameters(call) & passed)
        lasting = all(_hashes_by_value(given[name]) for name in needed if name in given)
        if not lasting or not needed <= _declarable(self._tunable) or needed & set(call.input_parameters):
            return ByLeaf(self._tunable)
        return None if needed == self._static_names else ByName(self._tunable, needed)

    def _trace(self, /, *args: Any, **kwargs: Any) -> Any:
        given = bind_arguments(self._tunable, args, kwargs)
        if not all(_hashes_by_value(given[name]) for name in self._static_names if name in given):
            raise WrongEntryError
        return _trace_call(self._tunable, args, kwargs, declared=self._static_names)


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

    def run(self, /, *args: Any, **kwargs: Any) -> Any:
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
        shardings = asked_shardings(call)
        options: dict[str, Any] = {"in_shardings": (*shardings,)} if any(s is not None for s in shardings) else {}
        if output_shardings(call) is not None:
            options["out_shardings"] = output_shardings(call)
        return jax.jit(
            _named(self._tunable, self._trace, inspect.signature(self._trace)),
            static_argnums=0,
            donate_argnums=tuple(1 + i for i, name in enumerate(call.input_parameters) if name in donated),
            compiler_options=dict(self._tunable.compiler_options) or None,
            **options,
        )

    def _trace(self, frame: _Frame, *inputs: Any) -> Any:
        return _trace_call(self._tunable, *frame.join(inputs), declared=frozenset())


def _trace_call(tunable: Tunable, args: Args, kwargs: Kwargs, *, declared: frozenset[str]) -> Any:
    call, _ = make_call(tunable, *(HANDED.arguments or (args, kwargs)))
    leaves = select_leaves(call, args, kwargs)
    static = [leaves[index] for index, _ in call.statics] + [
        _given(tunable, name, args, kwargs) for name, _ in call.fixed
    ]
    if any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves(static)) or declared & set(call.input_parameters):
        raise WrongEntryError
    return bind_call(call, [leaves[index] for index in call.dynamic_indices])


def _given(tunable: Tunable, name: str, args: Args, kwargs: Kwargs) -> Any:
    arguments = bind_arguments(tunable, args, kwargs)
    return arguments[name] if name in arguments else kwargs[name]


def _static_parameters(call: Call) -> frozenset[str]:
    owners = call.parameters
    return frozenset(owners[index] for index, _ in call.statics) | {name for name, _ in call.fixed}


def _declarable(tunable: Tunable) -> frozenset[str]:
    """The parameters that `jax.jit` can be told of by name."""
    parameters = tunable.signature.parameters.values()
    return frozenset(p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY))


def _hashes_by_value(value: Any) -> bool:
    """Whether `jax.jit`, which compares by == and the outermost type, tells this value apart as calls do."""
    if value is not None and not jax.tree_util.all_leaves([value]):
        return False
    try:
        return make_static("", value).key == (type(value), value)
    except ArgumentError:
        return False


def _named(tunable: Tunable, function: Callable[..., Any], signature: inspect.Signature) -> Callable[..., Any]:
    def tuned(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    tuned.__name__ = tuned.__qualname__ = tunable.name
    tuned.__signature__ = signature  # type: ignore[attr-defined]
    return tuned
