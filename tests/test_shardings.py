"""`in_shardings` and `out_shardings`: one sharding an input, and what they do to a call."""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.layout import Format, Layout

from tune_jax import CONFIG, tune
from tune_jax._binding import make_call
from tune_jax._build import programs, threads
from tune_jax._call import Batch, with_batch
from tune_jax._errors import OptionError
from tune_jax._shardings import (
    committed_devices,
    input_shardings,
    layout_options,
    output_shardings,
    placed_inputs,
    spanning_arguments,
)

X = np.arange(8, dtype=np.float32)

pytestmark = pytest.mark.usefixtures("quick_tuning")


@pytest.fixture
def mesh():
    return jax.make_mesh((2,), ("data",), devices=jax.devices()[:2])


@pytest.fixture
def split(mesh):
    return jax.NamedSharding(mesh, jax.P("data"))


@pytest.fixture
def whole(mesh):
    return jax.NamedSharding(mesh, jax.P())


def call_of(function, *args, in_shardings=None, out_shardings=None, **kwargs):
    tuned = tune(function, {"b": [1, 2]}, in_shardings=in_shardings, out_shardings=out_shardings)
    return make_call(tuned._tunable, args, kwargs)[0]


def test_no_shardings_say_nothing():
    assert input_shardings(call_of(lambda x, y, b: x, X, X)) == [None, None]


def test_a_single_sharding_holds_for_all_inputs(split):
    call = call_of(lambda x, y, b: x, X, {"w": X, "v": X}, in_shardings=split)
    assert input_shardings(call) == [split, split, split]


def test_a_tuple_has_an_entry_an_argument(split, whole):
    call = call_of(lambda x, y, b: x, X, {"w": X, "v": X}, in_shardings=(split, whole))
    assert input_shardings(call) == [split, whole, whole]


def test_an_entry_may_be_a_tree_like_its_argument(split, whole):
    call = call_of(lambda x, y, b: x, X, {"w": X, "v": X}, in_shardings=(split, {"w": whole, "v": None}))
    assert input_shardings(call) == [split, None, whole]


def test_none_says_nothing_of_an_argument(split):
    assert input_shardings(call_of(lambda x, y, b: x, X, X, in_shardings=(None, split))) == [None, split]


def test_arguments_beyond_the_tuple_are_left_alone(split):
    assert input_shardings(call_of(lambda x, y, b: x, X, X, in_shardings=(split,))) == [split, None]


def test_static_arguments_take_an_entry_and_no_sharding(split, whole):
    call = call_of(lambda x, mode, y, b: x, X, "relu", X, in_shardings=(split, None, whole))
    assert input_shardings(call) == [split, whole]


def test_entries_go_by_position_whatever_the_hyperparameters_place(split, whole):
    call = call_of(lambda x, b, y: x, X, y=X, in_shardings=(split, whole))
    assert input_shardings(call) == [split, whole]


def test_keyword_arguments_are_counted_in_the_order_of_the_signature(split, whole):
    call = call_of(lambda x, y, b: x, y=X, x=X, in_shardings=(split, whole))
    assert input_shardings(call) == [split, whole]


def test_too_many_entries_are_refused_with_both_counts(split):
    call = call_of(lambda x, y, b: x, X, X, in_shardings=(split,) * 3)
    with pytest.raises(
        OptionError, match="in_shardings has 3 entries, but the call passes 2 arguments: x, y; give one"
    ):
        input_shardings(call)


def test_an_entry_of_another_structure_is_refused(split):
    call = call_of(lambda x, b: x, {"w": X}, in_shardings=({"v": split},))
    with pytest.raises(OptionError, match="in_shardings does not fit the arguments"):
        input_shardings(call)


def test_a_partition_spec_takes_the_mesh_in_force(mesh, split):
    call = call_of(lambda x, b: x, X, in_shardings=jax.P("data"))
    with jax.set_mesh(mesh):
        (found,) = input_shardings(call)
    assert found.is_equivalent_to(split, 1)


def test_a_partition_spec_in_a_tuple_is_one_entry(mesh, split):
    call = call_of(lambda x, y, b: x, X, X, in_shardings=(jax.P("data"), jax.P()))
    with jax.set_mesh(mesh):
        found = input_shardings(call)
    assert found[0].is_equivalent_to(split, 1)


