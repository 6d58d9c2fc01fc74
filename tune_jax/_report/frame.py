"""A tuned function's results as a pandas DataFrame."""

from __future__ import annotations

from typing import Any

from tune_jax._report.target import find_results
from tune_jax._results import Results


def to_df(target: Any) -> Any:
    """The rows of a tuned function, its results or its timing results as a `pandas.DataFrame`.

    Times are in seconds; failed candidates have a `stage` and an `error` instead. Before the first tuning the
    frame is empty.

    Example:
      >>> to_df(attention).sort_values("median_s")  # doctest: +SKIP

    Raises ArgumentError for anything else, ImportError where pandas is missing.
    """
    results = find_results(target) or Results(function="", rows=())
    return results.to_df()
