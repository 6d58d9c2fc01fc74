"""`tune` as people call it: the forms it takes, the options it refuses, and how it says so."""

from __future__ import annotations

import functools
import inspect
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax import TunedFunction, TuneError, tune
from tune_jax._errors import ArgumentError, ExampleError, HyperparamsError, HyperparamsTypeError, OptionError

X = np.arange(4, dtype=np.float32)

pytestmark = pytest.mark.usefixtures("quick_tuning")


def mark(x, b):
    """Tell by the output which b was used."""
    return x * b


# The forms of the decorator


def test_tune_takes_a_function_and_a_grid():
    assert isinstance(tune(mark, {"b": 2}), TunedFunction)


def test_tune_is_a_decorator_with_keywords():
    @tune(hyperparams={"b": 2})
    def double(x, b):
        return x * b

    np.testing.assert_array_equal(double(X), 2 * X)


def test_tune_is_a_decorator_without_parentheses():
    @tune
    def double(x):
        return x * 2

    np.testing.assert_array_equal(double(X), 2 * X)
    assert [row.hyperparams for row in double.results.rows] == [{}]


def test_a_partial_of_tune_is_a_decorator():
    tune_b = functools.partial(tune, hyperparams={"b": 2})

    @tune_b
    def double(x, b):
        return x * b

    np.testing.assert_array_equal(double(X), 2 * X)


def test_the_decorator_keeps_its_options():
    decorate = tune(hyperparams={"b": [1, 2, 3]}, where=lambda b: b > 1)
    assert [row.hyperparams["b"] for row in sorted(decorate(mark).tune(X).rows, key=lambda row: row.id)] == [2, 3]


def test_one_decorator_tunes_several_functions():
    decorate = tune(hyperparams={"b": [2]})
    first, second = decorate(mark), decorate(lambda x, b: x - b)
    np.testing.assert_array_equal(first(X), 2 * X)
    np.testing.assert_array_equal(second(X), X - 2)


def test_one_decorator_tunes_several_functions_with_a_grid_from_a_generator():
    decorate = tune(hyperparams={"b": (b for b in (2, 3))})
    assert len(decorate(mark).tune(X).rows) == 2
    assert len(decorate(lambda x, b: x - b).tune(X).rows) == 2


def test_a_tuned_function_looks_like_the_function():
    tuned = tune(mark, {"b": 2})
    assert (tuned.__name__, tuned.__doc__, tuned.__module__) == ("mark", mark.__doc__, mark.__module__)
    assert tuned.__wrapped__ is mark
    assert inspect.signature(tuned) == inspect.signature(mark)


def test_a_partial_is_named_after_its_function():
    assert tune(functools.partial(mark, b=2)).__name__ == "mark"


# What may be tuned


@pytest.mark.parametrize("what", ["mark", {"b": [1]}, 3])
def test_something_else_than_a_function_is_refused_with_the_right_form(what):
    with pytest.raises(
        OptionError, match=r"expected a function. Give the grid as tune\(function, hyperparams=\.\.\.\)"
    ):
        tune(what)


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_a_tuned_function_is_not_tuned_again(wrap):
    tuned = wrap(tune(mark, {"b": [1, 2]}))
    with pytest.raises(OptionError, match=r"mark.* is tuned already; put all of its hyperparameters into one tune"):
        tune(tuned, {"b": [3]})


def test_a_function_that_wraps_a_tuned_one_may_be_tuned():
    inner = tune(mark, {"b": 2})

    @functools.wraps(inner)
    def outer(x, *, c):
        return inner(x) * c

    outer.__signature__ = inspect.Signature.from_callable(lambda x, *, c: None)
    np.testing.assert_array_equal(tune(outer, {"c": 3})(X), 6 * X)


def test_a_callable_without_a_readable_signature_is_tuned():
    class Opaque:
        __signature__ = "unreadable"

        def __call__(self, x, b):
            return x * b

    tuned = tune(Opaque(), {"b": [2, 2]})
    np.testing.assert_array_equal(tuned(X), 2 * X)
    np.testing.assert_array_equal(tuned(X, b=7), 7 * X)
    assert tuned.__name__ == "Opaque"


