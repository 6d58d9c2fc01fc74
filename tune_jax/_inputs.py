"""The inputs that candidates are timed on: the call's own where they are known, examples, else made-up data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from tune_jax._call import CLOSED_OVER, Batch, Call, bind_arguments
from tune_jax._errors import ExampleError
from tune_jax._jax import key_impl_name
from tune_jax._leaves import describe_aval, is_concrete, is_dynamic
from tune_jax._warn import warn_user

_BLOCK = 1 << 20
_LARGEST_INTEGER = 8


def known_values(call: Call, avals: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """Return the value of each input of `call`, or None where data must be made up; an example wins over a given value.

    Raises:
      ExampleError: the examples do not fit the call.
    """
    examples = read_examples(call, avals)
    return [value if example is None else example for example, value in zip(examples, given, strict=True)]


def values_in_key(call: Call, avals: Sequence[Any], given: Sequence[Any]) -> list[Any]:
    """The values whose placement is part of the call's key: all that are known but those that a callable makes.

    What it makes for a call is up to the function and the call, which are in the key. Nor are examples that do not fit:
    it is the tuning that says so.
    """
    asked = call.tunable
    if callable(asked.example_args) or callable(asked.example_kws):
        return list(given)
    try:
        return known_values(call, avals, given)
    except ExampleError:
        return list(given)


def collect_inputs(call: Call, avals: Sequence[Any], values: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Return an array for each input of `call`, where its sharding says if it has one; made up for None and structs.

    Data is made with NumPy and put on the device explicitly, so that a caller's transfer guard has nothing to object
    to; it is put right where it belongs, so that no other device has to hold it.
    """
    values = [None if isinstance(value, jax.ShapeDtypeStruct) else value for value in values]
    _warn_of_integers(call, avals, values)
    places = enumerate(zip(avals, values, shardings, strict=True))
    # A caller's transfer guard is for the caller's own transfers, even one that objects to explicit ones.
    with jax.transfer_guard("allow"):
        return [
            make_value(aval, seed=index, sharding=sharding) if value is None else _place(value, sharding)
            for index, (aval, value, sharding) in places
        ]


def make_value(aval: Any, *, seed: int, sharding: Any = None) -> Any:
    """Make data of a shape and dtype: normal floats, small integers, random bools and keys.

    Integers are drawn from 0 to 7, or as far as the dtype reaches; arrays of more than a million elements repeat.
    """
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return _place(_make_keys(aval, seed), sharding)
    return jax.device_put(_make_array(aval.shape, np.dtype(aval.dtype), seed), sharding)


def read_examples(call: Call, avals: Sequence[Any]) -> list[Any]:
    """Return the example for each input of `call`, or None where there is none.

    Examples are for the function itself: under `vmap` each is repeated along the axes that are mapped, unless it has
    them already.

    Raises:
      ExampleError: the examples have another structure, shape or dtype than the call.
    """
    asked = call.tunable
    if asked.example_args is None and asked.example_kws is None:
        return [None] * len(avals)
    shapes = [_own_shape(call.batches, index, aval.shape) for index, aval in enumerate(avals)]
    structs = [jax.ShapeDtypeStruct(shape, aval.dtype) for shape, aval in zip(shapes, avals, strict=True)]
    abstract = {name: value for name, value in call.arguments(structs).items() if name != CLOSED_OVER}
    args = _resolve(asked.example_args, abstract, ())
    kwargs = _resolve(asked.example_kws, abstract, {})
    examples = _bind_examples(call, args, kwargs)
    unknown = [name for name in examples if name not in call.names]
    if unknown:
        raise ExampleError(
            f"example arguments are given for {', '.join(unknown)}, but the call passes {', '.join(call.names)}; "
            "give examples for parameters that the call passes."
        )
    return _match_examples(call, avals, examples)


def _place(value: Any, sharding: Any) -> Any:
    if sharding is not None:
        return jax.device_put(value, sharding)
    return value if isinstance(value, jax.Array) else jax.device_put(value)


def _resolve(examples: Any, abstract: dict[str, Any], default: Any) -> Any:
    if examples is None:
        return default
    return examples(**abstract) if callable(examples) else examples


def _bind_examples(call: Call, args: Any, kwargs: Any) -> dict[str, Any]:
    if not isinstance(args, tuple | list):
        raise ExampleError(f"example_args is of type {type(args).__name__}; expected a tuple of positional arguments.")
    if not isinstance(kwargs, Mapping):
        raise ExampleError(f"example_kws is of type {type(kwargs).__name__}; expected a dict of keyword arguments.")
    try:
        return bind_arguments(call.tunable, args, kwargs)
    except TypeError as error:
        raise ExampleError(
            f"example_args and example_kws are not arguments that the function takes: {error}; give them as in a call."
        ) from None


