"""Values and numbers as a person reads them in a table's cell."""

from __future__ import annotations

import enum
import functools
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

_LONGEST_VALUE = 40
_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")
_WORD_STRING = re.compile(r"[^\W\d][^\n\r\t]*")
_LOOKS_LIKE_OTHER = ("None", "True", "False", "nan", "inf")


def show_value(value: Any) -> str:
    """A hyperparameter's value; None is blank, since it stands for "leave it to the default"."""
    return "" if value is None else shorten(_name_value(value), _LONGEST_VALUE)


def show_hyperparams(hyperparams: Any) -> str:
    """`block_q=64, num_warps=None`: in a sentence, None must be visible."""
    return ", ".join(f"{name}={show_value(value) or None}" for name, value in hyperparams.items())


def show_seconds(time_s: float | None) -> str:
    """Five digits with an exponent, so that a column of times can be compared by eye."""
    return "" if time_s is None else f"{time_s:.4e}"


def show_spread(spread: float | None) -> str:
    """A relative spread in percent; blank where a single sample gave none."""
    return "" if spread is None else f"±{100 * spread:.1f}%"


def show_factor(factor: float | None) -> str:
    """How many times slower."""
    return "" if factor is None else f"{factor:.2f}x"


def show_ids(ids: Sequence[int]) -> str:
    """`3, 5-9`: every id is named, runs of three or more by their ends."""
    ordered = sorted(ids)
    starts = [place for place, id in enumerate(ordered) if place == 0 or id != ordered[place - 1] + 1]
    runs = [ordered[start:end] for start, end in zip(starts, [*starts, len(ordered)][1:], strict=True)]
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def shorten(text: str, longest: int) -> str:
    """Cut the middle out of a long text and mark the cut; both ends tell similar names apart."""
    if len(text) <= longest:
        return text
    tail = (longest - 1) // 2
    return f"{text[: longest - 1 - tail]}…{text[-tail:]}"


def strip_addresses(text: str) -> str:
    """Memory addresses differ from process to process, and tell a reader nothing."""
    return _ADDRESS.sub("", text)


def _name_value(value: Any) -> str:
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, str):
        # Quotes only where the text alone would read as something else: a number, None, nothing.
        plain = _WORD_STRING.fullmatch(value) and value.isprintable() and value not in _LOOKS_LIKE_OTHER
        return value if plain and value == value.strip() else repr(value)
    if isinstance(value, np.dtype | np.generic):
        return str(value)
    if type(value) in (tuple, list):
        inner = ", ".join(_name_value(item) for item in value)
        return f"[{inner}]" if type(value) is list else f"({inner},)" if len(value) == 1 else f"({inner})"
    return _name_callable(value) if callable(value) else strip_addresses(repr(value))


def _name_callable(value: Any) -> str:
    if isinstance(value, functools.partial):
        bound = [_name_value(item) for item in value.args]
        bound += [f"{name}={_name_value(item)}" for name, item in value.keywords.items()]
        return f"partial({', '.join([_name_value(value.func), *bound])})"
    name = getattr(value, "__name__", None)
    return name if isinstance(name, str) else strip_addresses(repr(value))
