"""Values and numbers as a person reads them."""

from __future__ import annotations

import enum
import functools

import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax._results.cells import (
    shorten,
    show_factor,
    show_hyperparams,
    show_ids,
    show_seconds,
    show_spread,
    show_value,
    strip_addresses,
)


class Mode(enum.Enum):
    FAST = 1


def kernel(x):
    return x


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, ""),
        (64, "64"),
        (True, "True"),
        (0.1, "0.1"),
        (1e-10, "1e-10"),
        ("fast", "fast"),
        ("block major", "block major"),
        ("größe", "größe"),
        (Mode.FAST, "FAST"),
        (kernel, "kernel"),
        (np.dtype("float32"), "float32"),
        (jnp.dtype(jnp.bfloat16), "bfloat16"),
        (jnp.bfloat16, "bfloat16"),
        (np.int8, "int8"),
        (np.float32(0.5), "0.5"),
        ((1, 2), "(1, 2)"),
        ((1,), "(1,)"),
        ((), "()"),
        ([None, "a"], "[None, a]"),
        ((jnp.bfloat16, kernel), "(bfloat16, kernel)"),
        (functools.partial(kernel, 2, y="a"), "partial(kernel, 2, y=a)"),
    ],
)
def test_shows_a_value(value, text):
    assert show_value(value) == text


@pytest.mark.parametrize("value", ["", "64", "None", "True", "nan", " a", "a ", "a\nb", "-", "(1, 2)"])
def test_a_string_that_reads_as_something_else_is_quoted(value):
    assert show_value(value) == repr(value)


def test_an_objects_address_is_not_shown():
    assert "0x" not in show_value(object())


def test_an_object_that_can_be_called_but_has_no_name_is_shown_by_its_repr():
    class Block:
        def __call__(self):
            return None

        def __repr__(self):
            return "Block(4)"

    assert show_value(Block()) == "Block(4)"


def test_a_long_value_is_cut_visibly():
    text = show_value("x" * 100)
    assert (len(text), "…" in text) == (40, True)


def test_a_cut_keeps_both_ends():
    assert shorten("abcdefghij", 5) == "ab…ij"


def test_a_text_that_fits_is_not_cut():
    assert shorten("abcde", 5) == "abcde"


@pytest.mark.parametrize(
    ("time_s", "text"),
    [(3.8098e-2, "3.8098e-02"), (1.0, "1.0000e+00"), (1.23456e-9, "1.2346e-09"), (None, "")],
)
def test_shows_seconds(time_s, text):
    assert show_seconds(time_s) == text


@pytest.mark.parametrize(("spread", "text"), [(0.004, "±0.4%"), (0.0, "±0.0%"), (1.5, "±150.0%"), (None, "")])
def test_shows_a_spread_in_percent(spread, text):
    assert show_spread(spread) == text


@pytest.mark.parametrize(("factor", "text"), [(1.0, "1.00x"), (12.345, "12.35x"), (None, "")])
def test_shows_a_factor(factor, text):
    assert show_factor(factor) == text


@pytest.mark.parametrize(
    ("ids", "text"),
    [
        ([], ""),
        ([3], "3"),
        ([3, 4], "3, 4"),
        ([3, 4, 5], "3-5"),
        ([9, 1, 2, 3, 7], "1-3, 7, 9"),
        ([0, 2, 4], "0, 2, 4"),
    ],
)
def test_shows_every_id(ids, text):
    assert show_ids(ids) == text


def test_hyperparams_in_a_sentence_show_none():
    assert show_hyperparams({"block_q": 64, "num_warps": None, "mode": ""}) == "block_q=64, num_warps=None, mode=''"


def test_no_hyperparams_are_no_text():
    assert show_hyperparams({}) == ""


def test_strips_every_address():
    assert strip_addresses("<f at 0x7fab12>, <g at 0xFF>") == "<f>, <g>"
