"""Which arguments make new tunings, which numbers are static, and what a callable grid is given."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax import tune
from tune_jax._binding import make_call

X = np.arange(4, dtype=np.float32)


def statics_of(function, *args, **kwargs):
    call, _ = make_call(tune(function, {"b": [1, 2]})._tunable, args, kwargs)
    return {call.paths[index]: static.value for index, static in call.statics}


# Which numbers are static


def test_a_number_that_is_computed_with_is_an_input():
    assert statics_of(lambda x, n, b: x * n + b, X, 3) == {}


def test_a_number_used_as_a_shape_is_static():
    assert statics_of(lambda x, n, b: jnp.zeros((n,)) + b, X, 3) == {"n": 3}


def test_a_number_that_decides_a_branch_is_static():
    assert statics_of(lambda x, n, b: x * b if n > 2 else x, X, 3) == {"n": 3}


def test_a_number_used_as_a_python_loop_bound_is_static():
    assert statics_of(lambda x, n, b: sum((x for _ in range(n)), 0 * b), X, 3) == {"n": 3}


def test_a_number_used_as_a_dictionary_key_is_static():
    assert statics_of(lambda x, n, b: x * {3: b}[n], X, 3) == {"n": 3}


def test_a_number_that_only_appears_in_a_string_is_static():
    def function(x, n, b):
        with jax.named_scope(f"layer_{n}"):
            return x * b

    assert statics_of(function, X, 3) == {"n": 3}


def test_an_unused_number_is_static():
    assert statics_of(lambda x, n, b: x * b, X, 3) == {"n": 3}


def test_a_float_that_is_used_as_a_float_is_static():
    assert statics_of(lambda x, rate, b: x * b * np.float32(float(rate)), X, 0.5) == {"rate": 0.5}


def test_each_number_is_settled_by_itself():
    def function(x, n, scale, axis, b):
        return jnp.concatenate([x * scale] * n, axis=axis) * b

    assert statics_of(function, X, 2, 0.5, 0) == {"n": 2, "axis": 0}


def test_numbers_nested_in_pytrees_are_settled_by_themselves():
    def function(x, cfg, b):
        return x.reshape(cfg["shape"]) * cfg["scale"] * b

    assert statics_of(function, X, {"shape": (2, 2), "scale": 0.5}) == {"cfg['shape'][0]": 2, "cfg['shape'][1]": 2}


def test_a_numpy_integer_used_as_a_shape_is_static():
    assert statics_of(lambda x, n, b: jnp.zeros((n,)) + b, X, np.int64(3)) == {"n": 3}


def test_whether_a_number_is_static_may_depend_on_the_shapes():
    def function(x, n, b):
        return x.reshape(n, -1) * b if x.ndim == 2 else x * n * b

    tunable = tune(function, {"b": [1, 2]})._tunable
    flat, _ = make_call(tunable, (X, 2), {})
    square, _ = make_call(tunable, (X.reshape(2, 2), 2), {})
    assert flat.statics == ()
    assert [static.value for _, static in square.statics] == [2]


def test_settling_numbers_traces_once_for_the_same_kind_of_call():
    traces = []

    def function(x, n, b):
        traces.append(n)
        return x * n * b

    tunable = tune(function, {"b": [1, 2]})._tunable
    make_call(tunable, (X, 1), {})
    before = len(traces)
    make_call(tunable, (X + 1, 2), {})
    assert len(traces) == before


# Grids that depend on the call


def seen_by_grid(function, *args, **kwargs):
    seen = {}

    def grid(*grid_args, **grid_kwargs):
        seen["args"], seen["kwargs"] = grid_args, grid_kwargs
        return {"b": [1, 2]}

    make_call(tune(function, grid)._tunable, args, kwargs)
    return seen


def test_a_callable_grid_gets_arrays_as_shapes_and_statics_as_they_are():
    seen = seen_by_grid(lambda x, mode, n, b: x * n, X, "relu", 3)
    assert seen["args"] == (jax.ShapeDtypeStruct((4,), np.float32), "relu", 3)


def test_a_callable_grid_gets_pytrees_of_shapes():
    seen = seen_by_grid(lambda x, b: x["w"], x={"w": X, "mode": "relu"})
    assert seen["kwargs"] == {"x": {"w": jax.ShapeDtypeStruct((4,), np.float32), "mode": "relu"}}


def test_a_callable_grid_gets_structs_as_they_are():
    struct = jax.ShapeDtypeStruct((4,), np.float32)
    assert seen_by_grid(lambda x, b: x, struct)["args"] == (struct,)


def test_a_callable_grid_decides_by_shape(count_tunings):
    tuned = tune(lambda x, b: x * b, lambda x: {"b": [1, 2]} if x.ndim == 1 else [{"b": 3}])
    assert len(tuned.tune(X).rows) == 2
    assert len(tuned.tune(X.reshape(2, 2)).rows) == 1
    assert count_tunings() == 2


def test_a_callable_grid_may_yield_its_choices():
    tuned = tune(lambda x, b: x * b, lambda x: {"b": (n for n in range(1, x.size))})
    assert list(make_call(tuned._tunable, (X,), {})[0].space.grids) == [(("b", (1, 2, 3)),)]


@pytest.mark.parametrize("by", ["position", "keyword"])
def test_a_callable_grid_is_not_bothered_with_a_hyperparameter_given_at_call_time(by, quick_tuning):
    tuned = tune(lambda x, b: x * b, lambda x: {"b": [1, 2]})
    out = tuned(X, 7) if by == "position" else tuned(X, b=7)
    np.testing.assert_array_equal(out, 7 * X)


def test_a_callable_grid_gets_defaults_that_the_call_leaves_out():
    def grid(x, mode):
        return {"b": [1, 2] if mode == "fast" else [3]}

    call, _ = make_call(tune(lambda x, mode="fast", b=1: x * b, grid)._tunable, (X,), {})
    assert call.space.grids == ((("b", (1, 2)),),)


def test_a_callable_grid_may_take_only_some_arguments_by_name():
    def grid(*, y):
        return {"b": list(range(1, y.size))}

    call, _ = make_call(tune(lambda x, y, b: x * y * b, grid)._tunable, (X, X), {})
    assert call.space.grids == ((("b", (1, 2, 3)),),)


def test_a_callable_grid_may_name_the_arguments_otherwise():
    call, _ = make_call(tune(lambda x, b: x * b, lambda array: {"b": [array.size]})._tunable, (X,), {})
    assert call.space.grids == ((("b", (4,)),),)


def test_a_callable_grid_with_other_names_for_all_arguments_of_a_keyword_call_fails_by_name():
    tuned = tune(lambda x, b: x * b, lambda array: {"b": [array.size]})
    with pytest.raises(TypeError, match="'x'"):
        make_call(tuned._tunable, (), {"x": X})
