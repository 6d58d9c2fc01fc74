"""What functions and values that are made anew are compared by."""

from __future__ import annotations

import array
import collections
import contextvars
import dataclasses
import enum
import functools
import gc
import logging
import math
import threading
import types
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from tune_jax._content import (
    NotComparableError,
    Same,
    are_same,
    content_of,
    lasting_content_of,
    may_be_made_anew,
    plain_parts,
)

SCALE = 2.0
ARRAY = jnp.ones(3)
MUTABLE = np.ones(3)


class Config:
    scale = 2.0


class Holder:
    def __init__(self, value):
        self.value = value

    def read(self, y):
        return y * self.value


@dataclasses.dataclass
class Settings:
    scale: float


Pair = collections.namedtuple("Pair", "first second")


def module_function(y):
    return y * SCALE


def close_over(value):
    return lambda y: y * value


def recursive(depth):
    def function(y):
        return y if depth == 0 else function(y)

    return function


def with_default(value):
    def function(y, k=value):
        return y * k

    return function


def with_keyword(value):
    def function(y, *, k=value):
        return y * k

    return function


def with_attribute(value):
    def function(y):
        return y

    function.note = value
    return function


HOLDER = Holder(3)
MAKERS = {
    "closure": close_over,
    "default": with_default,
    "keyword": with_keyword,
    "attribute": with_attribute,
    "recursive": recursive,
    "nested": lambda value: close_over(close_over(value)),
    "partial": lambda value: functools.partial(close_over(value), 1),
    "partial argument": lambda value: functools.partial(module_function, y=value),
    "list": lambda value: close_over([1, value]),
    "dict": lambda value: close_over({"a": value}),
    "tuple": lambda value: close_over(Pair(1, value)),
    "set": lambda value: close_over({1, value}),
    "slice": lambda value: close_over(slice(value)),
    "dataclass": lambda value: close_over(Settings(value)),
    "numpy scalar": lambda value: close_over(np.float32(value)),
    "builtin": lambda value: close_over([value].count),
}


@pytest.mark.parametrize("maker", MAKERS)
def test_functions_made_anew_with_equal_values_are_equal_and_with_others_not(maker):
    make = MAKERS[maker]
    assert content_of(make(5)) == content_of(make(5))
    assert hash(content_of(make(5))) == hash(content_of(make(5)))
    assert content_of(make(5)) != content_of(make(6))


@pytest.mark.parametrize(
    ("one", "other"), [(1, True), (1, 1.0), (0.0, -0.0), ("1", 1), ((1,), [1]), (np.float32(0), np.float32(-0.0))]
)
def test_values_that_are_equal_but_not_the_same_are_told_apart(one, other):
    assert content_of(close_over(one)) != content_of(close_over(other))


def test_functions_of_other_code_are_told_apart():
    assert content_of(lambda y: y * 2) != content_of(lambda y: y * 3)
    assert content_of(lambda y: y * 2) != content_of(lambda y: y + 2)


def test_what_is_read_from_the_module_counts(monkeypatch):
    def make():
        return lambda y: module_function(y) * SCALE

    before = content_of(make())
    assert content_of(make()) == before
    monkeypatch.setitem(globals(), "SCALE", 3.0)
    assert content_of(make()) != before


def test_what_is_read_from_a_class_counts(monkeypatch):
    def make():
        return lambda y: y * Config.scale

    before = content_of(make())
    assert content_of(make()) == before
    monkeypatch.setattr(Config, "scale", 3.0)
    assert content_of(make()) != before


def test_an_object_is_the_same_while_its_attributes_are():
    before = content_of(HOLDER.read)
    assert content_of(HOLDER.read) == before
    assert content_of(Holder(3).read) != before
    HOLDER.value = 4
    assert content_of(HOLDER.read) != before


class Base:
    scale = 2.0

    def read(self, y):
        return y * FACTOR[0]

    def __mul__(self, y):
        return y * FACTOR[0]

    @property
    def factor(self):
        return FACTOR[0]


class Meta(type):
    rate = 2.0


class Inheriting(Base, metaclass=Meta):
    pass


class Kind(enum.Enum):
    ONE = 1


@dataclasses.dataclass(frozen=True)
class Frozen:
    value: int = 1


class Hashed(Holder):
    def __eq__(self, other):
        return True

    def __hash__(self):
        return 1


def read_scale(place):
    return lambda y: y * place.scale


def helper(y, place):
    return y * place.scale


FACTOR = [2.0]
INHERITING = Inheriting()
HASHED = Hashed(1)
NAMES = types.SimpleNamespace(scale=2.0)

