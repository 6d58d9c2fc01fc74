"""The random programs of `benchmarks/stress.py`: a few of them, and whether it sees what is wrong."""

from __future__ import annotations

import pathlib
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import tune_jax
from tune_jax._lookup import SHARED, memory_of

pytestmark = pytest.mark.usefixtures("quick_tuning")

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "benchmarks"
SEED = 0


# Its neighbours there import each other by their plain names.
with pytest.MonkeyPatch.context() as _patch:
    _patch.syspath_prepend(str(FOLDER))
    import _programs as programs
    import stress

SMALL = [number for number in range(60) if len(programs.draw(SEED, number).layers) <= 3][:12]


@pytest.mark.parametrize("number", SMALL)
def test_a_random_program_agrees_and_tunes_each_key_once(number: int) -> None:
    program = programs.draw(SEED, number)
    assert stress.check(program) > 0, program


def test_programs_are_drawn_again_by_their_number() -> None:
    drawn = [str(programs.draw(7, number)) for number in range(40)]
    assert drawn == [str(programs.draw(7, number)) for number in range(40)]
    assert len(set(drawn)) == 40
    assert drawn[:5] != [str(programs.draw(8, number)) for number in range(5)]


def test_every_layer_base_and_context_is_drawn() -> None:
    drawn = [programs.draw(SEED, number) for number in range(300)]
    layers = {layer.text.partition("[")[0] for program in drawn for layer in program.layers}
    forms = {"grad": "grad", "jvp": "linearize"}
    assert {forms.get(kind.__name__, kind.__name__) for kind in programs.LAYERS} <= layers
    assert {program.base for program in drawn} == set(programs.BASES)
    assert {program.context for program in drawn} == set(programs.CONTEXTS)


# Tuned functions that are broken in one way each, which the check must see


class Broken:
    """A tuned function with something between it and its callers."""

    def __init__(self, tuned: Any, before_call: Callable[..., Any]) -> None:
        self._tuned = tuned
        self._tunable = tuned._tunable
        self._before_call = before_call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self._before_call(self._tuned, args)
        return self._tuned(*args, **kwargs)


def broken_by(before_call: Callable[..., Any]) -> Callable[..., Any]:
    return lambda function, **options: Broken(tune_jax.tune(function, **options), before_call)


def wrong_under_vmap(function: Callable[..., Any], **options: Any) -> Any:
    @jax.custom_batching.custom_vmap
    def shifted(x: Any) -> Any:
        return x

    @shifted.def_vmap
    def rule(size: int, mapped: Any, x: Any) -> Any:
        return x + 1, mapped[0]

    def wrapped(*args: Any, factor: int = 1) -> Any:
        return jax.tree.map(shifted, function(*args, factor=factor))

    return tune_jax.tune(wrapped, **options)


def weaker(function: Callable[..., Any], **options: Any) -> Any:
    return tune_jax.tune(
        lambda *args, factor=1: jax.tree.map(lambda leaf: leaf.astype("bfloat16"), function(*args, factor=factor)),
        **options,
    )


def forget(tuned: Any, args: Any) -> None:
    memory_of(tuned._tunable).results.clear()
    SHARED.clear()


class Kept:
    """Holds on to what it is given."""

    def __init__(self) -> None:
        self.values: list[Any] = []

    def __call__(self, tuned: Any, args: Any) -> None:
        self.values.append(args)


def spoil_settings(tuned: Any, args: Any) -> None:
    jax.config.update("jax_default_matmul_precision", "tensorfloat32")


def tune_unbatched(tuned: Any, args: Any) -> None:
    tuned.tune(*(jax.ShapeDtypeStruct((7,), jnp.float32) for _ in args))


BROKEN = {
    "wrong under vmap": (wrong_under_vmap, "values differ"),
    "another dtype": (weaker, "came, .* was expected"),
    "tunes again": (broken_by(forget), "tunings: |it tuned"),
    "keeps a tracer": (broken_by(Kept()), "[Ll]eaked"),
    "changes a setting": (broken_by(spoil_settings), "settings are not as they were: jax_default_matmul_precision"),
    "tunes another shape": (broken_by(tune_unbatched), r"keys that should not: \n  \('base', \(\(\(7,\)"),
}


@pytest.fixture
def precision_as_before() -> Iterator[None]:
    yield
    jax.config.update("jax_default_matmul_precision", None)


@pytest.mark.usefixtures("precision_as_before")
@pytest.mark.parametrize("how", BROKEN)
def test_a_broken_tuned_function_is_found_out(how: str) -> None:
    plain = programs.Argument((3,), "float32")
    inner = programs.Spec(plain, plain, frozenset({programs.Site("base", (((3,), "float32"),) * 2)}))
    layer = programs.vmap(random.Random(0), inner)
    program = programs.assemble("smooth", [layer], "plain", layer.spec)
    broken, expected = BROKEN[how]
    with pytest.raises(Exception, match=expected):
        stress.check(program, broken)
    assert stress.check(program) == 1


def test_the_command_prints_what_failed_and_how_to_run_it_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(stress, "check", lambda program: 1 / (4 - program.spec.y.weak * 4))
    monkeypatch.setattr(stress, "_measure_little", lambda: None)
    monkeypatch.setattr(sys, "argv", ["stress.py", "--programs", "20", "--seed", "0"])
    with pytest.raises(SystemExit):
        stress.main()
    text = capsys.readouterr().out
    weak = [number for number in range(20) if programs.draw(0, number).spec.y.weak]
    assert f"--only {weak[0]} --seed 0\n{programs.draw(0, weak[0])}" in text
    assert f"20 programs (seed 0), {(20 - len(weak)) / 4} tunings, {len(weak)} failures {weak}" in text