def test_an_object_with_call_is_tuned():
    class Layer:
        def __init__(self, weight):
            self.weight = weight

        def __call__(self, x, b):
            return x * b + self.weight

    np.testing.assert_array_equal(tune(Layer(1.0), {"b": 2})(X), 2 * X + 1)


# Jitted functions


def test_a_jitted_function_is_tuned_on_parameters_it_traces():
    @jax.jit
    def repeat(x, b):
        return jnp.concatenate([x] * b)[: x.shape[0]]

    tuned = tune(repeat, {"b": [1, 2]})
    np.testing.assert_array_equal(tuned(X), X)
    assert len(tuned.results.failures) == 0


def test_a_jitted_function_keeps_its_own_static_arguments():
    @functools.partial(jax.jit, static_argnames=("b", "power"))
    def raised(x, power, *, b):
        return x**power * len(range(b))

    tuned = tune(raised, {"b": [2]})
    np.testing.assert_array_equal(tuned(X, 3), 2 * X**3)
    np.testing.assert_array_equal(tuned(X, power=2), 2 * X**2)


def test_static_arguments_given_by_number_are_kept():
    @functools.partial(jax.jit, static_argnums=(1, 2))
    def raised(x, power, b):
        return x**power * len(range(b))

    np.testing.assert_array_equal(tune(raised, {"b": [2]})(X, 3), 2 * X**3)


def test_a_jitted_function_that_donates_still_donates_and_spares_the_argument_while_tuning():
    donating = jax.jit(lambda x, b: x * b, donate_argnums=0)
    tuned = tune(donating, {"b": [3, 3.0]})
    x = jnp.asarray(X)
    np.testing.assert_array_equal(tuned(x), 3 * X)
    assert x.is_deleted()
    assert len(tuned.results.failures) == 0


def test_tuning_alone_leaves_a_donated_argument_alive():
    tuned = tune(jax.jit(lambda x, b: x * b, donate_argnums=0), {"b": [1, 3]})
    x = jnp.asarray(X)
    tuned.tune(x)
    np.testing.assert_array_equal(x, X)


def test_donating_the_first_of_many_positional_arguments_spares_the_others():
    tuned = tune(jax.jit(lambda *xs, b: (xs[0] * b, xs[1] * b), donate_argnums=0), {"b": [3]})
    first, second = jnp.asarray(X), jnp.asarray(X)
    tuned(first, second)
    np.testing.assert_array_equal(second, X)


@pytest.mark.parametrize("statics", [(0,), (0, 2)])
def test_a_jitted_method_is_tuned_with_its_instance(statics):
    class Layer:
        repeats = 2

        @functools.partial(jax.jit, static_argnums=statics)
        def apply(self, x, b):
            return jnp.tile(x, self.repeats) + sum(0 for _ in range(b))

    tuned = tune(Layer().apply, {"b": [1, 2]})
    np.testing.assert_array_equal(tuned(X), np.tile(X, 2))
    assert tuned.__name__ == "apply"
    assert len(tuned.results.failures) == 0


def test_a_grid_from_a_generator_for_a_jitted_function_is_read_once():
    tuned = tune(jax.jit(mark), {"b": (b for b in (1, 2))})
    assert len(tuned.tune(X).rows) == 2


def test_a_callable_grid_works_for_a_jitted_function_that_traces_the_hyperparameter():
    @jax.jit
    def repeat(x, b):
        return jnp.concatenate([x] * b)[: x.shape[0]]

    assert len(tune(repeat, lambda x: {"b": [1, 2]}).tune(X).failures) == 0


def test_grids_with_different_names_are_refused_for_a_jitted_function_that_traces_them():
    with pytest.raises(
        HyperparamsError, match="grids in hyperparams have different names, and the jitted function traces b; name them"
    ):
        tune(jax.jit(mark), [{"b": [1]}, {}])


def test_grids_with_different_names_work_for_a_jitted_function_where_they_are_static():
    @functools.partial(jax.jit, static_argnames=("a", "b"))
    def scaled(x, a=1, b=1):
        return x * a * b

    results = tune(scaled, [{"a": [2]}, {"b": [2]}]).tune(X)
    assert {row.id: dict(row.hyperparams) for row in results.rows} == {0: {"a": 2}, 1: {"b": 2}}


