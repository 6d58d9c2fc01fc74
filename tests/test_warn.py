"""Warnings point at the line of the user's that made the call, whatever JAX does in between."""

from __future__ import annotations

import itertools
import linecache
import os
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax import record, tune, tune_all
from tune_jax._warn import warn_user

ONES = jnp.ones((2, 4))
SIZES = jnp.array([[1, 2, 3, 4]] * 2)

pytestmark = pytest.mark.usefixtures("quick_rounds")


class Changing:
    """Told apart by which object it is, which draws a warning."""

    def __init__(self):
        self.factor = 2.0


def scale(x, sizes, *, b):
    return (x * sizes).sum() * b


def scale_by(x, changing, *, b):
    return x.sum() * changing.factor * b


def made_up():
    return tune(scale, {"b": [1, 2]})


def places_of(run: Callable[[], Any]) -> list[tuple[str, str]]:
    """The file of each warning that a run draws, and the comment on its line."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    lines = [linecache.getline(found.filename, found.lineno).strip() for found in caught]
    return [(found.filename, line.rpartition("# ")[2]) for found, line in zip(caught, lines, strict=True)]


# Calls whose integers have no values


def jit():
    jax.jit(made_up())(ONES, SIZES)  # jit


def inner_jit():
    jax.jit(lambda x, sizes: 2 * jax.jit(made_up())(x, sizes))(ONES, SIZES)  # inner_jit


def grad():
    jax.jit(jax.grad(made_up()))(ONES, SIZES)  # grad


def checkpoint():
    jax.jit(jax.value_and_grad(jax.checkpoint(made_up())))(ONES, SIZES)  # checkpoint


def vmap():
    jax.jit(jax.vmap(made_up()))(ONES, SIZES)  # vmap


def scan():
    tuned = made_up()
    jax.lax.scan(lambda total, each: (total + tuned(*each), None), 0.0, (ONES, SIZES))  # scan


def shard_map():
    mesh, spec = jax.make_mesh((1,), ("a",)), jax.P()
    jax.jit(jax.shard_map(made_up(), mesh=mesh, in_specs=spec, out_specs=spec))(ONES, SIZES)  # shard_map


def lower():
    jax.jit(made_up()).lower(ONES, SIZES)  # lower


def ahead():
    made_up().tune(ONES, jax.ShapeDtypeStruct((2, 4), jnp.int32))  # ahead


# Other warnings


def argument():
    tune(scale_by, {"b": [1, 2]})(ONES, Changing())  # argument


def argument_in_grad():
    tuned, changing = tune(scale_by, {"b": [1, 2]}), Changing()
    jax.grad(lambda x: tuned(x, changing))(ONES)  # argument_in_grad


def argument_in_a_program():
    @jax.jit
    def program(x):
        return tune(scale_by, {"b": [1, 2]})(x, Changing())  # argument_in_a_program

    program(ONES)


def platform():
    jax.jit(tune(lambda x, *, b: x * b, {"b": [1, 2]})).trace(ONES).lower(lowering_platforms=("tpu",))  # platform


def program():
    tuned = tune(lambda x, *, b: x * b, {"b": [1, 2]}, example_args=(np.ones(7, np.float32),))
    tune_all(lambda x: jax.jit(tuned)(x), ONES)  # program


def recording():
    recorded = record(lambda x, size: x, dir_or_buffer=None)
    for size in range(102):
        recorded(ONES, size)  # recording


POINTED = [jit, inner_jit, grad, checkpoint, vmap, scan, shard_map, lower, ahead]
POINTED += [argument, argument_in_grad, argument_in_a_program, platform, program, recording]


@pytest.mark.parametrize("call", POINTED)
def test_a_warning_points_at_the_line_of_the_call(call):
    assert places_of(call) == [(__file__, call.__name__)]


@pytest.mark.parametrize("call", [jit, grad, argument])
def test_a_warning_in_a_thread_points_at_the_line_of_the_call(call):
    def run():
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()

    assert places_of(run) == [(__file__, call.__name__)]


def test_a_warning_of_the_wall_clock_points_at_the_line_of_the_call(tmp_path):
    def run():
        tune(lambda x, *, b: x * b, {"b": [1, 2]})(ONES)  # wall clock

    with jax.profiler.trace(str(tmp_path)):
        assert places_of(run) == [(__file__, "wall clock")]


def test_a_warning_from_a_host_callback_points_into_it():
    inner = tune(lambda x, *, c: x + c, {"c": [1, 2]})
    runs = itertools.count()

    def called_back(x):
        # The first runs come before the timing; this one falls into it.
        if next(runs) == 5:
            inner(ONES)  # callback
        return np.asarray(x)

    outer = tune(lambda x, *, b: jax.pure_callback(called_back, jax.typeof(x), x) * b, {"b": [1, 2]})
    assert places_of(lambda: outer(jnp.ones(4))) == [(__file__, "callback")]


def test_without_a_line_of_the_users_it_points_at_the_outermost():
    probe = "from tune_jax._warn import warn_user; __name__ = 'jax'; warn_user('here')"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, timeout=60)
    assert done.stderr.splitlines()[0] == "<string>:1: UserWarning: here"


def test_a_package_whose_name_starts_alike_is_the_users():
    names = {"__name__": "jax_models.layer", "warn": warn_user}
    with pytest.warns(UserWarning, match="here") as caught:
        exec(compile("\nwarn('here')", "layer.py", "exec"), names)
    assert (caught[0].filename, caught[0].lineno) == ("layer.py", 2)


def test_each_place_is_shown_once_with_its_line(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import jax, jax.numpy as jnp\n"
        "from tune_jax import tune\n"
        "for size in (2, 3, 4):\n"
        "    sizes = jnp.arange(size)\n"
        "    jax.jit(tune(lambda sizes, *, b: sizes * b, {'b': [1, 2]}))(sizes)  # place one\n"
        "jax.jit(tune(lambda sizes, *, b: sizes + b, {'b': [1, 2]}))(sizes)  # place two\n"
    )
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, env=os.environ | {"JAX_PLATFORMS": "cpu"}
    )
    shown = [line.rpartition("# ")[2] for line in done.stderr.splitlines() if "# place" in line]
    assert shown == ["place one", "place two"]
    assert done.stderr.count("UserWarning") == 2
