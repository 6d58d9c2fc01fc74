"""The outcome of one tuning: rows, raw samples and what is derived from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, SupportsIndex, overload

from tune_jax._errors import NoCandidateError
from tune_jax._records import Clock
from tune_jax._results import storage
from tune_jax._results.cells import show_hyperparams, show_seconds
from tune_jax._results.frame import make_frame
from tune_jax._results.notes import list_failures
from tune_jax._results.page import compose
from tune_jax._results.row import Row, TimingResult


@dataclasses.dataclass(frozen=True)
class Results:
    """What a tuning found: printable, iterable and sliceable.

    Rows are the timed ones, fastest first, then the failures by id.
    A slice is a `Results` of those rows, with the slowdowns and ties of the whole tuning.

    Example:
      >>> from tune_jax._records import Candidate, Samples
      >>> candidates = [Candidate(0, {"block": 64}), Candidate(1, {"block": 128})]
      >>> samples = {0: Samples("device", (3e3, 3e3)), 1: Samples("device", (1e3, 1e3))}
      >>> from tune_jax._results import make_results
      >>> results = make_results(
      ...     function="f", call="x: f32[8]", candidates=candidates, samples=samples, failures={},
      ...     device_kind="cpu", wall_s=1.5, separation=3.0,
      ... )
      >>> results.best.hyperparams
      {'block': 128}

    Attributes:
      function: name of the tuned function.
      rows: one a candidate.
      call: the arguments that were tuned for, readable.
      device_kind: kind of the device, as JAX names it.
      wall_s: seconds from start to end of the tuning.
      warnings: what the reader of the numbers must know.
    """

    function: str
    rows: tuple[Row, ...]
    call: str = ""
    device_kind: str | None = None
    wall_s: float | None = None
    warnings: tuple[str, ...] = ()

    @property
    def best(self) -> Row:
        """The fastest row; raises NoCandidateError, which lists the distinct errors, if none was timed."""
        if not self.timed:
            errors = "\n".join(list_failures(self.failures)) or "there are no candidates"
            raise NoCandidateError(f"No hyperparameters compiled successfully for {self.function}:\n{errors}")
        return self.timed[0]

    @property
    def timed(self) -> tuple[Row, ...]:
        """The rows that have times."""
        return tuple(row for row in self.rows if row.failure is None)

    @property
    def failures(self) -> tuple[Row, ...]:
        """The rows that have a failure instead of times."""
        return tuple(row for row in self.rows if row.failure is not None)

    @property
    def clock(self) -> Clock | None:
        """What all times were taken with, "device" or "host"; None if there are none."""
        return self.timed[0].clock if self.timed else None

    def timing_results(self) -> dict[int, TimingResult]:
        """The timed rows by id, fastest first, in the shape that tune-jax 0.8 gave them."""
        return {row.id: TimingResult(row) for row in self.timed}

    def to_df(self) -> Any:
        """A `pandas.DataFrame`, one line a row; raises ImportError where pandas is missing."""
        return make_frame(self.rows)

    def to_dict(self) -> dict[str, Any]:
        """Everything, raw samples included, as what `json.dumps` takes.

        Hyperparameter values come back equal if they are None, bool, int, float, complex, str, bytes, dtypes,
        NumPy or JAX scalar types, NumPy scalars, or tuples, lists and dicts of these; any other value
        comes back as an `Opaque` that holds its repr.
        """
        return {
            "format": storage.FORMAT,
            "function": self.function,
            "call": self.call,
            "device_kind": self.device_kind,
            "wall_s": self.wall_s,
            "warnings": list(self.warnings),
            "rows": [storage.pack_row(row) for row in self.rows],
        }

    @classmethod
    def from_dict(cls, stored: Mapping[str, Any]) -> Results:
        """What `to_dict` gave; raises ResultsError for anything else."""
        fields = storage.unpack_results(stored)
        return cls(**fields)

    def __len__(self) -> int:
        return len(self.rows)

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    @overload
    def __getitem__(self, index: SupportsIndex) -> Row: ...
    @overload
    def __getitem__(self, index: slice) -> Results: ...
    def __getitem__(self, index: SupportsIndex | slice) -> Row | Results:
        if isinstance(index, slice):
            return dataclasses.replace(self, rows=self.rows[index])
        return self.rows[index]

    def __str__(self) -> str:
        return compose(self)

    def __repr__(self) -> str:
        counts = f"{len(self.timed)} timed, {len(self.failures)} failed"
        best = "none"
        if self.timed:
            best = f"{show_seconds(self.best.median_s)} s with {{{show_hyperparams(self.best.hyperparams)}}}"
        return f"<Results of {self.function}: {counts}, best {best}>"

    def _repr_html_(self) -> str:
        return compose(self, tablefmt="html")
