"""Grids of hyperparameters -> candidates. Knows nothing of JAX.

A grid is a dict from names to choices, a list of such dicts, or a callable of a call's arguments that returns
either. Here the first two become a `Space`, whose candidates are counted off in the order of `itertools.product`.
"""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import math
import random
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping
from typing import Any

from tune_jax._errors import HyperparamsError, HyperparamsTypeError
from tune_jax._records import Candidate

Choices = tuple[tuple[str, tuple[Any, ...]], ...]


@dataclasses.dataclass(frozen=True)
class Space:
    """The grids of a tuning: for each grid, its names and their choices."""

    grids: tuple[Choices, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Every hyperparameter name, in order of first appearance."""
        return tuple(dict.fromkeys(name for grid in self.grids for name, _ in grid))


def read_space(hyperparams: Any) -> Space:
    """Read a dict of choices or a list of such dicts; a space that has been read already stays as it is.

    Raises:
      HyperparamsTypeError: `hyperparams`, a name or a value has the wrong type.
      HyperparamsError: a list of choices is empty.
    """
    if isinstance(hyperparams, Space):
        return hyperparams
    if hyperparams is None:
        return Space(((),))
    if isinstance(hyperparams, Mapping):
        return Space((_read_grid(hyperparams, "hyperparams"),))
    if not isinstance(hyperparams, list | tuple):
        raise HyperparamsTypeError(
            f"hyperparams is {hyperparams!r} of type {type(hyperparams).__name__}; expected a dict such as "
            "{'block': [64, 128]}, a list of such dicts, or a callable that returns either."
        )
    if not hyperparams:
        raise HyperparamsError("hyperparams is an empty list; give at least one dict, or leave hyperparams out.")
    for index, grid in enumerate(hyperparams):
        if not isinstance(grid, Mapping):
            raise HyperparamsTypeError(
                f"hyperparams[{index}] is {grid!r} of type {type(grid).__name__}; expected a dict such as "
                "{'block': [64, 128]}."
            )
    return Space(tuple(_read_grid(grid, f"hyperparams[{index}]") for index, grid in enumerate(hyperparams)))


def check_names(space: Space, signature: inspect.Signature, function_name: str) -> None:
    """Raise HyperparamsTypeError for a hyperparameter that the function does not take by keyword."""
    parameters = signature.parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = [parameter.name for parameter in parameters if parameter.kind in by_keyword]
    for name in space.names:
        if name not in taken:
            raise HyperparamsTypeError(
                f"hyperparams[{name!r}] is not a parameter that {function_name} takes by keyword; it takes "
                f"{', '.join(taken) or 'none'}. Rename the hyperparameter, or add the parameter to the function."
            )


def list_candidates(
    space: Space,
    *,
    fixed: Mapping[str, Any],
    where: Callable[..., Any] | None = None,
    sample_num: int | None = None,
    seed: int = 0,
) -> list[Candidate]:
    """List the candidates of `space`, distinct ones, with `fixed` values in place of their choices.

    `where` keeps the combinations for which it is true; it is not asked when everything is fixed. Of what is
    left, `sample_num` are drawn with `seed`, and stay in the order of the grid.

    Raises:
      HyperparamsError: no combination is left.
    """
    candidates = list(_distinct(_combinations(space, fixed), fixed))
    if all(name in fixed for name in space.names):
        return candidates[:1]
    kept = [c for c in candidates if where is None or _holds(where, c.hyperparams)]
    if not kept:
        raise HyperparamsError(
            f"where is false for each of the {len(candidates)} combinations of {', '.join(space.names)}, the first "
            f"being {dict(candidates[0].hyperparams)}; loosen where, or widen the grid."
        )
    if sample_num is None or sample_num >= len(kept):
        return kept
    return sorted(random.Random(seed).sample(kept, sample_num), key=lambda candidate: candidate.id)


def read_sample_num(sample_num: Any) -> int | None:
    """Return `sample_num` as an int, or None for all; whole floats and infinity are taken as well."""
    if sample_num is None or (isinstance(sample_num, float) and math.isinf(sample_num) and sample_num > 0):
        return None
    whole = not isinstance(sample_num, bool | str) and hasattr(sample_num, "__index__")
    whole = whole or (isinstance(sample_num, float) and sample_num.is_integer())
    if not whole or int(sample_num) < 1:
        raise HyperparamsError(
            f"sample_num is {sample_num!r}; expected a positive whole number of candidates, or None for all of them."
        )
    return int(sample_num)


def _read_grid(grid: Mapping[Any, Any], where: str) -> Choices:
    for name in grid:
        if not isinstance(name, str):
            raise HyperparamsTypeError(f"{where} has the name {name!r} of type {type(name).__name__}; expected a str.")
    return tuple((name, _read_choices(f"{where}[{name!r}]", value)) for name, value in grid.items())


def _read_choices(label: str, value: Any) -> tuple[Any, ...]:
    choices = list(_spread(label, value))
    if not choices:
        raise HyperparamsError(f"{label} is empty; give at least one value or drop the name.")
    for index, choice in enumerate(choices):
        _check_hashable(f"{label}[{index}]" if len(choices) > 1 else label, choice)
    distinct = {_tell_apart(choice): choice for choice in choices}
    return tuple(distinct.values())


def _spread(label: str, value: Any) -> Iterable[Any]:
    if isinstance(value, set | frozenset):
        raise HyperparamsTypeError(
            f"{label} is a {type(value).__name__}, whose order differs between processes; give a list or a tuple."
        )
    if isinstance(value, list | tuple | range | Iterator):
        return [_as_scalar(choice) for choice in value]
    if _is_array(value):
        if value.ndim > 1:
            raise HyperparamsTypeError(
                f"{label} is an array of shape {tuple(value.shape)}; expected one dimension, a choice an element."
            )
        return value.tolist() if value.ndim else [value.tolist()]
    return [value]


def _as_scalar(choice: Any) -> Any:
    return choice.item() if _is_array(choice) and choice.ndim == 0 else choice


def _is_array(value: Any) -> bool:
    # numpy.float32, the class, has the attributes of an array of no dimension as well.
    return hasattr(value, "ndim") and hasattr(value, "tolist") and not isinstance(value, type)


def _tell_apart(choice: Any) -> Hashable:
    """What to compare a choice by: its value and the types in it, so that 1, True and 1.0 are three."""
    inner = tuple(_tell_apart(part) for part in choice) if isinstance(choice, tuple) else choice
    return (type(choice), inner)


def _check_hashable(label: str, choice: Any) -> None:
    try:
        hash(choice)
    except TypeError:
        raise HyperparamsTypeError(
            f"{label} is {choice!r} of type {type(choice).__name__}, which cannot be hashed; give a hashable value "
            "such as a tuple instead of a list."
        ) from None


def _combinations(space: Space, fixed: Mapping[str, Any]) -> Iterator[Candidate]:
    number = itertools.count()
    for grid in space.grids:
        for values in itertools.product(*(choices for _, choices in grid)):
            chosen = dict(zip((name for name, _ in grid), values, strict=True))
            yield Candidate(next(number), chosen | dict(fixed))


def _distinct(candidates: Iterable[Candidate], fixed: Collection[str]) -> Iterator[Candidate]:
    # Fixed values are the same in all, and unlike choices they may be such that cannot be hashed.
    seen = set()
    for candidate in candidates:
        chosen = ((name, value) for name, value in candidate.hyperparams.items() if name not in fixed)
        key = frozenset((name, _tell_apart(value)) for name, value in chosen)
        if key not in seen:
            seen.add(key)
            yield candidate


def _holds(where: Callable[..., Any], hyperparams: Mapping[str, Any]) -> bool:
    return bool(where(**{name: hyperparams[name] for name in _asked_names(where, hyperparams)}))


def _asked_names(where: Callable[..., Any], hyperparams: Mapping[str, Any]) -> Collection[str]:
    parameters = inspect.signature(where).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return hyperparams.keys()
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in hyperparams]
    if missing:
        raise HyperparamsError(
            f"where takes {', '.join(missing)}, but the hyperparameters are {', '.join(hyperparams) or 'none'}; "
            "give the parameter a default, or take it out of where."
        )
    return [parameter.name for parameter in parameters if parameter.name in hyperparams]
