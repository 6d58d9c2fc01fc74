"""One tuning for several processes. Threads stand for processes here; `test_distributed.py` has real ones."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax import Results, tune
from tune_jax import _together as together
from tune_jax._binding import make_call
from tune_jax._errors import AgreementError, ExampleError, NoCandidateError
from tune_jax._lookup import key_of
from tune_jax._sharing import is_common
from tune_jax._together import tune_together

pytestmark = pytest.mark.usefixtures("quick_tuning", "own_places")

X = np.ones(4, np.float32)
SOON_S = 60.0


class OwnPlaces(dict[str, int]):
    """Real processes each count for themselves; here all are one process, so nobody counts."""

    def __missing__(self, digest: str) -> int:
        return 0

    def __setitem__(self, digest: str, place: int) -> None:
        pass


@pytest.fixture
def own_places(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "_places", OwnPlaces())
    monkeypatch.setattr(together, "is_common", lambda call: False)


class Role(threading.local):
    """Which process the thread stands for."""

    process = 0


ROLE = Role()


def ask(store: Any, tuned: Any, x: Any = X) -> Results:
    ROLE.process = store.process
    call, inputs = make_call(tuned._tunable, (x,), {})
    avals = [jax.typeof(value) for value in inputs]
    return tune_together(store, key_of(call, avals, inputs), call, avals, inputs)


def ask_all(stores: Sequence[Any], tuned: Sequence[Any]) -> list[Any]:
    """What each process gets or raises."""
    with concurrent.futures.ThreadPoolExecutor(len(stores)) as pool:
        running = [pool.submit(ask, *pair) for pair in zip(stores, tuned, strict=True)]
        return [future.exception(SOON_S) or future.result() for future in running]


def scale(x: Any, *, b: int) -> Any:
    return x * b


def fits(table: Any, *, b: int) -> bool:
    return bool(table[b])


def each(count: int, make: Callable[[], Any]) -> list[Any]:
    return [make() for _ in range(count)]


def test_all_hold_what_process_0_found(make_stores, monkeypatch):
    finished = []
    finish_session = together.finish_session

    def note(session: Any) -> Results:
        finished.append(ROLE.process)
        return finish_session(session)

    monkeypatch.setattr(together, "finish_session", note)
    results = ask_all(make_stores(3), each(3, lambda: tune(scale, {"b": [1, 2, 3]})))
    assert results[0].to_dict() == results[1].to_dict() == results[2].to_dict()
    assert len(results[0].timed) == 3
    assert finished == [0]


def test_a_candidate_that_fails_on_one_is_out_on_all(make_stores):
    def fragile(x: Any, *, b: int) -> Any:
        if (ROLE.process, b) in ((0, 1), (1, 2), (2, 1)):
            raise ValueError(f"no {b}")
        return x * b

    results = ask_all(make_stores(3), each(3, lambda: tune(fragile, {"b": [1, 2, 3]})))
    for found in results:
        assert [row.hyperparams["b"] for row in found.timed] == [3]
        messages = {row.hyperparams["b"]: row.failure.message for row in found.failures}
        assert messages == {1: "no 1", 2: "on process 1: no 2"}


def test_candidates_that_share_a_program_with_a_failed_one_go_with_it(make_stores):
    def doubled(x: Any, *, b: int, unused: int) -> Any:
        if (ROLE.process, b, unused) == (1, 2, 0):
            raise ValueError("no room")
        return x * b

    results = ask_all(make_stores(2), each(2, lambda: tune(doubled, {"b": [1, 2], "unused": [0, 1]})))
    for found in results:
        assert {row.hyperparams["b"] for row in found.timed} == {1}
        assert {row.hyperparams["b"] for row in found.failures} == {2}


def test_where_nothing_works_all_hold_the_failures(make_stores):
    def split(x: Any, *, b: int) -> Any:
        if b == ROLE.process:
            raise ValueError("not mine")
        return x * b

    first, second = ask_all(make_stores(2), each(2, lambda: tune(split, {"b": [0, 1]})))
    assert first.to_dict() == second.to_dict()
    assert first.timed == ()
    assert sorted(row.failure.message for row in first.failures) == ["not mine", "on process 1: not mine"]


def test_a_tuning_that_fails_on_all_is_tried_again(make_stores):
    broken = [True]

    def moody(x: Any, *, b: int) -> Any:
        if broken[0]:
            raise ValueError("not yet")
        return x * b

    stores, tuned = make_stores(2), each(2, lambda: tune(moody, {"b": [1, 2]}))
    failed = ask_all(stores, tuned)
    assert [type(error) for error in failed] == [NoCandidateError, NoCandidateError]
    broken[0] = False
    first, second = ask_all(stores, tuned)
    assert len(first.timed) == 2
    assert first.to_dict() == second.to_dict()


def test_a_tuning_without_a_winner_is_tried_again(make_stores):
    calls = []

    def host(x: Any) -> Any:
        calls.append(x)
        return 1 / 0 if len(calls) <= 4 else x

    def moody(x: Any, *, b: int) -> Any:
        return jax.pure_callback(host, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * b

    stores, tuned = make_stores(2), each(2, lambda: tune(moody, {"b": [1, 2]}))
    assert [found.timed for found in ask_all(stores, tuned)] == [(), ()]
    first, second = ask_all(stores, tuned)
    assert len(first.timed) == 2
    assert first.to_dict() == second.to_dict()


def test_all_try_what_process_0_has_drawn(make_stores):
    seeds = iter([5, 6, 7])
    results = ask_all(
        make_stores(3), each(3, lambda: tune(scale, {"b": list(range(100))}, sample_num=3, seed=next(seeds)))
    )
    drawn = {row.id for row in tune(scale, {"b": list(range(100))}, sample_num=3, seed=5).tune(X).rows}
    assert [{row.id for row in found.rows} for found in results] == [drawn] * 3


def test_a_sample_of_a_grid_too_large_to_list_is_drawn_alike(make_stores):
    grid = {name: list(range(1000)) for name in "abcd"}

    def pick(x: Any, *, a: int, b: int, c: int, d: int) -> Any:
        return x * a + b * c - d

    seeds = iter([1, 2])
    first, second = ask_all(make_stores(2), each(2, lambda: tune(pick, grid, sample_num=2, seed=next(seeds))))
    assert [row.hyperparams for row in first] == [row.hyperparams for row in second]
    assert len(first) == 2


def test_a_candidate_that_another_process_leaves_out_is_an_error_on_all(make_stores):
    def where(b: int) -> bool:
        return b > ROLE.process

    came = ask_all(make_stores(2), each(2, lambda: tune(scale, {"b": [1, 2]}, where=where)))
    message = "scale: process 0 tries 2 candidates, and `where` leaves 1 here, of which 0 are others; let `where` say"
    for error in came:
        with pytest.raises(AgreementError, match=message):
            raise error


def test_values_that_no_text_can_hold_are_each_processs_own(make_stores):
    def apply(x: Any, *, act: Any) -> Any:
        return act(x)

    results = ask_all(make_stores(2), each(2, lambda: tune(apply, {"act": [jnp.sin, jnp.tanh]})))
    for found in results:
        assert {row.hyperparams["act"] for row in found.rows} == {jnp.sin, jnp.tanh}


def test_who_asks_again_finds_the_results_alone(make_stores):
    stores, tuned = make_stores(2), each(2, lambda: tune(scale, {"b": [1, 2]}))
    before = ask_all(stores, tuned)
    assert ask(stores[1], tuned[1]).to_dict() == before[0].to_dict()
    assert list(stores[0].list("tune_jax")) == [name for name in stores[0].shelf.texts if name.endswith("/0/0/outcome")]


def test_an_error_on_one_is_told_to_all(make_stores):
    came = ask_all(make_stores(2), [tune(scale, {"b": [1, 2]}), tune(scale, {"b": [1, 2]}, example_args=(X[:2],))])
    assert [type(error) for error in came] == [AgreementError, ExampleError]
    assert str(came[0]).startswith("process 1 could not tune [scale(x: float32[4]); cpu")
    assert str(came[0]).endswith(f"ExampleError: {came[1]}")


def test_after_an_error_the_next_call_is_another_attempt(make_stores):
    examples = iter([(X[:2],), (X,)])
    stores = make_stores(2)
    tuned = [tune(scale, {"b": [1, 2]}), tune(scale, {"b": [1, 2]}, example_args=lambda **_: next(examples))]
    assert [type(error) for error in ask_all(stores, tuned)] == [AgreementError, ExampleError]
    first, second = ask_all(stores, tuned)
    assert first.to_dict() == second.to_dict()


@pytest.fixture
def real_places(own_places: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(together, "_places", together.collections.Counter())
    monkeypatch.setattr(together, "_common", {})
    monkeypatch.setattr(together, "is_common", is_common)


@pytest.mark.usefixtures("real_places")
def test_equal_functions_are_one_tuning(make_stores):
    (store,) = make_stores(1)
    first, second = (ask(store, tune(lambda x, *, b: x * b, {"b": [1, 2]})) for _ in range(2))
    assert len(store.shelf.texts) == 1
    assert first.to_dict() == second.to_dict()


@pytest.mark.usefixtures("real_places")
def test_an_equal_function_goes_on_after_the_failures_of_the_first(make_stores):
    (store,) = make_stores(1)

    def fail(x: Any, *, b: int) -> Any:
        return jax.pure_callback(lambda x: 1 / 0, jax.ShapeDtypeStruct(x.shape, x.dtype), x) * b

    assert [len(ask(store, tune(fail, {"b": [1, 2]})).timed) for _ in range(3)] == [0, 0, 0]
    assert sorted(key.split("/")[-2] for key in store.shelf.texts) == ["0", "1", "2"]


@pytest.mark.usefixtures("real_places")
def test_functions_that_cannot_be_compared_are_two_tunings(make_stores):
    (store,) = make_stores(1)
    tables = np.ones(3), np.ones(3)
    first, second = (ask(store, tune(scale, {"b": [1, 2]}, where=functools.partial(fits, table))) for table in tables)
    assert len(store.shelf.texts) == 2
    assert first.to_dict() != second.to_dict()
