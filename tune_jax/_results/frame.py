"""Rows as a pandas DataFrame. pandas is optional and imported here only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tune_jax._results.notes import summarise_failure
from tune_jax._results.row import Row
from tune_jax._results.table import list_names

_STATISTICS = ("median_s", "mean_s", "std_s", "spread", "slowdown")


def make_frame(rows: Sequence[Row]) -> Any:
    """A `pandas.DataFrame`, one line a row; raises ImportError where pandas is missing."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError(
            'to_df needs pandas, which is not installed: pip install pandas, or the extra "pandas" of tune-jax'
        ) from error
    columns = {
        "id": pandas.Series([row.id for row in rows], dtype="int64"),
        # As objects: pandas would turn [64, None] into floats and True among numbers into 1.
        **{_name_column(n): _list_objects(pandas, rows, n) for n in list_names(rows)},
        **{n: pandas.Series([getattr(row, n) for row in rows], dtype="float64") for n in _STATISTICS},
        "tied": pandas.Series([row.tied for row in rows], dtype="bool"),
        "samples": pandas.Series([len(row.samples_ns) for row in rows], dtype="int64"),
    }
    texts = {
        "clock": [row.clock for row in rows],
        "shares_with": [row.shares_with for row in rows],
        "stage": [row.failure and row.failure.stage for row in rows],
        "error": [row.failure and summarise_failure(row.failure) for row in rows],
    }
    return pandas.DataFrame({**columns, **{n: pandas.Series(v, dtype=object) for n, v in texts.items()}})


def _list_objects(pandas: Any, rows: Sequence[Row], name: str) -> Any:
    return pandas.Series([row.hyperparams.get(name) for row in rows], dtype=object)


def _name_column(hyperparam: str) -> str:
    """A hyperparameter may be called like one of our own columns; both must stay."""
    own = {"id", *_STATISTICS, "tied", "samples", "clock", "shares_with", "stage", "error"}
    return f"hyperparams.{hyperparam}" if hyperparam in own else hyperparam
