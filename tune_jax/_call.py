"""Arguments -> a frozen `Call`: the only room that sees what the user passed, tracers included.

A call's values are split into leaves. Arrays and numbers are dynamic: the program takes them as inputs. Everything
else (strings, bools, dtypes, callables, objects) is static: part of the call itself. A Python number that the
function needs as a number, not as an input, becomes static too; `_outline` finds that out.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import jax

from tune_jax._leaves import Static, is_concrete, is_dynamic, keep_static
from tune_jax._placement import MeshShape
from tune_jax._records import Tunable
from tune_jax._traced import TracedCall

# The parameter that stands for what a function closes over: no name of Python's, so that no function has it.
CLOSED_OVER = "closed-over"


@dataclasses.dataclass(frozen=True)
class Batch:
    """One `vmap` around a call: the batched dimension of each input, the axis, and which outputs have it.

    `mapped` is None where that is not known; every output then gets the axis.
    """

    dims: tuple[int | None, ...]
    size: int
    axis_name: Hashable
    spmd_axis_name: Hashable
    mapped: tuple[bool, ...] | None = None


@dataclasses.dataclass(frozen=True)
class Hints:
    """Concrete values of a call's inputs, where they are known; never part of what a call is."""

    values: tuple[Any, ...] = ()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Hints)

    def __hash__(self) -> int:
        return 0


@dataclasses.dataclass(frozen=True, repr=False)
class Call:
    """What a call of a tuned function is, its inputs' shapes apart.

    `names` are the parameters given, `tree` the structure of the tuple of their values, `statics` its static
    leaves by index, `fixed` the hyperparameters given at call time, `batches` the vmaps from the inside out. `moving`
    are the inputs by which the whole is then differentiated, if the backward pass belongs to the call too. `mesh` is
    the one around all of this, if the function cannot be run without. `traced` holds the programs of a function that
    closes over traced values, which go behind its own inputs.
    """

    tunable: Tunable
    space: Any
    names: tuple[str, ...]
    tree: Any
    paths: tuple[str, ...]
    statics: tuple[tuple[int, Static], ...]
    fixed: tuple[tuple[str, Static], ...]
    batches: tuple[Batch, ...] = ()
    moving: tuple[int, ...] = ()
    mesh: MeshShape | None = None
    hints: Hints = Hints()
    traced: TracedCall | None = None

    def __repr__(self) -> str:
        # Shown in the text of every jaxpr that the call is in.
        return f"{self.tunable.name}({', '.join(self.paths)})"

    @property
    def dynamic_indices(self) -> tuple[int, ...]:
        """Indices of the leaves that are inputs."""
        static = {index for index, _ in self.statics}
        return tuple(index for index in range(self.tree.num_leaves) if index not in static)

    @property
    def closed_over_count(self) -> int:
        """How many of the inputs are no arguments, but what the function closes over."""
        return 0 if self.traced is None else len(self.traced.avals)

    @property
    def fixed_values(self) -> dict[str, Any]:
        """The hyperparameters given at call time."""
        return {name: static.value for name, static in self.fixed}

    @property
    def input_names(self) -> tuple[str, ...]:
        """The inputs as a user would write them: `q`, `params['w']`."""
        return tuple(self.paths[index] for index in self.dynamic_indices)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The parameter that each leaf belongs to."""
        parts = zip(self.names, self.tree.children(), strict=True)
        return tuple(name for name, part in parts for _ in range(part.num_leaves))

    @property
    def input_parameters(self) -> tuple[str, ...]:
        """The parameter that each input belongs to."""
        return tuple(self.parameters[index] for index in self.dynamic_indices)

    def arguments(self, inputs: Sequence[Any]) -> dict[str, Any]:
        """The call's arguments by parameter name, with `inputs` as its dynamic leaves."""
        leaves: list[Any] = [None] * self.tree.num_leaves
        for index, static in self.statics:
            leaves[index] = static.value
        for index, value in zip(self.dynamic_indices, inputs, strict=True):
            leaves[index] = value
        return dict(zip(self.names, jax.tree.unflatten(self.tree, leaves), strict=True))


