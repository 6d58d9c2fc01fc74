"""What candidates are timed on: the call's own values, examples, or data made up by shape and dtype."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import tune_jax
from tune_jax import _session
from tune_jax._binding import make_call
from tune_jax._errors import ExampleError
from tune_jax._inputs import collect_inputs, known_values, make_value
from tune_jax._jax import ShapedArray

pytestmark = pytest.mark.usefixtures("quick_tuning")

SIZES = np.array([3, 0, 7, 2], np.int32)
X = np.linspace(-1.0, 1.0, 8, dtype=np.float32)
CAPPED_TYPES = ["float8_e3m4", "float8_e4m3", "float8_e4m3b11fnuz", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2"]
SCALE_TYPES = ["float8_e5m2fnuz", "float8_e8m0fnu", "float4_e2m1fn"]
FLOATS = ["float16", "bfloat16", "float32", "float64", *CAPPED_TYPES, *SCALE_TYPES]
INTEGERS = ["int2", "int4", "int8", "int16", "int32", "int64", "uint2", "uint4", "uint8", "uint16", "uint32", "uint64"]


@pytest.fixture
def x64():
    with jax.enable_x64(True):
        yield


def made(dtype: str, shape: tuple[int, ...] = (1000,), seed: int = 0) -> Any:
    value = make_value(ShapedArray(shape, jnp.dtype(dtype)), seed=seed)
    assert isinstance(value, jax.Array)
    assert (value.shape, value.dtype) == (shape, jnp.dtype(dtype))
    return value


def plain(value: Any) -> np.ndarray[Any, Any]:
    return np.asarray(value).astype(np.float64)


def sums_seen(
    program: Callable[[Any], Any], function: Callable[..., Any], *args: Any, **options: Any
) -> tuple[set[int], Any]:
    """The sums of `sizes` that a tuned function sees in a program, and what the program returns."""
    seen: set[int] = set()

    def watched(*args, factor, **kwargs):
        jax.debug.callback(lambda total: seen.add(int(total)), {**kwargs, "sizes": args[-1]}["sizes"].sum())
        return function(*args, factor=factor)

    candidate = tune_jax.tune(watched, hyperparams={"factor": [1, 2]}, progress=False, **options)
    result = jax.block_until_ready(program(candidate)(*args))
    jax.effects_barrier()
    return seen, result


def grouped(x, sizes, *, factor=1):
    return x.sum() * factor / factor + sizes.sum()


def inputs_of(
    function: Callable[..., Any], args: Sequence[Any], given: Sequence[Any] | None = None, **options: Any
) -> list[Any]:
    """What a call with these arguments would be timed on; `given` are the values that are known, none by default."""
    candidate = tune_jax.tune(function, hyperparams={"factor": [1, 2]}, progress=False, **options)
    call, inputs = make_call(candidate._tunable, args, {})
    avals = [jax.typeof(value) for value in inputs]
    nothing = [None] * len(avals)
    values = known_values(call, avals, nothing if given is None else given)
    return collect_inputs(call, avals, values, nothing)


# Made-up data


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_are_finite_and_spread_like_normal_ones(dtype, x64):
    values = plain(made(dtype))
    assert np.isfinite(values).all()
    assert 0.4 < np.sqrt(np.mean(values**2)) < 1.3
    assert len(np.unique(values)) > 4


@pytest.mark.parametrize("dtype", sorted(set(FLOATS) - {"float8_e8m0fnu"}))
def test_floats_have_both_signs(dtype, x64):
    values = plain(made(dtype))
    assert values.min() < 0 < values.max()


@pytest.mark.parametrize("dtype", INTEGERS)
def test_integers_are_small_and_in_range(dtype, x64):
    values = plain(made(dtype))
    largest = min(7, int(jnp.iinfo(dtype).max))
    assert set(np.unique(values)) == set(range(largest + 1))


@pytest.mark.parametrize("dtype", ["complex64", "complex128"])
def test_complex_numbers_vary_in_both_parts(dtype, x64):
    values = np.asarray(made(dtype))
    assert np.std(values.real) > 0.5
    assert np.std(values.imag) > 0.5


def test_bools_are_of_both_kinds():
    assert 0.4 < np.mean(np.asarray(made("bool"))) < 0.6


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_prng_keys_are_made_with_their_own_generator(impl, shape):
    aval = jax.typeof(jax.random.split(jax.random.key(0, impl=impl), shape))
    keys = make_value(aval, seed=0)
    assert jax.typeof(keys) == aval
    assert np.isfinite(jax.vmap(jax.random.normal)(keys.reshape(-1))).all()


@pytest.mark.parametrize("dtype", ["float32", "int4", "bool", "complex64"])
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (1,)])
def test_scalars_and_arrays_without_elements_are_made(shape, dtype):
    made(dtype, shape)


@pytest.mark.parametrize("dtype", ["float32", "int4", "bfloat16"])
def test_large_arrays_repeat_and_keep_their_spread(dtype):
    values = plain(made(dtype, (3, (1 << 19) + 1)))
    assert np.std(values[2]) > 0.5
    assert not np.array_equal(values[0], values[1])


def test_data_is_the_same_each_time():
    np.testing.assert_array_equal(made("float32"), made("float32"))


def test_arguments_of_the_same_shape_are_independent():
    values = inputs_of(lambda a, b, c, *, factor: a + b + c, [jax.ShapeDtypeStruct((1000,), np.float32)] * 3)
    correlations = np.corrcoef(np.stack(values)) - np.eye(3)
    assert np.abs(correlations).max() < 0.15


def test_a_transfer_guard_has_nothing_to_object_to():
    avals = [jax.typeof(jax.random.key(0)), ShapedArray((3,), jnp.dtype("float32")), ShapedArray((), jnp.dtype("int4"))]
    with jax.transfer_guard("disallow"):
        for aval in avals:
            jax.block_until_ready(make_value(aval, seed=1))


def test_data_is_put_where_its_sharding_says():
    mesh = jax.make_mesh((2,), ("a",), axis_types=(jax.sharding.AxisType.Auto,))
    candidate = tune_jax.tune(lambda x, *, factor: x * factor, hyperparams={"factor": [1, 2]})
    call, inputs = make_call(candidate._tunable, [jnp.ones(8)], {})
    sharding = NamedSharding(mesh, P("a"))
    (value,) = collect_inputs(call, [jax.typeof(value) for value in inputs], [None], [sharding])
    assert value.sharding == sharding


# Kinds of arguments under jit: each runs, and equals the function called directly


def _pytree(tree, *, factor=1):
    return {"sum": tree["a"] * factor / factor, "none": tree["none"]}


KINDS = {
    "PRNG key": (lambda key, *, factor=1: jax.random.normal(key, (3,)) * factor / factor, jax.random.key(0)),
    "other PRNG key": (
        lambda key, *, factor=1: jax.random.normal(key, (3,)) * factor / factor,
        jax.random.key(0, impl="rbg"),
    ),
    "complex": (lambda x, *, factor=1: x * x * factor / factor, np.array([1 + 2j], np.complex64)),
    "bool": (lambda x, *, factor=1: jnp.where(x, factor / factor, 0.0), np.array([True, False])),
    "float8": (
        lambda x, *, factor=1: x.astype(np.float32) * factor / factor,
        jnp.ones(3, jnp.float8_e4m3fn),
    ),
    "int4": (lambda x, *, factor=1: x.astype(np.int32) * factor // factor, jnp.ones((), jnp.int4)),
    "pytree with None": (_pytree, {"a": np.ones(3, np.float32), "none": None}),
    "zero size": (lambda x, *, factor=1: x * factor / factor, np.ones((0, 3), np.float32)),
    "pytree with a number": (lambda c, *, factor=1: c["x"] * c["scale"] * factor / factor, {"x": X, "scale": 2.0}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_argument_is_tuned_under_jit(kind):
    function, value = KINDS[kind]
    candidate = tune_jax.tune(function, hyperparams={"factor": [1, 2]}, progress=False)
    came, expected = jax.jit(candidate)(value), jax.jit(function)(value)
    assert jax.tree.structure(came) == jax.tree.structure(expected)
    jax.tree.map(np.testing.assert_array_equal, came, expected)
    assert not candidate.results.failures


def test_a_static_string_is_tuned_under_jit():
    def function(x, mode, *, factor=1):
        return x * factor / factor if mode == "same" else x * 0

    candidate = tune_jax.tune(function, hyperparams={"factor": [1, 2]}, progress=False)
    np.testing.assert_array_equal(jax.jit(candidate, static_argnums=1)(X, "same"), X)


# What the call knows is used as it is


def test_concrete_arguments_beside_traced_ones_are_used_as_they_are():
    seen, result = sums_seen(lambda f: jax.jit(lambda x: f(x, SIZES)), grouped, X)
    assert seen == {12}
    np.testing.assert_allclose(result, grouped(X, SIZES), rtol=1e-5)


def test_concrete_arguments_inside_an_inner_jit_are_used_as_they_are():
    seen, _ = sums_seen(lambda f: jax.jit(jax.jit(lambda x: f(x, SIZES) * 2)), grouped, X)
    assert seen == {12}


def test_concrete_arguments_of_an_eager_call_are_used_as_they_are():
    seen, _ = sums_seen(lambda f: f, grouped, X, SIZES)
    assert seen == {12}


@pytest.mark.parametrize(
    "program",
    [
        lambda f: lambda x, sizes: jax.vmap(lambda row: f(row, sizes))(x[None]),
        lambda f: lambda x, sizes: jax.grad(lambda x: f(x, sizes))(x),
        lambda f: lambda x, sizes: jax.jit(jax.vmap(lambda row: f(row, sizes)))(x[None]),
    ],
    ids=["vmap", "grad", "jit of vmap"],
)
def test_concrete_arguments_beside_transformed_ones_are_used_as_they_are(program):
    seen, _ = sums_seen(lambda f: lambda x: program(f)(x, SIZES), grouped, X)
    assert seen == {12}


def test_arguments_differentiated_eagerly_are_used_as_they_are():
    seen: set[float] = set()

    def watched(x, *, factor):
        jax.debug.callback(lambda total: seen.add(round(float(total), 3)), x.sum())
        return (x * x).sum() * factor / factor

    jax.grad(tune_jax.tune(watched, hyperparams={"factor": [1, 2]}, progress=False))(np.full(8, 0.5, np.float32))
    jax.effects_barrier()
    assert seen == {4.0}


def test_each_new_program_is_tuned_on_its_own_values_once(count_tunings):
    seen, _ = sums_seen(
        lambda f: lambda x: (jax.jit(lambda x: f(x, SIZES))(x), jax.jit(lambda x: f(x, SIZES + 1))(x)), grouped, X
    )
    # The second program has the same key, so it runs the winner, on its own sizes.
    assert seen == {12, 16}
    assert count_tunings() == 1


def test_an_array_of_the_call_is_timed_where_it_is():
    value = jax.device_put(X, jax.devices()[1])
    (came,) = inputs_of(lambda x, *, factor: x * factor, [value], [value])
    assert came is value


# Integers that nobody knows


def test_a_traced_integer_array_draws_one_warning_that_names_it():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen, _ = sums_seen(jax.jit, grouped, X, SIZES)
    (message,) = [str(one.message) for one in caught]
    assert "the integer argument args[1] has no value while tuning" in message
    assert "example_args" in message
    assert max(seen - {12}) > 0


def test_each_traced_integer_array_is_named():
    def function(x, sizes, tree, *, factor):
        return x * factor + sizes.sum() + tree["starts"].sum()

    candidate = tune_jax.tune(function, hyperparams={"factor": [1, 2]}, progress=False)
    with pytest.warns(UserWarning, match="has no value while tuning") as caught:
        jax.jit(candidate)(X, SIZES, {"starts": SIZES})
    assert sorted(str(one.message).split()[4] for one in caught) == ["sizes", "tree['starts']"]


@pytest.mark.parametrize("value", [np.int32(3), np.array([True]), X], ids=["scalar", "bool", "float"])
def test_other_traced_arguments_draw_no_warning(value):
    candidate = tune_jax.tune(lambda x, *, factor: x * factor, hyperparams={"factor": [1, 2]}, progress=False)
    jax.jit(candidate)(value)


def test_integers_made_up_make_some_work():
    sizes = jax.ShapeDtypeStruct((4,), np.int32)
    with pytest.warns(UserWarning, match="the integer argument sizes"):
        _, values = inputs_of(grouped, [X, sizes])
    assert 0 < int(values.sum()) <= 28


# Examples


def test_examples_win_over_made_up_data():
    seen, result = sums_seen(jax.jit, grouped, X, SIZES, example_args=(X, np.array([8, 8, 8, 8], np.int32)))
    assert seen == {32, 12}
    np.testing.assert_allclose(result, grouped(X, SIZES), rtol=1e-5)


def test_examples_win_over_values_given():
    seen, result = sums_seen(lambda f: f, grouped, X, SIZES, example_args=(X, np.array([8, 8, 8, 8], np.int32)))
    assert seen == {32, 12}
    np.testing.assert_allclose(result, grouped(X, SIZES), rtol=1e-5)


@pytest.mark.parametrize("own", [None, jax.ShapeDtypeStruct(X.shape, X.dtype)], ids=["None", "struct"])
def test_none_and_structs_among_examples_stand_for_the_calls_own(own):
    example = np.array([8, 8, 8, 8], np.int32)
    x, sizes = inputs_of(grouped, [X, SIZES], [X, SIZES], example_args=(own, example))
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(sizes, example)


def test_examples_for_the_last_arguments_may_be_left_out():
    _, sizes = inputs_of(grouped, [X, SIZES], [X, SIZES], example_args=(X + 1,))
    np.testing.assert_array_equal(sizes, SIZES)


def test_a_leaf_of_a_pytree_may_have_an_example():
    def function(tree, *, factor):
        return tree["x"] * factor + tree["sizes"].sum()

    example = {"x": None, "sizes": np.array([8, 8, 8, 8], np.int32)}
    sizes, x = inputs_of(function, [{"x": X, "sizes": SIZES}], [SIZES, X], example_args=(example,))
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(sizes, example["sizes"])


def test_examples_by_keyword_are_used():
    _, sizes = inputs_of(grouped, [X, SIZES], example_kws={"sizes": SIZES * 2})
    np.testing.assert_array_equal(sizes, SIZES * 2)


def test_a_callable_of_the_abstract_arguments_makes_examples():
    def examples(x, sizes):
        assert isinstance(x, jax.ShapeDtypeStruct)
        return None, np.full(sizes.shape, x.shape[0] // sizes.shape[0], sizes.dtype)

    _, sizes = inputs_of(grouped, [X, SIZES], example_args=examples)
    np.testing.assert_array_equal(sizes, [2, 2, 2, 2])


def test_a_callable_for_keywords_gets_static_values_as_they_are():
    def function(x, sizes, mode, *, factor):
        return x * factor + sizes.sum()

    def examples(x, sizes, mode):
        assert mode == "even"
        return {"sizes": np.full(sizes.shape, 2, sizes.dtype)}

    _, sizes = inputs_of(function, [X, SIZES, "even"], example_kws=examples)
    np.testing.assert_array_equal(sizes, [2, 2, 2, 2])


def test_an_example_of_another_shape_is_an_error_with_both():
    with pytest.raises(ExampleError, match=r"the example for sizes is int32\[2\], but the call passes int32\[4\]"):
        inputs_of(grouped, [X, SIZES], example_args=(None, SIZES[:2]))


def test_an_example_of_another_structure_is_an_error_with_both():
    with pytest.raises(ExampleError, match=r"given for tree\['b'\], but the call passes tree\['a'\]"):
        inputs_of(lambda tree, *, factor: tree["a"] * factor, [{"a": X}], example_args=({"b": X},))


def test_examples_of_each_call_must_fit_it():
    candidate = tune_jax.tune(
        functools.partial(grouped), hyperparams={"factor": [1, 2]}, progress=False, example_args=(X, SIZES)
    )
    candidate(X, SIZES)
    with pytest.raises(ValueError, match=r"the example for x is float32\[8\], but the call passes float32\[4\]"):
        candidate(X[:4], SIZES)


def test_examples_of_a_batched_call_have_its_batched_shape():
    program = lambda f: jax.jit(jax.vmap(f))  # noqa: E731
    rows = np.stack([SIZES, SIZES])
    seen, _ = sums_seen(program, grouped, np.stack([X, X]), rows, example_args=(None, rows * 2))
    assert seen == {24, 12}


def batched_inputs_of(transform: Callable[[Any], Any], args: Sequence[Any], **options: Any) -> list[Any]:
    """What `grouped` is timed on where `transform` calls it, as NumPy arrays."""
    seen: list[Any] = []
    candidate = tune_jax.tune(grouped, hyperparams={"factor": [1, 2]}, progress=False, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_session, "collect_inputs", lambda *given: seen.append(collect_inputs(*given)) or seen[-1])
        jax.jit(transform(candidate)).lower(*args)
    return [np.asarray(value) for value in seen[0]]


@pytest.mark.parametrize("axis", [0, 1])
def test_an_example_of_the_functions_own_shape_is_repeated_where_vmap_maps_it(axis):
    example = np.array([8, 1, 2, 3], np.int32)
    sizes = np.stack([SIZES, SIZES, SIZES], axis)
    x, repeated = batched_inputs_of(lambda f: jax.vmap(f, in_axes=(None, axis)), [X, sizes], example_args=(X, example))
    np.testing.assert_array_equal(x, X)
    np.testing.assert_array_equal(repeated, np.stack([example] * 3, axis))


def test_an_example_is_repeated_for_each_of_nested_vmaps():
    example = np.array([8, 1, 2, 3], np.int32)
    _, repeated = batched_inputs_of(
        lambda f: jax.vmap(jax.vmap(f, in_axes=(None, 1)), in_axes=(0, 2)),
        [np.zeros((3, 8), np.float32), np.zeros((4, 2, 3), np.int32)],
        example_args=(None, example),
    )
    np.testing.assert_array_equal(repeated, np.broadcast_to(example[:, None, None], (4, 2, 3)))


def test_an_example_that_is_an_array_of_the_device_is_repeated_under_a_transfer_guard():
    example = jax.device_put(np.array([8, 1, 2, 3], np.int32))
    sizes = jax.device_put(np.stack([SIZES, SIZES]))
    with jax.transfer_guard("disallow"):
        _, repeated = batched_inputs_of(
            lambda f: jax.vmap(f, in_axes=(None, 0)), [jax.device_put(X), sizes], example_args=(None, example)
        )
    np.testing.assert_array_equal(repeated, [[8, 1, 2, 3], [8, 1, 2, 3]])


def test_a_key_for_an_example_is_repeated():
    def draw(key, *, factor):
        return jax.random.normal(key, (2,)) * factor

    candidate = tune_jax.tune(draw, hyperparams={"factor": [1, 2]}, progress=False, example_args=(jax.random.key(7),))
    keys = jax.random.split(jax.random.key(0), 3)
    assert jax.jit(jax.vmap(candidate))(keys).shape == (3, 2)
    assert candidate.results.failures == ()


def test_a_callable_for_examples_gets_the_functions_own_shapes_under_vmap():
    shapes = []

    def examples(x, sizes):
        shapes.append((x.shape, sizes.shape))
        return None, np.full(sizes.shape, 2, np.int32)

    _, sizes = batched_inputs_of(
        jax.vmap, [np.stack([X, X, X]), np.stack([SIZES, SIZES, SIZES])], example_args=examples
    )
    assert set(shapes) == {((8,), (4,))}
    np.testing.assert_array_equal(sizes, np.full((3, 4), 2))


def test_an_example_that_fits_neither_shape_under_vmap_is_an_error_with_all_three():
    expected = (
        r"the example for sizes is int32\[2\], but the call passes int32\[4\], int32\[3,4\] with the axes that vmap"
    )
    with pytest.raises(ExampleError, match=expected):
        batched_inputs_of(jax.vmap, [np.stack([X, X, X]), np.stack([SIZES, SIZES, SIZES])], example_args=(X, SIZES[:2]))
