"""The scripts that `record` writes: they run as they stand, whatever was recorded."""

from __future__ import annotations

import ast
import collections
import dataclasses
import enum
import functools
import inspect
import linecache
import operator
import pathlib
import re
import subprocess
import sys
import textwrap
from typing import Any

import equinox as eqx
import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax import record, tune
from tune_jax._errors import NoCandidateError
from tune_jax._record.imports import import_folder
from tune_jax._record.sources import make_factory, names_read, read_function

X = jnp.ones(3)
SIZE = 4


class Color(enum.Enum):
    RED = 1


class Flags(enum.IntFlag):
    A = 1
    B = 2


Pair = collections.namedtuple("Pair", "a b")


@dataclasses.dataclass
class Plain:
    width: int
    more: Any = None


@dataclasses.dataclass(frozen=True)
class Checked:
    width: int

    def __post_init__(self):
        object.__setattr__(self, "width", self.width + 1)


@flax.struct.dataclass
class State:
    w: Any
    n: int = flax.struct.field(pytree_node=False, default=1)


class Layer(eqx.Module):
    inner: eqx.nn.Linear
    act: Any = eqx.field(static=True)


@dataclasses.dataclass
class Late:
    w: Any
    mode: str


jax.tree_util.register_dataclass(Late, data_fields=["w"], meta_fields=["mode"])


class Op:
    scale = 2

    def __init__(self):
        self.w = np.ones(3, np.float32)

    def __call__(self, x):
        return x * self.w * self.scale

    def method(self, x):
        return x * self.w


def names_of(script: str) -> dict[str, Any]:
    """What a script defines, without running its main function."""
    ast.parse(script)
    names: dict[str, Any] = {"__name__": "script"}
    exec(compile(script, "script", "exec"), names)
    return names


def replayed(value: Any) -> Any:
    """A value that was an argument, as the script makes it again."""
    recorded = record(lambda x, y: x)
    recorded(X, value)
    _, kwargs = names_of(recorded.script())["CALLS"][0]()
    return kwargs["y"]


def rerun(function: Any, *args: Any, **kwargs: Any) -> Any:
    """What a function returns, as the script has it, for its recorded arguments."""
    recorded = record(function)
    recorded(*args, **kwargs)
    names = names_of(recorded.script())
    again, named = names["CALLS"][0]()
    return names["FUNCTION"](*again, **named)


# Values


@pytest.mark.parametrize(
    "value",
    [
        None, True, 3, -2.5, -0.0, float("inf"), float("-inf"), complex(1, -2), "a'b", 'q"\n', '"""', "\\", "€",
        "\ud800", b"x\xff", ..., range(3), slice(None, 3), (1,), (), [1, [2]], {"a b": 1, "c": (None,)}, {1, 2},
        frozenset("ab"), Color.RED, Flags.A, Flags.A | Flags.B, Pair(1, "x"), Plain(3, [4]),
        collections.OrderedDict(b=1, a=2),
        collections.deque([1, 2], 3), pathlib.PurePosixPath("a/b"), np.float32(2.5), np.int8(3), np.bool_(True),
        np.str_("x"), jnp.bfloat16.dtype.type(3), np.dtype("float32"), np.dtype([("a", "i4")]), np.float32, jnp.float32,
        jnp.bfloat16, jax.random.key(0).dtype, jax.sharding.PartitionSpec("x", None, ("a", "b")), dict, Color, len,
        operator.add, jnp.sin, jax.nn.relu, np, jax.numpy, re.compile("a+"),
    ],
)  # fmt: skip
def test_a_value_comes_back_equal(value):
    again = replayed(value)
    assert type(again).__name__ == type(value).__name__
    if not isinstance(value, (enum.Enum, Plain, Pair, type)):
        assert again == value
    else:
        assert repr(again) == repr(value)


@pytest.mark.parametrize("value", [float("nan"), np.float32("nan")])
def test_nan_comes_back_as_nan(value):
    assert np.isnan(replayed(value))


def test_a_complex_number_keeps_its_parts():
    again = replayed(complex(float("nan"), -0.0))
    assert np.isnan(again.real)
    assert np.signbit(again.imag)


def test_a_defaultdict_keeps_its_default():
    assert replayed(collections.defaultdict(list, a=[1]))["missing"] == []


