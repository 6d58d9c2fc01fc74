"""Tuning a whole program: every call is found wherever it is, tuned once, and nothing but winners is left behind."""

from __future__ import annotations

import functools
import gc
import io
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import tune_jax
from tune_jax import tune, tune_all
from tune_jax._lookup import memory_of
from tune_jax._recording import current_recording

pytestmark = pytest.mark.usefixtures("quick_tuning")

X = np.linspace(-1.0, 2.0, 12, dtype=np.float32).reshape(3, 4)
Y = np.linspace(0.5, 1.0, 4, dtype=np.float32)
STRUCT = jax.ShapeDtypeStruct(X.shape, X.dtype)

WINNER = 2


def marked(x: jax.Array, *, mark: int) -> jax.Array:
    """Value and slope tell the candidate: the first, which stands in while recording, is slow and never wins."""
    rounds = 5000 if mark == 1 else 1
    return x * mark + 0 * lax.fori_loop(0, rounds, lambda _, a: jnp.sin(a), x)


def make(function: Callable[..., Any] = marked, **options: Any) -> Any:
    return tune(function, {"mark": [1, WINNER]}, progress=False, **options)


def tuned_shapes(function: Any) -> list[list[int]]:
    """The shapes of the first input of all that a function was tuned for, in order."""
    return [list(key.avals[0].shape) for key in memory_of(function._tunable).results]


def places(results: tune_jax.ProgramResults) -> list[tuple[str, int]]:
    """In which function each call is made, and how often."""
    return [(call.site.rpartition(" in ")[2], call.count) for call in results]


def summed(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*args).sum()


# Where calls are found. Each program is a transformation of a tuned function; with the winner, its result is what the
# same one of `x * 2` is.


def _inner_jits(f):
    inner = jax.jit(f)
    return lambda x: inner(x) + jax.jit(lambda x: inner(x + 1))(x)


def _scan(f):
    return lambda x: lax.scan(lambda total, row: (total + f(row), None), jnp.zeros(4), x)[0]


def _while(f):
    return lambda x: lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, f(c[1])), (0, x))[1]


def _while_condition(f):
    return lambda x: lax.while_loop(lambda c: f(c).sum() < 1e3, lambda c: c + 1, x)


def _cond(f):
    return lambda x: lax.cond(x.sum() < 100, f, lambda x: x, x)


def _own_vjp(f):
    @jax.custom_vjp
    def wrapped(x):
        return f(x)

    wrapped.defvjp(lambda x: (f(x), x), lambda kept, slope: (f(kept) * slope,))
    return wrapped


def _own_vjp_that_differentiates(f):
    @jax.custom_vjp
    def wrapped(x):
        return x

    wrapped.defvjp(lambda x: (jax.grad(summed(f))(x), None), lambda _, slope: (jax.grad(summed(f))(slope) + slope,))
    return wrapped


def _own_jvp(f):
    @jax.custom_jvp
    def wrapped(x):
        return f(x)

    wrapped.defjvp(lambda primals, slopes: (f(*primals), jax.jvp(f, primals, slopes)[1] + f(*slopes)))
    return wrapped


