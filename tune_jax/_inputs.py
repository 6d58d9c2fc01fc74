"""The inputs that candidates are timed on: the call's own where they are known, examples, else made-up data."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import ml_dtypes
import numpy as np

from tune_jax._call import CLOSED_OVER, Call, bind_arguments
from tune_jax._errors import ExampleError
from tune_jax._jax import key_impl_name
from tune_jax._leaves import describe_aval, is_concrete, is_dynamic

_BLOCK = 1 << 20
_LARGEST_INTEGER = 8


def collect_inputs(call: Call, avals: Sequence[Any], given: Sequence[Any], shardings: Sequence[Any]) -> list[Any]:
    """Return one concrete value for each input of `call`.

    An example wins over the value given by the call, which wins over made-up data; each is put where its sharding
    says, if it has one. Data is made with NumPy and put on the device explicitly, so that a caller's transfer guard
    has nothing to object to.

    Raises:
      ExampleError: the examples do not fit the call.
    """
    examples = read_examples(call, avals)
    values = [value if example is None else example for example, value in zip(examples, given, strict=True)]
    _warn_of_integers(call, avals, values)
    made = [
        make_value(aval, seed=index) if value is None else value
        for index, (aval, value) in enumerate(zip(avals, values, strict=True))
    ]
    return [_place(value, sharding) for value, sharding in zip(made, shardings, strict=True)]


def make_value(aval: Any, *, seed: int) -> Any:
    """Make data of a shape and dtype: normal floats, small integers, random bools and keys.

    Integers are drawn from 0 to 7, or as far as the dtype reaches; arrays of more than a million elements repeat.
    """
    if jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return _make_keys(aval, seed)
    return jax.device_put(_make_array(aval.shape, np.dtype(aval.dtype), seed))


def read_examples(call: Call, avals: Sequence[Any]) -> list[Any]:
    """Return the example for each input of `call`, or None where there is none.

    Raises:
      ExampleError: the examples have another structure, shape or dtype than the call.
    """
    asked = call.tunable
    if asked.example_args is None and asked.example_kws is None:
        return [None] * len(avals)
    arguments = call.arguments([jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in avals])
    abstract = {name: value for name, value in arguments.items() if name != CLOSED_OVER}
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
    for label, aval in zip(call.input_names, avals, strict=True):
        if label in found:
            _check_example(label, found[label], aval)
    return [found.get(label) for label in call.input_names]


def _check_example(label: str, example: Any, aval: Any) -> None:
    came = jax.typeof(example)
    if came.shape != aval.shape or came.dtype != aval.dtype:
        raise ExampleError(
            f"the example for {label} is {describe_aval(came)}, but the call passes {describe_aval(aval)}; give an "
            "example of that shape and dtype, or a callable of the abstract arguments that makes one."
        )


def _warn_of_integers(call: Call, avals: Sequence[Any], values: Sequence[Any]) -> None:
    made_up = [
        label
        for label, aval, value in zip(call.input_names, avals, values, strict=True)
        if value is None and aval.shape and jax.dtypes.issubdtype(aval.dtype, np.integer)
    ]
    for label in made_up:
        warnings.warn(
            f"{call.tunable.name}: the integer argument {label} has no value while tuning, so random integers from 0 "
            f"to {_LARGEST_INTEGER - 1} stand in for it. If it says how much work there is (group sizes, lengths, "
            "indices), give real ones with example_args or example_kws.",
            stacklevel=2,
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
