"""Rows as a table of cells, as text and as HTML."""

from __future__ import annotations

import xml.etree.ElementTree as ElementTree

import pytest

from tune_jax._errors import ArgumentError
from tune_jax._results.row import Row
from tune_jax._results.table import Table, list_names, pick_ends, render, tabulate_rows


def timed(id, hyperparams, *samples_ns, slowdown=1.0, tied=False):
    return Row(id, hyperparams, samples_ns=samples_ns, clock="device", slowdown=slowdown, tied=tied)


def tabulate_all(*rows, head=None, tail=None):
    return tabulate_rows(rows, title="title", head=head, tail=tail)


SIMPLE = Table("title", ("id", "name"), (("1", "a"), ("2", "b|<b>")), ("right", "left"), frozenset({0}))


# Cells


def test_columns_are_id_hyperparams_and_statistics():
    table = tabulate_all(timed(0, {"block": 64, "warps": None}, 38098.0, 38098.0))
    assert table.headers == ("id", "block", "warps", "median [s]", "spread", "slowdown")


def test_cells_are_readable():
    table = tabulate_all(timed(7, {"block": 64, "warps": None}, 38098e3, 38098e3))
    assert table.lines == (("7", "64", "", "3.8098e-02", "±0.0%", "1.00x"),)


def test_no_hyperparams_leave_the_other_columns():
    assert tabulate_all(timed(0, {}, 1.0)).headers == ("id", "median [s]", "spread", "slowdown")


def test_one_sample_leaves_the_spread_blank():
    assert tabulate_all(timed(0, {}, 1000.0)).lines[0][2] == ""


def test_ties_have_a_column_of_their_own():
    rows = [timed(0, {}, 1.0), timed(1, {}, 1.0, tied=True), timed(2, {}, 9.0, slowdown=9.0)]
    table = tabulate_all(*rows)
    assert (table.headers[-1], [line[-1] for line in table.lines]) == ("tie", ["", "=", ""])


def test_without_ties_there_is_no_such_column():
    assert "tie" not in tabulate_all(timed(0, {}, 1.0), timed(1, {}, 9.0, slowdown=9.0)).headers


def test_different_keys_leave_blanks():
    table = tabulate_all(timed(0, {"a": 1}, 1.0), timed(1, {"b": 2}, 2.0, slowdown=2.0))
    assert [line[1:3] for line in table.lines] == [("1", ""), ("", "2")]


def test_names_come_in_the_order_of_the_grid():
    rows = [timed(5, {"late": 1, "b": 1}, 1.0), timed(0, {"b": 1, "a": 1}, 2.0)]
    assert list_names(rows) == ["b", "a", "late"]


def test_numbers_go_right_and_words_left():
    table = tabulate_all(timed(0, {"n": 1, "s": "x", "mixed": 1}, 1.0), timed(1, {"n": None, "mixed": "y"}, 2.0))
    assert table.aligns == ("right", "right", "left", "left", "right", "right", "right")


def test_the_winner_is_bold_and_its_ties_are_not():
    rows = [timed(0, {}, 1.0), timed(1, {}, 1.0, tied=True), timed(2, {}, 9.0, slowdown=9.0)]
    assert tabulate_all(*rows).bold == {0}


def test_without_the_winner_nothing_is_bold():
    assert tabulate_all(timed(2, {}, 9.0, slowdown=9.0)).bold == frozenset()


def test_dots_stand_for_the_rows_left_out():
    rows = [timed(i, {"b": i}, 1.0 + i, slowdown=1.0 + i) for i in range(10)]
    table = tabulate_all(*rows, head=2, tail=1)
    assert [line[0] for line in table.lines] == ["0", "1", "...", "9"]


def test_dots_fill_every_column():
    rows = [timed(i, {"b": i}, 1.0, tied=i > 0) for i in range(10)]
    table = tabulate_all(*rows, head=1)
    assert set(table.lines[1]) == {"..."}
    assert len(table.lines[1]) == len(table.headers)


def test_ties_stay_with_their_rows_after_the_dots():
    rows = [timed(0, {}, 1.0), timed(1, {}, 1.0, tied=True), timed(2, {}, 9.0, slowdown=9.0)]
    assert [line[-1] for line in tabulate_all(*rows, head=0, tail=2).lines] == ["...", "=", ""]


# Ends


@pytest.mark.parametrize(
    ("head", "tail", "picked"),
    [
        (None, None, [0, 1, 2, 3]),
        (2, None, [0, 1, None]),
        (None, 1, [None, 3]),
        (1, 1, [0, None, 3]),
        (0, 0, [None]),
        (2, 2, [0, 1, 2, 3]),
        (3, 3, [0, 1, 2, 3]),
        (9, None, [0, 1, 2, 3]),
    ],
)
def test_picks_ends(head, tail, picked):
    assert pick_ends(range(4), head=head, tail=tail) == picked


@pytest.mark.parametrize("count", [-1, 2.0, "3", True], ids=repr)
@pytest.mark.parametrize("name", ["head", "tail"])
def test_a_count_that_is_no_whole_number_is_an_error_that_shows_it(name, count):
    counts = {"head": None, "tail": None, name: count}
    with pytest.raises(ArgumentError, match=f"{name}={count!r}: expected how many rows"):
        pick_ends(range(4), **counts)


# Text


def test_renders_text_with_the_title_above():
    assert render(SIMPLE, tablefmt="simple").splitlines() == [
        "title",
        "",
        "  id  name",
        "----  ------",
        "   1  a",
        "   2  b|<b>",
    ]


def test_renders_markdown_with_bars_escaped():
    assert r"|    2 | b\|<b> " in render(SIMPLE, tablefmt="github")


def test_numbers_are_left_as_they_were_written():
    table = Table("", ("t",), (("3.8100e-02",), ("1.0000e+00",)), ("right",))
    assert "3.8100e-02" in render(table, tablefmt="simple")


def test_no_title_leaves_no_blank_lines():
    assert render(Table("", ("t",), (("1",),), ("right",)), tablefmt="plain").splitlines()[0].strip() == "t"


def test_a_table_without_lines_is_its_title():
    assert render(Table("nothing"), tablefmt="simple") == "nothing"


def test_a_format_that_does_not_exist_is_an_error_that_lists_those_that_do():
    with pytest.raises(ArgumentError, match=r"tablefmt='fancy' is not a table format; expected one of .*github"):
        render(SIMPLE, tablefmt="fancy")


def test_unicode_stays():
    table = Table("größe", ("名",), (("β",),), ("left",))
    assert {"größe", "β"} <= set(render(table, tablefmt="plain").split())


# HTML


def test_html_parses_and_escapes():
    tree = ElementTree.fromstring(render(SIMPLE, tablefmt="html"))
    assert [cell.text for cell in tree.iter("td")][-2:] == ["2", "b|<b>"]


def test_html_title_is_the_caption():
    assert ElementTree.fromstring(render(SIMPLE, tablefmt="html")).findtext("caption") == "title"


def test_html_headers_are_header_cells():
    tree = ElementTree.fromstring(render(SIMPLE, tablefmt="html"))
    assert [cell.text for cell in tree.iter("th")] == ["id", "name"]


def test_html_bold_line_is_bold_throughout():
    tree = ElementTree.fromstring(render(SIMPLE, tablefmt="html"))
    assert [cell.text for cell in tree.iter("b")] == ["1", "a"]


def test_html_of_no_lines_is_a_paragraph():
    assert render(Table("<none>"), tablefmt="html") == "<p>&lt;none&gt;</p>"
