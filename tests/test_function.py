"""What a tuned function shows of its tunings, and the ways besides a call to use it."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax import Results, TunedFunction, tabulate, tune

X = np.arange(4, dtype=np.float32)
STRUCT = jax.ShapeDtypeStruct((4,), np.float32)

pytestmark = pytest.mark.usefixtures("quick_tuning")


@pytest.fixture
def tuned():
    return tune(lambda x, b: x * b + 0 * b, {"b": [2]})


@pytest.fixture
def two():
    """Two candidates that return the same."""

    def twofold(x, b):
        return x + x if b == 1 else x * 2

    return tune(twofold, {"b": [1, 2]})


# Before and after the first tuning


def test_there_is_nothing_to_show_before_the_first_call(two):
    assert two.results is None
    assert two.results_for(X) is None
    assert two.timing_results == {}
    assert two.optimal_hyperparams == {}
    assert "twofold" in tabulate(two)


def test_a_call_leaves_results(two):
    two(X)
    assert isinstance(two.results, Results)
    assert sorted(row.id for row in two.results.rows) == [0, 1]
    assert two.results.best.hyperparams == two.optimal_hyperparams
    assert next(iter(two.timing_results)) == two.results.best.id


def test_timing_results_hold_seconds_by_candidate(two):
    two(X)
    for result in two.timing_results.values():
        assert 0 < result.t_mean < 1
        assert result.t_std >= 0
        assert set(result.hyperparams) == {"b"}


def test_a_call_that_tunes_nothing_leaves_the_results_alone(two):
    two(X)
    before = two.results
    two(X + 1)
    two(X, b=1)
    assert two.results is before


def test_results_are_of_the_latest_tuning_and_results_for_of_the_calls(two):
    two(X)
    first = two.results
    two(X[:2])
    assert two.results is not first
    assert two.results_for(X) is first
    assert two.results_for(x=X) is first
    assert two.results_for(STRUCT) is first
    assert two.results_for(X[:2]) is two.results


def test_asking_for_results_does_not_tune(two, count_tunings):
    assert two.results_for(X) is None
    assert two.results_for(STRUCT) is None
    assert count_tunings() == 0


def test_results_for_a_call_with_a_hyperparameter_given_are_its_own(two):
    two(X)
    assert two.results_for(X, b=1) is None


def test_the_two_dicts_are_changed_in_place(two):
    timing, optimal = two.timing_results, two.optimal_hyperparams
    two(X)
    assert timing is two.timing_results
    assert optimal is two.optimal_hyperparams
    assert len(timing) == 2
    assert set(optimal) == {"b"}


def test_a_jitted_tuned_function_shows_the_same_dicts(two):
    jitted = jax.jit(two)
    assert jitted.timing_results == {}
    jitted(X)
    assert jitted.timing_results is two.timing_results
    assert jitted.optimal_hyperparams is two.optimal_hyperparams
    assert len(jitted.timing_results) == 2


def test_changing_what_is_shown_does_not_change_what_runs(tuned):
    tuned(X)
    tuned.optimal_hyperparams["b"] = 5
    np.testing.assert_array_equal(tuned(X), 2 * X)
    np.testing.assert_array_equal(jax.jit(tuned)(X), 2 * X)


def test_a_failed_tuning_shows_its_failures_and_leaves_the_last_winner(two):
    def picky(x, b):
        if x.ndim == 2:
            raise ValueError("only vectors")
        return x * b

    tuned = tune(picky, {"b": [1, 2]})
    tuned(X)
    with pytest.raises(ValueError, match="only vectors"):
        tuned(X.reshape(2, 2))
    assert tuned.results.timed == ()
    assert len(tuned.results.failures) == 2
    assert len(tuned.timing_results) == 2


# tune


def test_tune_returns_results_without_running(count_tunings):
    runs = []

    def spy(x, b):
        return jax.pure_callback(lambda x: runs.append(1) or x, x, x) * b

    tuned = tune(spy, {"b": [1, 2]})
    results = tuned.tune(X)
    assert isinstance(results, Results)
    assert tuned.results is results
    before = len(runs)
    assert tuned.tune(X) is results
    assert len(runs) == before
    assert count_tunings() == 1


def test_tune_takes_structs_and_the_call_finds_the_result(two, count_tunings):
    results = two.tune(STRUCT)
    np.testing.assert_array_equal(two(X), 2 * X)
    assert two.results is results
    assert count_tunings() == 1


def test_tune_takes_structs_nested_and_beside_statics(count_tunings):
    tuned = tune(lambda params, mode, b: params["w"] * len(mode) + 0 * b, {"b": [1, 2]})
    tuned.tune({"w": STRUCT}, mode="ab")
    np.testing.assert_array_equal(tuned({"w": X}, "ab"), 2 * X)
    assert count_tunings() == 1


def test_tune_takes_structs_beside_arrays(count_tunings):
    tuned = tune(lambda x, y, b: x * y + 0 * b, {"b": [1, 2]})
    tuned.tune(X, STRUCT)
    tuned(X, X)
    assert count_tunings() == 1


def test_tune_with_a_struct_of_integers_warns_that_they_are_made_up(two):
    with pytest.warns(UserWarning, match="the integer argument x has no value while tuning"):
        two.tune(jax.ShapeDtypeStruct((4,), np.int32))


def test_tune_with_a_hyperparameter_given_times_it(two):
    assert [row.hyperparams for row in two.tune(X, b=7).rows] == [{"b": 7}]


def test_tune_checks_arguments_as_a_call_does(two):
    with pytest.raises(TypeError, match=r"twofold\(\) missing required arguments: 'x'"):
        two.tune()


# Staging


def test_eval_shape_and_trace_do_not_tune(two, count_tunings):
    assert two.eval_shape(X) == STRUCT
    assert two.eval_shape(STRUCT) == STRUCT
    assert two.trace(X).out_info.shape == (4,)
    assert jax.eval_shape(two, X) == STRUCT
    assert jax.jit(two).trace(X).out_info.shape == (4,)
    assert count_tunings() == 0


def test_lower_tunes_and_holds_the_winner(two, count_tunings):
    compiled = two.lower(X).compile()
    assert count_tunings() == 1
    np.testing.assert_array_equal(compiled(X), 2 * X)
    two(X)
    assert count_tunings() == 1


def test_lower_takes_structs(two, count_tunings):
    np.testing.assert_array_equal(two.lower(STRUCT).compile()(X), 2 * X)
    two(X)
    assert count_tunings() == 1


def test_staging_takes_static_arguments(count_tunings):
    tuned = tune(lambda x, mode, b: jnp.tile(x, len(mode)) + 0 * b, {"b": [1, 2]})
    assert tuned.eval_shape(X, "abc").shape == (12,)
    assert tuned.trace(X, mode="ab").out_info.shape == (8,)
    assert count_tunings() == 0
    np.testing.assert_array_equal(tuned.lower(X, "ab").compile()(X), np.tile(X, 2))


def test_staging_takes_numbers_that_are_static():
    tuned = tune(lambda x, n, b: jnp.tile(x, n) + 0 * b, {"b": [1, 2]})
    assert tuned.eval_shape(X, 3).shape == (12,)
    assert tuned.eval_shape(X, 2).shape == (8,)


def test_staging_takes_a_hyperparameter(count_tunings):
    tuned = tune(lambda x, b: jnp.tile(x, b), {"b": [2]})
    assert tuned.eval_shape(X, b=3).shape == (12,)
    np.testing.assert_array_equal(tuned.lower(X, b=3).compile()(X), np.tile(X, 3))
    assert count_tunings() == 0


def test_the_lowered_program_is_named_after_the_function(two):
    assert "module @jit_twofold" in two.lower(X).as_text()


def test_the_lowered_program_is_that_of_the_winner_alone(tuned):
    def winner(x):
        return tuned.__wrapped__(x, 2)

    winner.__name__ = tuned.__name__
    assert tuned.lower(X).as_text() == jax.jit(winner).lower(X).as_text()


# Methods


@dataclasses.dataclass(frozen=True, eq=False)
class Layer:
    """Told apart by identity, and cannot change."""

    weight: float

    @tune(hyperparams={"b": [2]})
    def apply(self, x, *, b):
        """Scale."""
        return x * b + self.weight

    @staticmethod
    @tune(hyperparams={"b": [2]})
    def plain(x, *, b):
        return x * b

    @classmethod
    @tune(hyperparams={"b": [2]})
    def named(cls, x, *, b):
        return x * b * len(cls.__name__)


def test_a_method_is_tuned_with_its_instance():
    np.testing.assert_array_equal(Layer(1.0).apply(X), 2 * X + 1)
    np.testing.assert_array_equal(Layer(5.0).apply(X), 2 * X + 5)


def test_a_method_of_one_instance_is_tuned_once(count_tunings):
    layer = Layer(1.0)
    layer.apply(X), layer.apply(x=X), Layer.apply(layer, X)
    assert count_tunings() == 1


def test_a_method_takes_a_hyperparameter(count_tunings):
    np.testing.assert_array_equal(Layer(1.0).apply(X, b=7), 7 * X + 1)
    assert count_tunings() == 0


def test_a_method_is_reached_through_its_class():
    assert isinstance(Layer.apply, TunedFunction)
    assert Layer(0.0).apply.__doc__ == "Scale."
    assert Layer(0.0).apply.__func__ is Layer.apply


def test_static_and_class_methods_are_tuned():
    np.testing.assert_array_equal(Layer.plain(X), 2 * X)
    np.testing.assert_array_equal(Layer(1.0).plain(X), 2 * X)
    np.testing.assert_array_equal(Layer.named(X), 2 * 5 * X)


def test_a_bound_method_is_tuned_as_a_function():
    class Model:
        def apply(self, x, b):
            return x * b

    np.testing.assert_array_equal(tune(Model().apply, {"b": [3]})(X), 3 * X)


def test_a_method_of_a_pytree_has_its_arrays_as_inputs(count_tunings):
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass
    class Dense:
        weight: jax.Array

        @tune(hyperparams={"b": [1, 2]})
        def apply(self, x, *, b):
            return x * self.weight + 0 * b

    np.testing.assert_array_equal(Dense(jnp.asarray(X)).apply(X), X * X)
    np.testing.assert_array_equal(Dense(jnp.asarray(X + 1)).apply(X), X * (X + 1))
    assert count_tunings() == 1


def test_a_method_of_an_instance_that_cannot_be_hashed_is_keyed_by_value(count_tunings):
    @dataclasses.dataclass
    class Dense:
        weight: float

        @tune(hyperparams={"b": [1, 2]})
        def apply(self, x, *, b):
            return x * self.weight + 0 * b

    dense = Dense(2.0)
    np.testing.assert_array_equal(dense.apply(X), 2 * X)
    np.testing.assert_array_equal(Dense(2.0).apply(X), 2 * X)
    assert count_tunings() == 1
    dense.weight = 3.0
    np.testing.assert_array_equal(dense.apply(X), 3 * X)


def test_a_method_lowered_after_a_change_computes_with_what_it_was_traced_with():
    @dataclasses.dataclass
    class Dense:
        weight: float

        @tune(hyperparams={"b": [1, 2]})
        def apply(self, x, *, b):
            return x * self.weight + 0 * b

    dense = Dense(2.0)
    traced = Dense.apply.trace(dense, X)
    dense.weight = 3.0
    np.testing.assert_array_equal(traced.lower().compile()(X), 2 * X)
    np.testing.assert_array_equal(dense.apply(X), 3 * X)


def test_a_method_of_an_instance_that_may_change_unseen_warns_once_with_the_way_out():
    class Changing:
        def __init__(self, weight):
            self.weight = weight

        @tune(hyperparams={"b": [1, 2]})
        def apply(self, x, *, b):
            return x * self.weight + 0 * b

    first = Changing(2.0)
    with pytest.warns(UserWarning, match=r"self of type Changing has no __hash__.*not noticed.*as a pytree") as caught:
        first.apply(X)
    assert len(caught) == 1
    np.testing.assert_array_equal(Changing(3.0).apply(X), 3 * X)
    np.testing.assert_array_equal(first.apply(X), 2 * X)


def test_an_array_inside_an_instance_that_is_compared_by_value_is_refused_with_the_way_out():
    @dataclasses.dataclass
    class Dense:
        weight: np.ndarray

        @tune(hyperparams={"b": [1, 2]})
        def apply(self, x, *, b):
            return x * self.weight

    with pytest.raises(TypeError, match=r"argument self.weight is static but came as float32\[4\].* as a pytree"):
        Dense(X).apply(X)


def test_a_method_may_be_called_with_self_by_keyword():
    np.testing.assert_array_equal(Layer.apply(self=Layer(1.0), x=X), 2 * X + 1)
    assert Layer.apply.eval_shape(self=Layer(1.0), x=X).shape == (4,)
    assert Layer.apply.results_for(self=Layer(1.0), x=X) is None


def test_a_method_is_jitted():
    layer = Layer(1.0)
    np.testing.assert_array_equal(jax.jit(layer.apply)(X), 2 * X + 1)


# As an object


def test_repr_names_the_function(two):
    assert repr(two) == "<tuned function twofold>"


def test_a_partial_of_a_tuned_function_works(two):
    np.testing.assert_array_equal(functools.partial(two, X)(), 2 * X)


def test_tuned_functions_are_hashable_and_equal_to_themselves(two):
    assert two in {two}
    assert two != tune(two.__wrapped__, {"b": [1, 2]})


def test_a_tuned_function_may_be_an_argument_of_another(two):
    outer = tune(lambda f, x, c: f(x) * c, {"c": [3]})
    np.testing.assert_array_equal(outer(two, X), 6 * X)


def test_two_tuned_functions_of_one_function_know_nothing_of_each_other(count_tunings):
    def scale(x, b):
        return x * b

    first, second = tune(scale, {"b": [2]}), tune(scale, {"b": [3]})
    np.testing.assert_array_equal(first(X), 2 * X)
    np.testing.assert_array_equal(second(X), 3 * X)
    assert first.optimal_hyperparams == {"b": 2}
    assert count_tunings() == 2


class Scaler:
    """A method to tune, of an object that only its identity tells apart."""

    @tune(hyperparams={"b": [1, 2]})
    def scale(self, x, *, b):
        return x * b / b


@pytest.mark.parametrize("name", ["tune", "results_for", "lower", "eval_shape", "trace"])
def test_what_takes_a_calls_arguments_takes_them_without_the_instance(name: str) -> None:
    scaler, x = Scaler(), jnp.ones(3)
    assert scaler.scale(x).shape == (3,)
    assert getattr(scaler.scale, name)(x) is not None


def test_a_bound_method_has_the_signature_of_one() -> None:
    assert list(inspect.signature(Scaler().scale).parameters) == ["x", "b"]


def test_bound_methods_of_one_instance_are_equal() -> None:
    first, second = Scaler(), Scaler()
    assert first.scale == first.scale
    assert hash(first.scale) == hash(first.scale)
    assert first.scale != second.scale


def test_a_bound_method_can_be_jitted() -> None:
    assert jax.jit(Scaler().scale)(jnp.ones(3)).shape == (3,)


def test_copies_of_a_tuned_function_are_the_function() -> None:
    tuned = tune(lambda x, b: x * b, {"b": [1]})
    assert copy.copy(tuned) is tuned
    assert copy.deepcopy({"f": tuned})["f"] is tuned
