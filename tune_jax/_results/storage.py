"""Rows and results to JSON-safe dicts and back."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from tune_jax._errors import ResultsError
from tune_jax._records import Failure, KernelTime
from tune_jax._results.codec import decode, encode, encode_float
from tune_jax._results.row import Row

FORMAT = 1


def pack_row(row: Row) -> dict[str, Any]:
    """A row as what `json.dumps(..., allow_nan=False)` takes."""
    return {
        "id": row.id,
        "hyperparams": {name: encode(value) for name, value in row.hyperparams.items()},
        "samples_ns": [encode_float(duration) for duration in row.samples_ns],
        "spans_ns": [encode_float(span) for span in row.spans_ns],
        "clock": row.clock,
        "kernels": [dataclasses.asdict(kernel) for kernel in row.kernels],
        "slowdown": row.slowdown,
        "tied": row.tied,
        "failure": None if row.failure is None else dataclasses.asdict(row.failure),
        "shares_with": list(row.shares_with),
    }


def unpack_row(stored: Mapping[str, Any]) -> Row:
    """The row that `pack_row` was given."""
    return Row(
        id=int(stored["id"]),
        hyperparams={name: decode(value) for name, value in stored["hyperparams"].items()},
        samples_ns=tuple(map(float, stored["samples_ns"])),
        spans_ns=tuple(map(float, stored["spans_ns"])),
        clock=stored["clock"],
        kernels=tuple(KernelTime(**kernel) for kernel in stored["kernels"]),
        slowdown=stored["slowdown"],
        tied=stored["tied"],
        failure=None if stored["failure"] is None else Failure(**stored["failure"]),
        shares_with=tuple(stored["shares_with"]),
    )


def unpack_results(stored: Any) -> dict[str, Any]:
    """The fields of `Results`, by name; raises ResultsError for what `Results.to_dict` never makes."""
    found = stored.get("format") if isinstance(stored, Mapping) else stored
    if found != FORMAT:
        raise ResultsError(f"stored results have format {found!r}, expected {FORMAT}; tune again")
    try:
        return {
            "function": stored["function"],
            "rows": tuple(map(unpack_row, stored["rows"])),
            "call": stored["call"],
            "device_kind": stored["device_kind"],
            "wall_s": stored["wall_s"],
            "warnings": tuple(stored["warnings"]),
        }
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ResultsError(
            f"stored results are damaged ({type(error).__name__}: {error}), expected what Results.to_dict "
            "gives; delete them and tune again"
        ) from error
