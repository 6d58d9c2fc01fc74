"""`record`: what it notes, where it writes, and that the recorded function stays what it is."""

from __future__ import annotations

import ast
import collections
import copy
import functools
import gc
import inspect
import io
import os
import pickle
import subprocess
import sys
import textwrap
import threading
import types
import warnings
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import tune_jax
from tune_jax import CONFIG, record, tune
from tune_jax._errors import OptionError
from tune_jax._record import recording
from tune_jax.experimental import record as experimental


def plain(x, y=1, *, name="n", block=8):
    """Doubles."""
    return x * 2


@record
def decorated(x):
    return x + 1


X = jnp.ones((2, 3))


# The function that stays as it is


def test_the_experimental_name_is_the_same_function():
    assert experimental.record is record


@pytest.mark.parametrize("make", [record, lambda f: record(f, None), record(dir_or_buffer=None), record()])
def test_every_form_of_the_decorator_returns_the_functions_result(make):
    assert make(plain)(X).tolist() == [[2, 2, 2], [2, 2, 2]]


def test_a_recorded_function_looks_like_the_function():
    recorded = record(plain)
    assert recorded.__name__ == "plain"
    assert recorded.__doc__ == "Doubles."
    assert recorded.__wrapped__ is plain
    assert str(inspect.signature(recorded)) == "(x, y=1, *, name='n', block=8)"
    assert repr(recorded) == "<recorded function plain>"


def test_what_the_function_has_is_had_through_it():
    assert record(jax.jit(plain)).lower(X).out_info.shape == (2, 3)


def test_what_the_function_lacks_is_an_attribute_error():
    assert not hasattr(record(plain), "nothing_like_it")


def test_the_functions_own_error_comes_through_as_it_is():
    error = ValueError("mine")

    @record
    def fails(x):
        raise error

    with pytest.raises(ValueError, match="mine") as caught:
        fails(X)
    assert caught.value is error


def test_arguments_that_the_function_does_not_take_raise_its_own_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        record(plain)(X, z=1)


def test_a_jitted_recorded_function_is_traced_once():
    traces = []

    @jax.jit
    @record
    def count(x):
        traces.append(1)
        return x

    for _ in range(3):
        count(X)
    assert len(traces) == 1
    assert count.calls[0].count == 1


def test_a_recorded_jitted_function_is_traced_once_and_counted_each_time():
    traces = []
    recorded = record(jax.jit(lambda x: traces.append(1) or x))
    for _ in range(3):
        recorded(X)
    assert len(traces) == 1
    assert recorded.calls[0].count == 3


@pytest.mark.parametrize(
    "transform",
    [jax.jit, jax.vmap, jax.checkpoint, lambda f: jax.grad(lambda x: f(x).sum()), lambda f: jax.jit(jax.vmap(f))],
)
def test_transformed_calls_give_what_they_give_without_recording(transform):
    np.testing.assert_array_equal(transform(record(plain))(X), transform(plain)(X))


def test_the_program_is_the_same_with_recording():
    assert str(jax.make_jaxpr(record(plain))(X)) == str(jax.make_jaxpr(plain)(X))


def test_no_tracer_is_kept():
    recorded = record(lambda x, f: f(x))
    with jax.checking_leaks():
        jax.jit(lambda x: jax.vmap(lambda row: recorded(row, lambda y: y * row))(x))(X)
        jax.grad(lambda x: recorded(x, jnp.sin).sum())(X)
    assert len(recorded.calls) == 2


def test_no_argument_is_kept_alive():
    class Held:
        pass

    held, array = Held(), jnp.arange(6)
    recorded = record(lambda x, y: x)
    recorded(array, held)
    dead = weakref.ref(held), weakref.ref(array)
    del held, array
    gc.collect()
    assert [one() for one in dead] == [None, None]


def test_methods_are_bound_and_the_instance_is_an_argument():
    class Model:
        def __init__(self):
            self.w = jnp.full(3, 2.0)

        @record
        def apply(self, x):
            return x * self.w

    model = Model()
    assert model.apply(X).tolist() == [[2, 2, 2], [2, 2, 2]]
    assert list(Model.apply.calls[0].kwargs) == ["self", "x"]
    assert model.apply.calls is Model.apply.calls


