"""A whole report: the table, more tables, failures and notes, as text or as HTML."""

from __future__ import annotations

import html
from collections.abc import Sequence

from tune_jax._results.notes import Outcome, list_failures, list_notes, write_caption
from tune_jax._results.table import Table, render, tabulate_rows


def compose(
    outcome: Outcome,
    *,
    head: int | None = None,
    tail: int | None = None,
    tablefmt: str = "simple",
    more: Sequence[Table] = (),
) -> str:
    """The report as one string; `tablefmt` is "html" or a name that the `tabulate` library knows."""
    main = tabulate_rows(outcome.timed, title=write_caption(outcome), head=head, tail=tail)
    tables = [render(table, tablefmt=tablefmt) for table in (main, *more)]
    return join_page(tables, list_failures(outcome.failures), list_notes(outcome), tablefmt=tablefmt)


def join_page(tables: Sequence[str], failures: Sequence[str], notes: Sequence[str], *, tablefmt: str) -> str:
    """Rendered tables and the lines below them as one string."""
    if tablefmt == "html":
        return "\n".join(["<div>", *tables, *_list_html(failures), *_paragraph_html(notes), "</div>"])
    return "\n\n".join(filter(None, [*tables, "\n".join(failures), "\n".join(notes)]))


def _list_html(lines: Sequence[str]) -> list[str]:
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return [f"<ul>{items}</ul>"] if lines else []


def _paragraph_html(lines: Sequence[str]) -> list[str]:
    return [f"<p>{'<br>'.join(map(html.escape, lines))}</p>"] if lines else []