GRAD = lambda f: jax.grad(summed(f))  # noqa: E731
PROGRAMS: dict[str, tuple[Callable[..., Any], list[int]]] = {
    "call": (lambda f: lambda x: f(x), [3, 4]),
    "the function itself": (lambda f: f, [3, 4]),
    "jit": (jax.jit, [3, 4]),
    "inner jits": (_inner_jits, [3, 4]),
    "vmap": (jax.vmap, [3, 4]),
    "vmap of jit": (lambda f: jax.vmap(jax.jit(f)), [3, 4]),
    "vmap of grad": (lambda f: jax.vmap(GRAD(f)), [4]),
    "vmap of grad of jit": (lambda f: jax.vmap(GRAD(jax.jit(f))), [4]),
    "scan": (_scan, [4]),
    "grad of scan": (lambda f: GRAD(_scan(f)), [4]),
    "while": (_while, [3, 4]),
    "while condition": (_while_condition, [3, 4]),
    "cond": (_cond, [3, 4]),
    "grad of cond": (lambda f: GRAD(_cond(f)), [3, 4]),
    "checkpoint": (jax.checkpoint, [3, 4]),
    "grad of checkpoint": (lambda f: GRAD(jax.checkpoint(f)), [3, 4]),
    "grad of scan of checkpoint": (lambda f: GRAD(_scan(jax.checkpoint(f))), [4]),
    "grad": (GRAD, [3, 4]),
    "grad of inner jits": (lambda f: GRAD(_inner_jits(f)), [3, 4]),
    "jit of grad of jit": (lambda f: jax.jit(GRAD(jax.jit(f))), [3, 4]),
    "jvp": (lambda f: lambda x: jax.jvp(f, (x,), (x,)), [3, 4]),
    "jvp of jit": (lambda f: lambda x: jax.jvp(jax.jit(f), (x,), (x,)), [3, 4]),
    "vjp": (lambda f: lambda x: jax.vjp(f, x)[1](x), [3, 4]),
    "linearize": (lambda f: lambda x: jax.linearize(f, x)[1](x), [3, 4]),
    "hessian": (lambda f: lambda x: jax.hessian(summed(f))(x[0]), [4]),
    "inside custom_vjp": (_own_vjp, [3, 4]),
    "grad of custom_vjp": (lambda f: GRAD(_own_vjp(f)), [3, 4]),
    "grad of jit of custom_vjp": (lambda f: GRAD(jax.jit(_own_vjp(f))), [3, 4]),
    "grad inside of custom_vjp": (lambda f: GRAD(jax.jit(_own_vjp_that_differentiates(f))), [3, 4]),
    "jvp of custom_jvp": (lambda f: lambda x: jax.jvp(_own_jvp(f), (x,), (x,)), [3, 4]),
    "jvp of jit of custom_jvp": (lambda f: lambda x: jax.jvp(jax.jit(_own_jvp(f)), (x,), (x,)), [3, 4]),
    "closure convert": (lambda f: lambda x: jax.closure_convert(f, x)[0](x), [3, 4]),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_call_is_found_tuned_once_and_its_winner_is_what_runs(name, count_tunings):
    transform, shape = PROGRAMS[name]
    function = make()
    program = transform(function)
    with jax.checking_leaks():
        results = tune_all(program, X)
    assert tuned_shapes(function) == [shape]
    assert {call.results.best.hyperparams["mark"] for call in results} == {WINNER}
    expected = transform(lambda x: x * WINNER)(X)
    jax.tree.map(np.testing.assert_allclose, jax.jit(program)(X), expected)
    jax.tree.map(np.testing.assert_allclose, program(X), expected)
    assert count_tunings() == 1


@pytest.mark.parametrize("name", [name for name in PROGRAMS if "jit" in name or "custom" in name])
def test_a_program_that_jax_has_traced_before_runs_the_winner_too(name, count_tunings):
    transform, _ = PROGRAMS[name]
    program = transform(make())
    jax.eval_shape(program, X)
    tune_all(program, X)
    jax.tree.map(np.testing.assert_allclose, jax.jit(program)(X), transform(lambda x: x * WINNER)(X))
    assert count_tunings() == 1


def test_no_mark_of_the_recording_is_left_in_a_program():
    layer = jax.jit(make())
    program = jax.value_and_grad(summed(lambda x: layer(layer(x))))
    tune_all(program, X)
    traced = jax.jit(program).trace(X)
    assert "placed_call" not in str(traced.jaxpr)
    assert "2.000000e+00" in traced.lower().as_text()


def test_a_call_under_shard_map_is_tuned_for_local_shapes(count_tunings):
    function = make()
    mesh = jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))
    program = jax.shard_map(lambda x: f_and_slope(function, x), mesh=mesh, in_specs=P("a"), out_specs=P("a"))
    tune_all(program, X.T)
    assert tuned_shapes(function) == [[2, 3]]
    value, slope = jax.jit(program)(X.T)
    np.testing.assert_allclose(value, 2 * X.T)
    np.testing.assert_allclose(slope, np.full_like(X.T, 2))
    assert count_tunings() == 1


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_a_call_of_sharded_arguments_is_tuned_once(kind, count_tunings):
    function = make()
    mesh = jax.make_mesh((2,), ("a",), axis_types=(kind,))
    with jax.set_mesh(mesh):
        x = jax.device_put(X.T, jax.sharding.NamedSharding(mesh, P("a")))
        program = functools.partial(f_and_slope, function)
        tune_all(program, x)
        value, _ = jax.jit(program)(x)
    np.testing.assert_allclose(value, 2 * X.T)
    assert value.sharding.spec[0] == "a"
    assert count_tunings() == 1