def test_grids_with_different_names_work_for_a_plain_function():
    def scaled(x, a=1, b=1):
        return x * a * b

    assert len(tune(scaled, [{"a": [2]}, {"b": [3]}]).tune(X).rows) == 2


# Options that are refused


def test_every_refusal_is_a_tune_error_and_a_builtin_one():
    assert issubclass(HyperparamsError, TuneError)
    assert issubclass(HyperparamsError, ValueError)
    assert issubclass(HyperparamsTypeError, TypeError)
    assert issubclass(OptionError, ValueError)


def test_an_empty_list_is_refused_at_once():
    with pytest.raises(HyperparamsError, match=r"hyperparams\['b'\] is empty"):
        tune(mark, {"b": []})


def test_an_empty_list_from_a_callable_grid_is_refused_at_the_call():
    with pytest.raises(HyperparamsError, match=r"hyperparams\['b'\] is empty"):
        tune(mark, lambda x: {"b": []})(X)


def test_an_unknown_name_is_refused_at_once_with_the_ones_there_are():
    with pytest.raises(
        HyperparamsTypeError, match=r"hyperparams\['block'\] is not a parameter that mark takes .* x, b\."
    ):
        tune(mark, {"block": [1]})


def test_an_unknown_name_from_a_callable_grid_is_refused_at_the_call():
    with pytest.raises(HyperparamsTypeError, match=r"hyperparams\['block'\] is not a parameter that mark takes"):
        tune(mark, lambda x: {"block": [1]})(X)


def test_a_string_for_a_grid_is_refused():
    with pytest.raises(HyperparamsTypeError, match="hyperparams is 'b' of type str; expected a dict such as"):
        tune(mark, "b")


def test_a_string_from_a_callable_grid_is_refused():
    with pytest.raises(HyperparamsTypeError, match="hyperparams is 'b' of type str; expected a dict such as"):
        tune(mark, lambda x: "b")(X)


def test_an_unhashable_choice_is_refused_at_once():
    with pytest.raises(HyperparamsTypeError, match="cannot be hashed; give a hashable value"):
        tune(mark, {"b": [[1]]})


def test_where_that_drops_everything_is_an_error_of_the_call():
    with pytest.raises(HyperparamsError, match="where is false for each of the 2 combinations of b"):
        tune(mark, {"b": [1, 2]}, where=lambda b: b > 2)(X)


def test_where_that_cannot_be_called_is_refused_at_once():
    with pytest.raises(OptionError, match="where is 'b > 1' of type str; expected a function of hyperparameters"):
        tune(mark, {"b": [1, 2]}, where="b > 1")


def test_where_whose_parameters_cannot_be_read_is_refused_at_once():
    with pytest.raises(
        HyperparamsError, match=r"where is <built-in function max>.*; put it into a function that names"
    ):
        tune(mark, {"b": [1, 2]}, where=max)


def test_where_that_raises_is_an_error_of_the_call():
    with pytest.raises(HyperparamsError, match=r"where fails for \{'b': 1\} with KeyError: 7"):
        tune(mark, {"b": [1, 2]}, where=lambda b: {}[7])(X)


def test_a_callable_grid_with_a_name_that_cannot_be_given_by_keyword_is_refused_at_the_call():
    tuned = tune(lambda x, **options: x, lambda x, **options: {"options": [1, 2]})
    with pytest.raises(HyperparamsTypeError, match=r"hyperparams\['options'\] is not a .*, but a variadic keyword one"):
        tuned(X)


@pytest.mark.parametrize("kind", [classmethod, staticmethod])
def test_a_class_or_static_method_inside_of_tune_is_refused_with_the_right_order(kind):
    with pytest.raises(OptionError, match=f"tune got a {kind.__name__}; put @{kind.__name__} outside of @tune"):
        tune(kind(mark), {"b": [1, 2]})


def test_class_and_static_methods_outside_of_tune_work():
    class Scale:
        factor = 3

        @classmethod
        @tune(hyperparams={"b": [2]})
        def by_class(cls, x, b):
            return x * b * cls.factor

        @staticmethod
        @tune(hyperparams={"b": [2]})
        def static(x, b):
            return x * b

    np.testing.assert_array_equal(Scale.by_class(X), X * 6)
    np.testing.assert_array_equal(Scale().static(X), X * 2)


