"""Progress bars: in a terminal or a notebook, and nowhere else unless asked for."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

from tqdm import tqdm

_is_covered = contextvars.ContextVar("is_covered", default=False)


@contextlib.contextmanager
def progress_bar(label: str, total: int, *, wanted: bool | None) -> Iterator[Callable[[int], object]]:
    """Show a bar of `total` steps; yields the function that advances it. `wanted=None` shows it where someone looks."""
    shown = is_interactive() if wanted is None else wanted and _can_be_written(sys.stderr)
    shown = shown and not _is_covered.get()
    with _bar_class()(total=total, desc=label, disable=not shown, leave=False) as bar:
        # Timing goes on for those that may still win, after all are counted once.
        yield lambda steps: bar.update(min(steps, total - bar.n))


@contextlib.contextmanager
def covering_bar(label: str) -> Iterator[Callable[[int, int], object]]:
    """Show one bar where someone looks, and in this thread none inside; yields what takes the steps done and in all."""
    with _bar_class()(total=0, desc=label, disable=not is_interactive(), leave=False) as bar:
        token = _is_covered.set(True)
        try:
            yield functools.partial(_show_steps, bar)
        finally:
            _is_covered.reset(token)


def _show_steps(bar: Any, done: int, total: int) -> None:
    bar.n, bar.total = done, total
    bar.refresh()


def _bar_class() -> Any:
    """The bar for where we are; a notebook without ipywidgets shows the plain one."""
    if _in_notebook() and importlib.util.find_spec("ipywidgets") is not None:
        from tqdm.notebook import tqdm as notebook_tqdm

        return notebook_tqdm
    return tqdm


def is_interactive() -> bool:
    """Whether standard error is a terminal, or this is a notebook."""
    return _in_notebook() or _is_terminal(sys.stderr)


def _is_terminal(stream: Any) -> bool:
    return _can_be_written(stream) and bool(getattr(stream, "isatty", lambda: False)())


def _can_be_written(stream: Any) -> bool:
    # Standard error may be None, closed, or replaced by something with no more than `write`.
    return hasattr(stream, "write") and not getattr(stream, "closed", False)


def _in_notebook() -> bool:
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return type(shell).__name__ == "ZMQInteractiveShell"