@pytest.mark.parametrize(
    "array",
    [
        jnp.ones((2, 3)), jnp.ones((2, 3), jnp.bfloat16), jnp.ones(3, jnp.float8_e4m3fn), jnp.ones(3, jnp.int4),
        jnp.zeros((0, 2)), jnp.zeros((0, 2), int), jnp.arange(5000), jnp.array(True), jnp.ones(2, complex),
        jax.random.key(0), jax.random.split(jax.random.key(1, impl="rbg"), 3), jax.random.PRNGKey(0),
        np.ones((2, 3)), np.ones(3, jnp.bfloat16), np.ones(3, jnp.int4), np.arange(5000), np.zeros((0, 3)),
        np.array(["a", "b"]), np.array([None, 1], object),
    ],
    ids=lambda array: f"{type(array).__name__} {array.dtype}{list(array.shape)}",
)  # fmt: skip
def test_an_array_comes_back_with_its_kind_shape_and_dtype(array):
    again = replayed(array)
    assert isinstance(again, np.ndarray) == isinstance(array, np.ndarray)
    assert (again.shape, again.dtype) == (array.shape, array.dtype)


@pytest.mark.parametrize("make", [jnp.array, np.array])
@pytest.mark.parametrize("dtype", ["int8", "uint32", "int32", "int4"])
def test_a_small_integer_array_comes_back_with_its_values(make, dtype):
    again = replayed(make([[3, 5], [7, 0]], dtype))
    assert again.astype(int).tolist() == [[3, 5], [7, 0]]
    assert again.dtype == dtype


def test_integers_that_have_no_values_are_said_to_be_made_up():
    recorded = record(lambda x: x)
    jax.jit(recorded)(jnp.arange(3))
    assert "# int32[3]: its values were not recorded, and integers from 0 to 7 stand in." in recorded.script()


def test_a_shape_stands_for_an_array():
    assert replayed(jax.ShapeDtypeStruct((2, 3), jnp.float32)).shape == (2, 3)


def test_same_shape_arrays_of_a_call_differ():
    first, second = replayed([jnp.ones(8), jnp.ones(8)])
    assert not np.array_equal(first, second)


