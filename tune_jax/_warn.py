"""Warnings that point at the user's line."""

from __future__ import annotations

import sys
import types
import warnings

# JAX calls some of its functions through `contextlib`.
_PACKAGES = {"tune_jax", "jax", "jaxlib", "contextlib"}


def warn_user(message: str) -> None:
    """Warn at the innermost line that is neither this package's nor JAX's, from however deep in them.

    So that Python shows it once for each such line, and filters by module fit the module that made the call.
    """
    depth, frame = 1, sys._getframe(1)
    while _is_inside(frame) and frame.f_back is not None:
        depth, frame = depth + 1, frame.f_back
    warnings.warn(message, stacklevel=depth + 1)


def _is_inside(frame: types.FrameType) -> bool:
    return str(frame.f_globals.get("__name__")).partition(".")[0] in _PACKAGES
