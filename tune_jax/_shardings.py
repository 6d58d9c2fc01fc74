"""The shardings a user asks for, and those that arrays have, as one sharding an input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from tune_jax._call import Call
from tune_jax._errors import OptionError


def input_shardings(call: Call) -> list[Any]:
    """The `in_shardings` of the tuned function for each input of `call`; None where it says nothing.

    Raises:
      OptionError: `in_shardings` has more entries than the call has arguments, or does not fit their structure.
    """
    asked = call.tunable.in_shardings
    if asked is None or call.batches:
        return [None] * len(call.dynamic_indices)
    parts = call.tree.children()
    prefixes = _by_parameter(call, asked, len(parts))
    if call.traced is not None:
        prefixes[-1] = None  # what is closed over is no argument
    leaves = [leaf for prefix, part in zip(prefixes, parts, strict=True) for leaf in _spread(prefix, part)]
    return [_resolve(leaves[index]) for index in call.dynamic_indices]


def output_shardings(call: Call) -> Any:
    """The `out_shardings` of the tuned function, a prefix tree of its result."""
    return None if call.batches else call.tunable.out_shardings


def placed_inputs(avals: Sequence[Any], inputs: Sequence[Any]) -> list[jax.ShapeDtypeStruct]:
    """Abstract values with the shardings of those inputs that are committed to their devices."""
    return [
        jax.ShapeDtypeStruct(a.shape, a.dtype, weak_type=a.weak_type, sharding=_committed_sharding(value))
        for a, value in zip(avals, inputs, strict=True)
    ]


def _committed_sharding(value: Any) -> Any:
    return value.sharding if isinstance(value, jax.Array) and value.committed else None


def _by_parameter(call: Call, asked: Any, count: int) -> list[Any]:
    if not isinstance(asked, tuple | list):
        return [asked] * count
    if len(asked) > count:
        raise OptionError(
            f"in_shardings has {len(asked)} entries, but the call passes {count} arguments: {', '.join(call.names)}; "
            "give one entry an argument, or a single sharding for all."
        )
    return [*asked, *[None] * (count - len(asked))]


def _spread(prefix: Any, part: Any) -> list[Any]:
    whole = jax.tree.unflatten(part, range(part.num_leaves))
    try:
        spread = jax.tree.broadcast(prefix, whole, is_leaf=lambda leaf: leaf is None)
    except ValueError as error:
        raise OptionError(f"in_shardings does not fit the arguments: {error}") from error
    return jax.tree.leaves(spread, is_leaf=lambda leaf: leaf is None)


def _resolve(sharding: Any) -> Any:
    if isinstance(sharding, jax.sharding.PartitionSpec):
        return jax.sharding.NamedSharding(jax.sharding.get_mesh(), sharding)
    return sharding