@pytest.mark.parametrize(
    "value",
    [
        State(jnp.ones(2)),
        Layer(eqx.nn.Linear(2, 3, key=jax.random.key(0)), jax.nn.relu),
        Late(jnp.ones(2), "m"),
        Pair(1, jnp.ones(2)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_pytree_comes_back_with_its_structure(value):
    again = replayed(value)
    assert [leaf.shape for leaf in jax.tree.leaves(again) if hasattr(leaf, "shape")] == [
        leaf.shape for leaf in jax.tree.leaves(value) if hasattr(leaf, "shape")
    ]
    assert jax.tree.structure(again).num_leaves == jax.tree.structure(value).num_leaves


def test_a_dataclass_that_changes_its_fields_is_not_made_twice():
    assert replayed(Checked(3)).width == 4


@pytest.mark.parametrize("value", [object.__new__(type("Made", (), {})), (i for i in ()), jax.devices()[0]])
def test_what_cannot_be_written_is_a_todo(value):
    recorded = record(lambda x, y: x)
    recorded(X, value)
    assert "Todo(" in recorded.calls[0].kwargs["y"]
    ast.parse(recorded.script())


def test_a_script_runs_whose_todo_nothing_uses(quick_tuning, capsys):
    recorded = record(lambda x, y: x * 2)
    recorded(X, sys.stdout)
    assert "Todo(" in recorded.calls[0].kwargs["y"]
    names_of(recorded.script())["main"]()
    assert "x: float32[3]" in capsys.readouterr().out


# Functions


def with_helper(x):
    return helper(x) * SIZE + np.pi


def helper(x):
    return x + jnp.sin(0.0)


def local_function():
    k, array = 3, jnp.arange(3)

    def inner(x):
        """Has
        two lines."""
        return x * k + array

    return inner


def recursive():
    def power(x, n=3):
        return x if n == 0 else power(x * 2, n - 1)

    return power


def counting():
    count = 0

    def function(x):
        nonlocal count
        count += 1
        return x + count * 0

    return function


@jax.custom_vjp
def with_vjp(x):
    return x * 2


def with_vjp_forward(x):
    return with_vjp(x), x


with_vjp.defvjp(with_vjp_forward, lambda x, g: (g * x,))


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def with_jvp(x, n):
    return x * n


@with_jvp.defjvp
def _(n, primals, tangents):
    return primals[0] * n, tangents[0] * n


@functools.partial(jax.jit, static_argnames="n")
def jitted(x, *, n):
    return x[:n]


two, of_two = (lambda x: x + 1), (lambda x: x + 2)


def adding_one(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs) + 1

    return wrapper


def total(x):
    return (x * x).sum()


@adding_one
def wrapped(x, n=2):
    return x * n


@pytest.mark.parametrize(
    ("function", "kwargs"),
    [
        (wrapped, {"n": 3}), (jax.grad(total), {}), (jax.vmap(jnp.sin, in_axes=0), {}),
        (jax.vmap(lambda x: x + SIZE), {}), (jax.checkpoint(total), {}),
        (jax.jit(jax.value_and_grad(total)), {}), (eqx.filter_jit(total), {}),
        (with_helper, {}), (local_function(), {}), (recursive(), {"n": 2}), (counting(), {}), (with_vjp, {}),
        (with_jvp, {"n": 2}), (jitted, {"n": 2}), (two, {}), (of_two, {}), (lambda x, *, s="q": x * SIZE, {"s": "z"}),
        (functools.partial(lambda a, x, k: x * a, 2.0, k={"w": 3}), {}), (jnp.sin, {}), (jax.nn.relu, {}),
        (functools.partial(operator.add, 2), {}), (jax.jit(lambda x: x + SIZE), {}),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)  # fmt: skip
def test_a_function_is_written_so_that_it_does_the_same(function, kwargs):
    recorded = record(function)
    recorded(X, **kwargs)
    names = names_of(recorded.script())
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-6),
        names["FUNCTION"](X, **kwargs),
        function(X, **kwargs),
    )


def test_a_cache_around_a_function_is_left_out_with_a_word():
    recorded = record(functools.lru_cache(lambda n: n + 1))
    recorded(3)
    assert "# The _lru_cache_wrapper around it is left out." in recorded.script()
    assert names_of(recorded.script())["FUNCTION"](3) == 4


def test_a_signature_that_a_decorator_hides_is_kept():
    recorded = record(wrapped)
    recorded(X, 3)
    assert list(inspect.signature(names_of(recorded.script())["FUNCTION"]).parameters) == ["x", "n"]


@pytest.mark.parametrize("order", ["outside", "inside"])
def test_a_jitted_method_is_written_with_its_class(order):
    jit = functools.partial(jax.jit, static_argnums=0)

    class Local:
        def outside(self, x):
            return x * 2

        def inside(self, x):
            return x * 2

    recorded = record(jit(getattr(Local, order))) if order == "outside" else record(getattr(Local, order))
    setattr(Local, order, recorded if order == "outside" else jit(recorded))
    assert getattr(Local(), order)(X).tolist() == [2, 2, 2]
    names = names_of(recorded.script())
    _, kwargs = names["CALLS"][0]()
    assert names["FUNCTION"](**kwargs).shape == (3,)


def test_super_works_in_a_recorded_method():
    class Base:
        def go(self, x):
            return x + 1

    class Sub(Base):
        @record
        def go(self, x):
            return super().go(x) * 2

    Sub().go(X)
    names = names_of(Sub.go.script())
    _, kwargs = names["CALLS"][0]()
    assert names["FUNCTION"](**{**kwargs, "x": X}).tolist() == [4, 4, 4]


def test_globals_of_a_module_that_can_be_imported_are_imported_from_it(tmp_path, monkeypatch):
    (tmp_path / "settings_here.py").write_text("TABLE = object()\ndef make():\n    return lambda x: (TABLE, x)[1]\n")
    monkeypatch.syspath_prepend(tmp_path)
    recorded = record(__import__("settings_here").make())
    recorded(X)
    assert "from settings_here import TABLE" in recorded.script()
    assert f"sys.path.append({str(tmp_path)!r})" in recorded.script()


def test_a_custom_derivative_comes_along():
    recorded = record(with_vjp)
    recorded(X)
    again = names_of(recorded.script())["FUNCTION"]
    assert jax.grad(lambda x: again(x).sum())(jnp.full(3, 5.0)).tolist() == [5, 5, 5]


def test_an_object_that_is_called_comes_along_with_its_attributes():
    recorded = record(Op())
    recorded(X)
    again = names_of(recorded.script())["FUNCTION"]
    assert (again.scale, again.w.shape, again(X).shape) == (2, (3,), (3,))


def test_a_bound_method_comes_along_with_its_object():
    assert rerun(Op().method, X).shape == (3,)


def test_a_method_of_a_local_class_is_written_with_its_class():
    class Local:
        def __init__(self):
            self.w = jnp.ones(3)

        @record
        def apply(self, x):
            return x * self.w

    Local().apply(X)
    script = Local.apply.script()
    names = names_of(script)
    _, kwargs = names["CALLS"][0]()
    assert "@record" not in script
    assert names["FUNCTION"](**kwargs).shape == (3,)


def test_two_things_of_one_name_stay_two():
    def first():
        scale = 2
        return lambda x: x * scale

    def second():
        scale = 3
        return lambda x: x * scale

    recorded = record(lambda x, f, g: f(x) + g(x))
    recorded(X, first(), second())
    names = names_of(recorded.script())
    _, kwargs = names["CALLS"][0]()
    assert (kwargs["f"](1), kwargs["g"](1)) == (2, 3)


def test_a_tuned_function_is_tuned_over_its_own_grid(quick_tuning, capsys):
    recorded = record(tune(lambda x, *, c: x * c, hyperparams={"c": [1, 2]}))
    recorded(X)
    script = recorded.script()
    assert "HYPERPARAMS = {'c': [1, 2]}" in script
    exec(compile(script, "script", "exec"), {"__name__": "__main__"})
    assert "2 candidates" in capsys.readouterr().out


def test_a_function_without_source_says_so_in_the_script_and_when_it_is_run(quick_tuning):
    names: dict[str, Any] = {}
    exec("def made(x): return x", names)
    recorded = record(names["made"])
    recorded(X)
    assert "# TODO: made, a function without source, could not be recorded: import or define it here." in (
        recorded.script()
    )
    with pytest.raises(NoCandidateError, match="fill in made, a function without source"):
        exec(compile(recorded.script(), "script", "exec"), {"__name__": "__main__"})


def test_a_global_that_cannot_be_written_says_so_when_it_is_used(quick_tuning):
    lock = (i for i in ())
    recorded = record(lambda x: next(lock, x))
    recorded(X)
    with pytest.raises((NotImplementedError, NoCandidateError, TypeError)):
        exec(compile(recorded.script(), "script", "exec"), {"__name__": "__main__"})


def test_the_example_names_parameters_that_look_like_hyperparameters():
    recorded = record(lambda q, *, causal=True, block_q=64, warps=None: q)
    recorded(X)
    assert 'such as {"block_q": [32, 64, 128], "warps": [32, 64, 128]}' in recorded.script()


def test_arguments_after_a_star_stay_in_place():
    assert rerun(lambda x, *rest, **more: (len(rest), more), X, 1, 2, k=3) == (2, {"k": 3})


def test_positional_only_arguments_stay_in_place():
    def function(x, /, y):
        return y

    assert rerun(function, X, 5) == 5


def test_scripts_do_not_depend_on_the_order_of_sets():
    assert "set(['a', 'b', 'c'])" in _script_of({"c", "a", "b"})


def _script_of(value: Any) -> str:
    recorded = record(lambda x, y: x)
    recorded(X, value)
    return recorded.script()


def test_what_a_notebook_defines_is_written_with_its_source():
    cell = """
        from tune_jax import record

        class Scale:
            def __init__(self, by):
                self.by = by

            def apply(self, x):
                return x * self.by

        @record
        def scaled(x, scale):
            return scale.apply(x)
    """
    lines = textwrap.dedent(cell).splitlines(keepends=True)
    linecache.cache["<cell>"] = (sum(map(len, lines)), None, lines, "<cell>")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile("".join(lines), "<cell>", "exec"), names)
    names["scaled"](X, names["Scale"](3))
    again = names_of(names["scaled"].script())
    _, kwargs = again["CALLS"][0]()
    assert again["FUNCTION"](X, kwargs["scale"]).tolist() == [3, 3, 3]


# Sources and imports


def test_each_lambda_of_a_line_is_told_apart():
    assert read_function(two) == "lambda x: x + 1"
    assert read_function(of_two) == "lambda x: x + 2"


def test_the_text_of_a_function_lacks_its_decorators_and_keeps_its_comments():
    @functools.lru_cache
    def decorated(x):
        # why
        return x

    assert read_function(decorated.__wrapped__) == "def decorated(x):\n    # why\n    return x"


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("def f(x, n=SIZE): return helper(x).shape", ["SIZE", "helper"]),
        ("def f(x: Unknown) -> Other: return x", []),
        ("class C(Base):\n    a = 1\n    b = a\n    def m(self): return other", ["Base", "other"]),
        ("f = lambda x: [y for y in g(x)]", ["g"]),
    ],
)
def test_the_names_that_a_definition_reads(text, names):
    assert names_read(text) == names


