"""What static values are compared by, what is kept of them, and which ones may change without being noticed."""

from __future__ import annotations

import collections
import dataclasses
import enum
import functools
import math
import types
import warnings
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax import tune
from tune_jax._errors import ArgumentError
from tune_jax._leaves import keep_static, make_static

X = np.arange(4, dtype=np.float32)


def key(value):
    return make_static("b", value).key


def kept(value):
    return make_static("b", value).value


def warnings_of(*values):
    tunable = tune(lambda x, b: x, {"b": [1]})._tunable
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for value in values:
            keep_static(tunable, "b", value)
    return [str(warning.message) for warning in caught]


class Pair(NamedTuple):
    a: object
    b: object


class Mode(enum.Enum):
    ON = 1


class Slotted:
    __slots__ = ("scale",)


class Empty:
    pass


class Changing:
    def __init__(self, scale=1.0):
        self.scale = scale

    def __call__(self, x):
        return x * self.scale


class ByValue(Changing):
    def __eq__(self, other):
        return isinstance(other, ByValue) and self.scale == other.scale

    def __hash__(self):
        return hash(self.scale)


class Modular(tuple):
    """Compares by its sum."""

    def __eq__(self, other):
        return sum(self) == sum(other)

    def __hash__(self):
        return sum(self)


@dataclasses.dataclass
class Config:
    scale: object
    name: str = "plain"


@dataclasses.dataclass(frozen=True)
class Frozen:
    sizes: object


@dataclasses.dataclass(slots=True)
class Slim:
    sizes: list


@dataclasses.dataclass(frozen=True, eq=False)
class Fixed:
    scale: float


@dataclasses.dataclass(eq=False)
class Loose:
    scale: float


# When two values are the same


@pytest.mark.parametrize(
    "values",
    [
        [(1,), (True,), (1.0,), (np.int64(1),)],
        [frozenset({1}), frozenset({True}), frozenset({1.0})],
        [{1}, {True}, frozenset({1})],
        [("on", (1,)), ("on", (True,)), ["on", (1,)]],
        [(1, 2), Pair(1, 2), Pair(1, 2.0), [1, 2], {1, 2}],
        [{1: "a"}, {True: "a"}, {1: "b"}],
        [slice(0, 2), slice(0, 2.0), slice(False, 2)],
        [0.0, -0.0, 0, False],
        [1j, complex(-0.0, 1)],
        [math.nan, np.float32("nan"), "nan", "float('nan')"],
        [Config((1,)), Config((True,)), Config([1])],
        [Frozen([1]), Frozen([True])],
    ],
)
def test_values_that_are_not_the_same_have_different_keys(values):
    assert len({key(value) for value in values}) == len(values)


@pytest.mark.parametrize(
    "make",
    [
        lambda: (1, "on", (2.0, None)),
        lambda: frozenset({1, "on", (2.0,)}),
        lambda: Pair([1], {"a": {2}}),
        lambda: float("nan"),
        lambda: complex("nan"),
        lambda: complex(0, float("nan")),
        lambda: np.float32("nan"),
        lambda: np.dtype(jnp.bfloat16).type("nan"),
        lambda: np.complex64("nan"),
        lambda: np.datetime64("NaT", "s"),
        lambda: (1, [float("nan")]),
        lambda: Config(float("nan")),
        lambda: Modular((1, 2)),
        lambda: functools.partial(jnp.full, (2,), fill_value=float("nan")),
    ],
)
def test_values_made_alike_have_one_key(make):
    assert key(make()) == key(make())
    assert hash(key(make())) == hash(key(make()))


def test_a_tuple_with_its_own_equality_is_compared_by_it():
    assert key(Modular((1, 2))) == key(Modular((2, 1)))


def test_partials_are_told_apart_by_function_arguments_and_keywords():
    def apply(*args, **kwargs):
        return args, kwargs

    partials = [
        functools.partial(apply),
        functools.partial(len, func=apply),
        functools.partial(apply, func=len),
        functools.partial(apply, len),
        functools.partial(apply, 1),
        functools.partial(apply, True),
        functools.partial(apply, func=1),
        functools.partial(apply, ("func", 1)),
    ]
    assert len({key(partial) for partial in partials}) == len(partials)


def test_the_order_of_a_partials_keywords_does_not_matter():
    assert key(functools.partial(len, a=1, b=2)) == key(functools.partial(len, b=2, a=1))


@pytest.mark.parametrize("value", [(1, X), {"w": X}, [X], Config(X), Pair(1, jnp.asarray(X))])
def test_an_array_inside_is_refused_by_name(value):
    with pytest.raises(ArgumentError, match=r"argument b.* is static but came as float32\[4\]"):
        make_static("b", value)


