"""The sentences around a table: what was tuned, what failed, what the numbers mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from tune_jax._records import Clock, Failure
from tune_jax._results.cells import shorten, show_hyperparams, show_ids, strip_addresses
from tune_jax._results.row import Row

_LONGEST_ERROR = 200
_LONGEST_CALL = 300
# Above this a launch is mostly gaps, and someone who watches a wall clock will miss them in the table.
_MUCH_IDLE = 0.5


class Outcome(Protocol):
    """What the sentences are written from; `Results` is one. A protocol, so that results can import this."""

    @property
    def function(self) -> str:
        """Name of the tuned function."""

    @property
    def call(self) -> str:
        """The arguments, readable."""

    @property
    def device_kind(self) -> str | None:
        """The device's kind."""

    @property
    def clock(self) -> Clock | None:
        """What the times were taken with."""

    @property
    def wall_s(self) -> float | None:
        """Seconds that the tuning took."""

    @property
    def rows(self) -> tuple[Row, ...]:
        """All rows."""

    @property
    def timed(self) -> tuple[Row, ...]:
        """Rows with times."""

    @property
    def failures(self) -> tuple[Row, ...]:
        """Rows without."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """What the reader must know."""


def write_caption(outcome: Outcome) -> str:
    """`f(x: f32[8]) on cpu: 16 candidates (12 distinct programs), 1 failed, device time, tuned in 1.2 s`."""
    call = f"({shorten(strip_addresses(' '.join(outcome.call.split())), _LONGEST_CALL)})" if outcome.call else ""
    place = f" on {outcome.device_kind}" if outcome.device_kind else ""
    facts = [
        f"{len(outcome.failures)} failed" if outcome.failures else "",
        f"{outcome.clock} time" if outcome.clock else "",
        "" if outcome.wall_s is None else f"tuned in {outcome.wall_s:.1f} s",
    ]
    return f"{outcome.function}{call}{place}: " + ", ".join([_count_programs(outcome.rows), *filter(None, facts)])


def list_failures(rows: Sequence[Row]) -> list[str]:
    """One line for each distinct error, with all the candidates it hit."""
    hit: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.failure is not None:
            hit.setdefault((row.failure.stage, summarise_failure(row.failure)), []).append(row)
    return [f"{_name_rows(group)}: failed at {stage}: {error}" for (stage, error), group in hit.items()]


def summarise_failure(failure: Failure) -> str:
    """`ValueError: the first line of its message`."""
    line, name = shorten(failure.first_line, _LONGEST_ERROR), failure.error_type
    return line if line.startswith(f"{name}:") else f"{name}: {line}" if line else name


def list_notes(outcome: Outcome) -> list[str]:
    """What the marks and numbers mean, the warnings, and last how much the choice matters."""
    timed = outcome.timed
    notes = [_explain_ties(timed), _explain_clock(outcome.clock), _explain_idle(timed)]
    warnings = [f"Warning: {warning}" for warning in outcome.warnings]
    return [*filter(None, notes), *warnings, _compare_ends(timed)]


def _count_programs(rows: Sequence[Row]) -> str:
    count = f"{len(rows)} candidate{'' if len(rows) == 1 else 's'}"
    timed = [row for row in rows if row.failure is None]
    distinct = len({frozenset((row.id, *row.shares_with)) for row in timed})
    return count if distinct == len(timed) else f"{count} ({distinct} distinct program{'' if distinct == 1 else 's'})"


def _name_rows(rows: Sequence[Row]) -> str:
    if len(rows) > 1:
        return f"ids {show_ids([row.id for row in rows])} ({len(rows)} candidates)"
    values = show_hyperparams(rows[0].hyperparams)
    return f"id {rows[0].id} ({values})" if values else f"id {rows[0].id}"


def _explain_ties(timed: Sequence[Row]) -> str:
    return "= : not told apart from the fastest by these samples." if any(row.tied for row in timed) else ""


def _explain_clock(clock: Clock | None) -> str:
    return "Times are from the host clock, dispatch included, not from the device." if clock == "host" else ""


def _explain_idle(timed: Sequence[Row]) -> str:
    idle = [row.id for row in timed if (row.idle_share or 0.0) > _MUCH_IDLE]
    return f"The device was idle for most of each launch of {show_ids(idle)}; times are busy time." if idle else ""


def _compare_ends(timed: Sequence[Row]) -> str:
    medians_s = [row.median_s for row in timed if row.median_s is not None]
    if not medians_s:
        return "No setting could be timed."
    if len(medians_s) == 1:
        return "There is one timed setting here, so nothing to compare it with."
    return f"The fastest setting runs {max(medians_s) / min(medians_s):.2f} times as fast as the slowest."
