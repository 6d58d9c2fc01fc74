"""What becomes of candidates that fail: every candidate ends as exactly one row, with a stage and a reason."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax import CONFIG, Results, TuneError, tabulate, tune
from tune_jax._build import threads
from tune_jax._errors import ProfileError
from tune_jax._measure import timers

pytestmark = pytest.mark.usefixtures("quick_rounds")

X = jnp.ones((16, 16))


def call_back(callback: Callable[[np.ndarray], np.ndarray], x: jax.Array) -> jax.Array:
    return jax.pure_callback(callback, jax.ShapeDtypeStruct(x.shape, x.dtype), x)


def fail(error: Exception) -> Any:
    raise error


def reasons(results: Results) -> dict[int, tuple[str, str, str]]:
    return {r.id: (r.failure.stage, r.failure.error_type, r.failure.first_line) for r in results.failures}


def check_rows(results: Results, count: int) -> None:
    assert sorted(row.id for row in results.rows) == list(range(count))
    assert all((row.failure is None) == (row.median_s is not None) for row in results.rows)


@pytest.mark.parametrize(
    "other",
    [lambda x: (x, x), lambda x: None, lambda x: x[:8], lambda x: x.astype(jnp.bfloat16)],
    ids=["structure", "nothing", "shape", "dtype"],
)
def test_a_candidate_that_returns_something_else_fails_at_trace(other: Callable[[jax.Array], Any]) -> None:
    results = tune(lambda x, *, b: other(x) if b else x + 1, {"b": [0, 1]}).tune(X)
    assert reasons(results)[1][:2] == ("trace", "MismatchError")
    check_rows(results, 2)


def test_the_first_that_traces_says_what_to_return() -> None:
    def scale(x: jax.Array, *, b: int) -> Any:
        if b == 0:
            raise ValueError("no such block")
        return (x, x) if b == 1 else x

    results = tune(scale, {"b": [0, 1, 2]}).tune(X)
    assert [row.id for row in results.timed] == [1]
    assert {key: reason[0] for key, reason in reasons(results).items()} == {0: "trace", 2: "trace"}


def test_a_candidate_that_does_not_compile_fails_at_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    compile_program = threads.compile_program

    def compile_some(lowering: Any, donated: Any) -> Any:
        if lowering.candidate.hyperparams["b"] == 2:
            raise RuntimeError("INTERNAL: ptxas exited with non-zero error code 65280")
        return compile_program(lowering, donated)

    monkeypatch.setattr(threads, "compile_program", compile_some)
    results = tune(lambda x, *, b: x * b, {"b": [1, 2, 3]}).tune(X)
    assert reasons(results) == {1: ("compile", "RuntimeError", "INTERNAL: ptxas exited with non-zero error code 65280")}
    check_rows(results, 3)


def test_a_program_that_xla_refuses_fails_at_compile() -> None:
    def custom(x: jax.Array, *, b: int) -> jax.Array:
        if b == 0:
            return x + 1
        return jax.ffi.ffi_call("nobody_registered_this", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)

    results = tune(custom, {"b": [0, 1]}).tune(X)
    stage, _, line = reasons(results)[1]
    assert stage in ("compile", "run")
    assert "nobody_registered_this" in line


def test_a_host_callback_that_raises_fails_at_run_and_says_why() -> None:
    def calling(x: jax.Array, *, b: int) -> jax.Array:
        return call_back(lambda v: fail(ValueError(f"boom {b}")) if b else v, x)

    results = tune(calling, {"b": [0, 1, 2]}).tune(X)
    assert {key: (stage, line) for key, (stage, _, line) in reasons(results).items()} == {
        1: ("run", "ValueError: boom 1"),
        2: ("run", "ValueError: boom 2"),
    }
    check_rows(results, 3)


def test_the_process_is_usable_after_a_host_callback_raised() -> None:
    def calling(x: jax.Array, *, b: int) -> jax.Array:
        jax.debug.callback(lambda v: fail(ValueError("boom")) if b else None, x)
        return x * 2

    tune(calling, {"b": [0, 1]}).tune(X)
    jax.effects_barrier()
    assert float((X + 1).sum()) == 2 * X.size


def test_a_candidate_that_fails_only_when_it_is_timed_is_a_failure_at_run() -> None:
    calls: list[int] = []

    def calling(x: jax.Array, *, b: int) -> jax.Array:
        def callback(v: np.ndarray) -> np.ndarray:
            calls.append(b)
            return v if b == 0 or calls.count(b) < 3 else fail(ValueError("third time"))

        return call_back(callback, x)

    results = tune(calling, {"b": [0, 1]}).tune(X)
    assert reasons(results) == {1: ("run", "JaxRuntimeError", "ValueError: third time")}
    assert results.best.id == 0
    check_rows(results, 2)


def test_a_candidate_that_has_failed_is_not_launched_again() -> None:
    calls: list[int] = []

    def calling(x: jax.Array, *, b: int) -> jax.Array:
        def callback(v: np.ndarray) -> np.ndarray:
            calls.append(b)
            return v if b == 0 or calls.count(b) < 2 else fail(ValueError("second time"))

        return call_back(callback, x)

    tune(calling, {"b": [0, 1]}).tune(X)
    assert calls.count(1) == 2


@pytest.mark.parametrize("device_time", [True, False])
def test_a_candidate_that_fails_when_it_is_timed_does_not_end_the_race_of_others(
    device_time: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CONFIG, "profiling_samples", 6)
    monkeypatch.setattr(CONFIG, "max_rounds", 18)
    if not device_time:
        monkeypatch.setattr(timers, "record_trace", lambda run, **_: fail(ProfileError("none today")))
    calls: list[int] = []

    def calling(x: jax.Array, *, b: int) -> jax.Array:
        def callback(v: np.ndarray) -> np.ndarray:
            calls.append(b)
            return v if b or calls.count(b) < 2 else fail(ValueError("second time"))

        for _ in range(b and 10):
            x = jnp.sin(x)
        return call_back(callback, x)

    with contextlib.nullcontext() if device_time else pytest.warns(match="wall clock"):
        results = tune(calling, {"b": [0, 1, 2]}).tune(X)
    # The two that are left do the same, so only a bound or a tie after several stretches ends their race.
    assert all(len(row.samples_ns) > CONFIG.profiling_samples for row in results.timed)
    assert [row.id for row in results.failures] == [0]


def test_candidates_of_one_program_fail_together() -> None:
    def zero(x: jax.Array, *, b: int) -> jax.Array:
        return jax.ffi.ffi_call("nobody_registered_this", jax.ShapeDtypeStruct(x.shape, x.dtype))(x) if b else x + 1

    results = tune(zero, {"b": [0, 1, 2]}).tune(X)
    assert [row.id for row in results.failures] == [1, 2]
    check_rows(results, 3)


def test_running_out_of_memory_is_said_in_the_row_and_leaves_nothing_held() -> None:
    held: list[weakref.ref[np.ndarray]] = []

    def hungry(x: jax.Array, *, b: int) -> jax.Array:
        if b:
            block = np.zeros(500 << 20, np.uint8)
            held.append(weakref.ref(block))
            raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate 200000000000 bytes.")
        return x + 1

    results = tune(hungry, {"b": [0, 1]}).tune(X)
    stage, _, line = reasons(results)[1]
    assert stage == "trace"
    assert line.startswith("out of memory: RESOURCE_EXHAUSTED")
    gc.collect()
    assert held
    assert all(block() is None for block in held)


def test_out_of_memory_in_a_run_is_said_in_the_row() -> None:
    def hungry(x: jax.Array, *, b: int) -> jax.Array:
        return call_back(lambda v: fail(MemoryError("RESOURCE_EXHAUSTED")) if b else v, x)

    assert "out of memory" in reasons(tune(hungry, {"b": [0, 1]}).tune(X))[1][2]


def test_if_all_fail_each_distinct_error_is_said_with_its_count() -> None:
    def never(x: jax.Array, *, b: int) -> jax.Array:
        raise (TypeError("no block") if b < 2 else ValueError("too large"))

    with pytest.raises(ValueError, match=r"^No hyperparameters compiled successfully") as caught:
        tune(never, {"b": [0, 1, 2]}).tune(X)
    assert "2 of 3 at trace: TypeError: no block" in str(caught.value)
    assert "1 of 3 at trace: ValueError: too large" in str(caught.value)
    assert isinstance(caught.value, TuneError)


def test_if_all_fail_to_run_each_distinct_error_is_said() -> None:
    def never(x: jax.Array, *, b: int) -> jax.Array:
        return call_back(lambda v: fail(ValueError(f"boom {b % 2}")), x)

    with pytest.raises(ValueError, match=r"^No hyperparameters compiled successfully") as caught:
        tune(never, {"b": [0, 1, 2]}).tune(X)
    assert "2 of 3 at run: JaxRuntimeError: ValueError: boom 0" in str(caught.value)
    assert "1 of 3 at run: JaxRuntimeError: ValueError: boom 1" in str(caught.value)


def test_if_all_fail_when_they_are_timed_no_clock_is_blamed() -> None:
    calls: list[int] = []

    def calling(x: jax.Array, *, b: int) -> jax.Array:
        def callback(v: np.ndarray) -> np.ndarray:
            calls.append(b)
            return v if calls.count(b) < 2 else fail(ValueError("second time"))

        return call_back(callback, x)

    with pytest.raises(ValueError, match="ValueError: second time"):
        tune(calling, {"b": [0, 1]}).tune(X)


def test_a_call_of_a_function_that_all_fail_for_says_so_too() -> None:
    def never(x: jax.Array, *, b: int) -> jax.Array:
        raise TypeError("no block")

    with pytest.raises(ValueError, match=r"^No hyperparameters compiled successfully(?s:.*)2 of 2 at trace"):
        tune(never, {"b": [0, 1]})(X)


def test_a_function_that_all_fail_for_can_be_called_again_with_other_arguments() -> None:
    @tune(hyperparams={"b": [1, 2]})
    def picky(x: jax.Array, *, b: int) -> jax.Array:
        return x * b if x.ndim == 2 else fail(ValueError("two dimensions, please"))

    with pytest.raises(ValueError, match="two dimensions"):
        picky(X[0])
    assert picky(X).shape == X.shape


def test_failures_are_in_the_table_below_the_times() -> None:
    results = tune(lambda x, *, b: x if b else fail(TypeError("no block 0")), {"b": [0, 1]}).tune(X)
    assert "no block 0" in tabulate(results)


def reshape(x: jax.Array) -> jax.Array:
    return x.reshape(3, 3)


@pytest.mark.parametrize("how", ["call", "tune", "jit", "vmap"])
def test_if_all_fail_to_trace_the_error_leads_to_the_users_line_and_the_rows_are_kept(how: str) -> None:
    tuned = tune(lambda x, *, b: reshape(x) * b, {"b": [1, 2]})
    ways = {"call": tuned, "tune": tuned.tune, "jit": jax.jit(tuned), "vmap": jax.vmap(tuned)}
    with pytest.raises(ValueError, match=r"^No hyperparameters compiled successfully") as caught:
        ways[how](X)
    last = str(caught.value).splitlines()[-2:]
    assert __file__ in last[0]
    assert last[0].endswith("in reshape")
    assert last[1].strip() == "return x.reshape(3, 3)"
    check_rows(tuned.results, 2)
    assert len(tuned.results.failures) == 2
    table = tabulate(tuned)
    assert "ids 0, 1 (2 candidates): failed at trace: TypeError: cannot reshape" in table
    assert "float32[" in table


def test_if_all_fail_to_run_the_error_names_the_callback_and_the_rows_are_kept() -> None:
    def callback(value: np.ndarray) -> np.ndarray:
        raise ValueError("boom")

    tuned = tune(lambda x, *, b: call_back(callback, x) * b, {"b": [1, 2]})
    with pytest.raises(ValueError, match=r"^No hyperparameters compiled successfully") as caught:
        tuned(X)
    assert str(caught.value).splitlines()[-1].endswith("in callback")
    assert "failed at run: JaxRuntimeError: ValueError: boom" in tabulate(tuned)


def test_what_failed_is_no_winner_and_leaves_the_dicts_as_they_are() -> None:
    picky = tune(lambda x, *, b: x * b if x.ndim == 2 else fail(ValueError("two, please")), {"b": [1, 2]})
    picky(X)
    best, times = dict(picky.optimal_hyperparams), dict(picky.timing_results)
    with pytest.raises(ValueError, match="two, please"):
        picky(X[0])
    assert picky.results.timed == ()
    with pytest.raises(ValueError, match="two, please"):
        _ = picky.results.best
    assert picky.results_for(X[0]) is None
    assert (picky.optimal_hyperparams, picky.timing_results) == (best, times)
    picky(X[:4])
    assert len(picky.results.timed) == 2


def test_a_tuned_function_inside_that_fails_says_its_first_error_in_the_outer_row() -> None:
    inner = tune(lambda x, *, b: fail(TypeError("no block")), {"b": [1, 2]})
    outer = tune(lambda x, *, c: inner(x) if c else x, {"c": [0, 1]})
    outer(X)
    assert reasons(outer.results)[1] == ("trace", "NoCandidateError", "2 of 2 at trace: TypeError: no block")


def test_a_candidate_whose_exception_cannot_say_its_message_is_one_row() -> None:
    class Mute(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    results = tune(lambda x, *, b: fail(Mute()) if b else x, {"b": [0, 1]}).tune(X)
    assert reasons(results)[1][:2] == ("trace", "Mute")
    check_rows(results, 2)


@pytest.mark.parametrize(
    "use",
    [lambda x, n: sum(x for _ in range(n)), lambda x, n: x if n > 2 else -x, lambda x, n: x.reshape(n, -1)],
    ids=["range", "if", "shape"],
)
def test_a_later_candidate_that_needs_a_number_says_what_to_declare(use: Callable[[jax.Array, Any], Any]) -> None:
    def scale(x: jax.Array, scale: float, n: int, *, b: int) -> jax.Array:
        return use(x, n).reshape(x.shape) * scale if b else x * n * scale

    results = tune(scale, {"b": [0, 1]}).tune(X, 2.0, 4)
    stage, _, line = reasons(results)[1]
    assert (stage, line) == (
        "trace",
        "it needs the value of n while it is traced; pass static_argnames=['n'] to tune",
    )
    assert tune(scale, {"b": [0, 1]}, static_argnames=["n"]).tune(X, 2.0, 4).failures == ()


def test_nothing_is_to_be_declared_where_a_candidate_needs_the_value_of_an_array() -> None:
    def branch(x: jax.Array, n: int, *, b: int) -> jax.Array:
        return -x if b and x.sum() > 0 else x * n

    results = tune(branch, {"b": [0, 1]}).tune(X, 2)
    assert "static_argnames" not in results.failures[0].failure.message
