"""What a call can ask for that not every backend can do, by the names that errors and the docs use."""

from __future__ import annotations

from collections.abc import Callable

from .call import Operands, Spec

Asks = Callable[[Spec, Operands, bool], bool]

FEATURES: dict[str, Asks] = {
    "causal": lambda spec, operands, return_lse: spec.causal,
    "window": lambda spec, operands, return_lse: spec.window != (None, None),
    "window past the query": lambda spec, operands, return_lse: spec.window != (None, None) and spec.right != 0,
    "q_offset": lambda spec, operands, return_lse: operands.q_offset is not None,
    "segment_ids": lambda spec, operands, return_lse: operands.q_segments is not None,
    "q_lengths": lambda spec, operands, return_lse: operands.q_lengths is not None,
    "kv_lengths": lambda spec, operands, return_lse: operands.kv_lengths is not None,
    "mask": lambda spec, operands, return_lse: operands.mask is not None,
    "bias": lambda spec, operands, return_lse: operands.bias is not None,
    "array scale": lambda spec, operands, return_lse: operands.scale is not None,
    "softcap": lambda spec, operands, return_lse: spec.softcap is not None,
    "sinks": lambda spec, operands, return_lse: operands.sinks is not None,
    "return_lse": lambda spec, operands, return_lse: return_lse,
    "deterministic": lambda spec, operands, return_lse: spec.deterministic,
    "grouped heads": lambda spec, operands, return_lse: operands.group > 1,
    "Dv other than D": lambda spec, operands, return_lse: operands.v.shape[3] != operands.q.shape[3],
}


def asked(spec: Spec, operands: Operands, return_lse: bool) -> tuple[str, ...]:
    """The features that a call asks for."""
    return tuple(name for name, asks in FEATURES.items() if asks(spec, operands, return_lse))