@pytest.mark.parametrize("bad", [0, -1, 2.5])
def test_a_bad_sample_num_is_refused_at_once(bad):
    with pytest.raises(HyperparamsError, match=f"sample_num is {bad}; expected a positive whole number"):
        tune(mark, {"b": [1, 2]}, sample_num=bad)


@pytest.mark.parametrize("bad", [None, "lucky", 1.5, True, np.array([1, 2])])
def test_a_seed_that_is_no_whole_number_is_refused(bad):
    with pytest.raises(OptionError, match=r"seed is .*; expected a whole number"):
        tune(mark, {"b": [1, 2]}, seed=bad)


@pytest.mark.parametrize("bad", [0, -2, 1.5, "4", True, np.array([1, 2])])
def test_a_bad_number_of_workers_is_refused(bad):
    with pytest.raises(OptionError, match=r"max_workers is .*; expected a positive whole number of threads, or None"):
        tune(mark, {"b": [1, 2]}, max_workers=bad)


@pytest.mark.parametrize("bad", ["*gemm", "(", 7, b"gemm"])
def test_a_broken_event_filter_is_refused(bad):
    with pytest.raises(OptionError, match=r"event_filter_regex is .*no regular expression.*put re.escape\(\) around"):
        tune(mark, {"b": [1, 2]}, event_filter_regex=bad)


@pytest.mark.parametrize("bad", [1, 0, "yes", np.True_, []])
def test_progress_that_is_neither_true_nor_false_nor_none_is_refused(bad):
    with pytest.raises(OptionError, match=r"progress is .* of type \w+; expected True, False, or None for bars where"):
        tune(mark, {"b": [1, 2]}, progress=bad)


@pytest.mark.parametrize("bad", [3, True, b"traces", "", ["traces"]])
def test_a_trace_folder_that_is_no_path_is_refused(bad):
    with pytest.raises(OptionError, match=r"keep_trace is .* of type \w+; expected the path of a folder, such as"):
        tune(mark, {"b": [1, 2]}, keep_trace=bad)


@pytest.mark.parametrize("below", ["", "traces", "traces/of/today"])
def test_a_trace_folder_that_is_a_file_or_below_one_is_refused_with_the_file(below, tmp_path):
    file = tmp_path / "notes"
    file.write_text("")
    with pytest.raises(OptionError, match=f"keep_trace is '{file / below}', but {file} is no folder; give a folder"):
        tune(mark, {"b": [1, 2]}, keep_trace=str(file / below))


def test_a_trace_folder_that_is_a_link_to_nothing_is_refused(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "nothing")
    with pytest.raises(OptionError, match="link is no folder"):
        tune(mark, {"b": [1, 2]}, keep_trace=tmp_path / "link")


def test_a_trace_folder_that_may_not_be_made_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "access", lambda path, mode: os.fspath(path) != str(tmp_path))
    with pytest.raises(OptionError, match=f"but {tmp_path} may not be written to; give a folder that can be made"):
        tune(mark, {"b": [1, 2]}, keep_trace=tmp_path / "traces")


@pytest.mark.parametrize("kind", [str, pathlib.Path])
def test_a_trace_folder_is_made_by_the_tuning_and_not_before(kind, tmp_path):
    folder = tmp_path / "deep" / "traces"
    tuned = tune(mark, {"b": [1, 2]}, keep_trace=kind(folder))
    assert list(tmp_path.iterdir()) == []
    tuned(X)
    assert list(folder.iterdir())


def test_the_same_seed_times_the_same_candidates_and_no_more_than_asked():
    def scale(x, a, b):
        return x * (a + b)

    def drawn(seed):
        rows = tune(scale, {"a": [1, 2, 3], "b": [4, 5, 6, 7]}, sample_num=3, seed=seed).tune(X).rows
        return sorted(row.id for row in rows)

    assert drawn(4) == drawn(4)
    assert len(set(drawn(4))) == 3


def test_an_event_filter_that_matches_nothing_says_so():
    tuned = tune(mark, {"b": [1, 2]}, event_filter_regex="no_such_kernel")
    with pytest.raises(ValueError, match="event_filter_regex 'no_such_kernel' matches none of its kernels; loosen it"):
        tuned(X)


