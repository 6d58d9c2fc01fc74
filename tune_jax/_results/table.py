"""Tables of text cells, in the formats of the `tabulate` library or as HTML."""

from __future__ import annotations

import dataclasses
import html
from collections.abc import Sequence
from typing import Literal, TypeVar

import tabulate as tabulate_library  # type: ignore[import-untyped, unused-ignore]

from tune_jax._errors import ArgumentError
from tune_jax._results.cells import show_factor, show_seconds, show_spread, show_value
from tune_jax._results.row import Row

Align = Literal["left", "right"]
GAP = "..."
_Item = TypeVar("_Item")


@dataclasses.dataclass(frozen=True)
class Table:
    """Headers, lines of cells, an alignment a column and the places of the lines to print in bold in HTML."""

    title: str
    headers: tuple[str, ...] = ()
    lines: tuple[tuple[str, ...], ...] = ()
    aligns: tuple[Align, ...] = ()
    bold: frozenset[int] = frozenset()


def tabulate_rows(rows: Sequence[Row], *, title: str, head: int | None, tail: int | None) -> Table:
    """The table of timed rows in the order given, with a line of dots where rows are left out."""
    names = list_names(rows)
    shown = pick_ends(rows, head=head, tail=tail)
    headers = ("id", *names, "median [s]", "spread", "slowdown")
    lines = [_list_cells(row, names) for row in shown if row is not None]
    if any(row.tied for row in rows):
        headers = (*headers, "tie")
        lines = [
            (*line, "=" if row.tied else "")
            for line, row in zip(lines, [row for row in shown if row is not None], strict=True)
        ]
    if None in shown:
        lines.insert(shown.index(None), (GAP,) * len(headers))
    return Table(title, headers, tuple(lines), _align(rows, names, headers), _find_winner(shown))


def list_names(rows: Sequence[Row]) -> list[str]:
    """Every hyperparameter's name in the order of the grid: a list of grids can have different ones."""
    by_id = sorted(rows, key=lambda row: row.id)
    return list(dict.fromkeys(name for row in by_id for name in row.hyperparams))


def pick_ends(items: Sequence[_Item], *, head: int | None, tail: int | None) -> list[_Item | None]:
    """The first `head` and last `tail` items with a None between, or all where that leaves none out.

    Raises ArgumentError for anything but None or a whole number from 0.
    """
    for name, count in (("head", head), ("tail", tail)):
        if count is not None and (type(count) is not int or count < 0):
            raise ArgumentError(f"{name}={count!r}: expected how many rows to show, a whole number from 0, or None")
    first, last = head or 0, tail or 0
    if (head is None and tail is None) or first + last >= len(items):
        return list(items)
    return [*items[:first], None, *items[len(items) - last :]]


def render(table: Table, *, tablefmt: str) -> str:
    """The table's text; `tablefmt` is "html" or any other name that the `tabulate` library knows."""
    if tablefmt == "html":
        return _render_html(table)
    if tablefmt not in tabulate_library.tabulate_formats:
        known = ", ".join(tabulate_library.tabulate_formats)
        raise ArgumentError(f"tablefmt={tablefmt!r} is not a table format; expected one of {known}")
    if not table.lines:
        return table.title
    # Cells are finished text: the library must not read them as numbers and format those anew.
    body = tabulate_library.tabulate(
        _escape_bars(table.lines, tablefmt),
        table.headers,
        tablefmt=tablefmt,
        colalign=table.aligns,
        disable_numparse=True,
    )
    return f"{table.title}\n\n{body}" if table.title else str(body)


def _list_cells(row: Row, names: Sequence[str]) -> tuple[str, ...]:
    values = [show_value(row.hyperparams.get(name)) for name in names]
    return (
        str(row.id),
        *values,
        show_seconds(row.median_s),
        show_spread(row.spread),
        show_factor(row.slowdown),
    )


def _align(rows: Sequence[Row], names: Sequence[str], headers: Sequence[str]) -> tuple[Align, ...]:
    values: list[Align] = ["right" if _holds_numbers(rows, name) else "left" for name in names]
    rest: list[Align] = ["right", "right", "right", "left"]
    return ("right", *values, *rest)[: len(headers)]


def _holds_numbers(rows: Sequence[Row], name: str) -> bool:
    return all(isinstance(row.hyperparams.get(name), int | float | None) for row in rows)


def _find_winner(shown: Sequence[Row | None]) -> frozenset[int]:
    """The line of the fastest of the whole tuning; a slice may not hold it."""
    return frozenset(
        place for place, row in enumerate(shown) if row is not None and row.slowdown == 1.0 and not row.tied
    )


def _escape_bars(lines: Sequence[tuple[str, ...]], tablefmt: str) -> list[list[str]]:
    """In Markdown a bar in a value would start a new cell."""
    bar = r"\|" if tablefmt in ("github", "pipe") else "|"
    return [[text.replace("|", bar) for text in line] for line in lines]


def _render_html(table: Table) -> str:
    if not table.lines:
        return f"<p>{html.escape(table.title)}</p>"
    header = "".join(f"<th>{html.escape(text)}</th>" for text in table.headers)
    body = "\n".join(
        _render_html_line(line, table.aligns, bold=place in table.bold) for place, line in enumerate(table.lines)
    )
    caption = f"<caption>{html.escape(table.title)}</caption>"
    return f"<table>\n{caption}\n<thead><tr>{header}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def _render_html_line(line: Sequence[str], aligns: Sequence[Align], *, bold: bool) -> str:
    start, end = ("<b>", "</b>") if bold else ("", "")
    cells = (
        f'<td style="text-align: {align}">{start}{html.escape(text)}{end}</td>'
        for text, align in zip(line, aligns, strict=True)
    )
    return f"<tr>{''.join(cells)}</tr>"
