"""Attention for TPUs, written in Pallas; on a CPU the same kernels are interpreted.

Each kernel walks a grid whose last axis is the blocks of the other side, accumulates in VMEM in float32 and
writes once. Which blocks a walk visits is computed beforehand and prefetched as scalars: what lies outside of
causal, window, lengths and segments is neither computed nor loaded. The backward pass is two walks, one for
dq and one for dk and dv, and a third for the gradient of a bias; sums have a fixed order, so that all results
repeat bit for bit.
"""

from __future__ import annotations

from ..call import Array, Operands, Spec
from ..differentiable import attend as _attend
from ..partition import Partitioned
from . import backward, bias, forward
from .vmem import VMEM_LIMIT, vmem_bytes

__all__ = ["VMEM_LIMIT", "attend", "vmem_bytes"]


class _Kernels:
    forward = staticmethod(forward.forward)
    backward = staticmethod(backward.backward)
    bias_gradient = staticmethod(bias.bias_gradient)


_KERNELS = Partitioned(_Kernels())


def attend(spec: Spec, operands: Operands) -> tuple[Array, Array]:
    """The `pallas_tpu` backend of `flash_attention`: output and log-sum-exp `[batch, Tq, heads]`."""
    return _attend(_KERNELS, spec, operands)
