"""Grids -> candidates: what counts as a choice, what is refused and how it is said, `where`, and the draw."""

from __future__ import annotations

import inspect
import random
import re
import subprocess
import sys
import time

import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax._errors import HyperparamsError, HyperparamsTypeError
from tune_jax._space import check_names, list_candidates, read_sample_num, read_space

MILLION = dict.fromkeys("abcdef", range(10))
GRID_3X4 = {"a": [1, 2, 3], "b": [10, 20, 30, 40]}


def choices_of(value):
    ((_, choices),) = read_space({"b": value}).grids[0]
    return choices


def rows(hyperparams, **options):
    options.setdefault("fixed", {})
    return [dict(c.hyperparams) for c in list_candidates(read_space(hyperparams), **options)]


def ids(hyperparams, **options):
    options.setdefault("fixed", {})
    return [c.id for c in list_candidates(read_space(hyperparams), **options)]


# What is a list of choices, and what is one choice


@pytest.mark.parametrize(
    "value",
    [
        [1, 2, 4],
        (1, 2, 4),
        np.array([1, 2, 4]),
        jnp.array([1, 2, 4]),
        [np.int32(1), np.int64(2), np.array(4)],
        (n for n in (1, 2, 4)),
        iter([1, 2, 4]),
        map(int, "124"),
        {1: "a", 2: "b", 4: "c"}.__iter__(),
    ],
    ids=["list", "tuple", "numpy", "jax", "numpy scalars", "generator", "iterator", "map", "dict iterator"],
)
def test_a_sequence_is_a_list_of_choices_that_are_python_ints(value):
    choices = choices_of(value)
    assert choices == (1, 2, 4)
    assert [type(choice) for choice in choices] == [int, int, int]


def test_a_range_is_a_list_of_choices():
    assert choices_of(range(1, 4)) == (1, 2, 3)


@pytest.mark.parametrize("value", ["ieee", None, 3, 2.5, True, b"x", np.float32, jnp.bfloat16, np.dtype("int8"), len])
def test_anything_else_is_a_single_choice_passed_unchanged(value):
    (choice,) = choices_of(value)
    assert choice is value


def test_an_array_of_no_dimension_is_a_single_choice():
    assert choices_of(np.array(7)) == (7,)


@pytest.mark.parametrize("value", [[np.float32, jnp.bfloat16], [len, None], ["a", "b"], [(1, 2), (3, 4)]])
def test_choices_of_any_hashable_kind_stay_as_they_are(value):
    assert list(choices_of(value)) == value


def test_array_elements_of_a_float_array_become_python_floats():
    assert [type(choice) for choice in choices_of(np.linspace(0, 1, 3, dtype=np.float32))] == [float] * 3


def test_duplicates_are_one_choice():
    assert choices_of([1, 1, 2]) == (1, 2)


def test_equal_values_of_different_types_are_different_choices():
    assert [type(choice) for choice in choices_of([1, True, 1.0])] == [int, bool, float]


def test_values_of_different_types_inside_tuples_are_different_choices():
    assert len(choices_of([(1, 2), (True, 2), (1.0, 2)])) == 3


def test_no_grid_is_one_candidate_without_hyperparameters():
    assert rows(None) == rows({}) == rows([{}]) == [{}]


def test_candidates_come_in_the_order_of_the_product_and_are_numbered():
    assert rows({"a": [1, 2], "b": [5, 6]}) == [
        {"a": 1, "b": 5},
        {"a": 1, "b": 6},
        {"a": 2, "b": 5},
        {"a": 2, "b": 6},
    ]
    assert ids({"a": [1, 2], "b": [5, 6]}) == [0, 1, 2, 3]


def test_a_list_of_grids_is_their_union():
    assert rows([{"a": [1, 2]}, {"b": 3}]) == [{"a": 1}, {"a": 2}, {"b": 3}]


def test_a_combination_in_two_grids_is_one_candidate_with_its_first_id():
    assert rows([{"a": [1, 2]}, {"a": [2, 3]}]) == [{"a": 1}, {"a": 2}, {"a": 3}]
    assert ids([{"a": [1, 2]}, {"a": [2, 3]}]) == [0, 1, 3]


def test_names_are_listed_in_order_of_first_appearance():
    assert read_space([{"b": 1, "a": 1}, {"c": 1, "a": 2}]).names == ("b", "a", "c")


# What is refused


@pytest.mark.parametrize("empty", [[], (), range(0), np.array([]), iter([])])
def test_an_empty_list_is_refused_by_name(empty):
    with pytest.raises(
        HyperparamsError, match=r"hyperparams\['b'\] is empty; give at least one value or drop the name"
    ):
        read_space({"a": 1, "b": empty})


