"""Grids of hyperparameters -> candidates. Knows nothing of JAX.

A grid is a dict from names to choices, a list of such dicts, or a callable of a call's arguments that returns
either. Here the first two become a `Space`, whose candidates are counted off in the order of `itertools.product`.
"""

from __future__ import annotations

import bisect
import collections
import dataclasses
import functools
import inspect
import itertools
import math
import operator
import random
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from tune_jax._errors import HyperparamsError, HyperparamsTypeError
from tune_jax._records import Candidate

Choices = tuple[tuple[str, tuple[Any, ...]], ...]
_Predicate = Callable[[Mapping[str, Any]], bool]


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
    return Space(tuple(_read_grid(grid, f"hyperparams[{index}]") for index, grid in enumerate(hyperparams)))


def check_names(space: Space, signature: inspect.Signature, function_name: str) -> None:
    """Raise HyperparamsTypeError for a hyperparameter that the function does not take by keyword."""
    kinds = {parameter.name: parameter.kind for parameter in signature.parameters.values()}
    by_keyword = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    taken = [name for name, kind in kinds.items() if kind in by_keyword]
    takes_any = inspect.Parameter.VAR_KEYWORD in kinds.values()
    for name in space.names:
        if name not in taken and (name in kinds or not takes_any):
            what = f", but a {kinds[name].description} one" if name in kinds else ""
            listed = ", ".join([*taken, *(["any other keyword"] if takes_any else [])])
            raise HyperparamsTypeError(
                f"hyperparams[{name!r}] is not a parameter that {function_name} takes by keyword{what}; it takes "
                f"{listed or 'none'}. Rename the hyperparameter, or make it a keyword parameter of the function."
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
    walk = _Walk(space, fixed)
    if all(name in fixed for name in space.names):
        return [walk.grids[0].at(0)]
    holds = _read_where(where, walk)
    everything = sample_num is None or sample_num >= walk.total
    order = range(walk.total) if everything else _shuffled(walk.total, seed)
    found = filter(None, (walk.find(index, holds) for index in order))
    kept = list(found if everything else itertools.islice(found, sample_num))
    if not kept:
        count = sum(walk.find(index) is not None for index in range(walk.total))
        raise HyperparamsError(
            f"where is false for each of the {count} combinations of {', '.join(space.names)}, the first "
            f"being {dict(walk.grids[0].at(0).hyperparams)}; loosen where, or widen the grid."
        )
    return sorted(kept, key=lambda candidate: candidate.id)


def read_sample_num(sample_num: Any) -> int | None:
    """Return `sample_num` as an int, or None for all; whole floats and infinity are taken as well."""
    if sample_num is None or (isinstance(sample_num, float) and math.isinf(sample_num) and sample_num > 0):
        return None
    number = as_whole(int(sample_num) if isinstance(sample_num, float) and sample_num.is_integer() else sample_num)
    if number is None or number < 1:
        raise HyperparamsError(
            f"sample_num is {sample_num!r}; expected a positive whole number of candidates, or None for all of them."
        )
    return number


def as_whole(value: Any) -> int | None:
    """Return a whole number of any type as an int, None for anything else; a bool is no number."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def where_parameters(where: Callable[..., Any]) -> Sequence[inspect.Parameter]:
    """The parameters of a `where`, which say what to call it with; raises HyperparamsError if they cannot be read."""
    try:
        return tuple(inspect.signature(where).parameters.values())
    except (TypeError, ValueError) as error:
        raise HyperparamsError(
            f"where is {where!r}, whose parameters cannot be read ({error}); put it into a function that names the "
            "hyperparameters, such as lambda block_q, block_k: block_q >= block_k."
        ) from error


def _read_grid(grid: Any, where: str) -> Choices:
    if not isinstance(grid, Mapping):
        raise HyperparamsTypeError(
            f"{where} is {grid!r} of type {type(grid).__name__}; expected a dict such as {{'block': [64, 128]}}."
        )
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


class _Grid(NamedTuple):
    """A grid of a walk: its first index and first id, and what is free, with the ids from one choice to the next."""

    start: int
    first_id: int
    base: Mapping[str, Any]
    free: tuple[tuple[str, tuple[Any, ...], int], ...]
    free_names: frozenset[str]

    def at(self, index: int) -> Candidate:
        rest, place, chosen = index - self.start, self.first_id, dict(self.base)
        for name, choices, apart in reversed(self.free):
            rest, digit = divmod(rest, len(choices))
            chosen[name] = choices[digit]
            place += digit * apart
        return Candidate(place, chosen)


class _Walk:
    """The combinations of a space with `fixed` values in place of their choices, made one by one, by their index."""

    def __init__(self, space: Space, fixed: Mapping[str, Any]) -> None:
        self.grids: list[_Grid] = []
        self.total, first_id = 0, 0
        for grid in space.grids:
            sizes = [len(choices) for _, choices in grid]
            apart = [math.prod(sizes[place + 1 :]) for place in range(len(sizes))]
            free = tuple((*part, ids) for part, ids in zip(grid, apart, strict=True) if part[0] not in fixed)
            base = {name: choices[0] for name, choices in grid} | dict(fixed)
            self.grids.append(_Grid(self.total, first_id, base, free, frozenset(name for name, *_ in free)))
            self.total += math.prod(len(choices) for _, choices, _ in free)
            first_id += math.prod(sizes)

    def find(self, index: int, holds: _Predicate | None = None) -> Candidate | None:
        """The combination at `index`, None if an earlier grid has it too or it does not hold."""
        number = bisect.bisect_right(self.grids, index, key=operator.attrgetter("start")) - 1
        candidate = self.grids[number].at(index)
        if number > 0 and self._first_owner(self.grids[number], candidate.hyperparams) < number:
            return None
        return candidate if holds is None or holds(candidate.hyperparams) else None

    def _first_owner(self, grid: _Grid, hyperparams: Mapping[str, Any]) -> int:
        owners = self._owners[grid.free_names]
        for name in grid.free_names:
            owners &= self._owners[name, _tell_apart(hyperparams[name])]
        return (owners & -owners).bit_length() - 1

    @functools.cached_property
    def _owners(self) -> Mapping[Hashable, int]:
        """Which grids have a set of free names, and which a choice of a name: a bit for each grid."""
        owners: dict[Hashable, int] = collections.defaultdict(int)
        for number, grid in enumerate(self.grids):
            keys: list[Hashable] = [(name, _tell_apart(choice)) for name, choices, _ in grid.free for choice in choices]
            for key in itertools.chain(keys, [grid.free_names]):
                owners[key] |= 1 << number
        return owners


def _shuffled(total: int, seed: int) -> Iterator[int]:
    """The numbers below `total` in a random order, made one by one."""
    draw, moved = random.Random(seed), dict[int, int]()
    for last in reversed(range(total)):
        place = draw.randrange(last + 1)
        yield moved.get(place, place)
        moved[place] = moved.pop(last, last)


def _read_where(where: Callable[..., Any] | None, walk: _Walk) -> _Predicate | None:
    """The predicate over combinations that a `where` over some of their names makes."""
    if where is None:
        return None
    parameters = where_parameters(where)
    asked = {names: _asked_names(parameters, names) for names in dict.fromkeys(tuple(grid.base) for grid in walk.grids)}
    return lambda hyperparams: _holds(where, asked[tuple(hyperparams)], hyperparams)


def _holds(where: Callable[..., Any], asked: Sequence[str], hyperparams: Mapping[str, Any]) -> bool:
    try:
        return bool(where(**{name: hyperparams[name] for name in asked}))
    except Exception as error:  # whatever the user's own code raises, chained below
        raise HyperparamsError(
            f"where fails for {dict(hyperparams)} with {type(error).__name__}: {error}; have it return a single bool."
        ) from error


def _asked_names(parameters: Sequence[inspect.Parameter], names: Sequence[str]) -> Sequence[str]:
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return names
    missing = [p.name for p in parameters if p.default is p.empty and p.name not in names]
    if missing:
        raise HyperparamsError(
            f"where takes {', '.join(missing)}, but the hyperparameters are {', '.join(names) or 'none'}; "
            "give the parameter a default, or take it out of where."
        )
    return [parameter.name for parameter in parameters if parameter.name in names]