def test_a_recorded_function_is_pickled_by_name():
    assert pickle.loads(pickle.dumps(collections.Counter)) is collections.Counter
    module = types.ModuleType("recorded_here")
    sys.modules[module.__name__] = module
    try:
        exec("from tune_jax import record\n@record\ndef f(x): return x", module.__dict__)
        assert pickle.loads(pickle.dumps(module.f)) is module.f
    finally:
        del sys.modules[module.__name__]


def test_one_under_another_name_is_pickled_with_its_function():
    again = pickle.loads(pickle.dumps(record(os.path.join)))
    assert again("a", "b") == "a/b"


def test_copies_are_the_function_itself():
    assert copy.copy(decorated) is decorated
    assert copy.deepcopy(decorated) is decorated


def test_a_recorded_function_is_tuned(quick_tuning):
    tuned = tune(record(lambda x, *, c: x * c), hyperparams={"c": [2]})
    assert tuned(X)[0, 0] == 2


def test_a_tuned_function_is_recorded_and_keeps_its_results(quick_tuning):
    recorded = record(tune(lambda x, *, c: x * c, hyperparams={"c": [2]}))
    assert recorded(X)[0, 0] == 2
    assert recorded.optimal_hyperparams == {"c": 2}
    assert list(jax.jit(recorded).timing_results) == [0]


@pytest.mark.parametrize("kind", [staticmethod, classmethod])
def test_a_class_or_static_method_is_refused_with_the_right_order(kind):
    with pytest.raises(OptionError, match=f"put @{kind.__name__} outside of @record"):
        record(kind(plain))


def test_what_cannot_be_called_is_refused():
    with pytest.raises(OptionError, match="got 'folder' of type str; expected a function"):
        record("folder")


# What a distinct call is


def test_calls_of_the_same_shapes_are_one_and_counted():
    recorded = record(plain)
    for value in (1.0, 2.0, 3.0):
        recorded(X * value)
    assert [call.count for call in recorded.calls] == [3]
    assert "# Made 3 times." in recorded.script()


@pytest.mark.parametrize(
    "other", [jnp.ones((2, 4)), jnp.ones((2, 3), jnp.bfloat16), np.ones((2, 3), np.float32), jnp.ones(3)]
)
def test_another_shape_dtype_or_kind_of_array_is_another_call(other):
    recorded = record(plain)
    recorded(X)
    recorded(other)
    assert len(recorded.calls) == 2


@pytest.mark.parametrize("other", [{"y": 2}, {"name": "m"}, {"y": True}, {"y": None}])
def test_another_static_value_is_another_call(other):
    recorded = record(plain)
    recorded(X, y=1)
    recorded(X, **other)
    assert len(recorded.calls) == 2


def test_how_an_argument_is_passed_makes_no_difference():
    recorded = record(plain)
    recorded(X, 3)
    recorded(y=3, x=X)
    assert len(recorded.calls) == 1


@pytest.mark.parametrize(("first", "second"), [(-1, -2), (1, True), ("a", "b"), ({"a": 1}, {"b": 1}), ([1], (1,))])
def test_values_that_hash_alike_or_look_alike_are_told_apart(first, second):
    recorded = record(plain)
    for value in (first, second, first):
        recorded(X, value)
    assert [call.count for call in recorded.calls] == [2, 1]


def test_a_call_that_is_known_is_not_written_again(monkeypatch):
    recorded = record(plain)
    recorded(X)
    monkeypatch.setattr(recording, "capture_call", None)
    recorded(X)
    assert recorded.calls[0].count == 2


def test_values_of_integer_arrays_are_those_of_the_first_call():
    recorded = record(lambda x: x)
    recorded(jnp.array([3, 5, 7]))
    recorded(jnp.array([1, 1, 1]))
    assert [call.integers for call in recorded.calls] == [("jnp.array([3, 5, 7], 'int32')",)]


def test_weak_types_are_noted():
    recorded = record(lambda x: x)
    recorded(jnp.asarray(2.0))
    assert recorded.calls[0].kwargs["x"] == "random_array((), jnp.float32, seed=0, weak_type=True)"


