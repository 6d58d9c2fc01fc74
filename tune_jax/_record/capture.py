"""A call's arguments, as they come, to text: what of it makes it a distinct call, and what a script says of it."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from tune_jax._failure import attempt
from tune_jax._function import TunedFunction, TunedMethod
from tune_jax._jax import settings
from tune_jax._leaves import is_concrete
from tune_jax._record import arrays, functions, values
from tune_jax._record.arrays import describe_integers, write_integers
from tune_jax._record.writer import Shelf, Writer
from tune_jax._records import Failure

_KINDS = [*values.FIRST, *arrays.KINDS, *functions.KINDS, *values.LAST]


_BY_NAME = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)


@dataclasses.dataclass(frozen=True)
class Target:
    """The recorded function as a script has it: the expression, its grid, and its parameters in words."""

    expression: str
    hyperparams: str
    signature: str
    parameters: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Capture:
    """The arguments of a call as expressions; two calls with equal `key` are the same call.

    `integers` are the arrays whose values the expressions name, to be read once and let go.
    """

    args: tuple[str, ...]
    kwargs: Mapping[str, str]
    notes: tuple[str, ...]
    settings: tuple[tuple[str, Any], ...]
    integers: tuple[Any, ...]
    key: Any


def capture_target(shelf: Shelf, function: Any, owner: tuple[type, str] | None) -> Target:
    """Write a recorded function; `owner` is the class that it was defined in, and its name there."""
    writer = Writer(shelf, _KINDS, pending=None)
    grid = "{}"
    if isinstance(function, TunedFunction | TunedMethod):
        # It cannot be tuned twice, so the script tunes what is inside, over the same grid.
        grid, function, owner = functions.write_grid(writer, _tunable(function).space), _inside(function), None
    expression = functions.write_method(writer, *owner, function) if owner else writer.write(function)
    signature = attempt("run", lambda: inspect.signature(function))
    if isinstance(signature, Failure):
        return Target(expression, grid, "(...)", ())
    named = tuple(p.name for p in signature.parameters.values() if _may_be_tuned(p))
    return Target(expression, grid, " ".join(str(signature).split()), named)


def capture_call(shelf: Shelf, function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Capture:
    """Write a call's arguments, by name where the function's signature says the names."""
    pending: list[Any] = []
    writer = Writer(shelf, _KINDS, pending)
    placed, named = _by_name(function, args, kwargs)
    written = tuple(map(writer.write, placed))
    keywords = {name: writer.write(value) for name, value in named.items()}
    notes = tuple(dict.fromkeys(writer.notes))
    key = (written, tuple(keywords.items()), notes, describe_integers(pending), settings())
    return Capture(written, keywords, notes, settings(), tuple(pending), key)


def quick_key(args: Sequence[Any], kwargs: Mapping[str, Any]) -> Hashable:
    """A key by which a call is known again without writing it; None where its arguments are not so simple.

    Equal ones are the same call, and one call can have several. Holds none of the arguments.
    """
    flat = attempt("run", lambda: jax.tree.flatten((args, kwargs)))
    leaves, tree = ((None,), None) if isinstance(flat, Failure) else flat
    parts = [_describe_leaf(leaf) for leaf in leaves]
    if any(part is None for part in parts):
        return None
    # What a tree's nodes hold besides their leaves may be objects of any kind, so that only its text is kept.
    return (str(tree), hash(tree), tuple(parts), settings())


def _describe_leaf(leaf: Any) -> Hashable:
    if type(leaf) in (bool, int, str):
        return (type(leaf), leaf)
    if isinstance(leaf, jax.Array) and is_concrete(leaf):
        return (leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False), leaf.sharding)  # keys have none
    is_plain = type(leaf) is np.ndarray and leaf.dtype.kind in "biufc"
    return (np.ndarray, leaf.shape, leaf.dtype) if is_plain else None


def read_integers(captured: Capture) -> tuple[str, ...]:
    """The expressions of the call's small integer arrays, with their values."""
    return tuple(map(write_integers, captured.integers))


def _tunable(function: TunedFunction | TunedMethod) -> Any:
    return function.__func__._tunable if isinstance(function, TunedMethod) else function._tunable


def _inside(function: TunedFunction | TunedMethod) -> Any:
    inside = _tunable(function).function
    return inside.__get__(function.__self__) if isinstance(function, TunedMethod) else inside


def _by_name(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """The arguments that must be given by place, and those that can be given by name."""
    bound = attempt("run", lambda: inspect.signature(function).bind_partial(*args, **kwargs))
    if isinstance(bound, Failure):
        return list(args), dict(kwargs)
    kinds = {name: bound.signature.parameters[name].kind for name in bound.arguments}
    if inspect.Parameter.VAR_POSITIONAL in kinds.values():
        return list(args), dict(kwargs)
    placed = [value for name, value in bound.arguments.items() if kinds[name] is inspect.Parameter.POSITIONAL_ONLY]
    named = {name: value for name, value in bound.arguments.items() if kinds[name] in _BY_NAME}
    return placed, {**named, **{name: value for name, value in kwargs.items() if name not in named}}


def _may_be_tuned(parameter: inspect.Parameter) -> bool:
    """Whether a parameter looks like a hyperparameter."""
    if parameter.default is parameter.empty:
        return parameter.kind is parameter.KEYWORD_ONLY
    return parameter.kind in _BY_NAME and (parameter.default is None or type(parameter.default) is int)
