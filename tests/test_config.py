"""The settings: what each takes, and how the rest is refused."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

import numpy as np
import pytest

from tune_jax import CONFIG, TuneError
from tune_jax._config import Config
from tune_jax._errors import OptionError

ROUNDS = ["profiling_samples", "max_rounds"]
AMOUNTS = ["max_measure_s", "separation", "tie_tolerance"]
FLAGS = ["allow_fallback_timing", "find_optimal_layouts_automatically"]
SECONDS = ["agreement_timeout_s"]


def test_every_setting_is_checked_here() -> None:
    assert sorted(ROUNDS + AMOUNTS + FLAGS + SECONDS) == sorted(field.name for field in dataclasses.fields(Config))


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("value", [1, 500, np.int64(4)])
def test_a_number_of_rounds_is_taken(name: str, value: Any) -> None:
    config = Config()
    setattr(config, name, value)
    assert getattr(config, name) == value


@pytest.mark.parametrize("name", ROUNDS)
@pytest.mark.parametrize("value", [0, -1, 2.5, 3.0, math.inf, math.nan, "3", None, True, [3], np.array([3, 4])])
def test_what_is_no_number_of_rounds_is_refused(name: str, value: Any) -> None:
    message = (
        f"CONFIG.{name} is {value!r} of type {type(value).__name__}; expected a whole number of rounds, at least 1, "
        f"such as the default, {getattr(Config(), name)}."
    )
    with pytest.raises(OptionError, match=re.escape(message)):
        setattr(Config(), name, value)


@pytest.mark.parametrize("name", AMOUNTS)
@pytest.mark.parametrize("value", [0, 2, 0.5, math.inf, np.float32(0.5), np.int8(3)])
def test_an_amount_is_taken(name: str, value: Any) -> None:
    config = Config()
    setattr(config, name, value)
    assert getattr(config, name) == value


@pytest.mark.parametrize("name", AMOUNTS)
@pytest.mark.parametrize("value", [-1, -0.1, math.nan, -math.inf, "1", None, False, 1j, np.ones(2)])
def test_what_is_no_amount_is_refused(name: str, value: Any) -> None:
    with pytest.raises(OptionError, match=rf"CONFIG\.{name} is .* of type \w+; expected a number, at least 0, such as"):
        setattr(Config(), name, value)


@pytest.mark.parametrize("value", [True, False])
def test_a_flag_is_taken(value: bool) -> None:
    config = Config()
    config.allow_fallback_timing = value
    assert config.allow_fallback_timing is value


@pytest.mark.parametrize("value", [0, 1, None, "no", np.True_])
def test_what_is_no_flag_is_refused(value: Any) -> None:
    with pytest.raises(
        OptionError, match=r"allow_fallback_timing is .*; expected True or False, such as the default, T"
    ):
        Config().allow_fallback_timing = value


@pytest.mark.parametrize("value", [1, 7200, 1.5, math.inf, np.float32(2)])
def test_a_number_of_seconds_is_taken(value: Any) -> None:
    config = Config()
    config.agreement_timeout_s = value
    assert config.agreement_timeout_s == value


@pytest.mark.parametrize("value", [0, 0.9, -1, math.nan, "60", None, True])
def test_what_is_no_number_of_seconds_is_refused(value: Any) -> None:
    with pytest.raises(OptionError, match=r"expected a number of seconds, at least 1, such as the default, 300\.0"):
        Config().agreement_timeout_s = value


def test_a_setting_that_there_is_not_is_refused_with_those_there_are() -> None:
    with pytest.raises(
        AttributeError, match=r"CONFIG has no setting 'max_round'; it has profiling_samples, max_rounds, "
    ):
        CONFIG.max_round = 3  # type: ignore[attr-defined]


def test_a_refused_value_changes_nothing_and_is_an_error_of_the_library_and_a_value_error() -> None:
    before = dataclasses.asdict(CONFIG)
    for kind in (TuneError, ValueError):
        with pytest.raises(kind, match="max_rounds is 0"):
            CONFIG.max_rounds = 0
    assert dataclasses.asdict(CONFIG) == before


def test_a_configuration_is_checked_when_it_is_made() -> None:
    assert Config(max_rounds=7).max_rounds == 7
    with pytest.raises(OptionError, match="separation is -1"):
        Config(separation=-1)


def test_a_setting_can_be_patched_and_comes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    before = CONFIG.max_rounds
    with monkeypatch.context() as patched:
        patched.setattr(CONFIG, "max_rounds", before + 1)
        assert CONFIG.max_rounds == before + 1
    assert CONFIG.max_rounds == before