def f_and_slope(function: Callable[..., Any], x: Any) -> tuple[Any, Any]:
    return function(x), jax.grad(summed(function))(x)


def test_settings_inside_a_program_are_those_that_its_calls_are_tuned_under(count_tunings):
    function = make()

    def program(x):
        with jax.default_matmul_precision("highest"):
            slope = jax.grad(summed(function))(x)
        return slope + function(x)

    results = tune_all(program, X)
    assert [key.settings[0][1] for key in memory_of(function._tunable).results] == ["highest", None]
    assert jax.config.jax_default_matmul_precision is None
    assert sorted(places(results)) == [("<lambda>", 1), ("program", 1)]
    jax.jit(program)(X)
    assert count_tunings() == 2


def test_a_program_is_recorded_as_under_jit_where_jit_is_disabled(count_tunings):
    function = make()
    program = _while(function)
    with jax.disable_jit():
        tune_all(program, X)
        assert jax.config.jax_disable_jit
        program(X)
    assert count_tunings() == 1


# Nothing of the user's is run


def test_the_program_is_not_run():
    seen = []

    def program(x):
        jax.debug.callback(seen.append, x.sum())
        return function(x)

    function = make()
    tune_all(program, X)
    jax.effects_barrier()
    assert seen == []


def test_the_arguments_values_are_not_looked_at():
    seen = []

    def watch(x, *, mark):
        jax.debug.callback(lambda x: seen.append(float(x.max())), x)
        return x * mark

    tune_all(make(watch), jax.device_put(np.full((3, 4), 77.0, np.float32)))
    jax.effects_barrier()
    assert seen
    assert 77.0 not in seen


@pytest.mark.parametrize("around", [lambda f: f, lambda f: jax.jit(lambda x: f(x))], ids=["jitted", "inside"])
def test_donated_arguments_are_left_alone(around, count_tunings):
    function = make()
    step = around(jax.jit(lambda x: function(x) + 1, donate_argnums=0))
    x = jax.device_put(X)
    tune_all(step, x)
    assert not x.is_deleted()
    np.testing.assert_allclose(step(x), 2 * X + 1)
    assert count_tunings() == 1


# What a program may be


class Model:
    def __init__(self, function: Any, size: float) -> None:
        self.function = function
        self.size = size

    def step(self, x: Any) -> Any:
        return self.function(x) * self.size

    @functools.partial(jax.jit, static_argnums=(0, 2))
    def repeated(self, x: Any, times: int) -> Any:
        for _ in range(times):
            x = self.function(x)
        return x


def test_a_jitted_function_has_static_arguments(count_tunings):
    function = make()

    @functools.partial(jax.jit, static_argnames=("times", "kind"))
    def step(x, times, *, kind):
        for _ in range(times):
            x = function(x) if kind == "twice" else x
        return x

    assert places(tune_all(step, STRUCT, 3, kind="twice")) == [("step", 3)]
    np.testing.assert_allclose(step(X, 3, kind="twice"), 8 * X)
    assert count_tunings() == 1


def test_a_jitted_function_that_was_tuned_for_runs_without_another_trace():
    function, traces = make(), []

    @jax.jit
    def step(x):
        traces.append(x)
        return jax.grad(summed(function))(x)

    step(X)
    tune_all(step, X)
    before = len(traces)
    np.testing.assert_allclose(step(X), np.full_like(X, 2))
    assert len(traces) == before


def test_methods_and_partials(count_tunings):
    model = Model(make(), 3.0)
    assert places(tune_all(model.step, STRUCT)) == [("Model.step", 1)]
    np.testing.assert_allclose(jax.jit(model.step)(X), 6 * X)
    assert places(tune_all(model.repeated, STRUCT, 2)) == [("Model.repeated", 2)]
    assert places(tune_all(functools.partial(model.repeated, times=2), STRUCT)) == [("Model.repeated", 2)]
    np.testing.assert_allclose(model.repeated(X, 2), 4 * X)
    assert places(tune_all(functools.partial(Model.step, model), x=STRUCT)) == [("Model.step", 1)]
    assert count_tunings() == 1


