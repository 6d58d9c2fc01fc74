"""Results of a tuning: rows, derived statistics, printing, and JSON.

Rendering sits in here, below `Results`, so that a `Results` can print itself without importing `_report`.
"""

from __future__ import annotations

from tune_jax._results.build import make_results
from tune_jax._results.cells import shorten, show_hyperparams, show_value
from tune_jax._results.codec import Opaque, decode, encode
from tune_jax._results.notes import list_failures
from tune_jax._results.page import compose
from tune_jax._results.program import ProgramResults, TunedCall
from tune_jax._results.results import Results
from tune_jax._results.row import Row, TimingResult
from tune_jax._results.table import Align, Table, pick_ends

__all__ = [
    "Align",
    "Opaque",
    "ProgramResults",
    "Results",
    "Row",
    "Table",
    "TimingResult",
    "TunedCall",
    "compose",
    "decode",
    "encode",
    "list_failures",
    "make_results",
    "pick_ends",
    "shorten",
    "show_hyperparams",
    "show_value",
]