def bind_arguments(tunable: Tunable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Bind a call's arguments to parameter names, in the order of the signature.

    Raises:
      TypeError: an argument is unknown or given twice, as for any Python call.
    """
    try:
        return dict(tunable.signature.bind_partial(*args, **kwargs).arguments)
    except TypeError as error:
        raise TypeError(f"{tunable.name}() {error}") from None


def split_fixed(
    tunable: Tunable, arguments: Mapping[str, Any], hyperparam_names: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Static]]:
    """Split bound arguments into the function's own, flags and names by default added, and the fixed hyperparameters.

    Raises:
      TypeError: a parameter without default is neither given nor a hyperparameter.
    """
    own, given = _split(tunable, arguments, hyperparam_names)
    _check_complete(tunable, own, hyperparam_names)
    return own, {name: keep_static(tunable, name, value) for name, value in given.items()}


def describe_call(
    tunable: Tunable,
    space: Any,
    own: Mapping[str, Any],
    fixed: Mapping[str, Static],
    *,
    static_leaves: frozenset[int] = frozenset(),
) -> tuple[Call, list[Any]]:
    """Return the `Call` of these arguments, and the values of its dynamic leaves.

    `static_leaves` are leaves that are static besides those that must be.
    """
    leaves_with_paths, tree = jax.tree_util.tree_flatten_with_path(tuple(own.values()))
    names = tuple(own)
    paths = tuple(_readable_path(names, path) for path, _ in leaves_with_paths)
    statics, dynamic = [], []
    for index, (path, leaf) in enumerate(leaves_with_paths):
        if _is_declared(tunable, names, path) or index in static_leaves or not is_dynamic(leaf):
            statics.append((index, keep_static(tunable, paths[index], leaf)))
        else:
            dynamic.append(leaf)
    call = Call(tunable, space, names, tree, paths, tuple(statics), tuple(fixed.items()))
    return call, dynamic


def select_leaves(call: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The leaves of the arguments of a call like `call`, static ones included, without its fixed hyperparameters."""
    arguments = bind_arguments(call.tunable, args, kwargs)
    own, _ = _split(call.tunable, arguments, call.space.names)
    return jax.tree.leaves(tuple(own.values()))


def with_hints(call: Call, values: Iterable[Any]) -> Call:
    """Return `call` with those of the inputs' `values` that are concrete as hints."""
    concrete = tuple(value if is_concrete(value) else None for value in values)
    return dataclasses.replace(call, hints=Hints(concrete)) if any(v is not None for v in concrete) else call


def with_batch(call: Call, batch: Batch) -> Call:
    """Return `call` with one more vmap around it; hints of batched inputs no longer hold."""
    hints = tuple(None if dim is not None else hint for dim, hint in zip(batch.dims, call.hints.values, strict=False))
    return dataclasses.replace(call, batches=(*call.batches, batch), hints=Hints(hints))


def without_hints(call: Call) -> Call:
    """Return `call` as caches keep it, so that they do not keep its inputs' values alive."""
    return dataclasses.replace(call, hints=Hints()) if call.hints.values else call


def _readable_path(names: Sequence[str], path: Sequence[Any]) -> str:
    return f"{names[path[0].idx]}{jax.tree_util.keystr(tuple(path[1:]))}"


def _is_declared(tunable: Tunable, names: Sequence[str], path: Sequence[Any]) -> bool:
    name = names[path[0].idx]
    if name == variadic_name(tunable.signature):
        name = path[1].key
    return name in tunable.static_names


def _split(
    tunable: Tunable, arguments: Mapping[str, Any], hyperparam_names: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    variadic = variadic_name(tunable.signature)
    extra = arguments.get(variadic, {}) if variadic else {}
    given = {name: {**arguments, **extra}[name] for name in hyperparam_names if name in arguments or name in extra}
    defaults = _plain_defaults(tunable.signature)
    own = {
        name: arguments.get(name, defaults.get(name))
        for name in tunable.signature.parameters
        if name not in hyperparam_names and (name in arguments or name in defaults)
    }
    if variadic in own:
        own[variadic] = {name: value for name, value in extra.items() if name not in given}
    return own, given


def _plain_defaults(signature: inspect.Signature) -> dict[str, Any]:
    """Defaults that are static by their type; a call that leaves one out is the call that gives it."""
    defaults = {p.name: p.default for p in signature.parameters.values() if p.default is not p.empty}
    return {name: value for name, value in defaults.items() if all(map(_is_plain, jax.tree.leaves(value)))}


def _is_plain(leaf: Any) -> bool:
    return not is_dynamic(leaf) and isinstance(leaf, Hashable)


def variadic_name(signature: inspect.Signature) -> str | None:
    """The name of a signature's `**kwargs`, None if it has none."""
    return next((p.name for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD), None)


def _check_complete(tunable: Tunable, own: Mapping[str, Any], hyperparam_names: Sequence[str]) -> None:
    required = [
        p.name
        for p in tunable.signature.parameters.values()
        if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]
    missing = [name for name in required if name not in own and name not in hyperparam_names]
    if missing:
        raise TypeError(f"{tunable.name}() missing required arguments: {', '.join(map(repr, missing))}")
