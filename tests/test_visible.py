"""How much can be seen of a value."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import enum
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tune_jax._visible import (
    hashes_by_value,
    hides_what_it_reads,
    is_library,
    is_standard,
    shows_its_state,
    special_names,
)


class Plain:
    scale = 2.0

    def __call__(self, y):
        return y

    def read(self, y):
        return y


class Slotted:
    __slots__ = ("value",)


class Pickled:
    def __reduce__(self):
        return Pickled, ()


@dataclasses.dataclass(frozen=True, slots=True)
class Frozen:
    value: int = 1


class Kind(enum.Enum):
    ONE = 1


VARIABLE = contextvars.ContextVar("VARIABLE", default=1)


@pytest.mark.parametrize("value", [Plain(), Slotted(), Frozen(), Kind.ONE])
def test_objects_of_python_classes_show_their_state(value):
    assert shows_its_state(value)


@pytest.mark.parametrize("value", [collections.deque(), VARIABLE, iter([]), Pickled(), object])
def test_what_is_not_copied_by_its_attributes_hides_state(value):
    assert not shows_its_state(value)


@pytest.mark.parametrize("value", [jnp.sin, np.sin, jnp, jax.nn.relu, optax.adam, optax.GradientTransformation])
def test_what_is_installed_does_not_change(value):
    assert is_library(value)


@pytest.mark.parametrize("value", [Plain, Plain(), optax, optax.adam(1.0).update, is_library])
def test_what_is_written_here_made_anew_or_set_from_outside_may_change(value):
    assert not is_library(value)


def test_code_that_reads_by_names_it_makes_up_is_seen_inside_of_functions_too():
    assert hides_what_it_reads((lambda y, name: getattr(y, name)).__code__)
    assert hides_what_it_reads((lambda: lambda y: vars(y)).__code__)
    assert not hides_what_it_reads((lambda y: y.name).__code__)


def test_python_asks_a_class_for_its_special_functions():
    assert special_names(Plain) == {"__call__"}


def test_values_are_compared_by_value_and_references_are_not():
    assert hashes_by_value(np.dtype("float32"))
    assert hashes_by_value(range(3))
    assert not hashes_by_value(VARIABLE)
    assert not hashes_by_value(weakref.ref(Plain))
    assert not hashes_by_value([])


def test_classes_of_pythons_own_library_are_known():
    assert is_standard(enum.Enum)
    assert not is_standard(Plain)
