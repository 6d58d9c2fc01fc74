"""What the Pallas backends share: where a kernel is compiled or interpreted, and the types of its outputs."""

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


def like(inputs: Any, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """The type of an output; inside shard_map it varies over the axes of a mesh that `inputs.q` varies over."""
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(inputs.q).manual_axis_type)
