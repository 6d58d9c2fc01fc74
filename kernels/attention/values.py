"""What callers hand over: as arrays of whole numbers within bounds, and shown in messages."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .call import Array

_INT32 = np.iinfo(np.int32)


def show(value: object) -> str:
    """A value and its type, for a message; of an array that is no scalar, what kind it is."""
    if isinstance(value, (np.ndarray, jax.Array)) and value.ndim:
        return kind_of(value)
    return f"{value!r} ({type(value).__name__})"


def kind_of(array: Array | np.ndarray) -> str:
    """Dtype and shape, for a message."""
    return f"{array.dtype}{list(array.shape)}"


def is_whole_number(value: Any) -> bool:
    """Whether this is an integer that is known now, and no bool."""
    return isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))


def as_array(name: str, value: Any, wanted: str) -> Array:
    """What JAX makes of the value, or an error that says what is wanted."""
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise TypeError(f"{name} must be {wanted}, got {show(value)}.") from error


def read_integers(name: str, value: Any, shapes: tuple[tuple[int, ...], ...], wanted: str) -> Array:
    """An array of any integer dtype and one of the shapes; what NumPy holds in more than 32 bits is cut to them."""
    array = as_array(name, _saturate(value), wanted)
    if not jnp.issubdtype(array.dtype, jnp.integer):
        raise TypeError(f"{name} must be {wanted}, got {kind_of(array)}; cast with .astype(jnp.int32).")
    if array.shape not in shapes:
        expected = " or ".join(str(shape) for shape in shapes)
        raise ValueError(
            f"{name} must be {wanted}, of shape {expected}, got shape {array.shape}; jnp.broadcast_to repeats "
            f"what all share."
        )
    return array


def _saturate(value: Any) -> Any:
    # JAX would wrap these around.
    if is_whole_number(value):
        return np.int32(min(max(int(value), _INT32.min), _INT32.max))
    if isinstance(value, np.ndarray) and np.issubdtype(value.dtype, np.integer):
        return np.clip(value, _INT32.min, _INT32.max).astype(np.int32)
    return value


def clip(array: Array, low: int, high: int) -> Array:
    """Between two bounds that int32 holds, as int32, from integers of any width."""
    limits = jnp.iinfo(array.dtype)
    if limits.bits < _INT32.bits:
        # The bounds need not fit these.
        array = array.astype(jnp.int32)
    else:
        low = max(low, int(limits.min))
    return jnp.clip(array, low, high).astype(jnp.int32)