def test_a_batched_input_is_split_as_an_unbatched_one_is(mesh, split):
    call = call_of(lambda x, y, b: x, X, X, in_shardings=split)
    batched = with_batch(call, Batch((0, None), 3, None, None))
    assert input_shardings(batched) == [jax.NamedSharding(mesh, jax.P(None, "data")), split]
    twice = with_batch(batched, Batch((2, 1), 5, None, None))
    assert input_shardings(twice)[0].spec == jax.P(None, "data", None)
    assert input_shardings(twice)[1].spec == jax.P("data", None)


def test_a_batch_over_a_mesh_axis_splits_the_new_dimension(mesh, whole):
    call = with_batch(call_of(lambda x, b: x, X, in_shardings=whole), Batch((0,), 2, None, "data"))
    assert input_shardings(call) == [jax.NamedSharding(mesh, jax.P("data"))]


def test_a_batched_input_on_one_device_stays_there():
    there = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    call = with_batch(call_of(lambda x, b: x, X, in_shardings=there), Batch((0,), 2, None, None))
    assert input_shardings(call) == [there]


def test_out_shardings_say_nothing_of_a_batched_call(split):
    call = with_batch(call_of(lambda x, b: x, X, out_shardings=split), Batch((0,), 2, None, None))
    assert output_shardings(call) is None


def test_only_committed_inputs_are_lowered_for_where_they_are(split):
    inputs = [jax.device_put(X, split), jnp.asarray(X), X]
    structs = placed_inputs([jax.typeof(X)] * 3, inputs)
    assert [struct.sharding for struct in structs] == [split, None, None]
    assert {(struct.shape, struct.dtype) for struct in structs} == {((8,), np.dtype(np.float32))}


@pytest.mark.parametrize("kind", ["mesh", "single device", "struct", "nothing"])
def test_the_devices_of_committed_values_are_told_in_order(kind):
    third, second = jax.devices()[2:0:-1]
    mesh = jax.sharding.Mesh(np.array([third, second]), ("a",))
    values, expected = {
        "mesh": ([X, jax.device_put(X, jax.NamedSharding(mesh, jax.P("a")))], (third, second)),
        "single device": ([None, jax.device_put(X, second), jax.device_put(X, third)], (second,)),
        "struct": ([jax.ShapeDtypeStruct((2,), X.dtype, sharding=jax.NamedSharding(mesh, jax.P()))], (third, second)),
        "nothing": ([None, X, jnp.asarray(X)], ()),
    }[kind]
    assert committed_devices(values) == expected


# In calls


class Abroad(jax.sharding.Sharding):
    """Stands for a sharding over devices of several processes, of which a test has one."""

    is_fully_addressable = False

    def check_compatible_aval(self, shape):
        """Fits everything."""


def struct(sharding):
    return jax.ShapeDtypeStruct(X.shape, X.dtype, sharding=sharding)


def test_what_this_process_holds_spans_no_others(split):
    call = call_of(lambda x, y, z, *, b: x, X, X, X, in_shardings=(None, split, None), out_shardings=split)
    assert spanning_arguments(call, [jax.typeof(X)] * 3, [X, None, struct(split)]) == []


def test_inputs_and_options_that_span_processes_are_named(split):
    call = call_of(lambda x, y, z, *, b: x, X, X, X, in_shardings=(None, Abroad(), split), out_shardings=(Abroad(),))
    assert spanning_arguments(call, [jax.typeof(X)] * 3, [X, None, struct(Abroad())]) == ["y", "z", "out_shardings"]


def test_a_call_runs_on_the_devices_of_in_shardings(split, count_tunings):
    tuned = tune(lambda x, b: x * 2 + 0 * b, {"b": [1, 2]}, in_shardings=split)
    for _ in range(2):
        out = tuned(X)
        np.testing.assert_array_equal(out, 2 * X)
        assert len(out.sharding.device_set) == 2
    assert count_tunings() == 1


def test_out_shardings_place_the_result(split, count_tunings):
    tuned = tune(lambda x, b: (x * 2 + 0 * b, x), {"b": [1, 2]}, out_shardings=split)
    for out in tuned(X):
        assert out.sharding.is_equivalent_to(split, 1)
    assert count_tunings() == 1


