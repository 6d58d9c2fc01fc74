"""Values -> Python expressions: the way through a value, and the shelf of what the expressions need."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import keyword
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

Kind = tuple[Callable[[Any], bool], Callable[["Writer", Any], str]]

_FIXED_IMPORTS = {
    "jax": "import jax",
    "jnp": "import jax.numpy as jnp",
    "np": "import numpy as np",
    "tune_jax": "import tune_jax",
    "functools": "import functools",
    "sys": "import sys",
    "warnings": "import warnings",
    "Todo": "from tune_jax.experimental.record import Todo",
    "ensure_pytree": "from tune_jax.experimental.record import ensure_pytree",
    "random_array": "from tune_jax.experimental.record import random_array",
    "rebuild": "from tune_jax.experimental.record import rebuild",
}
_TAKEN = {"HYPERPARAMS", "FUNCTION", "CALLS", "leave_open", "main"}
_DEEPEST = 50


@dataclasses.dataclass
class Shelf:
    """Names of a script and the statements that make them: imports, and definitions in the order they must run.

    Holds text alone, so that nothing of the recorded program is kept alive.
    """

    imports: dict[str, str] = dataclasses.field(default_factory=dict)
    definitions: dict[str, str] = dataclasses.field(default_factory=dict)
    folders: dict[str, None] = dataclasses.field(default_factory=dict)

    def use(self, name: str) -> str:
        """Import one of the names that every script means the same by."""
        self.imports[name] = _FIXED_IMPORTS[name]
        return name

    def add_import(self, wanted: str, statement: str, folder: str) -> str:
        """Import something under the wanted name or one like it; `statement` has a place for the name."""
        if folder:
            self.folders[folder] = None
        return self._add(self.imports, wanted, lambda name: _plainly_imported(statement.format(name), name))

    def define(self, wanted: str, make: Callable[[str], str]) -> str:
        """Define something under the wanted name or one like it; `make` gives the text for a name."""
        return self._add(self.definitions, wanted, make)

    def try_define(self, name: str, text: str) -> bool:
        """Define exactly this name, unless it stands for something else already."""
        if not self._is_free(name, text):
            return False
        self.definitions[name] = text
        return True

    def _add(self, place: dict[str, str], wanted: str, make: Callable[[str], str]) -> str:
        for name in itertools.chain([wanted], (f"{wanted}_{number}" for number in itertools.count(2))):
            text = make(name)
            if self._is_free(name, text):
                place.setdefault(name, text)
                return name
        raise AssertionError("numbers do not end")

    def _is_free(self, name: str, text: str) -> bool:
        known = self.imports.get(name) or self.definitions.get(name) or _FIXED_IMPORTS.get(name)
        return known == text or (known is None and name not in _TAKEN and not name.startswith(("call_", "integers_")))


class Writer:
    """Writes the values of one call as expressions, in one walk.

    `pending` are small integer arrays whose values are written apart, under the names that the expressions have for
    them; where it is None they are written in place. `notes` are remarks for the reader.
    """

    def __init__(self, shelf: Shelf, kinds: Sequence[Kind], pending: list[Any] | None) -> None:
        self.shelf = shelf
        self.pending = pending
        self.notes: list[str] = []
        self.seeds = itertools.count()
        self.names: dict[int, str] = {}
        self._kinds = kinds
        self._open: list[Any] = []
        self._wanted: dict[int, str] = {}

    def write(self, value: Any) -> str:
        """The expression that makes a value like this one."""
        if id(value) in self.names:
            return self.names[id(value)]
        if any(value is one for one in self._open) or len(self._open) > _DEEPEST:
            return self.todo(f"a {type(value).__name__} that holds itself or goes too deep")
        self._open.append(value)
        try:
            return next(write for fits, write in self._kinds if fits(value))(self, value)
        finally:
            self._open.pop()

    def write_as(self, name: str, value: Any) -> str:
        """The same, for a value that the program calls by a name; what is imported is imported as that."""
        self._wanted[id(value)] = name
        try:
            return self.write(value)
        finally:
            self._wanted.pop(id(value), None)

    def name_for(self, value: Any, default: str) -> str:
        """What the program calls a value where that is known."""
        return self._wanted.get(id(value), default)

    @contextlib.contextmanager
    def named(self, value: Any, name: str) -> Iterator[None]:
        """Inside, a value that is being defined goes by its name, and nothing is left pending: definitions stay."""
        self.names[id(value)] = name
        pending, self.pending = self.pending, None
        try:
            yield
        finally:
            self.pending = pending
            del self.names[id(value)]

    def todo(self, what: str) -> str:
        """Stand for what cannot be written, and say so at the top of the script."""
        return f"{self.shelf.use('Todo')}({what!r})"

    def items(self, values: Any) -> str:
        """Several values with commas between."""
        return ", ".join(map(self.write, values))

    def keywords(self, values: dict[str, Any]) -> str:
        """Several values as keyword arguments."""
        if all(map(is_name, values)):
            return ", ".join(f"{name}={self.write(value)}" for name, value in values.items())
        return f"**{self.write(dict(values))}"


def is_name(text: Any) -> bool:
    """Whether a text can stand as a name in a program."""
    return isinstance(text, str) and text.isidentifier() and not keyword.iskeyword(text)


def as_name(text: str) -> str:
    """A name made of what a function is called."""
    name = re.sub(r"\W+", "_", text.rpartition("<locals>.")[2].replace("<lambda>", "function"))
    return name if is_name(name) and name.strip("_") else f"function_{name}".rstrip("_")


def _plainly_imported(statement: str, name: str) -> str:
    """`import numpy as numpy` and `from a import b as b` say a name twice."""
    return re.sub(rf"(import {re.escape(name)}) as {re.escape(name)}$", r"\1", statement)
