"""Reports on a tuned function, its results, or its timing results."""

from __future__ import annotations

from tune_jax._report.frame import to_df
from tune_jax._report.text import tabulate

__all__ = ["tabulate", "to_df"]
