"""Hyperparameter values to JSON and back."""

from __future__ import annotations

import enum
import functools
import json
import math

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tune_jax._errors import ResultsError
from tune_jax._results.codec import Opaque, decode, encode, encode_float


class Mode(enum.IntEnum):
    FAST = 1


def pass_through_json(value):
    return decode(json.loads(json.dumps(encode(value), allow_nan=False)))


PLAIN = [None, True, False, 0, 1, -(2**70), 0.0, 1.0, 0.1, 1e300, "", "64", "None", "é\n", "a" * 1000]
TAGGED = [
    (),
    (1, 2),
    (1, (None, "x")),
    [1, [2]],
    {"a": 1, 2: (3,)},
    1 + 2j,
    b"\x00\xff",
    float("inf"),
    float("-inf"),
]
NUMPY = [
    np.dtype("float32"),
    np.dtype("bool"),
    np.dtype(ml_dtypes.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn),
    np.dtype(ml_dtypes.int4),
    np.float32,
    np.int8,
    np.bool_,
    ml_dtypes.bfloat16,
    jnp.float32,
    jnp.bfloat16,
    jnp.float8_e5m2,
]
SCALARS = [np.float32(0.1), np.int32(-3), np.bool_(True), ml_dtypes.bfloat16(1.5), np.complex64(1 + 2j)]


@pytest.mark.parametrize("value", [*PLAIN, *TAGGED, *NUMPY, *SCALARS], ids=repr)
def test_comes_back_equal(value):
    assert pass_through_json(value) == value


@pytest.mark.parametrize("value", [*PLAIN, *TAGGED, *SCALARS], ids=repr)
def test_comes_back_with_its_type(value):
    assert type(pass_through_json(value)) is type(value)


@pytest.mark.parametrize("value", [np.float32, jnp.float32, jnp.bfloat16, ml_dtypes.bfloat16], ids=repr)
def test_scalar_types_come_back_as_the_same_object(value):
    assert pass_through_json(value) is value


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_json_types_are_stored_as_they_are(value):
    assert encode(value) is value


def test_nan_comes_back():
    assert math.isnan(pass_through_json(float("nan")))


def test_bool_and_int_stay_distinct():
    assert [type(pass_through_json(value)) for value in (True, 1, 1.0)] == [bool, int, float]


def test_tuple_and_list_stay_distinct_inside():
    assert pass_through_json(([1], (2,))) == ([1], (2,))


def test_numpy_nan_scalar_comes_back():
    back = pass_through_json(np.float32("nan"))
    assert type(back) is np.float32
    assert np.isnan(back)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
        lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(st.text(), inner),
        max_leaves=10,
    )
)
def test_any_nest_of_plain_values_comes_back(value):
    assert pass_through_json(value) == value


def helper(x):
    return x


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (helper, "<function helper>"),
        (functools.partial(helper, 2), "functools.partial(<function helper>, 2)"),
        (Mode.FAST, "<Mode.FAST: 1>"),
        (np.dtype([("a", "f4")]), "dtype([('a', '<f4')])"),
        (np.datetime64("2020-01-01"), "np.datetime64('2020-01-01')"),
        (range(3), "range(0, 3)"),
    ],
)
def test_anything_else_comes_back_as_its_repr(value, text):
    assert pass_through_json(value) == Opaque(text)


def test_an_unknown_value_inside_a_tuple_does_not_spoil_the_rest():
    assert pass_through_json((1, helper)) == (1, Opaque("<function helper>"))


def test_a_dtype_whose_name_forgets_its_byte_order_is_not_changed_silently():
    swapped = np.dtype(">f4")
    assert pass_through_json(swapped) == Opaque("dtype('>f4')")


def test_a_class_that_only_sounds_like_a_scalar_type_is_not_stored_as_one():
    impostor = type("float32", (), {"__module__": "numpy"})
    assert isinstance(pass_through_json(impostor), Opaque)


def test_an_opaque_value_keeps_its_text_when_stored_again():
    stored = encode(helper)
    assert encode(decode(stored)) == stored


def test_the_same_function_is_stored_alike_by_every_process():
    assert "0x" not in encode(helper)["text"]


def test_an_opaque_value_prints_as_what_it_stands_for():
    assert repr(Opaque("<function f>")) == "<function f>"


def test_a_stored_name_imports_no_other_module():
    stored = {"type": "scalar_type", "module": "os", "name": "DirEntry"}
    assert decode(stored) == Opaque("os.DirEntry")


def test_a_scalar_type_that_this_version_lacks_is_opaque():
    stored = {"type": "scalar_type", "module": "jax.numpy", "name": "float1"}
    assert decode(stored) == Opaque("jax.numpy.float1")


def test_a_stored_function_of_a_known_module_is_no_scalar_type():
    stored = {"type": "scalar_type", "module": "numpy", "name": "load"}
    assert decode(stored) == Opaque("numpy.load")


@pytest.mark.parametrize("stored", [{"type": "pickle"}, {}, [1, 2], {"type": None}], ids=repr)
def test_an_unknown_form_is_an_error_that_shows_it(stored):
    with pytest.raises(ResultsError, match="no known form"):
        decode(stored)


@pytest.mark.parametrize(("number", "stored"), [(1.5, 1.5), (float("nan"), "nan"), (float("-inf"), "-inf")])
def test_a_float_that_json_lacks_becomes_text(number, stored):
    assert encode_float(number) == stored
