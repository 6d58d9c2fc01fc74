"""Arguments -> a call: what is an input, what is part of the program, and when two calls are the same."""

from __future__ import annotations

import dataclasses
import enum
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax import tune
from tune_jax._call import bind_arguments, describe_call, select_leaves, split_fixed, with_hints
from tune_jax._errors import ArgumentError
from tune_jax._leaves import is_concrete, is_dynamic, is_number, make_static

X = np.arange(4, dtype=np.float32)


def call_of(function, *args, hyperparams=("b",), **kwargs):
    tunable = tune(function, {name: [1, 2] for name in hyperparams})._tunable
    own, fixed = split_fixed(tunable, bind_arguments(tunable, args, kwargs), hyperparams)
    return describe_call(tunable, tunable.space, own, fixed)


class Colour(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


@dataclasses.dataclass
class Config:
    scale: float
    name: str = "plain"


@dataclasses.dataclass
class Mutable:
    inner: object


class Opaque:
    __hash__ = None


# By type


@pytest.mark.parametrize(
    "leaf",
    [
        X,
        jnp.zeros(2),
        np.float32(1),
        np.int64(3),
        np.bool_(True),
        1,
        2.5,
        1j,
        jax.ShapeDtypeStruct((2,), "int8"),
        jnp.zeros(2, jnp.bfloat16),
        np.zeros(2, jnp.float8_e4m3fn),
        np.zeros(2, jnp.int4),
    ],
)
def test_arrays_and_numbers_are_inputs(leaf):
    assert is_dynamic(leaf)


def test_prng_keys_are_inputs():
    assert is_dynamic(jax.random.key(0))


@pytest.mark.parametrize(
    "leaf",
    [
        "relu",
        b"x",
        True,
        jnp.float32,
        np.dtype("int8"),
        len,
        Colour.RED,
        Level.LOW,
        Config(1.0),
        functools.partial(max, 1),
        ...,
    ],
)
def test_anything_else_is_part_of_the_program(leaf):
    assert not is_dynamic(leaf)


@pytest.mark.parametrize("leaf", [np.array(["a"]), np.array([None]), np.datetime64("2020")])
def test_numpy_arrays_of_what_jax_cannot_hold_are_no_inputs(leaf):
    assert not is_dynamic(leaf)


@pytest.mark.parametrize(
    ("leaf", "expected"), [(1, True), (1.5, True), (1j, True), (True, False), ("1", False), (X, False)]
)
def test_python_numbers_may_turn_out_to_be_static(leaf, expected):
    assert is_number(leaf) is expected


def test_a_member_of_an_int_enum_is_no_number():
    assert not is_number(Level.LOW)


@pytest.mark.parametrize("number", [np.int64(3), np.float64(1.5), np.float32(1.5)])
def test_numpy_numbers_may_turn_out_to_be_static(number):
    assert is_number(number)


def test_structs_and_tracers_have_no_value():
    assert is_concrete(X)
    assert not is_concrete(jax.ShapeDtypeStruct((2,), "float32"))
    assert jax.jit(lambda x: x * is_concrete(x))(1.0) == 0


# What a call is


def test_inputs_are_named_as_a_user_would_write_them():
    call, _ = call_of(lambda params, x, b: x, {"w": X, "inner": [X, X]}, X)
    assert call.input_names == ("params['inner'][0]", "params['inner'][1]", "params['w']", "x")
    assert call.input_parameters == ("params", "params", "params", "x")


def test_statics_are_left_out_of_the_inputs():
    call, inputs = call_of(lambda x, mode, b: x, X, "relu")
    assert [static.value for _, static in call.statics] == ["relu"]
    assert call.input_names == ("x",)
    assert len(inputs) == 1


def test_statics_nested_in_pytrees_are_found():
    call, inputs = call_of(lambda x, cfg, b: x, X, {"mode": "relu", "scale": 2.0, "layers": (X, None, True)})
    assert [static.value for _, static in call.statics] == [True, "relu"]
    assert call.input_names == ("x", "cfg['layers'][0]", "cfg['scale']")
    assert len(inputs) == 3


def test_arguments_are_put_together_again():
    config = {"mode": "relu", "layers": (X, None)}
    call, inputs = call_of(lambda x, cfg, b: x, X, config)
    joined = call.arguments(inputs)
    assert jax.tree.structure(joined) == jax.tree.structure({"x": X, "cfg": config})
    assert joined["x"] is X
    assert joined["cfg"]["mode"] == "relu"


def test_positional_and_keyword_arguments_make_the_same_call():
    def function(x, y, *, scale, b):
        return x

    assert call_of(function, X, X, scale=1.0)[0].names == call_of(function, y=X, scale=1.0, x=X)[0].names
    assert call_of(function, X, X, scale=1.0)[0].paths == call_of(function, y=X, scale=1.0, x=X)[0].paths


def test_the_order_of_extra_keywords_does_not_matter():
    def function(x, b, **options):
        return x

    first, second = call_of(function, X, u=1.0, v=2.0)[0], call_of(function, X, v=1.0, u=2.0)[0]
    assert (first.tree, first.paths) == (second.tree, second.paths)


@pytest.mark.parametrize("default", ["relu", True, None, b"x", jax.nn.relu, jnp.float32, Colour.RED, ("same", None)])
def test_a_default_that_is_part_of_the_program_is_the_same_call_left_out_or_given(default):
    def function(x, mode=default, b=1):
        return x

    left_out, given = call_of(function, X)[0], call_of(function, X, default)[0]
    assert (left_out.names, left_out.tree, left_out.statics) == (given.names, given.tree, given.statics)


def test_a_default_of_numbers_stays_a_constant():
    call, _ = call_of(lambda x, scale=2.0, b=1: x, X)
    assert call.names == ("x",)


def test_hyperparameters_given_are_fixed_and_no_arguments():
    call, _ = call_of(lambda x, b, mode="relu": x, X, 7)
    assert call.fixed_values == {"b": 7}
    assert call.names == ("x", "mode")


def test_none_may_be_a_fixed_hyperparameter():
    assert call_of(lambda x, b=1: x, X, b=None)[0].fixed_values == {"b": None}


def test_a_hyperparameter_among_extra_keywords_is_fixed():
    call, inputs = call_of(lambda x, **options: x, X, b=7, scale=2.0)
    assert call.fixed_values == {"b": 7}
    assert call.input_names == ("x", "options['scale']")
    assert len(inputs) == 2


def test_declared_static_names_reach_into_extra_keywords():
    tunable = tune(lambda x, **options: x, {"b": [1]}, static_argnames="axis")._tunable
    own, fixed = split_fixed(tunable, bind_arguments(tunable, (X,), {"axis": 0, "scale": 1.0}), ("b",))
    call, _ = describe_call(tunable, tunable.space, own, fixed)
    assert call.input_names == ("x", "options['scale']")


def test_variadic_arguments_are_named_by_place():
    call, _ = call_of(lambda *xs, b: xs, X, X, "mode")
    assert call.input_names == ("xs[0]", "xs[1]")


def test_leaves_are_selected_in_the_order_of_the_call():
    call, _ = call_of(lambda x, y, b: x, X, 2.0)
    assert select_leaves(call, (), {"y": "second", "x": "first", "b": 7}) == ["first", "second"]


def test_hints_do_not_change_what_a_call_is():
    call, inputs = call_of(lambda x, b: x, X)
    hinted = with_hints(call, inputs)
    assert hinted.hints.values[0] is inputs[0]
    assert hinted == call
    assert hash(hinted) == hash(call)


# Wrong arguments


def test_a_missing_argument_is_named():
    with pytest.raises(TypeError, match=r"<lambda>\(\) missing required arguments: 'y'"):
        call_of(lambda x, y, b: x, X)


def test_an_argument_given_twice_is_named():
    with pytest.raises(TypeError, match="multiple values for argument 'x'"):
        call_of(lambda x, b: x, X, x=X)


def test_too_many_arguments_are_refused():
    with pytest.raises(TypeError, match="too many positional arguments"):
        call_of(lambda x, b: x, X, 1, 2)


@pytest.mark.parametrize("value", [X, jnp.asarray(X)])
def test_an_array_for_a_hyperparameter_is_refused_by_name(value):
    with pytest.raises(ArgumentError, match=r"argument b is static but came as float32\[4\]; pass a Python value"):
        call_of(lambda x, b: x, X, b=value)


# When two static values are the same


def test_equal_values_of_different_types_are_told_apart():
    assert len({make_static("b", value).key for value in (1, True, 1.0, np.int64(1))}) == 4


def test_dataclasses_that_cannot_be_hashed_are_compared_by_value():
    assert make_static("cfg", Config(2.0)).key == make_static("cfg", Config(2.0)).key
    assert make_static("cfg", Config(2.0)).key != make_static("cfg", Config(3.0)).key


def test_containers_that_cannot_be_hashed_are_compared_by_value():
    assert make_static("b", {"x": [1, 2]}).key == make_static("b", {"x": [1, 2]}).key
    assert make_static("b", {"x": [1, 2]}).key != make_static("b", {"x": [1, 3]}).key


@pytest.mark.parametrize(("make", "other"), [(lambda: {1, 2}, {1, 2.0}), (lambda: slice(0, 2), slice(0, 2, 1))])
def test_sets_and_slices_are_compared_by_value(make, other):
    assert make_static("b", make()).key == make_static("b", make()).key
    assert make_static("b", make()).key != make_static("b", other).key


def test_partials_are_compared_by_what_they_hold():
    def make(axis):
        return make_static("f", functools.partial(jax.nn.softmax, axis=axis)).key

    assert make(0) == make(0)
    assert make(0) != make(1)


def test_partials_that_hold_arrays_are_compared_by_identity():
    held = functools.partial(jnp.dot, X)
    assert make_static("f", held).key == make_static("f", held).key
    assert make_static("f", held).key != make_static("f", functools.partial(jnp.dot, X)).key


def test_other_objects_that_cannot_be_hashed_are_told_apart_by_identity():
    thing = Opaque()
    assert make_static("cfg", thing).key == make_static("cfg", thing).key
    assert make_static("cfg", thing).key != make_static("cfg", Opaque()).key


@pytest.mark.parametrize("value", [Opaque(), Mutable(Opaque()), {"inner": [Opaque()]}])
def test_a_call_warns_of_an_argument_told_apart_by_identity(value):
    with pytest.warns(
        UserWarning, match="argument b of type Opaque cannot be hashed, so calls are told apart by which"
    ):
        call_of(lambda x, b: x, X, b=value)


def test_a_call_warns_of_each_argument_once():
    tunable = tune(lambda x, b: x, {"b": [1]})._tunable
    with pytest.warns(UserWarning, match="argument b of type Opaque"):
        split_fixed(tunable, {"b": Opaque(), "x": X}, ("b",))
    split_fixed(tunable, {"b": Opaque(), "x": X}, ("b",))
