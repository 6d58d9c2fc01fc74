"""Every example runs: the Python blocks of the README and of `docs/`, and the docstrings of the package.

A block of plain code is run, one with `>>>` is also compared with what it prints. The blocks of a page share
their names, from the top down. `<!-- not run -->` on the line above a block leaves it out.
"""

from __future__ import annotations

import doctest
import importlib
import pathlib
import pkgutil
import re

import pytest

import tune_jax

ROOT = pathlib.Path(__file__).resolve().parents[1]
PAGES = [path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))) if path.exists()]
BLOCK = re.compile(r"^(?P<skip><!-- not run -->\n+)?```python\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
OPTIONS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
MODULES = ["tune_jax", *(found.name for found in pkgutil.walk_packages(tune_jax.__path__, "tune_jax."))]


def _blocks(text: str) -> list[tuple[int, str]]:
    """The blocks to run, each with the number of the line before its first."""
    found = [match for match in BLOCK.finditer(text) if not match["skip"]]
    return [(text.count("\n", 0, match.start("code")), match["code"]) for match in found]


def _run_block(code: str, *, names: dict[str, object], page: str, line: int) -> None:
    if ">>>" not in code:
        exec(compile("\n" * line + code, page, "exec"), names)
        return
    test = doctest.DocTestParser().get_doctest(code, names, page, page, line)
    runner = doctest.DebugRunner(optionflags=OPTIONS)
    runner.run(test, clear_globs=False)
    names.update(test.globs)


def _run_page(text: str, page: str) -> int:
    names: dict[str, object] = {"__name__": "__main__"}
    blocks = _blocks(text)
    for line, code in blocks:
        _run_block(code, names=names, page=page, line=line)
    return len(blocks)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_page_runs(path, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    _run_page(path.read_text(), str(path))


@pytest.mark.parametrize("name", MODULES)
def test_docstring_examples_run(name):
    outcome = doctest.testmod(importlib.import_module(name), optionflags=OPTIONS)
    assert outcome.failed == 0


def test_blocks_of_a_page_share_names_and_are_compared():
    blocks = ["x = 2", ">>> x + 1\n3\n>>> y = x", "assert y == 2"]
    page = "\n".join(f"Text\n```python\n{block}\n```\n" for block in blocks)
    assert _run_page(page, "page.md") == 3


def test_a_wrong_output_is_seen():
    with pytest.raises(doctest.DocTestFailure):
        _run_page("```python\n>>> 1 + 1\n3\n```\n", "page.md")


def test_an_error_in_plain_code_names_its_line():
    with pytest.raises(ZeroDivisionError) as caught:
        _run_page("Title\n\n```python\nx = 1\nx / 0\n```\n", "page.md")
    assert caught.traceback[-1].lineno + 1 == 5


def test_other_languages_and_marked_blocks_are_left_out():
    page = "```sh\nfalse\n```\n<!-- not run -->\n```python\n1 / 0\n```\n"
    assert _run_page(page, "page.md") == 0
