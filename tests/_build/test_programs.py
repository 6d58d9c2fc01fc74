"""From a candidate to an executable: what is checked, what makes two programs the same, what a launch does."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from tune_jax import tune
from tune_jax._binding import make_call
from tune_jax._build.programs import Lowering, MismatchError, Program, compile_program, lower_candidate, read_lowering
from tune_jax._outline import abstract_inputs, candidates_of, outline
from tune_jax._records import Candidate

FIRST = Candidate(0, {})
X = jnp.arange(8.0)


def read(function: Callable[..., Any], *args: Any, name: str = "candidate") -> Lowering:
    def renamed(*inputs: Any) -> Any:
        return function(*inputs)

    renamed.__name__ = name
    return read_lowering(FIRST, jax.jit(renamed).lower(*args))


def lower_each(function: Callable[..., Any], grid: dict[str, list[Any]], *args: Any) -> list[Lowering]:
    """Lower the candidates of a tuned function as a tuning does."""
    call, _ = make_call(tune(function, grid)._tunable, args, {})
    avals = [jax.typeof(value) for value in args]
    expected = outline(call, avals)
    return [
        lower_candidate(call, candidate, expected, abstract_inputs(avals), {}, f"t_{candidate.id}")
        for candidate in candidates_of(call)
    ]


def compile_one(function: Callable[..., Any], *args: Any, **options: Any) -> Program:
    lowered = jax.jit(function, **options).lower(*args)
    return compile_program(Lowering(FIRST, "m", None, lowered), tuple(bool(options) for _ in args))


# What makes two programs the same


def test_the_same_computation_under_two_names_has_one_text() -> None:
    first, second = read(jnp.sin, X, name="one"), read(jnp.sin, X, name="two")
    assert (first.module, second.module) == ("jit_one", "jit_two")
    assert first.text == second.text is not None


def test_another_constant_is_another_program() -> None:
    assert read(lambda x: x + 1, X).text != read(lambda x: x + 2, X).text


def test_another_array_constant_is_another_program() -> None:
    one, two = np.arange(8.0), np.arange(8.0) + 1
    assert read(lambda x: x + one, X).text != read(lambda x: x + two, X).text


def test_a_program_with_a_host_callback_is_like_no_other() -> None:
    def call_back(x: jax.Array) -> jax.Array:
        return jax.pure_callback(np.sin, jax.ShapeDtypeStruct(x.shape, x.dtype), x)

    assert read(call_back, X).text is None


def test_a_program_that_prints_is_like_no_other() -> None:
    def shout(x: jax.Array) -> jax.Array:
        jax.debug.print("x")
        return x + 1

    assert read(shout, X).text is None


def test_a_function_that_is_only_called_callback_can_be_shared() -> None:
    @jax.jit
    def callback(x: jax.Array) -> jax.Array:
        return jnp.sin(x)

    assert read(callback, X, name="my_callback").text is not None


def test_programs_for_other_devices_are_not_the_same() -> None:
    def on_devices(first: int) -> Callable[[jax.Array], jax.Array]:
        mesh = Mesh(np.array(jax.devices()[first : first + 2]), ("i",))
        spec = PartitionSpec("i")
        return jax.shard_map(jnp.sin, mesh=mesh, in_specs=spec, out_specs=spec)

    assert read(on_devices(0), X).text != read(on_devices(2), X).text
    assert read(on_devices(2), X).text == read(on_devices(2), X, name="other").text


def test_a_name_that_holds_the_word_module_is_read_whole() -> None:
    lowering = read(jnp.sin, X, name="module_7")
    assert lowering.module == "jit_module_7"
    assert "jit_module_7" not in str(lowering.text)


# What candidates must return


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (lambda x: (x, x), "returns the structure"),
        (lambda x: {"y": x}, "returns the structure"),
        (lambda x: None, "returns the structure"),
        (lambda x: x[:4], r"returns float32\[4\] as its output 0.*returns float32\[8\]"),
        (lambda x: x[None], r"returns float32\[1, 8\] as its output 0"),
        (lambda x: x.astype(jnp.bfloat16), r"returns bfloat16\[8\] as its output 0"),
        (lambda x: x.astype(jnp.int32), r"returns int32\[8\] as its output 0"),
    ],
)
def test_a_candidate_that_returns_something_else_is_refused(other: Callable[..., Any], words: str) -> None:
    def either(x: jax.Array, *, b: int) -> Any:
        return other(x) if b else x + 1

    with pytest.raises(MismatchError, match=words):
        lower_each(either, {"b": [0, 1]}, X)


def test_another_weak_type_is_no_mismatch() -> None:
    def either(x: jax.Array, *, b: int) -> Any:
        return jnp.sum(x) if b else jax.lax.full((), 1.0) * 1.0

    assert len(lower_each(either, {"b": [0, 1]}, X)) == 2


def test_every_candidate_has_a_module_name_of_its_own() -> None:
    lowerings = lower_each(lambda x, *, b: x + b, {"b": [1, 2, 3]}, X)
    assert [lowering.module for lowering in lowerings] == ["jit_t_0", "jit_t_1", "jit_t_2"]


def test_the_callers_matmul_precision_is_in_the_lowered_program() -> None:
    a = jnp.ones((4, 4))
    with jax.default_matmul_precision("highest"):
        (lowering,) = lower_each(lambda x: x @ x, {}, a)
    assert re.search(r"precision = \[HIGHEST, HIGHEST\]", str(lowering.text))


# Launching


def test_a_launch_leaves_donated_inputs_alive() -> None:
    x = jnp.arange(8.0)
    program = compile_one(lambda x: x + 1, x, donate_argnums=0)
    program.launch([x])
    program.launch([x])
    assert not x.is_deleted()
    assert x.tolist() == list(range(8))


def test_a_launch_does_not_copy_what_is_not_donated() -> None:
    x = jnp.arange(8.0)
    given: list[Any] = []
    Program(0, "m", lambda *inputs: given.extend(inputs), 0.0, (False,)).launch([x])
    assert given[0] is x


def test_a_launch_waits_for_every_output() -> None:
    waited: list[int] = []

    class Output:
        def __init__(self, index: int) -> None:
            self.index = index

        def block_until_ready(self) -> None:
            waited.append(self.index)

    Program(0, "m", lambda: (Output(0), {"y": Output(1)}, None, [Output(2)]), 0.0, ()).launch([])
    assert sorted(waited) == [0, 1, 2]
