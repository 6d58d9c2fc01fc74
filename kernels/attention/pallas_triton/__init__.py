"""Attention in the Triton dialect of Pallas, for NVIDIA GPUs from Ampere on: all features.

The dialect announces its end in newer versions of JAX. Everything that knows of it is in this folder.
"""

from __future__ import annotations

from .. import differentiable
from ..call import Array, Gradients, Operands, Saved, Spec
from ..partition import Partitioned
from .backward import key_gradients, query_gradient
from .bias import bias_gradient
from .forward import forward


class _Kernels:
    """The walks of this backend, see `differentiable.Kernels`."""

    def forward(self, spec: Spec, operands: Operands) -> tuple[Array, Array]:
        return forward(spec, operands)

    def backward(self, spec: Spec, operands: Operands, saved: Saved) -> Gradients:
        dk, dv = key_gradients(spec, operands, saved)
        return Gradients(q=query_gradient(spec, operands, saved), k=dk, v=dv)

    def bias_gradient(self, spec: Spec, operands: Operands, saved: Saved) -> Array:
        return bias_gradient(spec, operands, saved)


_KERNELS = Partitioned(_Kernels())


def attend(spec: Spec, operands: Operands) -> tuple[Array, Array]:
    """The `pallas_triton` backend of `flash_attention`."""
    return differentiable.attend(_KERNELS, spec, operands)
