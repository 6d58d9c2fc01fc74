"""From a kernel and its operands to a call."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from .._pallas import run
from ..call import Operands
from .parts import Plan


def launch(kernel: Callable[..., None], plan: Plan, programs: int, out_shape: Any, *inputs: Any) -> Any:
    """Runs `kernel(plan, *inputs, *outputs)` on references to whole arrays.

    The grid has one axis, whose launch limit is 2**31: batches and heads can be many. Pallas computes offsets
    in 64 bits where an array is large.
    """

    def make_call(interpret: bool) -> Callable[..., Any]:
        return pl.pallas_call(
            functools.partial(kernel, dataclasses.replace(plan, interpret=interpret)),
            grid=(programs,),
            out_shape=out_shape,
            interpret=interpret,
            compiler_params=plgpu.CompilerParams(num_warps=plan.launch.num_warps, num_stages=plan.launch.num_stages),
        )

    return run(make_call, *inputs, platform="gpu")


def for_device(operands: Operands) -> Operands:
    """The operands as kernels read them."""
    scale, mask = operands.scale, operands.mask
    if scale is not None:
        scale = scale.reshape(1)
    if mask is not None and mask.size >= 2**31:
        # Offsets into less than 2**32 bytes have 32 bits, of which the device takes the highest for a sign.
        mask = mask.astype("int16")
    return operands._replace(scale=scale, mask=mask)