@pytest.mark.parametrize("bad", [3, ["x", 3]])
def test_static_argnames_that_are_no_names_are_refused(bad):
    with pytest.raises(OptionError, match=r"static_argnames is .*; expected a parameter's name or several"):
        tune(mark, {"b": [1]}, static_argnames=bad)


def test_static_argnames_that_the_function_lacks_are_refused():
    with pytest.raises(OptionError, match="static_argnames names 'mode', which mark does not take; it takes x, b"):
        tune(mark, {"b": [1]}, static_argnames="mode")


# Examples


def test_an_example_of_another_shape_is_refused_with_both_shapes():
    tuned = tune(mark, {"b": [1, 2]}, example_args=(np.ones(3, np.float32),))
    with pytest.raises(
        ExampleError, match=r"the example for x is float32\[3\], but the call passes float32\[4\]; give an"
    ):
        tuned(X)


def test_an_example_of_another_dtype_is_refused():
    tuned = tune(mark, {"b": [1, 2]}, example_kws={"x": np.ones(4, np.float16)})
    with pytest.raises(ExampleError, match=r"the example for x is float16\[4\], but the call passes float32\[4\]"):
        tuned(X)


def test_an_example_of_another_structure_is_refused():
    tuned = tune(lambda params, b: params["w"] * b, {"b": [1, 2]}, example_args=({"v": X},))
    with pytest.raises(ExampleError, match=r"params\['v'\]"):
        tuned({"w": X})


def test_an_example_for_something_the_call_does_not_pass_is_refused():
    tuned = tune(lambda x, y=0.0, *, b: x * b, {"b": [1, 2]}, example_kws={"y": X})
    with pytest.raises(ExampleError, match="example arguments are given for y, but the call passes x"):
        tuned(X)


def test_an_example_for_something_the_function_does_not_take_is_refused():
    tuned = tune(mark, {"b": [1, 2]}, example_kws={"y": X})
    with pytest.raises(ExampleError, match=r"not arguments that the function takes: mark.* unexpected keyword .*'y'"):
        tuned(X)


def test_a_bare_array_for_example_args_is_refused():
    tuned = tune(mark, {"b": [1, 2]}, example_args=X)
    with pytest.raises(ExampleError, match=r"example_args .*expected a tuple"):
        tuned(X)


def test_a_list_for_example_kws_is_refused():
    tuned = tune(mark, {"b": [1, 2]}, example_kws=[X])
    with pytest.raises(ExampleError, match=r"example_kws .*expected a dict"):
        tuned(X)


def test_examples_that_fit_are_what_is_tuned_on():
    seen = []

    def spy(x, b):
        jax.debug.callback(lambda total: seen.append(float(total)), x.sum())
        return x * b

    tune(spy, {"b": [1, 2]}, example_args=(np.full(4, 2, np.float32),)).tune(X)
    jax.effects_barrier()
    assert set(seen) == {8.0}


# Arguments


def test_an_unknown_argument_is_a_type_error_with_the_functions_name():
    with pytest.raises(TypeError, match=r"mark\(\) got an unexpected keyword argument 'y'"):
        tune(mark, {"b": [1, 2]})(X, y=1)


def test_a_missing_argument_is_a_type_error_that_names_it():
    with pytest.raises(TypeError, match=r"mark\(\) missing required arguments: 'x'"):
        tune(mark, {"b": [1, 2]})()


def test_an_array_for_a_static_argument_is_refused_by_name():
    tuned = tune(lambda x, mode, b: x * b, {"b": [1]}, static_argnames="mode")
    with pytest.raises(ArgumentError, match=r"argument mode is static but came as float32\[4\]; pass a Python value"):
        tuned(X, X)


def test_all_candidates_failing_is_a_value_error_with_each_error_and_its_count():
    def broken(x, b):
        raise RuntimeError("odd" if b % 2 else "even")

    with pytest.raises(ValueError, match=r"^No hyperparameters compiled successfully") as caught:
        tune(broken, {"b": [1, 2, 3]})(X)
    assert "2 of 3 at trace: RuntimeError: odd" in str(caught.value)
    assert "1 of 3 at trace: RuntimeError: even" in str(caught.value)