def test_a_factory_keeps_strings_of_several_lines():
    names: dict[str, Any] = {}
    exec(make_factory("f", 'def f():\n    return """a\nb"""', ["n"], "make"), names)
    assert names["make"](1)() == "a\nb"


@pytest.mark.parametrize(
    ("name", "folder"), [("math", ""), ("jax.numpy", ""), ("__main__", None), ("not_loaded", None)]
)
def test_where_modules_are_imported_from(name, folder):
    assert import_folder(name) == folder


# In processes of their own

LIBRARY = """
import jax
from tune_jax import record

SCALE = 3

@record(dir_or_buffer="out")
def imported(x, n=2):
    return x * SCALE * n

@jax.jit
@record(dir_or_buffer="out")
def inside(x):
    return x + 1

class Net:
    def __init__(self, w):
        self.w = w

    @record(dir_or_buffer="out")
    def call(self, x):
        return x @ self.w
"""

PROGRAM = """
import dataclasses
import enum
import functools
import jax
import jax.numpy as jnp
import numpy as np
import library
from library import imported, inside, Net
from tune_jax import record, tune

recording = functools.partial(record, dir_or_buffer="out")
SIZE = 4

class Mode(enum.Enum):
    FAST = 1

@dataclasses.dataclass(frozen=True)
class Options:
    mode: Mode
    dtype: object = jnp.bfloat16

def helper(x):
    return x * SIZE

@recording
def in_main(x, options, *, text="a", key=None, sizes=None):
    return helper(x).astype(options.dtype)

@recording
@functools.partial(jax.jit, static_argnames="n")
def jitted(x, n):
    return x[:n]

class Model:
    def __init__(self):
        self.w = jnp.ones((3, 3))

    @recording
    def apply(self, x):
        return x @ self.w

def main():
    x = jnp.ones((3, 3))
    imported(x, n=4)
    inside(x)
    Net(x).call(x)
    in_main(x, Options(Mode.FAST), text="q'\\n\\u20ac", key=jax.random.key(3), sizes=np.arange(3))
    jax.jit(lambda x: in_main(x, Options(Mode.FAST), key=jax.random.PRNGKey(0)))(x)
    jitted(x, 2)
    Model().apply(x)
    scale = 2.0
    def local(x):
        return x * scale
    recording(local)(x)
    recording(lambda x: x + SIZE)(x)
    recording(functools.partial(helper))(x)
    recording(tune(lambda x, *, c: x * c, hyperparams={"c": [1, 2]}))(x)

if __name__ == "__main__":
    main()
"""