def test_an_empty_list_inside_a_list_of_grids_says_which_grid():
    with pytest.raises(HyperparamsError, match=r"hyperparams\[1\]\['b'\] is empty"):
        read_space([{"b": 1}, {"b": []}])


def test_an_empty_list_of_grids_is_refused():
    with pytest.raises(HyperparamsError, match="hyperparams is an empty list; give at least one dict"):
        read_space([])


@pytest.mark.parametrize("unordered", [{1, 2}, frozenset({1, 2})])
def test_a_set_is_refused_because_its_order_varies(unordered):
    with pytest.raises(HyperparamsTypeError, match=r"hyperparams\['b'\] is a (frozen)?set, .* give a list or a tuple"):
        read_space({"b": unordered})


@pytest.mark.parametrize("value", [[[1, 2], [3]], [{"x": 1}], [np.ones(2)]])
def test_an_unhashable_choice_is_refused_by_name_and_type(value):
    with pytest.raises(
        HyperparamsTypeError, match=r"hyperparams\['b'\].* of type (list|dict|ndarray).*cannot be hashed"
    ):
        read_space({"b": value})


def test_an_unhashable_choice_is_named_by_its_place():
    with pytest.raises(HyperparamsTypeError, match=r"hyperparams\['b'\]\[1\] is \[4\]"):
        read_space({"b": [1, [4], 2]})


def test_an_unhashable_single_choice_is_refused():
    with pytest.raises(HyperparamsTypeError, match=r"hyperparams\['b'\] is \{'x': 1\} of type dict"):
        read_space({"b": {"x": 1}})


def test_an_array_of_two_dimensions_is_refused():
    with pytest.raises(HyperparamsTypeError, match=r"array of shape \(2, 2\); expected one dimension"):
        read_space({"b": np.ones((2, 2))})


@pytest.mark.parametrize("grid", ["block", 7, {1, 2}, np.ones(3)])
def test_something_else_than_a_grid_is_refused_with_an_example(grid):
    with pytest.raises(HyperparamsTypeError, match=r"of type \w+; expected a dict such as \{'block': \[64, 128\]\}"):
        read_space(grid)


def test_something_else_than_a_dict_in_a_list_of_grids_says_where():
    with pytest.raises(HyperparamsTypeError, match=r"hyperparams\[1\] is 'b' of type str; expected a dict"):
        read_space([{"b": 1}, "b"])


def test_a_name_that_is_no_string_is_refused():
    with pytest.raises(HyperparamsTypeError, match=r"hyperparams has the name 3 of type int; expected a str"):
        read_space({3: [1]})


def test_a_name_the_function_does_not_take_is_refused_with_those_it_takes():
    def scale(x, *, block, warps): ...

    with pytest.raises(
        HyperparamsTypeError, match=r"hyperparams\['blok'\] is not a parameter that scale takes .* x, block, warps"
    ):
        check_names(read_space({"blok": [1]}), inspect.signature(scale), "scale")


def test_a_positional_only_parameter_cannot_be_tuned():
    def scale(x, block, /): ...

    with pytest.raises(HyperparamsTypeError, match="it takes none"):
        check_names(read_space({"block": [1]}), inspect.signature(scale), "scale")


@pytest.mark.parametrize(
    ("name", "kind"), [("x", "positional-only"), ("rest", "variadic positional"), ("options", "variadic keyword")]
)
def test_what_cannot_be_given_by_keyword_is_refused_for_a_function_that_takes_any_keyword(name, kind):
    def scale(x, /, y, *rest, block, **options): ...

    message = (
        f"hyperparams['{name}'] is not a parameter that scale takes by keyword, but a {kind} one; it takes y, block, "
        "any other keyword. Rename the hyperparameter, or make it a keyword parameter"
    )
    with pytest.raises(HyperparamsTypeError, match=re.escape(message)):
        check_names(read_space({name: [1]}), inspect.signature(scale), "scale")


@pytest.mark.parametrize("name", ["rest", "x"])
def test_what_cannot_be_given_by_keyword_is_refused_for_a_function_that_takes_no_other_keyword(name):
    def scale(x, /, *rest, block): ...

    with pytest.raises(HyperparamsTypeError, match=rf"hyperparams\['{name}'\] is not .* it takes block\. Rename"):
        check_names(read_space({name: [1]}), inspect.signature(scale), "scale")


def test_a_function_that_takes_any_keyword_takes_any_hyperparameter():
    def scale(x, **options): ...

    check_names(read_space({"block": [1]}), inspect.signature(scale), "scale")


# Fixed values


def test_a_fixed_value_takes_the_place_of_the_choices():
    assert rows({"a": [1, 2], "b": [5, 6]}, fixed={"a": 9}) == [{"a": 9, "b": 5}, {"a": 9, "b": 6}]