def test_a_tuned_function_and_a_tuned_method(count_tunings):
    class Layer:
        @tune(hyperparams={"mark": [1, WINNER]}, static_argnames="self")
        def apply(self, x, *, mark):
            return marked(x, mark=mark)

    layer, function = Layer(), make()
    (first,) = tune_all(function, STRUCT)
    (second,) = tune_all(layer.apply, STRUCT)
    assert (first.results.function, second.results.function) == ("marked", "apply")
    assert first.site.endswith(" in marked")
    function(X), layer.apply(X)
    assert count_tunings() == 2


def test_a_tuned_function_takes_numbers_as_its_callers_give_them(count_tunings):
    function = make(lambda x, times, *, mark: sum(marked(x, mark=mark) for _ in range(times)))
    tune_all(function, STRUCT, 3)
    np.testing.assert_allclose(function(X, 3), 6 * X)
    assert count_tunings() == 1


def test_arguments_are_pytrees_with_anything_in_them(count_tunings):
    function = make()

    def program(params, *rest, scale, act, kind):
        return {"out": act(function(params["w"])) * scale, "kind": kind, "none": None}

    def jitted(params, scale):
        return program(params, scale=scale, act=jnp.tanh, kind="any")["out"]

    tune_all(program, {"w": STRUCT, "unused": None}, "text", scale=0.5, act=jnp.tanh, kind="any")
    np.testing.assert_allclose(jax.jit(jitted)({"w": X}, 0.5), np.tanh(2 * X) * 0.5, rtol=1e-5)
    assert count_tunings() == 1


def test_numbers_are_traced_as_jit_traces_them():
    found = []

    def program(x, number, flag):
        found.extend([number, flag])
        return x

    tune_all(program, X, 3, True)
    assert [isinstance(value, jax.core.Tracer) for value in found] == [True, True]


def test_an_abstract_and_a_concrete_argument_are_the_same_tuning(count_tunings):
    function = make()
    for argument in (STRUCT, X, jax.device_put(X), jax.device_put(X, jax.devices()[3])):
        tune_all(lambda x: function(x), argument)
    assert count_tunings() == 1


def test_random_keys_pass():
    function = make(lambda key, *, mark: marked(jax.random.normal(key, (4,)), mark=mark))
    (call,) = tune_all(lambda key: function(jax.random.split(key)[0]), jax.random.key(0))
    assert call.results.best.hyperparams == {"mark": WINNER}


# Which calls are tuned, and in what order


def test_the_call_with_most_work_is_tuned_first():
    small, large = (make(lambda x, *, mark, size=size: marked(x @ x.T, mark=mark) * size) for size in (1, 2))

    def program(a, b):
        return small(a), lax.scan(lambda c, _: (c + small(a)[0, 0], None), 0.0, length=3), large(b)

    results = tune_all(program, np.ones((4, 4), np.float32), np.ones((64, 64), np.float32))
    assert [(call.results.call, call.count) for call in results] == [
        ("x: float32[64,64]", 1),
        ("x: float32[4,4]", 3),
        ("x: float32[4,4]", 1),
    ]


def test_work_is_counted_with_how_often_a_call_is_made(caplog):
    once, often = make(), make()

    def program(x):
        return once(x), lax.scan(lambda c, row: (c + often(row), None), Y, jnp.tile(x, (20, 1)))[0]

    with caplog.at_level("INFO", "tune_jax"):
        results = tune_all(program, X)
    assert [call.count for call in results] == [60, 1]
    assert ["float32[4])" in line for line in caplog.messages] == [True, False]


def test_places_come_by_the_work_that_is_done_there():
    small, large = make(), make(lambda x, *, mark: marked(x @ x.T, mark=mark))

    def program(x):
        first = lax.scan(lambda c, _: (small(c), None), x, length=9)[0]
        return small(first), large(jnp.tile(x, (30, 30)))

    calls = [(call.results.function, call.count) for call in tune_all(program, X)]
    assert calls == [("<lambda>", 1), ("marked", 9), ("marked", 1)]


def test_one_tuning_serves_every_place_that_makes_the_call(count_tunings):
    function = make()

    def program(x):
        first = function(x)
        return function(first) + function(x + 1)

    results = tune_all(program, X)
    assert places(results) == [("program", 2), ("program", 1)]
    assert int(results[0].place.rpartition(":")[2]) == int(results[1].place.rpartition(":")[2]) + 1
    assert len({id(call.results) for call in results}) == 1
    assert count_tunings() == 1


