"""Looking at a program without running it: which tuned calls are in it, where, how often, and how much work."""

from __future__ import annotations

import functools
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from tune_jax import tune
from tune_jax._survey import Program, survey

X = np.ones((4, 8), np.float32)


def make(function=None, **options):
    return tune(function or (lambda x, *, b: x @ x.T * b), {"b": [1, 2]}, progress=False, **options)


def look(function, *args: Any, **kwargs: Any):
    return list(survey(Program(function, args, kwargs)).values())


def test_nothing_is_tuned_by_looking(count_tunings):
    assert len(look(make(), X)) == 1
    assert count_tunings() == 0


def test_work_is_counted_in_operations():
    function = make(lambda x, w, *, b: x @ w)
    (call,) = look(lambda x: function(x, x.T), X)
    assert call.work == 2 * 4 * 8 * 4


def test_work_is_that_of_the_first_candidate():
    function = make(lambda x, *, b: lax.dot(x, x.T) if b == 1 else jnp.zeros((4, 4)))
    (call,) = look(function, X)
    assert call.work == 2 * 4 * 8 * 4


def test_work_grows_with_how_often_a_call_is_made():
    function = make(lambda x, *, b: lax.dot(x, x.T))
    (call,) = look(lambda x: lax.scan(lambda c, _: (c + function(x), None), jnp.zeros((4, 4)), length=7)[0], X)
    assert (call.work, call.total_work) == (2 * 4 * 8 * 4, 7 * 2 * 4 * 8 * 4)


def test_work_of_a_call_without_operations_is_its_bytes():
    function = make(lambda x, *, b: x.T)
    (call,) = look(function, X)
    assert call.work == 2 * 4 * 8 * 4


def test_work_that_cannot_be_known_is_the_inputs_bytes():
    def collect(x, *, b):
        return lax.psum(x, "i") * b

    program = jax.vmap(jax.grad(lambda x: make(collect)(x).sum()), axis_name="i")
    (call,) = look(program, X)
    assert call.work == 8 * 4
    assert "axis names" in call.note.obstacle


def test_work_of_a_function_of_keys_is_known():
    function = make(lambda key, *, b: key)
    (call,) = look(function, jax.random.key(0))
    assert call.work == 2 * 8


def test_sites_say_file_line_and_function():
    function = make()

    class Layer:
        def __call__(self, x):
            return function(x)

    (call,) = look(Layer(), X)
    line = Layer.__call__.__code__.co_firstlineno + 1
    assert call.sites == {f"{os.path.relpath(__file__)}:{line} in Layer.__call__": 1}


def test_a_site_outside_of_the_folder_has_its_whole_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    function = make()
    (call,) = look(lambda x: function(x), X)
    (site,) = call.sites
    assert site.startswith(f"{__file__}:")


def test_a_call_that_jit_itself_makes_has_the_site_of_what_calls_the_jit():
    inner = jax.jit(make())

    def program(x):
        return inner(x)

    (call,) = look(program, X)
    (site,) = call.sites
    assert site.endswith(f":{program.__code__.co_firstlineno + 1} in program")


def test_a_tuned_function_alone_has_the_site_of_its_definition():
    def product(x, *, b):
        return x @ x.T * b

    for program in (make(product), jax.jit(make(product))):
        (call,) = look(program, X)
        (site,) = call.sites
        assert site.endswith(f":{product.__code__.co_firstlineno} in product")


def test_a_callable_without_source_has_its_name_for_a_site():
    class Scale:
        def __call__(self, x, *, b):
            return x * b

    (call,) = look(jax.jit(make(Scale())), X)
    assert call.sites == {"Scale": 1}


def _made_anew(x, scale):
    return make(lambda y, *, b: y * b + 1)(x) * scale


def _closing_over_a_traced_value(x, scale):
    return make(lambda y, *, b: y * b * scale)(x)


def _inside_another_made_anew(x, scale):
    inner = make(lambda y, *, b: y * b + 2)
    return make(lambda y, *, b: inner(y) * b * scale)(x)


@pytest.mark.parametrize(
    ("layer", "places"),
    [
        (_made_anew, ["_made_anew"]),
        (_closing_over_a_traced_value, ["_closing_over_a_traced_value"]),
        (_inside_another_made_anew, ["<lambda>", "_inside_another_made_anew"]),
    ],
)
def test_functions_made_anew_are_counted_wherever_they_are_made(layer, places):
    def program(x, scale):
        for _ in range(3):
            x = layer(x, scale)
        return layer(lax.scan(lambda c, _: (layer(c, scale), None), x, None, length=5)[0], 2 * scale)

    found = look(program, X, 2.0)
    counts = {site.rpartition(" in ")[2]: count for call in found for site, count in call.sites.items()}
    assert counts == dict.fromkeys(places, 9)


def test_functions_made_anew_have_all_the_places_where_they_are_called():
    def make_scaled(scale):
        return make(lambda y, *, b: y * b * scale)

    def program(x, scale):
        first = make_scaled(scale)(x)
        return first + make_scaled(2 * scale)(x)

    (call,) = look(program, X, 2.0)
    assert list(call.sites.values()) == [1, 1]


def test_a_transposed_call_counts_once():
    function = make(lambda x, *, b: x * b)
    (call,) = look(lambda x: jax.linear_transpose(lambda x: function(x), x)(x), X)
    assert list(call.sites.values()) == [1]


def test_a_call_that_a_trace_runs_counts_once():
    function = make(lambda x, *, b: x * b)

    def program(x):
        with jax.ensure_compile_time_eval():
            return x + function(jnp.ones(3)).sum()

    (call,) = look(program, X)
    assert list(call.sites.values()) == [1]


def test_a_call_in_a_derivative_of_a_derivative_is_found():
    function = make(lambda x, *, b: jnp.sin(x) * b)
    (call,) = look(lambda x: jax.hessian(lambda x: function(x).sum())(x[0]), X)
    assert call.note.avals[0].shape == (8,)


def test_the_name_of_a_program_is_its_functions():
    class Step:
        def __call__(self, x):
            return x

    def plain(x):
        return x

    found = [plain, jax.jit(plain), functools.partial(jax.jit(plain), 1), Step(), Step().__call__]
    assert [Program(function, (), {}).name for function in found] == ["plain", "plain", "plain", "Step", "__call__"]


def test_what_jit_does_not_take_stays_as_it_is():
    found = []

    def program(*values):
        found.extend(values)

    given = ("text", None, np.array(["text"]), jnp.sin, jnp.float32, 2, np.float32(3), True, np.bool_(True))
    look(program, *given)
    traced = [isinstance(value, jax.core.Tracer) for value in found]
    assert traced == [False, False, False, False, False, True, True, True, True]


def test_numbers_stay_numbers_for_a_jit_of_another_library():
    found = []

    class OtherJit:
        def lower(self, *args):
            raise NotImplementedError

        def __call__(self, *values):
            found.extend(values)

    for program in (OtherJit(), functools.partial(OtherJit(), X)):
        look(program, 2, 0.5, X, True)
    numbers = [value for value in found if not isinstance(value, jax.core.Tracer)]
    assert numbers == [2, 0.5, True] * 2
    assert len(found) == 9


@pytest.mark.parametrize("make_program", [lambda f: f, jax.jit], ids=["plain", "jitted"])
def test_a_program_that_returns_what_is_no_array(make_program):
    (call,) = look(make_program(lambda x: {"out": make()(x), "none": None}), X)
    assert list(call.sites.values()) == [1]