def test_shardings_are_noted_and_told_apart():
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(AxisType.Auto,) * 2)
    recorded = record(lambda x: x)
    for spec in (PartitionSpec("x"), PartitionSpec(None, "y")):
        recorded(jax.device_put(jnp.ones((4, 8)), NamedSharding(mesh, spec)))
    first, second = (call.kwargs["x"] for call in recorded.calls)
    assert first.endswith("mesh={'x': 2, 'y': 4}, spec=('x',))")
    assert second.endswith("mesh={'x': 2, 'y': 4}, spec=(None, 'y'))")
    assert "laid out as ('x',) over a mesh" in recorded.calls[0].notes[0]


def test_shardings_over_explicit_axes_are_seen_under_jit():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Explicit,))
    recorded = record(lambda x: x)
    with jax.set_mesh(mesh):
        jax.jit(recorded)(jax.device_put(jnp.ones((8, 2)), PartitionSpec("x")))
    assert "mesh={'x': 8}, spec=('x', None)" in recorded.calls[0].kwargs["x"]


def test_a_mapped_argument_is_said_to_be_one():
    recorded = record(lambda x: x)
    jax.vmap(recorded)(jnp.ones((5, 3)))
    assert recorded.calls[0].notes == ("float32[3]: one of 5 under jax.vmap, which is not part of this call.",)


def test_settings_that_are_not_the_defaults_are_noted():
    recorded = record(lambda x: x)
    with jax.enable_x64(True), jax.default_matmul_precision("float32"):
        recorded(jnp.ones(3, "float64"))
    assert recorded.calls[0].settings == {"jax_default_matmul_precision": "float32", "jax_enable_x64": True}
    assert "jax.config.update('jax_enable_x64', True)" in recorded.script()


# What cannot be recorded


class Unreadable:
    def __reduce_ex__(self, protocol):
        raise RuntimeError("no")


class Unspeakable(dict):
    @property
    def __class__(self):
        raise RuntimeError("no class")


def test_an_object_that_cannot_be_taken_apart_is_left_to_do():
    recorded = record(lambda x, y: x)
    recorded(X, Unreadable())
    assert recorded.calls[0].kwargs["y"].startswith("Todo('a ")
    assert "# TODO: some of it could not be recorded." in recorded.script()


def test_a_call_that_cannot_be_recorded_warns_once_and_goes_through():
    recorded = record(lambda x, y: x)
    with pytest.warns(UserWarning, match=r"was not recorded.*RuntimeError: no class"):
        assert recorded(X, Unspeakable()) is X
    assert recorded(X, Unspeakable()) is X