def test_what_is_computed_again_for_a_derivative_counts_again():
    function = make(lambda x, *, mark: jnp.sin(marked(x, mark=mark)))

    def loss(x, around):
        return lax.scan(lambda c, _: (around(lambda c: function(c))(c), None), x, length=5)[0].sum()

    assert [call.count for call in tune_all(jax.grad(functools.partial(loss, around=lambda f: f)), X)] == [5]
    assert [call.count for call in tune_all(jax.grad(functools.partial(loss, around=jax.checkpoint)), X)] == [10]


def test_a_call_in_an_inner_jit_counts_each_time_that_is_called():
    inner = jax.jit(make())
    (call,) = tune_all(lambda x: inner(inner(inner(x))), X)
    assert call.count == 3


def test_calls_inside_candidates_are_found(count_tunings):
    inner = make()
    outer = make(lambda x, *, mark: inner(x) * mark)
    results = tune_all(lambda x: outer(outer(x)), X)
    assert sorted((call.results.function, call.count) for call in results) == [("<lambda>", 2), ("marked", 2)]
    assert count_tunings() == 2


def _slow(x):
    return x + 0 * lax.fori_loop(0, 20000, lambda _, a: jnp.sin(a), x)


def test_calls_that_only_the_winner_makes_are_found(count_tunings):
    inner = make()
    outer = make(lambda x, *, mark: _slow(x) if mark == 1 else inner(x))
    program = lambda x: lax.scan(lambda c, _: (outer(c), None), x, length=3)[0]  # noqa: E731
    results = tune_all(program, X)
    assert sorted((call.results.function, call.count) for call in results) == [("<lambda>", 3), ("marked", 3)]
    np.testing.assert_allclose(jax.jit(program)(X), 8 * X)
    assert count_tunings() == 2


def test_calls_that_only_the_winners_derivative_makes_are_found(count_tunings):
    inner = make()

    @jax.custom_vjp
    def fast(x):
        return x

    fast.defvjp(lambda x: (x, inner(x)), lambda kept, slope: (kept * slope,))
    outer = make(lambda x, *, mark: _slow(x) if mark == 1 else fast(x))
    program = jax.grad(summed(outer))
    results = tune_all(program, X)
    assert sorted(call.results.function for call in results) == ["<lambda>", "marked"]
    np.testing.assert_allclose(jax.jit(program)(X), 2 * X)
    assert count_tunings() == 2


def test_forward_and_backward_are_one_call_where_that_is_asked_for(count_tunings):
    function = make(with_vjp=True)
    program = jax.grad(summed(jax.jit(function)))
    (call,) = tune_all(program, X)
    assert call.results.call == "x: float32[3,4], with its vjp by x"
    np.testing.assert_allclose(jax.jit(program)(X), np.full_like(X, 2))
    assert count_tunings() == 1


def test_what_is_tuned_already_is_not_tuned_again(count_tunings):
    function = make()
    known = function.tune(X)
    (call,) = tune_all(lambda x: function(x), X)
    assert call.results is known
    assert count_tunings() == 1


def test_a_call_with_nothing_to_choose_is_not_listed():
    function = make()
    assert len(tune_all(lambda x: function(x, mark=1), X)) == 0


def test_a_program_without_tuned_calls_says_so():
    def program(x):
        return x

    results = tune_all(program, X)
    assert len(results) == 0
    assert str(results) == "program makes no call that can be tuned."


# What goes wrong


def test_the_recording_is_left_when_the_program_raises(count_tunings):
    function = make()

    def program(x):
        jax.grad(summed(function))(x)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        tune_all(program, X)
    assert current_recording() is None
    assert count_tunings() == 0
    np.testing.assert_allclose(jax.jit(jax.grad(summed(function)))(X), np.full_like(X, 2))


def test_a_failure_does_not_lose_the_other_results(count_tunings):
    def fail(x):
        raise ValueError("broken on the host")

    function = make()
    broken = make(lambda x, *, mark: jax.pure_callback(fail, STRUCT, x))

    def program(x):
        return broken(x) + function(x)

    with pytest.warns(UserWarning, match=r"program has calls without a winner.\ncall \d, .* broken on the host"):
        results = tune_all(program, X)
    (failed,) = results.failures
    assert [row.failure.stage for row in failed.results.rows] == ["run", "run"]
    (good,) = (call for call in results if call not in results.failures)
    assert good.results.best.hyperparams == {"mark": WINNER}
    assert function(X).shape == X.shape