# A function made anew, and what changes under it: object, name, value.
CHANGES = {
    "an inherited attribute of a class": (lambda: lambda y: y * Inheriting.scale, Base, "scale"),
    "an attribute that a metaclass has": (lambda: lambda y: y * Inheriting.rate, Meta, "rate"),
    "an object's attribute that its class has": (lambda: lambda y: y * INHERITING.scale, Base, "scale"),
    "a method": (lambda: lambda y: INHERITING.read(y), Base, "read"),
    "an operator": (lambda: lambda y: INHERITING * y, Base, "__mul__"),
    "a new attribute of an enum's class": (lambda: lambda y: Kind.ONE.scale, Kind, "scale"),
    "an attribute of a frozen dataclass's class": (lambda: read_scale(Frozen()), Frozen, "scale"),
    "an attribute of a named tuple's class": (lambda: read_scale(Pair(1, 2)), Pair, "scale"),
    "what a helper is passed and reads": (lambda: lambda y: helper(y, INHERITING), Base, "scale"),
    "an attribute of an object equal to all others": (lambda: lambda y: y * HASHED.value, HASHED, "value"),
    "a name in a namespace": (lambda: lambda y: y * NAMES.scale, NAMES, "scale"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_an_object_gets_from_its_class_counts(name, monkeypatch):
    make, place, attribute = CHANGES[name]
    before = content_of(make())
    assert content_of(make()) == before
    monkeypatch.setattr(place, attribute, 3.0, raising=False)
    assert content_of(make()) != before


@pytest.mark.parametrize(
    "make", [lambda: INHERITING.read, lambda: lambda y: INHERITING * y, lambda: lambda y: y * INHERITING.factor]
)
def test_what_an_objects_methods_operators_and_properties_read_counts(make, monkeypatch):
    before = content_of(make())
    assert content_of(make()) == before
    monkeypatch.setitem(globals(), "FACTOR", [3.0])
    assert content_of(make()) != before


def import_inside(y):
    import tests.conftest

    return y * tests.conftest.HOST_DEVICES


@pytest.mark.parametrize(
    "function",
    [import_inside, lambda y: y * getattr(Config, "scale"), lambda y: y * globals()["SCALE"]],  # noqa: B009
    ids=["import", "getattr", "globals"],
)
def test_a_function_that_makes_names_up_is_not_compared(function):
    with pytest.raises(NotComparableError, match="makes up"):
        content_of(function)


@pytest.mark.parametrize(
    "value",
    [
        P("x"),
        np.sin,
        np.sum,
        jax.devices()[0],
        Frozen(1),
        Kind.ONE,
        Pair(1, 2),
        Pair,
        logging.getLogger("tests"),
        optax.adam(1e-3),
        lax.Precision.HIGH,
        collections.Counter("aab"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_programs_often_hold_is_compared(value):
    assert content_of(close_over(value)) == content_of(close_over(value))


def test_specs_are_compared_by_value():
    assert content_of(close_over(P("x"))) == content_of(close_over(P("x")))
    assert content_of(close_over(P("x"))) != content_of(close_over(P("y")))


def test_jax_arrays_are_told_apart_by_which_they_are():
    assert content_of(close_over(ARRAY)) == content_of(close_over(ARRAY))
    assert content_of(close_over(ARRAY)) != content_of(close_over(ARRAY + 0))


def test_functions_of_jax_are_taken_as_they_are():
    assert content_of(close_over(jax.nn.relu)) == content_of(close_over(jax.nn.relu))
    assert content_of(close_over(jax.nn.relu)) != content_of(close_over(jax.nn.gelu))
    assert content_of(close_over(jnp.float32)) != content_of(close_over(jnp.float16))
    assert content_of(close_over(math.sqrt)) != content_of(close_over(math.exp))


@pytest.mark.parametrize(
    "value",
    [
        MUTABLE,
        iter([1]),
        list(range(1000)),
        collections.deque([1]),
        array.array("d", [1]),
        contextvars.ContextVar("scale", default=1),
        threading.local(),
        weakref.ref(HOLDER),
        np.random.default_rng(0),
        functools.lru_cache(module_function),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_may_change_unseen_is_not_compared(value):
    with pytest.raises(NotComparableError):
        content_of(close_over(value))


def test_a_tracer_is_not_compared():
    def program(w):
        with pytest.raises(NotComparableError):
            content_of(close_over(w))
        return w

    jax.jit(program)(1.0)


def test_a_function_of_no_module_is_not_compared():
    space = {"__name__": "nowhere"}
    exec("def function(y): return y", space)
    with pytest.raises(NotComparableError, match="of no module"):
        content_of(space["function"])


def test_an_empty_cell_is_not_a_value():
    def function():
        return late

    before = content_of(function)
    late = 3
    assert content_of(function) != before


def test_nothing_compared_is_kept_alive():
    holder = Holder(jnp.ones(3))
    alive = weakref.ref(holder), weakref.ref(holder.value)
    kept = content_of(close_over(holder))
    del holder
    gc.collect()
    assert [reference() for reference in alive] == [None, None]
    assert kept == kept


def test_the_same_object_is_equal_only_as_long_as_it_lives():
    holder = Holder(1)
    one, other = Same(holder), Same(holder)
    assert one == other
    assert hash(one) == hash(other)
    del holder
    assert one != other
    assert one == one


# What lasts


def test_lasting_content_has_what_a_function_of_a_module_reads(monkeypatch):
    before = lasting_content_of(module_function)
    assert lasting_content_of(module_function) == before
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    assert lasting_content_of(module_function) != before


@pytest.mark.parametrize(
    "value", [HOLDER.read, HOLDER, ARRAY, jax.custom_jvp(module_function), jax.jit(module_function)]
)
def test_lasting_content_hangs_on_no_array_or_object(value):
    with pytest.raises(NotComparableError):
        lasting_content_of(close_over(value))


# The quick look


def test_only_functions_that_can_be_made_anew_are():
    assert may_be_made_anew(close_over(1))
    assert may_be_made_anew(lambda y: y)
    assert not may_be_made_anew(module_function)
    assert not may_be_made_anew(Holder.read)


@pytest.mark.parametrize("value", [1, "a", None, jnp, jax.nn.relu, jnp.float32])
def test_plain_parts_are_what_a_function_reads(value):
    function = close_over(value)
    assert are_same(plain_parts(function), plain_parts(function))
    assert plain_parts(function) == (function.__code__, value)
    assert not are_same(plain_parts(function), plain_parts(close_over("another")))
    assert not are_same(plain_parts(function), (function.__code__,))


@pytest.mark.parametrize("value", [[1], HOLDER, ARRAY, module_function, types.SimpleNamespace()])
def test_what_may_change_inside_is_not_plain(value):
    assert plain_parts(close_over(value)) is None
    assert plain_parts(with_default(1)) is None