def test_candidates_keep_their_id_of_the_full_grid_when_something_is_fixed():
    assert ids({"a": [1, 2], "b": [5, 6]}, fixed={"b": 9}) == [0, 2]


def test_where_is_not_asked_when_everything_is_fixed():
    assert rows({"a": [1, 2]}, fixed={"a": 9}, where=lambda a: a < 5) == [{"a": 9}]


def test_a_fixed_value_may_be_one_that_cannot_be_hashed():
    assert rows([{"a": [1, 2], "b": 5}, {"a": 3, "b": [5, 6]}], fixed={"a": [9]}) == [
        {"a": [9], "b": 5},
        {"a": [9], "b": 6},
    ]


def test_a_combination_that_is_left_of_two_grids_when_something_is_fixed_is_one_candidate():
    assert ids([{"a": [1, 2], "b": [5, 6]}, {"b": [6, 7], "a": 3}], fixed={"a": 9}) == [0, 1, 5]


def test_where_sees_fixed_values():
    assert rows({"a": [1, 2], "b": [5, 6]}, fixed={"a": 6}, where=lambda a, b: a == b) == [{"a": 6, "b": 6}]


# where


def test_where_drops_combinations_and_ids_stay():
    assert ids(GRID_3X4, where=lambda a, b: a * 10 == b) == [0, 5, 10]


def test_where_may_take_some_of_the_names():
    assert len(rows(GRID_3X4, where=lambda b: b > 20)) == 6


def test_where_may_take_all_names_as_keywords():
    assert len(rows(GRID_3X4, where=lambda **h: sum(h.values()) == 11)) == 1


def test_where_may_have_defaults_for_names_that_a_grid_lacks():
    assert rows([{"a": [1, 2]}, {"b": [1, 2]}], where=lambda a=0, b=0: a + b == 2) == [{"a": 2}, {"b": 2}]


def test_where_that_drops_everything_is_an_error_with_the_count_and_an_instance():
    with pytest.raises(
        HyperparamsError, match=r"where is false for each of the 12 combinations of a, b, the first being \{'a': 1, 'b'"
    ):
        rows(GRID_3X4, where=lambda a: a > 3)


def test_where_that_asks_for_an_unknown_name_is_an_error():
    with pytest.raises(HyperparamsError, match="where takes c, but the hyperparameters are a, b"):
        rows(GRID_3X4, where=lambda a, c: True)


def test_where_that_takes_what_no_name_can_be_read_of_is_an_error_that_says_to_wrap_it():
    with pytest.raises(HyperparamsError, match="where is <built-in function max>, whose parameters cannot be read"):
        rows(GRID_3X4, where=max)


def test_where_that_raises_is_an_error_with_the_combination_and_the_cause():
    message = "where fails for {'a': 1, 'b': 10} with ZeroDivisionError: division by zero; have it return a single bool"
    with pytest.raises(HyperparamsError, match=re.escape(message)) as caught:
        rows(GRID_3X4, where=lambda b: b / 0)
    assert isinstance(caught.value.__cause__, ZeroDivisionError)


@pytest.mark.parametrize("make", [np.array, jnp.array])
def test_where_that_returns_several_truths_is_an_error_with_the_combination(make):
    with pytest.raises(HyperparamsError, match=r"where fails for \{'a': 1, 'b': 10\} with ValueError.*a single bool"):
        rows(GRID_3X4, where=lambda a: make([True, False]))


def test_where_may_return_an_array_of_one_element():
    assert len(rows(GRID_3X4, where=lambda a: np.array(a > 2))) == 4


def test_the_names_that_where_takes_are_read_once(monkeypatch):
    read = []
    signature = inspect.signature
    monkeypatch.setattr(inspect, "signature", lambda function: read.append(function) or signature(function))
    assert len(rows([GRID_3X4, {"a": 9}], where=lambda a, b=0: True)) == 13
    assert len(read) == 1


def test_where_is_asked_once_for_a_combination():
    asked = []
    rows([GRID_3X4, {"b": [40, 50], "a": [3, 4]}], where=lambda a, b: asked.append((a, b)) or True)
    assert len(asked) == len(set(asked)) == 15


# The draw


@pytest.mark.parametrize(("asked", "expected"), [(1, 1), (5, 5), (12, 12), (100, 12), (None, 12)])
def test_a_draw_gives_as_many_distinct_candidates_as_there_are(asked, expected):
    drawn = ids(GRID_3X4, sample_num=asked)
    assert len(set(drawn)) == len(drawn) == expected


def test_a_draw_stays_in_the_order_of_the_grid():
    drawn = ids(GRID_3X4, sample_num=5)
    assert drawn == sorted(drawn)


def test_the_same_seed_draws_the_same_and_another_seed_something_else():
    assert ids(GRID_3X4, sample_num=5, seed=3) == ids(GRID_3X4, sample_num=5, seed=3)
    assert len({tuple(ids(GRID_3X4, sample_num=5, seed=seed)) for seed in range(6)}) > 1


