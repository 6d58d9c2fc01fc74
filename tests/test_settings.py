"""A tuning under the caller's settings: candidates see them, and they are afterwards as they were."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import tune_jax
from tune_jax._errors import NoCandidateError

pytestmark = pytest.mark.usefixtures("quick_tuning")

X = np.linspace(0.5, 2.0, 12, dtype=np.float32).reshape(3, 4)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A setting of JAX by its flag: a value, the context manager that sets it, and what candidates see of it."""

    value: Any
    enter: Callable[[Any], contextlib.AbstractContextManager[Any]]
    seen: Any = None

    @property
    def expected(self) -> Any:
        return self.value if self.seen is None else self.seen


SETTINGS = {
    "jax_default_matmul_precision": Setting("highest", jax.default_matmul_precision),
    "jax_enable_x64": Setting(True, jax.enable_x64),
    "jax_numpy_dtype_promotion": Setting("strict", jax.numpy_dtype_promotion),
    "jax_debug_nans": Setting(True, jax.debug_nans, seen=False),
    "jax_debug_infs": Setting(True, jax.debug_infs, seen=False),
    "jax_disable_jit": Setting(True, jax.disable_jit, seen=False),
    "jax_log_compiles": Setting(True, jax.log_compiles),
    "jax_check_tracer_leaks": Setting(True, lambda _: jax.checking_leaks()),
    "jax_default_prng_impl": Setting("rbg", jax.default_prng_impl),
    "jax_threefry_partitionable": Setting(False, jax.threefry_partitionable),
}


def read(flag: str) -> Any:
    return getattr(jax.config, flag)


@contextlib.contextmanager
def updated(flag: str, value: Any) -> Iterator[None]:
    """The setting for the whole process rather than for this thread."""
    before = read(flag)
    jax.config.update(flag, value)
    try:
        yield
    finally:
        jax.config.update(flag, before)


def enter(flag: str, way: str) -> contextlib.AbstractContextManager[Any]:
    setting = SETTINGS[flag]
    return setting.enter(setting.value) if way == "context" else updated(flag, setting.value)


def watched(flag: str, seen: list[Any]) -> Any:
    """A tuned function that notes a setting whenever a candidate is traced."""

    def function(x: Any, *, factor: int) -> Any:
        seen.append(read(flag))
        return jnp.sin(x) * factor / factor

    return tune_jax.tune(function, hyperparams={"factor": [1, 2]}, progress=False)


@pytest.mark.parametrize("way", ["context", "update"])
@pytest.mark.parametrize("flag", SETTINGS)
def test_candidates_are_traced_under_the_callers_settings_which_stay_as_they_were(flag: str, way: str) -> None:
    seen: list[Any] = []
    before = read(flag)
    with enter(flag, way):
        results = watched(flag, seen).tune(X)
        assert read(flag) == SETTINGS[flag].value
    assert read(flag) == before
    assert set(seen) == {SETTINGS[flag].expected}
    assert len(results.timed) == 2


@pytest.mark.parametrize("around", [lambda f: f, jax.jit, lambda f: jax.grad(lambda x: f(x).sum())])
@pytest.mark.parametrize("flag", SETTINGS)
def test_a_call_under_the_callers_settings_agrees_and_leaves_them_as_they_were(flag: str, around: Any) -> None:
    with enter(flag, "context"):
        came = around(watched(flag, []))(X)
        assert read(flag) == SETTINGS[flag].value
        expected = around(jnp.sin)(X)
    assert came.dtype == expected.dtype
    np.testing.assert_allclose(came, expected, rtol=1e-6)


@pytest.mark.parametrize("flag", SETTINGS)
def test_settings_are_as_they_were_after_a_tuning_that_raises(flag: str) -> None:
    def fails(x: Any, *, factor: int) -> Any:
        raise ZeroDivisionError

    before = read(flag)
    with enter(flag, "context"):
        with pytest.raises(NoCandidateError, match="ZeroDivisionError"):
            tune_jax.tune(fails, hyperparams={"factor": [1, 2]}, progress=False)(X)
        assert read(flag) == SETTINGS[flag].value
    assert read(flag) == before


@pytest.mark.parametrize("way", ["context", "update"])
def test_a_default_device_is_where_candidates_run_and_results_are(way: str) -> None:
    device, before = jax.devices()[2], jax.config.jax_default_device  # type: ignore[attr-defined]
    tuned = watched("jax_default_device", seen := [])
    with jax.default_device(device) if way == "context" else updated("jax_default_device", device):
        out = tuned(X)
        assert read("jax_default_device") == device
    assert read("jax_default_device") == before
    assert set(seen) == {device}
    assert out.devices() == {device}


def test_strict_promotion_refuses_a_mix_although_it_was_tuned_without() -> None:
    tuned = tune_jax.tune(
        lambda x, y, *, factor: x * y * factor / factor, hyperparams={"factor": [1, 2]}, progress=False
    )
    weights = np.arange(4, dtype=np.int32)
    np.testing.assert_allclose(tuned(X, weights), X * weights, rtol=1e-6)
    with jax.numpy_dtype_promotion("strict"), pytest.raises(ValueError, match="TypePromotionError"):
        tuned(X, weights)


GUARDED = {"eager": lambda f: f, "jit": jax.jit, "vmap": lambda f: jax.jit(jax.vmap(f, in_axes=(0, None)))}


@pytest.mark.parametrize("level", ["disallow", "disallow_explicit"])
@pytest.mark.parametrize("way", GUARDED)
def test_a_transfer_guard_of_either_level_has_nothing_to_object_to(level: str, way: str) -> None:
    def noisy(x: Any, key: Any, *, factor: int) -> Any:
        return x * factor / factor + 0 * jax.random.normal(key, x.shape)

    tuned = tune_jax.tune(noisy, hyperparams={"factor": [1, 2]}, progress=False)
    arguments = jax.device_put((X, jax.random.key(0)))
    with jax.transfer_guard(level):
        out = jax.block_until_ready(GUARDED[way](tuned)(*arguments))
    np.testing.assert_allclose(out, X, rtol=1e-6)
    assert tuned.results.failures == ()


def test_the_callers_logs_of_compiles_name_every_candidate(caplog: pytest.LogCaptureFixture) -> None:
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        watched("jax_log_compiles", []).tune(X)
    text = caplog.text
    assert all(any(f"_function_{candidate}" in line for line in text.splitlines()) for candidate in (0, 1))


def test_a_tuning_in_another_thread_goes_by_that_threads_settings(background: Any) -> None:
    tuned = watched("jax_enable_x64", seen := [])
    with jax.enable_x64(True):
        other = background.submit(tuned, X.astype(np.float64)).result(60)
        own = tuned(X.astype(np.float64))
    assert (other.dtype, own.dtype) == (np.float32, np.float64)
    assert set(seen) == {False, True}
