"""What the Pallas backends share: where a kernel is compiled, and where it is interpreted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax import lax


def run(make_call: Callable[[bool], Callable[..., Any]], *operands: Any, platform: str) -> Any:
    """Calls a kernel, interpreted where the program is compiled for the CPU.

    Args:
        make_call: takes whether to interpret, and returns the function of the operands.
        *operands: arrays, or pytrees of them.
        platform: what the kernel is written for, "gpu" or "tpu".
    """
    if jax.default_backend() == platform:
        return make_call(False)(*operands)
    # What the program is compiled for is known only then: it may be exported to a device that is not here.
    return lax.platform_dependent(*operands, cpu=make_call(True), default=make_call(False))
