"""Whether a traced value hides in a function, an object or a container."""

from __future__ import annotations

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax import tune
from tune_jax._closures import attributes, cell_contents, global_names, holds_tracer


class Holder:
    def __init__(self, value):
        self.value = value

    def read(self):
        return self.value


class Slotted:
    __slots__ = ("unset", "value")

    def __init__(self, value):
        self.value = value


GLOBAL = Holder(None)


def _default(value):
    def function(x=value):
        return x

    return function


def _keyword(value):
    def function(*, x=value):
        return x

    return function


def _attribute(value):
    def function():
        return None

    function.note = value
    return function


def _jitted(value):
    return jax.jit(lambda: value)


PLACES = {
    "itself": lambda value: value,
    "cell": lambda value: lambda: value,
    "nested function": lambda value: (lambda inner: lambda: inner())(lambda: value),
    "default": _default,
    "keyword default": _keyword,
    "function attribute": _attribute,
    "partial": lambda value: functools.partial(print, value),
    "partial keyword": lambda value: functools.partial(print, end=value),
    "object": Holder,
    "slot": Slotted,
    "method": lambda value: Holder(value).read,
    "list in a dict in an object": lambda value: Holder({"a": [value]}),
    "set of functions": lambda value: {lambda: value},
    "jitted": _jitted,
    "tuned": lambda value: tune(lambda x, b: x * value * b, {"b": [1]}),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_tracer_is_found_wherever_it_is_held(place):
    found = []
    jax.jit(lambda w: found.append(holds_tracer([PLACES[place](w)])) or w)(1.0)
    assert found == [True]
    for value in (1.0, np.ones(3), jnp.ones(3), "text", None):
        assert not holds_tracer([PLACES["itself" if place == "set of functions" else place](value)])


def test_a_tracer_in_an_object_of_the_module_is_found():
    def program(w):
        GLOBAL.value = w
        found.append(holds_tracer([lambda: GLOBAL.value]))
        GLOBAL.value = None
        return w

    found = []
    jax.jit(program)(1.0)
    assert found == [True]
    assert not holds_tracer([lambda: GLOBAL.value])


def test_what_refers_to_itself_is_looked_at_once():
    loop = Holder(None)
    loop.value = [loop, {"again": loop}]
    assert not holds_tracer([loop])


def test_a_look_at_very_much_ends():
    assert not holds_tracer([[Holder(Holder(index)) for index in range(100_000)]])


def test_names_of_the_module_are_those_of_inner_functions_too():
    def outer():
        def inner():
            return max(1, 2)

        return len(jnp.ones(inner()))

    assert {"len", "max", "jnp", "ones"} <= set(global_names(outer.__code__))


def test_a_cell_that_has_no_value_yet_is_left_out():
    def function():
        return late, 1

    assert cell_contents(function) == []
    late = 3
    assert cell_contents(function) == [3]


def test_attributes_are_named():
    assert dict(attributes(Holder(3))) == {"value": 3}
    assert dict(attributes(Slotted(3))) == {"value": 3}
    assert dict(attributes(types.SimpleNamespace(a=1, b=2))) == {"a": 1, "b": 2}
    assert [name for name, _ in attributes(jax.jit(lambda x: x))] == ["__wrapped__"]
