"""Each example runs on the machine at hand and prints what it promises."""

from __future__ import annotations

import importlib.util
import math
import pathlib
import types

import pytest

EXAMPLES = pathlib.Path(__file__).resolve().parents[1] / "examples"


def _load(name: str) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location(f"example_{name}", EXAMPLES / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.usefixtures("quick_tuning")
def test_flash_attention_tunes_one_backend_then_all(monkeypatch, capsys):
    example = _load("flash_attention")
    if not example.ON_GPU:
        monkeypatch.setattr(example, "SHAPE", (1, 64, 2, 16))
        monkeypatch.setattr(example, "GRID", {"block_q": [None, 16], "block_k": [None, 16]})
    example.main()
    printed = capsys.readouterr().out
    assert example.ON_GPU or printed.startswith("No GPU here")
    assert printed.count(" times as fast as the slowest, {") == 2
    assert printed.count("fastest: {") == 2
    assert printed.count("implementation") >= 3  # a column of the second table, and in what is said of it


def test_flash_attention_has_about_190_settings_of_which_half_are_the_same_program():
    grid = _load("flash_attention").TRITON_GRID
    assert math.prod(map(len, grid.values())) == 192
    defaults = {"num_warps": 4, "num_stages": 3}
    programs = {name: {defaults.get(name) if choice is None else choice for choice in grid[name]} for name in grid}
    assert math.prod(map(len, programs.values())) == 96