def _match_examples(call: Call, avals: Sequence[Any], examples: dict[str, Any]) -> list[Any]:
    found: dict[str, Any] = {}
    for name, value in examples.items():
        for path, leaf in jax.tree_util.tree_leaves_with_path(value):
            if is_dynamic(leaf) and is_concrete(leaf):
                found[name + jax.tree_util.keystr(path)] = leaf
    strange = [label for label in found if label not in call.paths]
    if strange:
        raise ExampleError(
            f"example arguments are given for {', '.join(strange)}, but the call passes {', '.join(call.paths)}; give "
            "examples of the call's structure."
        )
    for index, (label, aval) in enumerate(zip(call.input_names, avals, strict=True)):
        if label in found:
            found[label] = _fit_example(label, found[label], aval, call.batches, index)
    return [found.get(label) for label in call.input_names]


def _fit_example(label: str, example: Any, aval: Any, batches: Sequence[Batch], index: int) -> Any:
    """The example with the axes of the vmaps around the call."""
    came, own_shape = jax.typeof(example), _own_shape(batches, index, aval.shape)
    if came.shape not in (own_shape, aval.shape) or came.dtype != aval.dtype:
        own = jax.ShapeDtypeStruct(own_shape, aval.dtype)
        under_vmap = "" if own_shape == aval.shape else f", {describe_aval(aval)} with the axes that vmap adds"
        raise ExampleError(
            f"the example for {label} is {describe_aval(came)}, but the call passes {describe_aval(own)}{under_vmap}; "
            "give an example of that shape and dtype, or a callable of the abstract arguments that makes one."
        )
    return example if came.shape == aval.shape else _repeat(example, batches, index, aval.dtype)


def _own_shape(batches: Sequence[Batch], index: int, shape: Sequence[int]) -> tuple[int, ...]:
    """An input's shape as the function sees it, without the axes that vmaps have added."""
    own = list(shape)
    for batch in reversed(batches):
        dim = batch.dims[index]
        if dim is not None:
            del own[dim]
    return tuple(own)


def _repeat(example: Any, batches: Sequence[Batch], index: int, dtype: Any) -> Any:
    # In NumPy as far as it is NumPy's: a caller's transfer guard has nothing to object to.
    numpy: Any = jax.numpy if isinstance(example, jax.Array) else np
    value = example if isinstance(example, jax.Array) else np.asarray(example, dtype)
    for batch in batches:
        dim = batch.dims[index]
        if dim is not None:
            shape = (*value.shape[:dim], batch.size, *value.shape[dim:])
            value = numpy.broadcast_to(numpy.expand_dims(value, dim), shape)
    return value


def _warn_of_integers(call: Call, avals: Sequence[Any], values: Sequence[Any]) -> None:
    made_up = [
        label
        for label, aval, value in zip(call.input_names, avals, values, strict=True)
        if value is None and aval.shape and jax.dtypes.issubdtype(aval.dtype, np.integer)
    ]
    for label in made_up:
        warn_user(
            f"{call.tunable.name}: the integer argument {label} has no value while tuning, so random integers from 0 "
            f"to {_LARGEST_INTEGER - 1} stand in for it. If it says how much work there is (group sizes, lengths, "
            "indices), give real ones with example_args or example_kws."
        )


def _make_keys(aval: Any, seed: int) -> Any:
    bits = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    data = np.random.default_rng(seed).integers(0, 1 << 32, bits.shape, dtype=np.uint32)
    return jax.random.wrap_key_data(jax.device_put(data), impl=key_impl_name(aval.dtype))


def _make_array(shape: tuple[int, ...], dtype: np.dtype[Any], seed: int) -> np.ndarray[Any, Any]:
    size = math.prod(shape)
    block = _make_block(min(size, _BLOCK), dtype, np.random.default_rng(seed))
    return np.resize(block, shape) if size > _BLOCK else block.reshape(shape)


def _make_block(size: int, dtype: np.dtype[Any], rng: np.random.Generator) -> np.ndarray[Any, Any]:
    if dtype == np.bool_:
        return rng.integers(0, 2, size).astype(dtype)
    if jax.dtypes.issubdtype(dtype, np.integer):
        most = int(ml_dtypes.iinfo(dtype).max)  # type: ignore[no-untyped-call]
        largest = min(_LARGEST_INTEGER - 1, most)
        return rng.integers(0, largest + 1, size).astype(dtype)
    if jax.dtypes.issubdtype(dtype, np.complexfloating):
        return (rng.standard_normal(size) + 1j * rng.standard_normal(size)).astype(dtype)
    values = rng.standard_normal(size, dtype=np.float32)
    # The one float kind without a sign, for scales, turns negative numbers into NaN.
    unsigned = float(ml_dtypes.finfo(dtype).min) > 0  # type: ignore[no-untyped-call]
    return (np.abs(values) if unsigned else values).astype(dtype)
