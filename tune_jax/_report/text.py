"""A tuned function's results as a table to print."""

from __future__ import annotations

from typing import Any

from tune_jax._report.kernels import tabulate_kernels
from tune_jax._report.target import find_results, name_target
from tune_jax._results import compose


def tabulate(
    target: Any,
    *,
    head: int | None = None,
    tail: int | None = None,
    kernels: bool = False,
    tablefmt: str = "simple",
) -> str:
    """The ranking of a tuned function, its results or its timing results, fastest first.

    Args:
      target: a tuned function, a `Results`, or the dict of a tuned function's `timing_results`.
      head: how many of the fastest rows to show; with `tail`, a row of dots stands for those between.
      tail: how many of the slowest rows to show.
      kernels: add a table of each candidate's kernels, how often each runs per launch and its share of time.
      tablefmt: "html", or any format of the `tabulate` library ("simple", "github", "latex", ...).

    Returns:
      Text: id, hyperparameters (None is blank), median time in seconds, spread of a launch, how many times
      slower than the fastest, "=" for a tie with it; then each failed candidate with its error; last, how
      many times as fast as the slowest the fastest is.

    Example:
      >>> print(tabulate(attention, head=5, tail=5))  # doctest: +SKIP

    Raises ArgumentError for a target, a count or a format that cannot be used.
    """
    results = find_results(target)
    if results is None:
        return f"Nothing has been tuned yet: call {name_target(target)}, or its .tune(...), first."
    more = [tabulate_kernels(results.timed, head=head, tail=tail)] if kernels else []
    return compose(results, head=head, tail=tail, tablefmt=tablefmt, more=more)
