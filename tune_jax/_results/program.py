"""What the tuning of a whole program found: the results of each tuned call by where it is made."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from typing import SupportsIndex, overload

from tune_jax._errors import CallSiteError
from tune_jax._results.cells import shorten, show_hyperparams, show_seconds
from tune_jax._results.notes import summarise_failure
from tune_jax._results.page import join_page
from tune_jax._results.results import Results
from tune_jax._results.table import Align, Table, render

_HEADERS = ("", "call site", "function", "arguments", "count", "fastest", "median [s]")
_LONGEST_CELL = 60


@dataclasses.dataclass(frozen=True)
class TunedCall:
    """A tuned call of a program.

    Attributes:
      site: where the user's code makes it: `model.py:12 in Layer.__call__`.
      count: how often the program makes it there, passes of a `scan` and what is computed again for a derivative
        included; the body of a `while` counts once.
      results: the results of its tuning, shared by all calls that are the same; without timed rows where it could
        not be tuned, and then with failures, or a warning that says why.
    """

    site: str
    count: int
    results: Results

    @property
    def place(self) -> str:
        """The file and line of the site."""
        return self.site.rpartition(" in ")[0]


@dataclasses.dataclass(frozen=True)
class ProgramResults:
    """The tuned calls of a program, most work first: printable, iterable, and found by index or call site.

    A call that the program makes at several places is in it once for each. `results["model.py:12"]` takes a whole
    site, its file and line, or the end of that path, and raises CallSiteError where that is not one call.

    Example:
      >>> results = ProgramResults("step", (TunedCall("model.py:12 in loss", 3, Results("attention", ())),))
      >>> results["model.py:12"].count, results[0].results.function
      (3, 'attention')

    Attributes:
      program: name of the program's function.
      calls: one `TunedCall` a call site and distinct call.
    """

    program: str
    calls: tuple[TunedCall, ...]

    @property
    def failures(self) -> tuple[TunedCall, ...]:
        """The calls that could not be tuned."""
        return tuple(call for call in self.calls if not call.results.timed)

    @property
    def problems(self) -> tuple[str, ...]:
        """A line for each call that could not be tuned, with the reason."""
        return tuple(
            f"call {index}, {call.site}: {_why(call)}" for index, call in enumerate(self) if not call.results.timed
        )

    def __len__(self) -> int:
        return len(self.calls)

    def __iter__(self) -> Iterator[TunedCall]:
        return iter(self.calls)

    @overload
    def __getitem__(self, index: SupportsIndex | str) -> TunedCall: ...
    @overload
    def __getitem__(self, index: slice) -> ProgramResults: ...
    def __getitem__(self, index: SupportsIndex | str | slice) -> TunedCall | ProgramResults:
        if isinstance(index, str):
            return self.calls[self._find(index)]
        if isinstance(index, slice):
            return dataclasses.replace(self, calls=self.calls[index])
        return self.calls[index]

    def __str__(self) -> str:
        return self._render("simple")

    def _repr_html_(self) -> str:
        return self._render("html")

    def _find(self, site: str) -> int:
        found = [index for index, call in enumerate(self.calls) if _is_at(call, site)]
        if len(found) == 1:
            return found[0]
        if found:
            raise CallSiteError(f"{site!r} is where the calls {found} are made; take one of them by its index.")
        known = ", ".join(dict.fromkeys(repr(call.site) for call in self.calls)) or "none"
        raise CallSiteError(f"no tuned call is made at {site!r}; the call sites are: {known}.")

    def _render(self, tablefmt: str) -> str:
        table = Table(self._caption(), _HEADERS, tuple(map(_list_cells, range(len(self)), self.calls)), _ALIGNS)
        return join_page([render(table, tablefmt=tablefmt)], [], self.problems, tablefmt=tablefmt)

    def _caption(self) -> str:
        if not self.calls:
            return f"{self.program} makes no call that can be tuned."
        distinct = len({id(call.results) for call in self.calls})
        failed = len({id(call.results) for call in self.failures})
        return f"{self.program}: {_many(distinct, 'distinct call')} at {_many(len(self), 'place')}" + (
            f", {failed} without a winner" if failed else ""
        )


_ALIGNS: tuple[Align, ...] = ("right", "left", "left", "left", "right", "left", "right")


def _is_at(call: TunedCall, site: str) -> bool:
    return site in (call.site, call.place) or call.place.endswith(os.sep + site)


def _list_cells(index: int, call: TunedCall) -> tuple[str, ...]:
    results = call.results
    fastest = results.timed[0] if results.timed else None
    return (
        str(index),
        call.site,
        results.function,
        shorten(results.call, _LONGEST_CELL),
        str(call.count),
        shorten(show_hyperparams(fastest.hyperparams), _LONGEST_CELL) if fastest else "none",
        show_seconds(fastest.median_s) if fastest else "",
    )


def _why(call: TunedCall) -> str:
    failed = [row.failure for row in call.results.failures if row.failure is not None]
    return (
        f"all candidates failed, the first with {summarise_failure(failed[0])}" if failed else call.results.warnings[0]
    )


def _many(count: int, noun: str) -> str:
    return f"{count} {noun}{'' if count == 1 else 's'}"
