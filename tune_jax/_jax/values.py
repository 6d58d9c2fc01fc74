"""Abstract values and dtypes."""

from __future__ import annotations

from typing import Any

import jax
from jax._src import dtypes as _dtypes
from jax._src.lax import lax as _lax

ShapedArray = jax.core.ShapedArray
Tracer = jax.core.Tracer


def shaped(aval: Any) -> Any:
    """The shape, dtype, weak type and explicit sharding of an abstract value, without what only its own trace knows."""
    weak = getattr(aval, "weak_type", False)
    if is_explicit(aval):
        return ShapedArray(aval.shape, aval.dtype, weak_type=weak, sharding=aval.sharding)
    return ShapedArray(aval.shape, aval.dtype, weak_type=weak)


def is_explicit(aval: Any) -> bool:
    """Whether an abstract value says how it lies on the explicit axes of a mesh."""
    return jax.sharding.AxisType.Explicit in aval.sharding.mesh.axis_types


def struct_of(aval: Any) -> jax.ShapeDtypeStruct:
    """What `jax.jit(...).trace` takes for an abstract value, with what is known of its place on the ambient mesh."""
    weak = getattr(aval, "weak_type", False)
    if aval.sharding.mesh.empty:
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak)
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, weak_type=weak, sharding=aval.sharding, manual_axis_type=aval.manual_axis_type
    )


def key_impl_name(dtype: Any) -> str:
    """The name of the generator behind a PRNG key dtype, as `jax.random.wrap_key_data` takes it."""
    return str(dtype._impl.name)


def is_key_dtype(value: Any) -> bool:
    """Whether `value` is the dtype of PRNG keys."""
    return isinstance(value, _dtypes.ExtendedDType)


def as_weak(value: Any) -> Any:
    """The same array with a weak type, as one made of a Python number has it."""
    return _lax._convert_element_type(value, value.dtype, weak_type=True)