# What is kept


def _change_list(value):
    value.append(3)


def _change_dict(value):
    value["c"] = 3


@pytest.mark.parametrize(
    ("value", "change"),
    [
        ([1, 2], _change_list),
        ({"a": 1}, _change_dict),
        (collections.Counter("aab"), _change_dict),
        (collections.OrderedDict(a=1), _change_dict),
        ({1, 2}, lambda value: value.add(3)),
        (([1], 2), lambda value: _change_list(value[0])),
        (Pair([1], 2), lambda value: _change_list(value.a)),
        ({"a": [[1]]}, lambda value: _change_list(value["a"][0])),
        (Config(1.0), lambda value: setattr(value, "scale", 2.0)),
        (Config([1]), lambda value: _change_list(value.scale)),
        (Config(Config(1)), lambda value: setattr(value.scale, "scale", 2)),
        (Frozen([1]), lambda value: _change_list(value.sizes)),
        (Slim([1]), lambda value: _change_list(value.sizes)),
    ],
)
def test_a_later_change_is_another_value_and_leaves_what_was_kept(value, change):
    static = make_static("b", value)
    before = repr(value)
    assert static.value == value
    assert type(static.value) is type(value)
    change(value)
    assert static.key != key(value)
    assert repr(static.value) == before


def test_a_later_change_inside_a_partial_leaves_what_was_kept():
    sizes = [1]
    partial = functools.partial(sum, sizes, start=1)
    static = make_static("f", partial)
    sizes.append(5)
    partial.keywords["start"] = 7
    assert static.value() == 2
    assert static.key != key(partial)


def test_a_partials_type_and_attributes_are_kept():
    class Named(functools.partial):
        pass

    partial = Named(len, "abc")
    partial.label = "count"
    assert type(kept(partial)) is Named
    assert kept(partial).label == "count"
    assert kept(partial)() == 3


def test_the_default_of_a_dict_is_kept():
    assert kept(collections.defaultdict(list, a=1)).default_factory is list


@pytest.mark.parametrize(
    "value", ["on", (1, "on"), Pair(1, (2, 3)), frozenset({1}), slice(0, 1), ByValue(), Changing(), len, Frozen(1)]
)
def test_what_cannot_be_changed_in_place_or_is_told_apart_by_identity_is_kept_itself(value):
    assert kept(value) is value


def test_what_is_told_apart_by_identity_inside_a_copy_is_kept_itself():
    thing = Changing()
    assert kept([thing])[0] is thing
    assert kept(Config(thing)).scale is thing


# What may change without being noticed


@pytest.mark.parametrize(
    "value",
    [
        "on",
        (1, "on"),
        len,
        warnings_of,
        jnp.sin,
        np.sin,
        jax.nn.relu,
        jax.jit(lambda x: x),
        jax.custom_vjp(lambda x: x),
        functools.lru_cache(lambda x: x),
        functools.partial(len, "abc"),
        tune(lambda x, b: x, {"b": [1]}),
        math,
        Changing,
        Mode.ON,
        np.dtype("int8"),
        jnp.float32,
        jax.lax.Precision.HIGH,
        jax.sharding.PartitionSpec("x"),
        Empty(),
        object(),
        ByValue(),
        Config(1.0),
        Frozen(1),
        Fixed(1.0),
        [Empty()],
    ],
    ids=lambda value: type(value).__name__,
)
def test_these_do_not_warn(value):
    assert warnings_of(value) == []


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (Changing(), "Changing has no __hash__ of its own"),
        (Slotted(), "Slotted has no __hash__ of its own"),
        (Loose(1.0), "Loose has no __hash__ of its own"),
        ([Changing()], "Changing has no __hash__ of its own"),
        (Config(Changing()), "Changing has no __hash__ of its own"),
        (frozenset({Changing()}), "Changing has no __hash__ of its own"),
        (functools.partial(Changing(), 1), "Changing has no __hash__ of its own"),
        (types.SimpleNamespace(a=1), "SimpleNamespace cannot be hashed"),
        (bytearray(b"x"), "bytearray cannot be hashed"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_may_change_without_being_noticed_warns_once_with_the_way_out(value, reason):
    (message,) = warnings_of(value, value)
    assert message.startswith(f"argument b of type {reason}, so calls are told apart by which object it is: changing")
    assert message.endswith("or register it as a pytree.")


def test_each_type_warns_once():
    assert len(warnings_of(Changing(), Changing(2.0), Loose(1.0), Changing())) == 2
