"""Hyperparameter values to JSON and back.

None, bool, int, finite float and str are stored as they are. Tuples, lists, dicts, complex numbers, bytes,
other floats, dtypes, NumPy scalars and the scalar types of NumPy, JAX and ml_dtypes are stored as a JSON
object with a "type". Anything else (a function, an enum, an object) is stored as its repr without memory
addresses and comes back as an `Opaque`, never as code to import. To find a live value in a stored
grid, compare `encode(value)`.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np

from tune_jax._errors import ResultsError
from tune_jax._results.cells import strip_addresses

_SCALAR_TYPE_MODULES = ("numpy", "jax.numpy", "ml_dtypes")
_PLAIN = (type(None), bool, int, str)


@dataclasses.dataclass(frozen=True)
class Opaque:
    """Stands for a stored value that JSON cannot hold: `text` is the repr of the one that was there."""

    text: str

    def __repr__(self) -> str:
        return self.text


def encode(value: Any) -> Any:
    """Something that `json.dumps(..., allow_nan=False)` takes and `decode` turns back into the value."""
    # By exact type: a subclass (an IntEnum, a str subclass) would come back as something else.
    if type(value) in _PLAIN:
        return value
    for encoder in (_encode_number, _encode_container, _encode_numpy):
        encoded = encoder(value)
        if encoded is not None:
            return encoded
    return {
        "type": "object",
        "text": value.text if isinstance(value, Opaque) else strip_addresses(repr(value)),
    }


def decode(stored: Any) -> Any:
    """The value that `encode` was given, or an `Opaque`; raises ResultsError for what it never makes."""
    if type(stored) in (*_PLAIN, float):
        return stored
    decoder = _DECODERS.get(stored.get("type")) if isinstance(stored, dict) else None
    if decoder is None:
        raise ResultsError(
            f"stored value {stored!r} is of no known form, expected a JSON scalar or an object whose "
            f"'type' is one of {sorted(_DECODERS)}; was it written by a newer version?"
        )
    return decoder(stored)


def encode_float(number: float) -> float | str:
    """JSON has no infinity and no NaN: those become text."""
    return number if math.isfinite(number) else repr(number)


def _encode_number(value: Any) -> Any:
    if type(value) is float:
        return value if math.isfinite(value) else {"type": "float", "text": repr(value)}
    if type(value) is complex:
        return {"type": "complex", "parts": [encode_float(value.real), encode_float(value.imag)]}
    if type(value) is bytes:
        return {"type": "bytes", "hex": value.hex()}
    return None


def _encode_container(value: Any) -> Any:
    if type(value) in (tuple, list):
        return {"type": type(value).__name__, "items": [encode(item) for item in value]}
    if type(value) is dict:
        return {"type": "dict", "items": [[encode(key), encode(item)] for key, item in value.items()]}
    return None


def _encode_numpy(value: Any) -> Any:
    if isinstance(value, np.dtype):
        return {"type": "dtype", "name": value.name} if _has_lasting_name(value) else None
    if isinstance(value, np.generic):
        # Structured and text scalars have dtypes whose names do not lead back to them.
        item = value.item()
        known = _has_lasting_name(value.dtype) and type(item) in (bool, int, float, complex)
        return {"type": "scalar", "dtype": value.dtype.name, "item": encode(item)} if known else None
    if isinstance(value, type) and _find_scalar_type(value.__module__, value.__name__) is value:
        return {"type": "scalar_type", "module": value.__module__, "name": value.__name__}
    return None


def _has_lasting_name(dtype: np.dtype[Any]) -> bool:
    try:
        return _find_dtype(dtype.name) == dtype
    except TypeError:
        return False


def _find_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def _find_scalar_type(module: str, name: str) -> Any:
    # A stored file may name anything: only these modules are ever imported for it.
    found = getattr(importlib.import_module(module), name, None) if module in _SCALAR_TYPE_MODULES else None
    return found if isinstance(found, type) else None


def _decode_scalar_type(stored: dict[str, Any]) -> Any:
    found = _find_scalar_type(stored["module"], stored["name"])
    return Opaque(f"{stored['module']}.{stored['name']}") if found is None else found


def _decode_items(stored: dict[str, Any]) -> list[Any]:
    return [decode(item) for item in stored["items"]]


_DECODERS: dict[Any, Callable[[dict[str, Any]], Any]] = {
    "float": lambda stored: float(stored["text"]),
    "complex": lambda stored: complex(*map(float, stored["parts"])),
    "bytes": lambda stored: bytes.fromhex(stored["hex"]),
    "tuple": lambda stored: tuple(_decode_items(stored)),
    "list": _decode_items,
    "dict": lambda stored: {decode(key): decode(item) for key, item in stored["items"]},
    "dtype": lambda stored: _find_dtype(stored["name"]),
    "scalar": lambda stored: _find_dtype(stored["dtype"]).type(decode(stored["item"])),
    "scalar_type": _decode_scalar_type,
    "object": lambda stored: Opaque(stored["text"]),
}
