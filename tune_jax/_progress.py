"""Progress bars: in a terminal or a notebook, and nowhere else unless asked for."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tqdm.auto import tqdm


@contextlib.contextmanager
def progress_bar(label: str, total: int, *, wanted: bool | None) -> Iterator[Callable[[int], object]]:
    """Show a bar of `total` steps; yields the function that advances it. `wanted=None` shows it where someone looks."""
    shown = is_interactive() if wanted is None else wanted
    with tqdm(total=total, desc=label, disable=not shown, leave=False) as bar:
        # Timing goes on for those that may still win, after all are counted once.
        yield lambda steps: bar.update(min(steps, total - bar.n))


def is_interactive() -> bool:
    """Whether standard error is a terminal, or this is a notebook."""
    return _in_notebook() or _is_terminal(sys.stderr)


def _is_terminal(stream: Any) -> bool:
    # Standard error may be None, closed, or replaced by something with no more than `write`.
    return not getattr(stream, "closed", False) and bool(getattr(stream, "isatty", lambda: False)())


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"
