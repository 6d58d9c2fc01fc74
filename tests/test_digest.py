"""Values in words that every process says alike."""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import operator
import time
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax._digest import lasting_text


class Shade(enum.Enum):
    LIGHT = 1
    DARK = 2


class Number(enum.IntEnum):
    ONE = 1


@dataclasses.dataclass
class Layout:
    width: int
    names: set[str]


@dataclasses.dataclass
class Noted:
    width: int
    note: object = dataclasses.field(default=None, compare=False)


class Width:
    """Compared by what it holds, which its repr does not show."""

    def __init__(self, width: int) -> None:
        self.width = width

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Width) and self.width == other.width

    def __hash__(self) -> int:
        return self.width


class Thing:
    """Compared by identity."""

    def method(self, x: Any) -> Any:
        return x


def make(add: Any, *, by: int = 1) -> Any:
    def inner(x: Any, scale: int = by) -> Any:
        return scale * x + add

    return inner


def mesh(name: str = "i") -> jax.sharding.Mesh:
    return jax.make_mesh((2,), (name,), devices=jax.devices()[:2])


@jax.custom_vjp
def own_rule(x: Any) -> Any:
    return x


SAME = {
    "object": Thing,
    "method": lambda: Thing().method,
    "closure": lambda: make(3),
    "closure over an array": lambda: make(jnp.arange(3)),
    "jitted": lambda: jax.jit(make(3)),
    "custom rule": lambda: jax.custom_jvp(make(3)),
    "partial": lambda: functools.partial(make(3), scale=2),
    "lambda": lambda: lambda x: x in {"a", "b", "c"},
    "dataclass": lambda: Layout(3, {"a", "b", "c"}),
    "uncompared field": lambda: Noted(3, time.monotonic_ns()),
    "value": lambda: Width(3),
    "array": lambda: np.random.default_rng().standard_normal(4),
    "sharding": lambda: jax.NamedSharding(mesh(), jax.P("i")),
    "generator": lambda: iter([1]),
    "not a number": lambda: float("nan"),
    "tree": lambda: jax.tree.structure({"a": make, "b": 1}),
}


@pytest.mark.parametrize("make_value", SAME.values(), ids=SAME)
def test_what_is_made_alike_reads_alike(make_value):
    first, second = make_value(), make_value()
    assert lasting_text(first) == lasting_text(second)


@pytest.mark.parametrize("make_value", SAME.values(), ids=SAME)
def test_no_text_has_an_address(make_value):
    assert " at 0x" not in lasting_text(make_value())


DIFFERENT = [
    [1, 1.0, True, "1", b"1", Number.ONE, np.int32(1), np.int64(1), None],
    [0.0, -0.0, math.nan, math.inf],
    [Shade.LIGHT, Shade.DARK],
    [(), [], {}, set(), frozenset(), ("",), ((),)],
    [(1, 2), (2, 1), (1, (2,)), ((1,), 2)],
    [{"a": 1}, {"a": 2}, {"b": 1}],
    [Layout(1, {"a"}), Layout(2, {"a"}), Layout(1, {"b"})],
    [Width(1), Width(2), Thing()],
    [make(1), make(2), make(1, by=2), make(make(1)), lambda x: x + 1, lambda x: x + 2, lambda x: x - 1, make],
    [jax.jit(make(1)), jax.jit(make(2)), make(1)],
    [functools.partial(make, 1), functools.partial(make, 2), functools.partial(make, add=1), functools.partial(abs, 1)],
    [Thing().method, Thing.method, Width(1).__eq__],
    [int, float, jnp.float32, np.float32, np.dtype("float32"), jnp.dtype("bfloat16")],
    [np.zeros(3), np.zeros(4), np.zeros((3, 1)), np.zeros(3, np.float32), jnp.zeros(3)],
    [slice(1, 2), slice(1, 3), slice(1, 2, 1), range(1, 2)],
    [abs, len, operator.add, math, types],
    [jax.NamedSharding(mesh(), jax.P("i")), jax.NamedSharding(mesh(), jax.P()), jax.NamedSharding(mesh("j"), jax.P())],
    [jax.nn.relu, jax.nn.gelu, jnp.tanh, own_rule],
]


@pytest.mark.parametrize("values", DIFFERENT, ids=lambda values: f"{type(values[0]).__name__} {len(values)}")
def test_what_differs_reads_differently(values):
    assert len({lasting_text(value) for value in values}) == len(values)


@pytest.mark.parametrize(
    "make_value",
    [
        lambda device: device,
        lambda device: jax.sharding.SingleDeviceSharding(device),
        lambda device: jax.make_mesh((1,), ("i",), devices=[device]),
        lambda device: [jax.NamedSharding(jax.make_mesh((1,), ("i",), devices=[device]), jax.P("i"))],
    ],
    ids=["device", "one device", "mesh", "on a mesh"],
)
def test_each_process_has_its_own_devices(make_value):
    first, second = jax.devices()[:2]
    assert lasting_text(make_value(first)) == lasting_text(make_value(second))


def test_a_function_that_closes_over_itself_has_an_end():
    def recursive(n: int) -> int:
        return recursive(n - 1) if n else 0

    assert "what it is part of" in lasting_text(recursive)


def test_a_function_that_closes_over_what_is_not_there_yet():
    def early() -> Any:
        return later

    assert lasting_text(early).endswith("builtins.NoneType(None))")
    later = 1


def test_a_text_says_types_and_contents():
    assert lasting_text({"a": (1, True)}) == (
        "builtins.dict(builtins.tuple(builtins.str('a'), builtins.tuple(builtins.int(1), builtins.bool(True))))"
    )
    assert lasting_text(np.zeros((2, 3), np.float32)) == "numpy.ndarray(float32[2,3])"


PROBE = """
    import dataclasses, functools
    import jax, jax.numpy as jnp, numpy as np
    from tune_jax._digest import lasting_text

    @dataclasses.dataclass
    class Layout:
        names: set

    class Thing:
        def method(self, x):
            return x in {"a", "b", "c", "d"}

    values = [Layout(set("abcdef")), frozenset("abcdef"), Thing(), Thing().method, jnp.sin, jax.nn.relu, np.zeros(3),
              functools.partial(Thing().method, 1), jax.jit(lambda x: x in {"a", "b", "c"}), jax.devices()[0]]
    print(lasting_text(values))
"""


def test_processes_with_other_hash_seeds_say_the_same(run_python):
    first, second = (run_python(PROBE, PYTHONHASHSEED=seed).stdout for seed in ("1", "2"))
    assert first == second
    assert len(first) > 1000