def test_shardings_and_static_arguments_go_together(split):
    tuned = tune(lambda x, mode, b: x * len(mode) + 0 * b, {"b": [1, 2]}, in_shardings=(split, None))
    np.testing.assert_array_equal(tuned(X, "ab"), 2 * X)
    np.testing.assert_array_equal(tuned(X, mode="abc"), 3 * X)


def test_sharded_and_unsharded_arguments_are_tuned_for_apart(split, count_tunings):
    tuned = tune(lambda x, b: x * 2 + 0 * b, {"b": [1, 2]})
    tuned(X)
    out = tuned(jax.device_put(X, split))
    assert out.sharding.is_equivalent_to(split, 1)
    tuned(jax.device_put(X + 1, split))
    assert count_tunings() == 2


def test_an_argument_on_the_second_device_stays_there(count_tunings):
    second = jax.devices()[1]
    out = tune(lambda x, b: x * 2 + 0 * b, {"b": [1, 2]})(jax.device_put(X, second))
    assert out.devices() == {second}
    np.testing.assert_array_equal(out, 2 * X)


# Layouts


@pytest.fixture
def free_layouts(monkeypatch):
    monkeypatch.setattr(CONFIG, "find_optimal_layouts_automatically", True)


def test_layouts_are_left_alone_unless_asked_for():
    assert layout_options([jax.typeof(jnp.ones(3))], [False]) == {}


def test_layouts_of_plain_inputs_are_left_to_xla(free_layouts):
    plain, key, packed = jnp.ones((2, 3)), jax.random.key(0), jnp.ones(4, jnp.int4)
    options = layout_options([jax.typeof(value) for value in (plain, key, packed, plain)], [False, False, False, True])
    formats = options["in_shardings"]
    assert formats[0].layout is Layout.AUTO
    assert formats[1:] == (None, None, None)


def test_a_program_asks_xla_for_layouts_and_computes_the_same(free_layouts, quick_tuning, compiled_texts):
    tuned = tune(lambda x, key, *, c: x.T @ x * c + jax.random.normal(key, ()), hyperparams={"c": [2, 3]})
    x, key = jnp.ones((4, 8)), jax.random.key(0)
    result = tuned(x, key)
    assert len(tuned.results.timed) == 2
    assert len(compiled_texts) == 2
    assert all('layout_mode = "auto"' in text for text in compiled_texts)
    c = tuned.optimal_hyperparams["c"]
    np.testing.assert_allclose(result, np.full((8, 8), 4.0 * c) + float(jax.random.normal(key, ())), rtol=1e-6)


def test_sharded_and_donated_inputs_go_with_free_layouts(free_layouts, quick_tuning, split):
    def scale(x, y, *, c):
        return x * c + y

    tuned = tune(jax.jit(scale, donate_argnames="y"), hyperparams={"c": [2]})
    x, y = (jax.device_put(jnp.ones((8, 2)), split) for _ in range(2))
    assert tuned(x, y).sharding.is_equivalent_to(split, 2)
    assert tuned.results.failures == ()


@pytest.fixture
def compiled_texts(monkeypatch):
    """The lowered texts of the programs that are compiled for timing."""
    texts = []

    def noted(lowering, donated):
        texts.append(lowering.lowered.as_text())
        return programs.compile_program(lowering, donated)

    monkeypatch.setattr(threads, "compile_program", noted)
    return texts


def test_an_input_is_moved_into_the_layout_that_a_program_wants():
    value = jnp.ones((4, 8))
    wanted = Format(Layout(major_to_minor=(1, 0)), value.sharding)
    program = programs.Program(0, "m", types.SimpleNamespace(input_formats=((wanted, wanted), {})), 0.0, (False, False))
    moved, key = program.laid_out([value, jax.random.key(0)])
    assert moved.format.layout.major_to_minor == (1, 0)
    assert np.array_equal(moved, value)
    assert jax.dtypes.issubdtype(key.dtype, jax.dtypes.prng_key)


def test_an_input_that_lies_as_wanted_is_the_same_array():
    value = jnp.ones((4, 8))
    compiled = types.SimpleNamespace(input_formats=((value.format,), {}))
    assert programs.Program(0, "m", compiled, 0.0, (False,)).laid_out([value])[0] is value