def test_the_same_seed_draws_the_same_in_a_fresh_process():
    script = (
        "from tune_jax._space import *\n"
        "space = read_space({'a': ['x', 'y', 'z'], 'b': [10, 20, 30, 40]})\n"
        "print([c.id for c in list_candidates(space, fixed={}, sample_num=5, seed=3)])"
    )
    printed = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True).stdout
    assert printed.strip() == str(ids({"a": ["x", "y", "z"], "b": [10, 20, 30, 40]}, sample_num=5, seed=3))


def test_the_draw_comes_after_where():
    assert ids(GRID_3X4, sample_num=3, where=lambda a, b: a * 10 == b) == [0, 5, 10]


def test_duplicates_are_not_drawn_twice():
    assert len(rows({"a": [1, 1, 2]}, sample_num=3)) == 2


def test_a_draw_comes_from_all_over_the_grid():
    counts = np.bincount([i for seed in range(600) for i in ids(GRID_3X4, sample_num=2, seed=seed)], minlength=12)
    assert counts.sum() == 1200
    assert counts.min() > 60
    assert counts.max() < 140


def test_a_draw_is_as_likely_from_two_grids_that_overlap_as_from_their_union():
    grids = [{"a": [1, 2]}, {"a": [2, 1]}, {"a": [3, 2]}]
    counts = np.bincount([i for seed in range(600) for i in ids(grids, sample_num=1, seed=seed)], minlength=6)
    assert list(counts[[2, 3, 5]]) == [0, 0, 0]
    assert counts[[0, 1, 4]].min() > 150


@pytest.mark.parametrize("seed", range(20))
def test_a_draw_is_part_of_what_the_whole_list_holds(seed):
    some = random.Random(seed)
    values = [1, True, 1.0, 2, "x", (1, 2), (True, 2)]
    grids = [{name: some.sample(values, some.randint(1, 4)) for name in some.sample("abc", 2)} for _ in range(3)]
    whole = dict(zip(ids(grids), map(repr, rows(grids)), strict=True))
    drawn = dict(zip(ids(grids, sample_num=4, seed=seed), map(repr, rows(grids, sample_num=4, seed=seed)), strict=True))
    assert len(set(whole.values())) == len(whole)
    assert len(drawn) == min(4, len(whole))
    assert drawn.items() <= whole.items()


def test_a_draw_that_nothing_holds_for_is_the_error_of_the_whole_list():
    with pytest.raises(
        HyperparamsError, match=r"each of the 12 combinations of a, b, the first being \{'a': 1, 'b': 1"
    ):
        rows([GRID_3X4, {"a": 1, "b": 10}], sample_num=2, where=lambda a: a > 3)


@pytest.mark.parametrize(
    ("grid", "where"),
    [
        (MILLION, None),
        (MILLION, lambda a, b: a > b),
        ([MILLION, {name: range(5, 15) for name in "abcdef"}], lambda a, b: a > b),
        ({name: range(100) for name in "abcdefgh"}, lambda a, b: a > b),
    ],
    ids=["all", "where", "two grids", "more than can be counted"],
)
def test_a_draw_from_a_large_grid_takes_little_time_and_asks_little(grid, where):
    space = read_space(grid)
    asked = []
    counted = where and (lambda a, b: asked.append(a) or where(a, b))
    started = time.perf_counter()
    drawn = list_candidates(space, fixed={}, where=counted, sample_num=4)
    assert time.perf_counter() - started < 1
    assert len({candidate.id for candidate in drawn}) == 4
    assert len(asked) < 200


def test_many_grids_are_told_apart_in_little_time():
    space = read_space([{"a": n % 5000, "b": n % 7} for n in range(10_000)])
    started = time.perf_counter()
    assert len(list_candidates(space, fixed={})) == 10_000
    assert len(list_candidates(space, fixed={"b": 1})) == 5000
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize("good", [5, 5.0, np.int64(5), np.float64(5.0)])
def test_a_whole_number_of_any_type_is_a_sample_num(good):
    assert read_sample_num(good) == 5
    assert type(read_sample_num(good)) is int


@pytest.mark.parametrize("everything", [None, float("inf")])
def test_none_and_infinity_are_a_sample_num_of_all(everything):
    assert read_sample_num(everything) is None


@pytest.mark.parametrize(
    "bad", [0, -1, 2.5, float("nan"), float("-inf"), "5", True, [5], np.array([1, 2]), np.array([5])]
)
def test_anything_else_is_no_sample_num(bad):
    with pytest.raises(
        HyperparamsError, match=r"sample_num is .*; expected a positive whole number of candidates, or No"
    ):
        read_sample_num(bad)