RUN_ALL = """
import pathlib, runpy, sys
import tune_jax
tune_jax.CONFIG.profiling_samples = tune_jax.CONFIG.max_rounds = 1
for path in sorted(pathlib.Path(sys.argv[1]).iterdir()):
    print(path.name)
    runpy.run_path(str(path), run_name="__main__")
"""


def _python(*command: str, cwd: pathlib.Path) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "error", *command], cwd=cwd, capture_output=True, text=True, timeout=160
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_scripts_of_a_program_run_in_another_process_and_folder(tmp_path):
    here, elsewhere = tmp_path / "project", tmp_path / "elsewhere"
    here.mkdir()
    elsewhere.mkdir()
    (here / "library.py").write_text(textwrap.dedent(LIBRARY))
    (here / "program.py").write_text(textwrap.dedent(PROGRAM))
    _python("program.py", cwd=here)
    written = sorted(path.name for path in (here / "out").iterdir())
    printed = _python("-c", RUN_ALL, str(here / "out"), cwd=elsewhere)
    assert written == [
        "Model_apply.py", "Net_call.py", "function.py", "function_2.py", "helper.py", "imported.py", "in_main.py",
        "inside.py", "jitted.py", "local.py",
    ]  # fmt: skip
    assert [line for line in printed.splitlines() if line.endswith(".py")] == written
    assert printed.count(" candidate") == 11  # in_main is called in two ways