def test_where_warnings_are_errors_the_call_goes_through_too():
    recorded = record(lambda x, y: x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert recorded(X, Unspeakable()) is X


def test_an_object_that_holds_itself_ends():
    held = []
    held.append(held)
    recorded = record(lambda x, y: x)
    recorded(X, held)
    assert recorded.calls[0].kwargs["y"] == "[Todo('a list that holds itself or goes too deep')]"


def test_a_counter_does_not_fill_the_memory():
    recorded = record(lambda x, step: x)
    for step in range(100):
        recorded(X, step)
    with pytest.warns(UserWarning, match="more than 100 distinct ones; give a number that changes at each call as an"):
        recorded(X, 100)
    recorded(X, 101)
    assert len(recorded.calls) == 100


def test_an_enormous_static_value_is_not_kept():
    recorded = record(lambda x, text: x)
    with pytest.warns(UserWarning, match="take 2000"):
        recorded(X, "a" * 2_000_000)
    assert recorded.calls == []


def test_a_donated_argument_is_read_before_it_is_gone():
    recorded = record(jax.jit(lambda x: x + 1, donate_argnums=0))
    recorded(jnp.arange(3))
    assert recorded.calls[0].integers == ("jnp.array([0, 1, 2], 'int32')",)


def test_a_deleted_argument_is_noted_by_its_shape():
    gone = jnp.arange(3)
    gone.delete()
    recorded = record(lambda x: 0)
    recorded(gone)
    assert recorded.calls[0].kwargs["x"] == "random_array((3,), jnp.int32, seed=0)"


def test_a_transfer_guard_does_not_stop_it():
    sizes = jnp.arange(3)
    recorded = record(lambda x: x)
    with jax.transfer_guard("disallow_explicit"):
        recorded(sizes)
    assert recorded.calls[0].integers == ("jnp.array([0, 1, 2], 'int32')",)


def test_ten_threads_record_each_call_once(background):
    recorded = record(lambda x, n: x)
    start = threading.Barrier(10)

    def work(index):
        start.wait()
        for number in range(5):
            recorded(X, number)

    list(background.map(work, range(10)))
    assert sorted(call.kwargs["n"] for call in recorded.calls) == ["0", "1", "2", "3", "4"]
    assert sum(call.count for call in recorded.calls) == 50


def test_a_recorded_function_that_calls_another_records_both():
    inner = record(lambda x: x + 1)
    outer = record(lambda x: inner(x) * 2)
    outer(X)
    assert (len(inner.calls), len(outer.calls)) == (1, 1)


# Where it is written


def test_nothing_is_written_for_none(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    recorded = record(plain)
    recorded(X)
    recorded.flush()
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_made_and_holds_a_file_named_after_the_function(tmp_path):
    folder = tmp_path / "not" / "there"
    recorded = record(plain, folder)
    assert not folder.exists()
    recorded(X)
    assert [path.name for path in folder.iterdir()] == ["plain.py"]
    assert (folder / "plain.py").read_text() == recorded.script()


def test_the_file_is_replaced_when_a_new_call_comes(tmp_path):
    recorded = record(plain, str(tmp_path))
    recorded(X)
    recorded(X[:1])
    assert (tmp_path / "plain.py").read_text().count("def call_") == 2


def test_two_functions_of_a_name_have_two_files(tmp_path):
    first, second = (record(lambda x: x, tmp_path), record(lambda x: x + 1, tmp_path))
    first(X)
    second(X)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["function.py", "function_2.py"]


def test_a_function_that_is_recorded_anew_has_the_same_file(tmp_path):
    for _ in range(2):
        record(lambda x: x, tmp_path)(X)
    assert [path.name for path in tmp_path.iterdir()] == ["function.py"]


def test_functions_of_a_name_that_are_gone_keep_their_files(tmp_path):
    record(lambda x: x, tmp_path)(X)
    record(lambda x: x + 1, tmp_path)(X)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["function.py", "function_2.py"]


def test_flush_says_how_often_calls_were_made(tmp_path):
    recorded = record(plain, tmp_path)
    recorded(X)
    recorded(X)
    recorded.flush()
    assert "# Made 2 times." in (tmp_path / "plain.py").read_text()


def test_a_folder_that_cannot_be_written_to_warns_and_the_call_goes_through(tmp_path):
    (tmp_path / "taken").mkdir()
    recorded = record(plain, tmp_path / "taken" / "below")
    (tmp_path / "taken" / "below").write_text("a file meanwhile")
    with pytest.warns(UserWarning, match="FileExistsError"):
        assert recorded(X).shape == (2, 3)


def test_a_file_for_a_folder_is_refused(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(OptionError, match="which is a file; give a folder"):
        record(plain, tmp_path / "file")


@pytest.mark.parametrize("bad", [3, "", b"bytes", object()])
def test_what_is_neither_a_folder_nor_a_buffer_is_refused(bad):
    with pytest.raises(OptionError, match="expected the path of a folder, a text or binary buffer, or None"):
        record(plain, bad)


def test_a_text_buffer_holds_one_script_after_each_call():
    buffer = io.StringIO()
    recorded = record(plain, buffer)
    for rows in (2, 1):
        recorded(X[:rows])
        ast.parse(buffer.getvalue())
    assert buffer.getvalue().count("def call_") == 2
    assert buffer.getvalue().count("def main") == 1


def test_a_binary_buffer_holds_the_script_as_utf8():
    buffer = io.BytesIO()
    record(plain, buffer)(X, name="€")
    assert "'name': '€'" in buffer.getvalue().decode()


@pytest.mark.parametrize("mode", ["w", "wb", "w+", "a"])
def test_an_open_file_holds_the_script(mode, tmp_path):
    with open(tmp_path / "script.py", mode) as file:
        recorded = record(plain, file)
        recorded(X)
        recorded(X[:1])
        assert (tmp_path / "script.py").read_text().count("def main") == 1


def test_functions_recorded_to_one_buffer_are_in_one_script():
    buffer = io.StringIO()
    record(plain, buffer)(X)
    other = record(lambda x: x, buffer)
    other(X)
    assert buffer.getvalue().count("def main") == 2
    compile(buffer.getvalue(), "both", "exec")


class Stream(io.RawIOBase):
    """A pipe's end: text goes in, and nothing can be taken back."""

    def __init__(self):
        self.written = b""

    def writable(self):
        return True

    def write(self, data):
        self.written += data
        return len(data)


def test_a_stream_is_written_when_asked_to():
    stream = Stream()
    recorded = record(plain, stream)
    recorded(X)
    assert stream.written == b""
    recorded.flush()
    recorded.flush()
    assert stream.written.decode() == recorded.script().replace("annotations\n\n", "annotations\n\n\n", 1)


def test_a_closed_buffer_warns_and_the_call_goes_through():
    buffer = io.StringIO()
    recorded = record(plain, buffer)
    buffer.close()
    with pytest.warns(UserWarning, match="closed file"):
        assert recorded(X).shape == (2, 3)


def test_standard_output_keeps_what_it_has_and_gets_the_script_at_the_end(tmp_path):
    program = """
        import sys, jax.numpy as jnp
        from tune_jax import record
        print("before")
        @record(dir_or_buffer=sys.stdout)
        def f(x): return x
        f(jnp.ones(3)); f(jnp.ones(3))
        print("after")
    """
    path = tmp_path / "out"
    with open(path, "w") as file:
        command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program)]
        subprocess.run(command, stdout=file, check=True, env={**os.environ, "JAX_PLATFORMS": "cpu"})
    lines = path.read_text().splitlines()
    assert lines[:3] == ["before", "after", "from __future__ import annotations"]
    assert "    # Made 2 times." in lines


# What scripts are made of


def test_random_arrays_have_the_shape_and_dtype_asked_for():
    made = experimental.random_array((2, 3), jnp.bfloat16)
    assert (made.shape, made.dtype, made.weak_type) == ((2, 3), jnp.bfloat16, False)


def test_random_arrays_of_two_seeds_differ():
    first, second = (experimental.random_array((8,), jnp.float32, seed=seed) for seed in (0, 1))
    assert not np.array_equal(first, second)


def test_random_arrays_may_have_a_weak_type():
    assert experimental.random_array((2,), jnp.float32, weak_type=True).weak_type


def test_random_keys_are_keys():
    made = experimental.random_array((3,), jax.random.key(0).dtype)
    assert jax.random.split(made[0]).shape == (2,)


def test_random_arrays_are_laid_out_over_a_mesh_where_there_is_one():
    made = experimental.random_array((8, 2), jnp.float32, mesh={"x": 8}, spec=("x",))
    assert {shard.data.shape for shard in made.addressable_shards} == {(1, 2)}


def test_random_arrays_lie_on_one_device_where_there_are_too_few():
    made = experimental.random_array((16, 2), jnp.float32, mesh={"x": 16}, spec=("x",))
    assert len(made.sharding.device_set) == 1


def test_leave_open_drops_names_of_a_dict_and_of_a_list_of_dicts():
    kwargs = {"x": 1, "a": 2, "b": 3}
    assert experimental.leave_open(kwargs, {"a": [1]}) == {"x": 1, "b": 3}
    assert experimental.leave_open(kwargs, [{"a": [1]}, {"b": [2]}]) == {"x": 1}
    assert experimental.leave_open(kwargs, plain) == kwargs


@pytest.mark.parametrize("use", [lambda t: t(), lambda t: t.name, lambda t: t * 2, lambda t: t[0], bool, list])
def test_using_a_todo_says_what_to_fill_in(use):
    with pytest.raises(NotImplementedError, match="fill in the table"):
        use(experimental.Todo("the table"))


def test_a_todo_that_nothing_uses_does_no_harm():
    assert not hasattr(experimental.Todo("the table"), "__jax_array__")
    assert not hasattr(experimental.Todo("the table"), "_jit_info")


def test_a_script_tunes_what_its_hyperparameters_name(tmp_path, quick_tuning, capsys):
    recorded = record(functools.partial(plain))
    recorded(X, block=64)
    script = recorded.script().replace("HYPERPARAMS = {}", 'HYPERPARAMS = {"block": [32, 64]}')
    exec(compile(script, "script", "exec"), {"__name__": "__main__"})
    assert "2 candidates" in capsys.readouterr().out
    assert CONFIG.max_rounds == 1
    assert tune_jax.record is record