def test_an_example_that_does_not_fit_does_not_lose_the_other_results():
    function, wrong = make(), make(example_args=(np.ones(7, np.float32),))
    with pytest.warns(UserWarning, match="without a winner"):
        results = tune_all(lambda x: function(wrong(x)), X)
    (failed,) = results.failures
    assert "example" in failed.results.warnings[0]
    assert len(results) == 2


def test_a_call_that_cannot_be_timed_on_its_own_is_shown_with_the_reason(count_tunings):
    def collect(x, *, mark):
        return lax.psum(x, "i") * mark

    program = jax.vmap(jax.grad(summed(make(collect))), axis_name="i")
    with pytest.warns(UserWarning, match=r"it needs the axis names around it \(i\)") as caught:
        (call,) = tune_all(program, X)
    assert len(caught) == 1
    assert call.results.timed == ()
    assert count_tunings() == 0


def test_what_no_tuning_can_do_without_is_an_error_at_once(monkeypatch, tmp_path):
    monkeypatch.setattr(tune_jax.CONFIG, "allow_fallback_timing", False)
    function = make()
    with jax.profiler.trace(str(tmp_path)), pytest.raises(tune_jax.TuneError, match="profil"):
        tune_all(lambda x: function(x), X)


def test_an_interrupted_tuning_keeps_what_was_tuned_before(monkeypatch):
    from tune_jax import _program

    first, second = make(), make(lambda x, *, mark: marked(x, mark=mark))
    tune_alone = _program.tune_alone

    def interrupt(alone, given):
        if alone.call.tunable is second._tunable:
            raise KeyboardInterrupt
        return tune_alone(alone, given)

    monkeypatch.setattr(_program, "tune_alone", interrupt)
    with pytest.raises(KeyboardInterrupt):
        tune_all(lambda x: (first(jnp.tile(x, (9, 9))), second(x)), X)
    assert len(first.results.timed) == 2
    assert current_recording() is None


# Others


def test_other_threads_tune_as_usual_meanwhile(background, count_tunings):
    function, recorded = make(), make(lambda x, *, mark: marked(x, mark=mark))
    inside, done = threading.Event(), threading.Event()

    def program(x):
        slope = jax.grad(summed(recorded))(x)
        inside.set()
        assert done.wait(60)
        return slope

    running = background.submit(tune_all, program, X)
    assert inside.wait(60)
    try:
        np.testing.assert_allclose(jax.jit(jax.grad(summed(function)))(X), np.full_like(X, 2))
        assert function.results.best.hyperparams == {"mark": WINNER}
    finally:
        done.set()
    assert len(running.result()) == 1
    assert count_tunings() == 2


def test_two_threads_that_tune_one_program_tune_each_call_once(background, count_tunings):
    function = make()
    program = jax.jit(jax.grad(summed(function)))
    futures = [background.submit(tune_all, program, X) for _ in range(4)]
    assert len({id(future.result()[0].results) for future in futures}) == 1
    assert count_tunings() == 1


def test_a_program_may_tune_another_while_it_is_traced(count_tunings):
    inner, outer = make(), make()

    def program(x):
        assert len(tune_all(jax.grad(summed(inner)), STRUCT)) == 1
        assert current_recording() is not None
        return outer(x)

    assert len(tune_all(program, X)) == 1
    assert {f.results.best.hyperparams["mark"] for f in (inner, outer)} == {WINNER}


def test_what_a_program_is_made_of_is_let_go():
    def function(x, *, mark):
        return jnp.sin(x) * mark

    alive = weakref.ref(function)
    tune_all(jax.jit(jax.grad(summed(jax.jit(make(function))))), X)
    del function
    gc.collect()
    gc.collect()
    assert alive() is None


def test_one_bar_is_shown_for_all(monkeypatch):
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    function = tune(marked, {"mark": [1, WINNER]}, progress=True)

    def step(x):
        return function(x), function(x[0])

    tune_all(step, X)
    assert "tuning step" in stream.getvalue()
    assert "2/2" in stream.getvalue()
    assert "compiling" not in stream.getvalue()
