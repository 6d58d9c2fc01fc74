"""The table of contexts: every item is there, and every test that it names exists."""

from __future__ import annotations

import ast
import functools
import pathlib
import re

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGE = (ROOT / "docs" / "contexts.md").read_text()
ITEMS = {*map(str, range(1, 11)), "program", "record", "drop-in", "processes"}
TEST = re.compile(r"`(tests/[\w/]+\.py)::(\w+)(?:\[(.+)\])?`")


def read_rows(page: str) -> list[list[str]]:
    """The cells of each row of the page's tables, heads left out."""
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("|")]
    return [row for row in rows if row[0] != "item" and set(row[0]) != {"-"}]


@functools.cache
def names_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@functools.cache
def strings_in(path: str) -> set[str]:
    tree = ast.parse((ROOT / path).read_text())
    return {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def find_fault(row: list[str]) -> str | None:
    """What is wrong with a row: its test is not named, or there is none of that name."""
    found = TEST.fullmatch(row[-1])
    if len(row) != 4 or not all(row) or found is None:
        return f"a row needs an item, a context, what happens and a test: {row}"
    path, name, program = found.groups()
    if not (ROOT / path).exists() or name not in names_in(path):
        return f"there is no {path}::{name}"
    return None if program is None or program in strings_in(path) else f"{path} names no {program!r}"


ROWS = read_rows(PAGE)


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"{row[0]}: {row[1]}"[:60])
def test_the_test_of_a_row_exists(row: list[str]) -> None:
    assert find_fault(row) is None


def test_every_item_has_rows() -> None:
    assert {row[0] for row in ROWS} >= ITEMS


def test_no_context_has_two_rows() -> None:
    contexts = [(row[0], row[1]) for row in ROWS]
    assert len(set(contexts)) == len(contexts) > 80


@pytest.mark.parametrize(
    ("test", "fault"),
    [
        ("`tests/test_contexts.py::test_every_item_has_rows`", None),
        ("`tests/test_contexts.py::test_every_item_has_rows[fault]`", None),
        ("`tests/test_contexts.py::test_nothing`", "there is no tests/test_contexts.py::test_nothing"),
        ("`tests/test_nowhere.py::test_every_item_has_rows`", "there is no tests/test_nowhere.py"),
        ("`tests/test_contexts.py::test_every_item_has_rows[not" + " there]`", "names no 'not there'"),
        ("", "a row needs"),
    ],
)
def test_a_wrong_row_is_seen(test: str, fault: str | None) -> None:
    found = find_fault(["1", "jit", "tuned", test])
    assert found is None if fault is None else fault in str(found)
