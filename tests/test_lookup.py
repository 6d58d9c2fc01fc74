"""Finding the winner of a call: one tuning a key, whoever asks and from however many threads."""

from __future__ import annotations

import concurrent.futures
import itertools
import threading
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax import Results, tune
from tune_jax import _lookup as lookup
from tune_jax._binding import make_call
from tune_jax._errors import NoCandidateError
from tune_jax._key import digest_of

pytestmark = pytest.mark.usefixtures("quick_rounds")

X = jnp.ones((8, 8))
SOON_S = 60.0


def scale(x: jax.Array, *, b: int) -> jax.Array:
    return x * b


@pytest.fixture
def sessions(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a test's tunings were for, in the order they began."""
    begun: list[str] = []
    run_session = lookup.run_session

    def note(call: Any, avals: Any, given: Any) -> Results:
        begun.append(f"{call.tunable.name}{[aval.shape for aval in avals]}")
        return run_session(call, avals, given)

    monkeypatch.setattr(lookup, "run_session", note)
    return begun


def run_together(pool: concurrent.futures.Executor, *actions: Callable[[], Any]) -> list[Any]:
    start = threading.Barrier(len(actions), timeout=SOON_S)

    def run(action: Callable[[], Any]) -> Any:
        start.wait()
        return action()

    running = [pool.submit(run, action) for action in actions]
    return [future.result(SOON_S) for future in running]


def test_ten_threads_with_one_key_tune_once(sessions: list[str], background: concurrent.futures.Executor) -> None:
    tuned = tune(scale, {"b": [2, 3]})
    outputs = run_together(background, *[lambda: tuned(X)] * 10)
    assert len(sessions) == 1
    assert {float(out[0, 0]) for out in outputs} == {float(tuned.optimal_hyperparams["b"])}


def test_threads_with_one_key_get_the_same_results(background: concurrent.futures.Executor) -> None:
    tuned = tune(scale, {"b": [2, 3]})
    results = run_together(background, *[lambda: tuned.tune(X)] * 5)
    assert len({id(each) for each in results}) == 1


def test_threads_with_other_keys_get_their_own_winners(
    sessions: list[str], background: concurrent.futures.Executor
) -> None:
    tuned = tune(scale, {"b": [2, 3]})
    inputs = [jnp.ones((size, 4)) for size in (1, 2, 3, 4)]
    outputs = run_together(background, *[lambda x=x: tuned(x) for x in inputs for _ in range(2)])
    assert sorted(sessions) == [f"scale[({size}, 4)]" for size in (1, 2, 3, 4)]
    for x, out in zip([x for x in inputs for _ in range(2)], outputs, strict=True):
        assert out.shape == x.shape
        assert float(out[0, 0]) == tuned.results_for(x).best.hyperparams["b"]


def test_what_users_hold_is_of_one_tuning_though_many_end_at_once(background: concurrent.futures.Executor) -> None:
    def sized(x: jax.Array, *, b: int) -> jax.Array:
        return x * b

    # The grid depends on the shape, so timing results that mix two tunings have values of both.
    tuned = tune(sized, lambda x: {"b": [10 * x.shape[0] + 1, 10 * x.shape[0] + 2]})
    run_together(background, *[lambda size=size: tuned.tune(jnp.ones((size, 2))) for size in (1, 2, 3, 4)])
    held = {result.hyperparams["b"] // 10 for result in tuned.timing_results.values()}
    assert len(held) == 1
    assert len(tuned.timing_results) == 2
    assert {row.hyperparams["b"] // 10 for row in tuned.results.rows} == held
    assert tuned.optimal_hyperparams == tuned.results.best.hyperparams


def test_threads_that_wait_for_a_tuning_that_fails_all_get_its_error(
    background: concurrent.futures.Executor,
) -> None:
    def never(x: jax.Array, *, b: int) -> jax.Array:
        time.sleep(0.01)
        raise TypeError("no block")

    tuned = tune(never, {"b": [1, 2]})

    def call() -> type[BaseException] | None:
        with pytest.raises(NoCandidateError, match="no block") as caught:
            tuned.tune(X)
        return caught.type

    assert run_together(background, call, call, call) == [NoCandidateError] * 3


def test_a_key_can_be_tuned_again_after_a_tuning_that_failed(
    sessions: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = tune(scale, {"b": [2, 3]})
    with monkeypatch.context() as patched:
        patched.setattr(lookup, "run_session", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            tuned.tune(X)
    assert tuned.results is None
    assert len(tuned.tune(X).timed) == 2


def test_an_interrupted_thread_lets_the_next_one_tune(
    background: concurrent.futures.Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    tuned = tune(scale, {"b": [2, 3]})
    run_session, inside = lookup.run_session, threading.Event()

    def first_is_interrupted(*args: Any) -> Results:
        if inside.is_set():
            return run_session(*args)
        inside.set()
        time.sleep(0.1)
        raise KeyboardInterrupt

    monkeypatch.setattr(lookup, "run_session", first_is_interrupted)
    first = background.submit(tuned.tune, X)
    assert inside.wait(SOON_S)
    second = background.submit(tuned.tune, X)
    with pytest.raises(KeyboardInterrupt):
        first.result(SOON_S)
    assert len(second.result(SOON_S).timed) == 2


def test_a_thread_that_meets_its_own_tuning_takes_the_first_candidate(monkeypatch: pytest.MonkeyPatch) -> None:
    tuned, found = tune(scale, {"b": [3, 2]}), []
    run_session = lookup.run_session

    def meet(call: Any, avals: Any, given: Any) -> Results:
        found.append(lookup.find_winner(call, avals, given))
        return run_session(call, avals, given)

    monkeypatch.setattr(lookup, "run_session", meet)
    tuned.tune(X)
    assert [dict(candidate.hyperparams) for candidate in found] == [{"b": 3}]


def test_a_function_that_calls_itself_for_ever_is_an_error() -> None:
    @tune(hyperparams={"b": [3, 2]})
    def again(x: jax.Array, *, b: int) -> jax.Array:
        return again(x) * b

    with pytest.raises(NoCandidateError, match="again calls itself with arguments of the same shapes"):
        again(X)


@pytest.mark.parametrize("count", [2, 3])
def test_threads_whose_tunings_need_each_other_in_a_circle_do_not_wait_for_ever(
    count: int, monkeypatch: pytest.MonkeyPatch, background: concurrent.futures.Executor
) -> None:
    functions = [tune(lambda x, *, b, i=i: x * b + i, {"b": [2, 3]}) for i in range(count)]
    places = {function._tunable: index for index, function in enumerate(functions)}
    all_begun, tuned, found = threading.Barrier(count, timeout=SOON_S), [], []
    run_session = lookup.run_session

    def need_the_next(call: Any, avals: Any, given: Any) -> Results:
        tuned.append(places[call.tunable])
        all_begun.wait()
        needed, _ = make_call(functions[(places[call.tunable] + 1) % count]._tunable, (X,), {})
        found.append(lookup.find_winner(needed, avals, given))
        return run_session(call, avals, given)

    monkeypatch.setattr(lookup, "run_session", need_the_next)
    outputs = run_together(background, *[lambda f=f: f.tune(X) for f in functions])
    assert all(results.timed for results in outputs)
    assert sorted(tuned) == list(range(count))
    assert len(found) == count


def test_two_tuned_functions_that_call_a_third_at_once(background: concurrent.futures.Executor) -> None:
    inner = tune(scale, {"b": [2, 3]})
    outers = [tune(lambda x, *, c, k=k: inner(x) + c + k, {"c": [0, 1]}) for k in range(3)]
    for out in run_together(background, *[lambda outer=outer: outer(X) for outer in outers]):
        assert out.shape == X.shape


def test_tune_and_a_call_share_what_they_find(sessions: list[str]) -> None:
    tuned = tune(scale, {"b": [2, 3]})
    results = tuned.tune(X)
    out = tuned(X)
    assert len(sessions) == 1
    assert float(out[0, 0]) == results.best.hyperparams["b"]


def test_an_abstract_and_a_concrete_array_share_a_key(sessions: list[str]) -> None:
    tuned = tune(scale, {"b": [2, 3]})
    assert tuned.tune(jax.ShapeDtypeStruct(X.shape, X.dtype)) is tuned.tune(X)
    assert len(sessions) == 1


def test_a_call_under_jit_and_an_eager_one_share_a_key(sessions: list[str]) -> None:
    tuned = tune(scale, {"b": [2, 3]})
    jax.jit(lambda x: tuned(tuned(x)))(X)
    tuned(X)
    assert len(sessions) == 1


def test_a_call_with_nothing_to_choose_is_not_tuned(sessions: list[str]) -> None:
    tuned = tune(scale, {"b": [2, 3]})
    assert float(tuned(X, b=7)[0, 0]) == 7
    assert sessions == []


def test_lowering_for_a_platform_that_is_not_here_takes_the_first_candidate_and_says_so(sessions: list[str]) -> None:
    tuned = tune(scale, {"b": [2, 3]})
    with pytest.warns(UserWarning, match="no tpu device is here to tune on"):
        text = jax.jit(tuned).trace(X).lower(lowering_platforms=("tpu",)).as_text()
    assert "2.000000e+00" in text
    assert sessions == []


def test_a_device_of_another_index_shares_the_key(sessions: list[str]) -> None:
    tuned = tune(scale, {"b": [2, 3]})
    for device in jax.devices()[:3]:
        assert tuned(jax.device_put(X, device)).devices() == {device}
    assert len(sessions) == 1


def test_the_latest_results_are_shown_and_earlier_ones_kept() -> None:
    tuned = tune(scale, {"b": [2, 3]})
    shown = tuned.timing_results
    first, second = tuned.tune(X), tuned.tune(X[:4])
    assert tuned.results is second
    assert tuned.results_for(X) is first
    assert tuned.timing_results is shown
    assert set(shown) == {0, 1}


def test_results_of_a_tuning_that_failed_are_the_latest_and_found_for_no_call(sessions: list[str]) -> None:
    tuned = tune(lambda x, *, b: x * b if x.ndim == 2 else x.no_such_thing, {"b": [2, 3]})
    tuned.tune(X)
    for count in (2, 3):
        with pytest.raises(NoCandidateError, match="no_such_thing"):
            tuned.tune(X[0])
        assert len(sessions) == count
    assert tuned.results is not None
    assert (len(tuned.results.timed), len(tuned.results.failures)) == (0, 2)
    assert tuned.results.call == "x: float32[8]"
    assert tuned.results_for(X[0]) is None


def test_a_call_that_was_only_asked_whether_it_stands_alone_has_not_failed() -> None:
    tuned = tune(lambda x, *, b: jax.lax.psum(x, "i") * b, {"b": [2, 3]})
    with pytest.warns(UserWarning, match="needs the axis names around it"):
        jax.vmap(jax.grad(lambda x: tuned(x).sum()), axis_name="i")(X)
    assert tuned.results is None
    with pytest.raises(NoCandidateError):
        tuned(X)
    assert tuned.results is not None


def test_the_key_reads_well_and_its_digest_fits_a_file_name() -> None:
    tuned = tune(scale, {"b": [2, 3]})
    call, inputs = make_call(tuned._tunable, (X,), {})
    key = lookup.key_of(call, [jax.typeof(value) for value in inputs], inputs)
    assert str(key).startswith("scale(x: float32[8,8])")
    assert digest_of(key, call).isalnum()
    assert len(digest_of(key, call)) == 32


def test_a_callback_of_a_program_being_timed_does_not_wait_for_itself() -> None:
    inner = tune(lambda y, *, b: y * b / b, {"b": [1, 2]})
    runs = itertools.count()

    def host(value: Any) -> Any:
        # The first runs come before the timing; this one falls into it.
        if next(runs) == 5:
            with pytest.warns(UserWarning, match="is called back by a program that is being timed"):
                inner(jnp.ones(8))
        return np.asarray(value)

    outer = tune(
        lambda x, *, b: jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * b / b, {"b": [1, 2]}
    )
    assert outer(jnp.ones(4)).shape == (4,)
    assert next(runs) > 5
