"""A tuned function's arguments -> the call they make: its grid, its inputs, and which numbers are static."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from tune_jax._call import Call, bind_arguments, describe_call, split_fixed
from tune_jax._closures import holds_tracer
from tune_jax._jax import shaped
from tune_jax._leaves import is_concrete, is_dynamic, is_number
from tune_jax._outline import Describe, static_numbers
from tune_jax._records import Tunable
from tune_jax._space import Space, check_names, read_space


def make_call(tunable: Tunable, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Call, list[Any]]:
    """Return the call that these arguments make, and its inputs.

    Raises:
      TypeError: the function does not take these arguments.
      HyperparamsError, HyperparamsTypeError: the grid that the user's callable returns cannot be used.
      NoCandidateError: no candidate can be traced.
    """
    arguments = bind_arguments(tunable, args, kwargs)
    space = _space_for(tunable, arguments, args, kwargs)
    own, fixed = split_fixed(tunable, arguments, space.names)
    own = {name: jax.tree.map(_as_leaf, value) for name, value in own.items()}

    def describe(static_leaves: frozenset[int]) -> tuple[Call, list[Any]]:
        return describe_call(tunable, space, own, fixed, static_leaves=static_leaves)

    loose, values = describe(frozenset())
    leaves = jax.tree.leaves(tuple(own.values()))
    numbers = frozenset(index for index in loose.dynamic_indices if is_number(leaves[index]))
    if not numbers:
        return loose, values
    avals = tuple(shaped(jax.typeof(value)) for value in values)
    return describe(_settle_numbers(loose, avals, describe, numbers))


def _settle_numbers(loose: Call, avals: tuple[Any, ...], describe: Describe, numbers: frozenset[int]) -> frozenset[int]:
    known: dict[Any, frozenset[int]] = loose.tunable.state.setdefault("numbers", {})
    key = (loose, avals, numbers)
    if key in known:
        return known[key]
    found = static_numbers(describe, numbers)
    if not holds_tracer(static.value for _, static in (*loose.statics, *loose.fixed)):
        known[key] = found
    return found


def _space_for(tunable: Tunable, arguments: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Space:
    if isinstance(tunable.space, Space):
        return tunable.space
    grid_args, grid_kwargs = _grid_arguments(tunable, arguments, args, kwargs)
    abstract_args, abstract_kwargs = jax.tree.map(_as_struct, (tuple(grid_args), dict(grid_kwargs)))
    space = read_space(tunable.space(*abstract_args, **abstract_kwargs))
    check_names(space, tunable.signature, tunable.name)
    return space


def _grid_arguments(
    tunable: Tunable, arguments: Mapping[str, Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """What a callable grid is called with: the arguments and defaults that it names, else the call's own."""
    try:
        wanted = inspect.signature(tunable.space).parameters.values()
    except (TypeError, ValueError):
        return args, kwargs
    own = tunable.signature.parameters
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    if not all(parameter.kind in by_name and parameter.name in own for parameter in wanted):
        return args, kwargs
    defaults = {p.name: p.default for p in own.values() if p.default is not p.empty}
    known = {**defaults, **arguments}
    return (), {parameter.name: known[parameter.name] for parameter in wanted if parameter.name in known}


def _as_struct(leaf: Any) -> Any:
    if is_number(leaf) or not is_dynamic(leaf):
        return leaf
    aval = jax.typeof(leaf)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype)


def _as_leaf(leaf: Any) -> Any:
    return leaf.__jax_array__() if hasattr(leaf, "__jax_array__") and is_concrete(leaf) else leaf
