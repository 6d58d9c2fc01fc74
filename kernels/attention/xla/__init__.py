"""The `xla` backend: attention over blocks in plain JAX, for every device XLA compiles for and every feature."""

from __future__ import annotations

from .. import differentiable
from ..call import Array, Operands, Spec
from . import walks


def attend(spec: Spec, operands: Operands) -> tuple[Array, Array]:
    """Output and log-sum-exp `[batch, Tq, heads]`, differentiable, in memory linear in Tq and Tk."""
    return differentiable.attend(walks, spec, operands)
