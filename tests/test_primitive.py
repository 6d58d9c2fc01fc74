"""A tuned function under every transformation: the untuned one's results, one tuning a key, the right shapes in it."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import tune_jax
from tune_jax._lookup import memory_of

pytestmark = pytest.mark.usefixtures("quick_tuning")

X = np.linspace(-1.0, 2.0, 24, dtype=np.float32).reshape(2, 3, 4)
Y = np.linspace(0.5, 1.0, 4, dtype=np.float32)


def tuned(function: Callable[..., Any], **options: Any) -> Any:
    """Tune over a factor that does not change what the function computes."""
    return tune_jax.tune(function, hyperparams={"factor": [1, 2]}, progress=False, **options)


def energy(x, y, *, factor=1):
    return jnp.sum(jnp.sin(x * y)) * factor / factor


def smooth(x, *, factor=1):
    return jnp.sin(x) * factor / factor


def collect(x, *, factor=1):
    return lax.psum(jnp.sin(x), "i") * factor / factor


def keys_of(function: Any) -> list[str]:
    """What was tuned: the inputs' shapes, and the vmaps around them from the inside out."""
    return [
        " ".join(
            [*(f"{list(aval.shape)}" for aval in key.avals), *(f"{b.size}@{list(b.dims)}" for b in key.call.batches)]
        )
        for key in memory_of(function._tunable).results
    ]


def is_key(value: Any) -> bool:
    return jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)


def same(came: Any, expected: Any) -> None:
    """Compare pytrees of arrays: structure, types and values."""
    assert jax.tree.structure(came) == jax.tree.structure(expected)
    for one, other in zip(jax.tree.leaves(came), jax.tree.leaves(expected), strict=True):
        if getattr(other, "dtype", None) == jax.dtypes.float0:
            assert (one.dtype, one.shape) == (other.dtype, other.shape)
            continue
        assert jax.typeof(one) == jax.typeof(other)
        if hasattr(other, "dtype") and is_key(other):
            one, other = jax.random.key_data(one), jax.random.key_data(other)
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-6)


def check(
    transform: Callable[..., Any], function: Callable[..., Any], args: Sequence[Any], keys: Sequence[str], count: Any
) -> None:
    """Compare a transformed tuned function with the transformed function, and what was tuned with `keys`."""
    candidate = tuned(function)
    with jax.checking_leaks():
        came = transform(candidate)(*args)
    same(came, transform(function)(*args))
    assert sorted(keys_of(candidate)) == sorted(keys)
    assert count() == len(keys)


@dataclasses.dataclass(frozen=True)
class Program:
    """A transformation of `energy`, its arguments, and the keys that it tunes."""

    transform: Callable[..., Any]
    args: tuple[Any, ...] = (X[0], Y)
    keys: tuple[str, ...] = ("[3, 4] [4]",)


def _two_jits(f):
    return lambda x, y: (jax.jit(lambda x, y: f(x, y) + f(x + 1, y))(x, y), jax.jit(lambda x, y: f(x, y) * 3)(x, y))


def _while(f):
    def run(x, y):
        return lax.while_loop(lambda c: c[0] < 3, lambda c: (c[0] + 1, c[1] + f(x, y)), (0, 0.0))[1]

    return run


def _while_condition(f):
    def run(x, y):
        return lax.while_loop(lambda c: c[1] + f(x, y) < 3, lambda c: (c[0] + 1, c[1] + 1.0), (0, 0.0))

    return run


def _scan(f):
    return lambda x, y: lax.scan(lambda total, row: (total + f(row, y), None), 0.0, x)[0]


def _three_layers(f):
    def run(x, y):
        for _ in range(3):
            x = x + f(x, y)
        return x

    return run


ROWS = functools.partial(jax.vmap, in_axes=(0, None))
ROWS_KEY = ("[3, 4] [4] 3@[0, None]",)
ROW_KEY = ("[4] [4]",)

PROGRAMS = {
    "eager": Program(lambda f: f),
    "eager twice": Program(lambda f: lambda x, y: (f(x, y), f(x + 1, y))),
    "jit": Program(jax.jit),
    "nested jit": Program(lambda f: jax.jit(jax.jit(f))),
    "two jits": Program(_two_jits),
    "three layers": Program(lambda f: jax.jit(_three_layers(f))),
    "itself after itself": Program(lambda f: jax.jit(lambda x, y: f(f(x, y), y)), keys=("[3, 4] [4]", "[] [4]")),
    "vmap": Program(ROWS, keys=ROWS_KEY),
    "vmap of jit": Program(lambda f: ROWS(jax.jit(f)), keys=ROWS_KEY),
    "jit of vmap": Program(lambda f: jax.jit(ROWS(f)), keys=ROWS_KEY),
    "jit of vmap of jit": Program(lambda f: jax.jit(ROWS(jax.jit(f))), keys=ROWS_KEY),
    "vmap over the last axis": Program(lambda f: jax.vmap(f, in_axes=(-1, 0)), keys=("[3, 4] [4] 4@[1, 0]",)),
    "nested vmap": Program(
        lambda f: jax.vmap(ROWS(f), in_axes=(2, None)), (X, Y[:3]), ("[2, 3, 4] [3] 2@[0, None] 4@[2, None]",)
    ),
    "nested vmap of jit": Program(
        lambda f: jax.vmap(ROWS(jax.jit(f)), in_axes=(2, None)),
        (X, Y[:3]),
        ("[2, 3, 4] [3] 2@[0, None] 4@[2, None]",),
    ),
    "vmap and no vmap": Program(lambda f: lambda x, y: (ROWS(f)(x, y), f(x, y)), keys=(*ROWS_KEY, "[3, 4] [4]")),
    "vectorize": Program(lambda f: jnp.vectorize(f, signature="(n),(n)->()"), keys=ROWS_KEY),
    "map in batches": Program(lambda f: lambda x, y: lax.map(lambda row: f(row, y), x, batch_size=3), keys=ROWS_KEY),
    "grad": Program(jax.grad),
    "grad of jit": Program(lambda f: jax.grad(jax.jit(f))),
    "jit of grad": Program(lambda f: jax.jit(jax.grad(f))),
    "grad by both": Program(lambda f: jax.grad(f, argnums=(0, 1))),
    "value and grad": Program(jax.value_and_grad),
    "jit of value and grad": Program(lambda f: jax.jit(jax.value_and_grad(f))),
    "jvp": Program(lambda f: lambda x, y: jax.jvp(f, (x, y), (x, y))),
    "jit of jvp": Program(lambda f: jax.jit(lambda x, y: jax.jvp(f, (x, y), (x, y)))),
    "vjp": Program(lambda f: lambda x, y: jax.vjp(f, x, y)[1](jnp.float32(2))),
    "jit of vjp": Program(lambda f: jax.jit(lambda x, y: jax.vjp(f, x, y)[1](jnp.float32(2)))),
    "linearize": Program(lambda f: lambda x, y: jax.linearize(f, x, y)[1](x, y)),
    "hessian": Program(jax.hessian, (Y, Y), ROW_KEY),
    "jit of hessian": Program(lambda f: jax.jit(jax.hessian(f)), (Y, Y), ROW_KEY),
    "grad of vmap": Program(lambda f: jax.grad(lambda x, y: ROWS(f)(x, y).sum()), keys=ROWS_KEY),
    "jit of grad of vmap of jit": Program(
        lambda f: jax.jit(jax.grad(lambda x, y: ROWS(jax.jit(f))(x, y).sum())), keys=ROWS_KEY
    ),
    # Differentiation comes first here, and knows nothing of the vmap around it.
    "vmap of grad": Program(lambda f: ROWS(jax.grad(f)), keys=ROW_KEY),
    "jit of vmap of grad": Program(lambda f: jax.jit(ROWS(jax.grad(f))), keys=ROW_KEY),
    "checkpoint": Program(lambda f: jax.checkpoint(f)),
    "grad of checkpoint": Program(lambda f: jax.grad(jax.checkpoint(f))),
    "jit of grad of checkpoint": Program(lambda f: jax.jit(jax.grad(jax.checkpoint(f)))),
    "checkpoint that saves all": Program(
        lambda f: jax.jit(jax.grad(jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable)))
    ),
    "scan": Program(_scan, keys=ROW_KEY),
    "jit of grad of scan": Program(lambda f: jax.jit(jax.grad(_scan(f))), keys=ROW_KEY),
    "vmap of scan": Program(lambda f: ROWS(_scan(f)), (X, Y), ("[2, 4] [4] 2@[0, None]",)),
    "scan of checkpoint": Program(lambda f: jax.jit(jax.grad(_scan(jax.checkpoint(f)))), keys=ROW_KEY),
    "while body": Program(_while),
    "while condition": Program(_while_condition),
    "cond": Program(lambda f: lambda x, y: lax.cond(x.sum() < 100, f, lambda x, y: 0.0, x, y)),
    "jit of cond": Program(lambda f: jax.jit(lambda x, y: lax.cond(x.sum() < 100, f, lambda x, y: 0.0, x, y))),
    "switch": Program(lambda f: jax.jit(lambda x, y: lax.switch(1, [lambda x, y: 0.0, f], x, y))),
    "pmap": Program(lambda f: jax.pmap(f, in_axes=(0, None)), (X, Y)),
    "named call": Program(lambda f: jax.jit(jax.named_call(f, name="layer"))),
    "closure convert": Program(lambda f: lambda x, y: jax.closure_convert(lambda x: f(x, y), x)[0](x)),
    "jaxpr run by hand": Program(lambda f: lambda x, y: jax.extend.core.jaxpr_as_fun(jax.make_jaxpr(f)(x, y))(x, y)),
    "inside custom_vjp": Program(lambda f: jax.jit(jax.grad(_with_own_vjp(f)))),
    "inside custom_vjp under vmap": Program(lambda f: ROWS(jax.grad(_with_own_vjp(f))), keys=ROWS_KEY),
    "inside custom_jvp": Program(lambda f: lambda x, y: jax.jvp(_with_own_jvp(f), (x, y), (x, y))),
}


def _with_own_vjp(f):
    @jax.custom_vjp
    def wrapped(x, y):
        return f(x, y)

    wrapped.defvjp(lambda x, y: (f(x, y), (x, y)), lambda kept, slope: (kept[0] * f(*kept) * slope, kept[1]))
    return wrapped


def _with_own_jvp(f):
    wrapped = jax.custom_jvp(f)
    wrapped.defjvp(lambda primals, slopes: (f(*primals), f(*primals) * slopes[1].sum()))
    return wrapped


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_transformed_program_agrees_and_tunes_each_key_once(name, count_tunings):
    program = PROGRAMS[name]
    check(program.transform, energy, program.args, program.keys, count_tunings)


@pytest.mark.parametrize("name", ["eager", "jit", "vmap", "grad", "jit of grad", "scan", "while body", "cond"])
def test_programs_agree_where_jit_is_disabled(name, count_tunings):
    program = PROGRAMS[name]
    with jax.disable_jit():
        check(program.transform, energy, program.args, program.keys, count_tunings)


@pytest.mark.parametrize("name", ["vmap", "grad", "jit of grad of scan", "three layers"])
def test_a_program_run_again_tunes_nothing(name, count_tunings):
    program = PROGRAMS[name]
    run = program.transform(tuned(energy))
    run(*program.args)
    before = count_tunings()
    run(*program.args)
    jax.clear_caches()
    run(*program.args)
    assert count_tunings() == before


# What the tuned function itself is made of


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _own_slope(power, x):
    return x**power


_own_slope.defvjp(lambda power, x: (x**power, x), lambda power, x, slope: (100 * power * slope,))


def _uses_own_vjp(x, *, factor=1):
    return _own_slope(3, x) * factor / factor


@jax.custom_jvp
def _own_tangent(x):
    return jnp.sin(x)


_own_tangent.defjvp(lambda primals, tangents: (jnp.sin(*primals), 5 * tangents[0]))


def _uses_own_jvp(x, *, factor=1):
    return _own_tangent(x) * factor / factor


OWN_DERIVATIVES = {
    "grad": (lambda f: jax.grad(lambda x: f(x).sum()), ["[3, 4]"]),
    "jit of grad": (lambda f: jax.jit(jax.grad(lambda x: f(x).sum())), ["[3, 4]"]),
    "grad of vmap": (lambda f: jax.grad(lambda x: jax.vmap(f)(x).sum()), ["[3, 4] 3@[0]"]),
    "vmap of grad": (lambda f: jax.vmap(jax.grad(lambda x: f(x).sum())), ["[4]"]),
    "jit": (jax.jit, ["[3, 4]"]),
}


@pytest.mark.parametrize("function", [_uses_own_vjp, _uses_own_jvp])
@pytest.mark.parametrize("name", OWN_DERIVATIVES)
def test_the_functions_own_derivative_is_used(name, function, count_tunings):
    transform, keys = OWN_DERIVATIVES[name]
    check(transform, function, [X[0]], keys, count_tunings)


def test_forward_mode_uses_the_functions_own_jvp(count_tunings):
    check(lambda f: lambda x: jax.jvp(f, (x,), (x,)), _uses_own_jvp, [X[0]], ["[3, 4]"], count_tunings)


def test_a_function_with_its_own_vjp_can_be_tuned_itself(count_tunings):
    @jax.custom_vjp
    def scaled(x, factor=1):
        return x * factor / factor

    scaled.defvjp(lambda x, factor: (scaled(x, factor), None), lambda _, slope: (7 * slope, None))
    came = jax.grad(lambda x: tuned(scaled)(x).sum())(X)
    np.testing.assert_array_equal(came, np.full(X.shape, 7.0))
    assert count_tunings() == 1


def test_scan_inside_a_tuned_function_is_differentiated(count_tunings):
    def rolled(x, *, factor=1):
        return lax.scan(lambda c, row: (jnp.tanh(c + row * factor / factor), c), x[0], x)[0].sum()

    check(jax.grad, rolled, [X[0]], ["[3, 4]"], count_tunings)


# Integers, keys, None and zeros under differentiation


def _with_index(x, index, *, factor=1):
    return x[index] * factor / factor, index + 1


def test_integer_inputs_and_outputs_are_passed_by_grad(count_tunings):
    check(
        lambda f: jax.grad(lambda x, i: f(x, i)[0].sum()),
        _with_index,
        [Y, np.array([2, 0])],
        ["[4] [2]"],
        count_tunings,
    )


def test_differentiating_by_an_integer_gives_float0(count_tunings):
    check(
        lambda f: jax.grad(lambda x, i: f(x, i)[0].sum(), argnums=(0, 1), allow_int=True),
        _with_index,
        [Y, np.array([2, 0])],
        ["[4] [2]"],
        count_tunings,
    )


def test_jvp_takes_and_gives_float0_for_integers(count_tunings):
    still = np.zeros(2, jax.dtypes.float0)
    check(
        lambda f: lambda x, i: jax.jvp(f, (x, i), (x, still)),
        _with_index,
        [Y, np.array([2, 0])],
        ["[4] [2]"],
        count_tunings,
    )


def test_prng_keys_are_passed_by_grad(count_tunings):
    def noisy(x, key, *, factor=1):
        return x * jax.random.normal(key, x.shape) * factor / factor, jax.random.split(key)

    check(
        lambda f: jax.value_and_grad(lambda x, k: (f(x, k)[0].sum(), f(x, k)[1]), has_aux=True),
        noisy,
        [X[0], jax.random.key(3)],
        ["[3, 4] []"],
        count_tunings,
    )


def test_none_in_a_result_is_passed_by_jvp(count_tunings):
    def partly(x, *, factor=1):
        return {"none": None, "x": x * factor / factor, "flat": (None, x.sum())}

    check(lambda f: lambda x: jax.jvp(f, (x,), (x,)), partly, [X[0]], ["[3, 4]"], count_tunings)


def test_aux_of_vjp_is_passed(count_tunings):
    def with_aux(x, *, factor=1):
        return x.sum() * factor / factor, {"kept": x, "none": None}

    check(lambda f: lambda x: jax.vjp(f, x, has_aux=True)[::2], with_aux, [X[0]], ["[3, 4]"], count_tunings)


def test_an_output_that_does_not_move_has_a_symbolic_zero_for_a_tangent(count_tunings):
    def with_constant(x, *, factor=1):
        return x * factor / factor, lax.stop_gradient(x * 0)

    def root(f):
        # The slope of the root is infinite here: times a zero that is an array, it would be NaN.
        return lambda x: jax.jvp(lambda x: f(x)[0] + jnp.sqrt(f(x)[1]), (x,), (x,))

    check(root, with_constant, [Y], ["[4]"], count_tunings)


def test_an_input_that_does_not_move_stays_so_inside(count_tunings):
    @jax.custom_jvp
    def watch(x, y):
        return x * y

    def watch_tangents(primals, tangents):
        moving = [not isinstance(t, jax.custom_derivatives.SymbolicZero) for t in tangents]
        return watch(*primals), primals[0] * 0 + 10.0 * moving[0] + moving[1]

    watch.defjvp(watch_tangents, symbolic_zeros=True)
    check(
        lambda f: lambda x, y: jax.jvp(lambda x: f(x, y), (x,), (x,)),
        lambda x, y, *, factor=1: watch(x, y) * factor / factor,
        [Y, Y],
        ["[4] [4]"],
        count_tunings,
    )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "complex64"])
def test_gradients_keep_the_dtype(dtype, count_tunings):
    x = jnp.asarray(Y).astype(dtype)
    check(lambda f: jax.grad(lambda x: jnp.real(f(x)).sum()), lambda x, *, factor=1: x * x * factor / factor, [x],
          ["[4]"], count_tunings)  # fmt: skip


# Transposition


def _linear(x, w, *, factor=1):
    return x * w * factor / factor, x.sum()


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_a_linear_function_is_transposed(around, count_tunings):
    check(
        lambda f: around(lambda x, w: jax.linear_transpose(lambda v: f(v, w), x)((x, jnp.float32(2)))),
        _linear,
        [X[0], Y],
        ["[3, 4] [4]"],
        count_tunings,
    )


def test_transposition_takes_outputs_that_are_not_used(count_tunings):
    check(
        lambda f: lambda x, w: jax.linear_transpose(lambda v: f(v, w)[0], x)(x),
        _linear,
        [X[0], Y],
        ["[3, 4] [4]"],
        count_tunings,
    )


# Axes that are mapped, and axes that are not


def _apart(x, y, *, factor=1):
    return x * factor / factor, {"none": None, "y": y.sum()}


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_an_output_without_the_mapped_axis_may_be_asked_for_without(around, count_tunings):
    check(
        lambda f: around(jax.vmap(f, in_axes=(0, None), out_axes=(0, None))),
        _apart,
        [X[0], Y],
        ROWS_KEY,
        count_tunings,
    )


def test_nested_vmaps_over_different_arguments_keep_their_outputs_apart(count_tunings):
    def both(f):
        inner = jax.vmap(f, in_axes=(0, None), out_axes=(0, None))
        return jax.vmap(inner, in_axes=(None, 0), out_axes=(None, 0))

    check(both, lambda x, y, *, factor=1: (x * factor / factor, y * 2), [X[0], X[1]],
          ["[3, 4] [3, 4] 3@[0, None] 3@[None, 0]"], count_tunings)  # fmt: skip


def test_a_condition_on_what_is_not_mapped_stays_a_condition(count_tunings):
    def program(f):
        return lambda x, y: jax.vmap(lambda row: lax.cond(f(y, y) > 0, lambda: row, lambda: -row))(x)

    text = jax.jit(program(tuned(energy))).lower(X[0], Y).as_text()
    assert "stablehlo.case" in text
    assert count_tunings() == 1


def test_a_call_of_which_nothing_is_mapped_is_tuned_as_it_is(count_tunings):
    check(lambda f: lambda x, y: jax.vmap(lambda row: row + f(y, y))(x), energy, [X[0], Y], ["[4] [4]"], count_tunings)


def test_a_call_without_arguments_under_vmap_is_tuned_as_it_is(count_tunings):
    def constant(*, factor=1):
        return jnp.arange(4.0) * factor / factor

    check(lambda f: jax.vmap(lambda x: x + f()), constant, [X[0]], [""], count_tunings)


def test_vmap_with_nothing_but_a_size_gives_back_one_result(count_tunings):
    check(
        lambda f: jax.vmap(f, in_axes=(None, None), out_axes=None, axis_size=5), energy, [Y, Y], ["[4] [4]"],
        count_tunings,
    )  # fmt: skip


def test_pytrees_are_mapped_by_a_tree_of_axes(count_tunings):
    def tree(params, *, factor=1):
        return {"out": params["w"] * params["b"] * factor / factor}

    check(
        lambda f: jax.vmap(f, in_axes=({"w": 1, "b": None},), out_axes=-1),
        tree,
        [{"w": X[0], "b": Y[:3]}],
        ["[3] [3, 4] 4@[None, 1]"],
        count_tunings,
    )


def test_prng_keys_are_mapped(count_tunings):
    def draw(key, scale, *, factor=1):
        return jax.random.normal(key, (2,)) * scale * factor / factor

    keys = jax.random.split(jax.random.key(0), 3)
    check(lambda f: jax.vmap(f, in_axes=(0, None)), draw, [keys, 2.0], ["[3] [] 3@[0, None]"], count_tunings)


# Axis names


NAMED = {
    "vmap": (lambda f: jax.vmap(f, axis_name="i"), ["[3, 4] 3@[0]"]),
    "vmap of jit": (lambda f: jax.vmap(jax.jit(f), axis_name="i"), ["[3, 4] 3@[0]"]),
    "jit of vmap": (lambda f: jax.jit(jax.vmap(f, axis_name="i")), ["[3, 4] 3@[0]"]),
    "name of an outer vmap": (lambda f: jax.vmap(jax.vmap(f), axis_name="i"), ["[3, 4] 4@[0] 3@[0]"]),
    "grad of vmap": (lambda f: jax.grad(lambda x: jax.vmap(f, axis_name="i")(x).sum()), ["[3, 4] 3@[0]"]),
    "scan inside": (
        lambda f: jax.vmap(lambda x: lax.scan(lambda c, v: (c + f(v), None), 0.0, x)[0], axis_name="i"),
        ["[3] 3@[0]"],
    ),
    "part of what is mapped": (
        lambda f: lambda x: jax.vmap(lambda v: f(v[:1] * 0 + 1), axis_name="i")(x),
        ["[3, 1] 3@[0]"],
    ),
}


@pytest.mark.parametrize("name", NAMED)
def test_collectives_over_a_named_axis_agree(name, count_tunings):
    transform, keys = NAMED[name]
    check(transform, collect, [X[0]], keys, count_tunings)


def test_a_sum_over_the_axis_may_be_asked_for_without_it(count_tunings):
    check(lambda f: jax.vmap(f, axis_name="i", out_axes=None), collect, [X[0]], ["[3, 4] 3@[0]"], count_tunings)


def test_collectives_see_constants_of_a_mapped_function(count_tunings):
    def program(f):
        return jax.vmap(lambda x: x + f(Y), axis_name="i")

    check(program, collect, [X[0]], ["[4] 3@[None]"], count_tunings)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_what_depends_on_the_size_of_an_axis_is_worked_out_for_each_size(around, count_tunings):
    def gather(x, *, factor=1):
        return lax.all_gather(x, "i") * lax.axis_size("i") + lax.axis_index("i") * factor / factor

    def program(f):
        run = jax.vmap(around(f), axis_name="i")
        return lambda x: (run(x[:2]), run(x[:3]))

    check(program, gather, [X[0]], ["[2, 4] 2@[0]", "[3, 4] 3@[0]"], count_tunings)


COUNTING = {
    "mapped": (lambda f: jax.vmap(f, axis_name="i"), ["[3, 4] 3@[0]"]),
    "mapped jit": (lambda f: jax.vmap(jax.jit(f), axis_name="i"), ["[3, 4] 3@[0]"]),
    "jit": (lambda f: jax.jit(jax.vmap(f, axis_name="i")), ["[3, 4] 3@[0]"]),
    "nothing mapped": (lambda f: jax.vmap(lambda x: x + f(Y), axis_name="i"), ["[4] 3@[None]"]),
    "nothing mapped, jit": (lambda f: jax.vmap(lambda x: x + jax.jit(lambda: f(Y))(), axis_name="i"), ["[4] 3@[None]"]),
    "nothing mapped, scan": (
        lambda f: jax.vmap(lambda x: lax.scan(lambda c, _: (c + f(Y), None), x, None, length=2)[0], axis_name="i"),
        ["[4] 3@[None]"],
    ),
}


@pytest.mark.parametrize("name", COUNTING)
def test_a_constant_is_summed_over_a_named_axis(name, count_tunings):
    def count(x, *, factor=1):
        return x * lax.psum(1, "i") * factor / factor

    transform, keys = COUNTING[name]
    check(transform, count, [X[0]], keys, count_tunings)


def test_a_constant_is_summed_over_a_named_axis_without_any_argument(count_tunings):
    def count(*, factor=1):
        return lax.psum(1, "i") * factor / factor

    check(lambda f: jax.vmap(lambda x: x + f(), axis_name="i"), count, [X[0]], ["3@[]"], count_tunings)


def test_the_size_of_a_named_axis_may_be_a_static_argument(count_tunings):
    def pad(x, size, *, factor=1):
        return jnp.pad(x, (0, size)) * factor / factor

    program = lambda f: jax.vmap(lambda x: f(x, lax.psum(1, "i")), axis_name="i")  # noqa: E731
    check(program, pad, [X[0]], ["[3, 4] 3@[0]"], count_tunings)


@pytest.mark.parametrize("around", [lambda f: f, jax.jit], ids=["eager", "jit"])
def test_differentiation_that_cannot_see_its_axis_takes_the_first_candidate_with_a_warning(around, count_tunings):
    def program(f):
        return jax.vmap(around(jax.grad(lambda x: f(x).sum())), axis_name="i")

    with pytest.warns(UserWarning, match=r"collect: it needs the axis names around it \(i\).*'factor': 1"):
        came = program(tuned(collect))(X[0])
    same(came, program(collect)(X[0]))
    assert count_tunings() == 0


def test_a_tuning_inside_a_named_axis_leaves_the_name_as_it_was():
    function = tuned(smooth)

    def program(x):
        return lax.psum(jax.grad(lambda x: function(x).sum())(x), "i")

    same(jax.vmap(program, axis_name="i")(X[0]), jax.vmap(lambda x: lax.psum(jnp.cos(x), "i"), axis_name="i")(X[0]))


# Meshes


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((2,), ("a",), axis_types=(AxisType.Auto,))


def _over(mesh, function, **options):
    return jax.shard_map(function, mesh=mesh, in_specs=(P("a"), P()), out_specs=P("a"), **options)


SHARDED = {
    "call": lambda f: lambda x, y: f(x, y)[None],
    "sum over devices": lambda f: lambda x, y: lax.psum(f(x, y), "a")[None] * jnp.ones(1),
    "value that varies carried by scan": lambda f: (
        lambda x, y: lax.scan(lambda c, row: (f(row, y), None), x.sum(), x)[0][None]
    ),
    "vmap inside": lambda f: lambda x, y: jax.vmap(f, in_axes=(0, None))(x, y),
    "grad inside": lambda f: lambda x, y: jax.grad(f)(x, y),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", SHARDED)
def test_shard_map_sees_the_local_shapes(name, check_vma, mesh, count_tunings):
    key = {
        "value that varies carried by scan": "[3, 4] [4]",
        "vmap inside": "[1, 3, 4] [4] 1@[0, None]",
    }.get(name, "[1, 3, 4] [4]")
    check(lambda f: jax.jit(_over(mesh, SHARDED[name](f), check_vma=check_vma)), energy, [X, Y], [key], count_tunings)


def test_eager_shard_map_agrees(mesh, count_tunings):
    check(lambda f: _over(mesh, lambda x, y: f(x, y)[None]), energy, [X, Y], ["[1, 3, 4] [4]"], count_tunings)


def test_grad_of_shard_map_agrees(mesh, count_tunings):
    def program(f):
        return jax.jit(jax.grad(lambda x, y: _over(mesh, lambda x, y: f(x, y)[None])(x, y).sum(), argnums=(0, 1)))

    check(program, energy, [X, Y], ["[1, 3, 4] [4]"], count_tunings)


def test_collectives_over_a_mesh_are_tuned(mesh, count_tunings):
    def spread(x, y, *, factor=1):
        return lax.psum(x * y, "a") * factor / factor

    check(lambda f: jax.jit(_over(mesh, f)), spread, [X, Y], ["[1, 3, 4] [4]"], count_tunings)


def test_collectives_over_a_mesh_agree(mesh):
    def spread(x, y, *, factor=1):
        return lax.psum(x * y, "a") * factor / factor * jnp.ones_like(x)

    same(jax.jit(_over(mesh, tuned(spread)))(X, Y), jax.jit(_over(mesh, spread))(X, Y))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
@pytest.mark.parametrize("transform", [lambda f: f, jax.jit, lambda f: jax.jit(lambda x: f(x) + x), jax.vmap])
def test_results_on_a_mesh_have_the_sharding_of_the_untuned_ones(kind, transform):
    mesh = jax.make_mesh((2, 4), ("a", "b"), axis_types=(kind, kind))
    with jax.set_mesh(mesh):
        x = jax.device_put(np.ones((4, 8), np.float32), NamedSharding(mesh, P("a")))
        came, expected = transform(tuned(smooth))(x), transform(smooth)(x)
    same(came, expected)
    assert came.sharding.is_equivalent_to(expected.sharding, came.ndim)


PLACING = {
    "shard_map": lambda mesh: (
        lambda x, *, factor=1: _over(mesh, lambda x, y: jnp.sin(x) * y * factor / factor)(x, jnp.float32(2))
    ),
    "constraint": lambda mesh: (
        lambda x, *, factor=1: lax.with_sharding_constraint(jnp.sin(x), NamedSharding(mesh, P("a"))) * factor / factor
    ),
    "jit with shardings": lambda mesh: (
        lambda x, *, factor=1: jax.jit(jnp.sin, in_shardings=NamedSharding(mesh, P("a")))(x) * factor / factor
    ),
    "inside another": lambda mesh: _around(tuned(PLACING["shard_map"](mesh))),
}


def _around(inner):
    return lambda x, *, factor=1: inner(x) * factor / factor


@pytest.mark.parametrize("name", PLACING)
@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        jax.jit,
        lambda f: jax.jit(jax.vmap(f, in_axes=-1)),
        lambda f: jax.jit(jax.vmap(f, in_axes=None, axis_size=2)),
        lambda f: jax.grad(lambda x: f(x).sum()),
        lambda f: lambda x: lax.scan(lambda c, row: (c, f(row)), 0, x[None])[1],
    ],
    ids=["eager", "jit", "vmap", "unmapped", "grad", "scan"],
)
def test_a_function_that_says_where_it_runs_runs_there(name, transform, mesh):
    function = PLACING[name](mesh)
    came, expected = transform(tuned(function))(X), transform(function)(X)
    same(came, expected)
    assert came.sharding.device_set == expected.sharding.device_set


# Tuned functions inside tuned functions, and closures


def test_an_inner_function_differentiated_inside_an_outer_one_does_not_take_the_outer_ones_arguments(count_tunings):
    inner = tuned(lambda a, *, factor: jnp.sum(a * a) * factor / factor)

    def outer(p, q, r, *, factor=1):
        return jax.grad(inner)(p) * factor / factor + q * r

    function = tuned(outer)
    same(function(X[0], X[1], Y), 2 * X[0] + X[1] * Y)
    assert [row.id for row in function.results.failures] == []
    assert function.results.timed[0].hyperparams["factor"] in (1, 2)
    assert count_tunings() == 2


def test_tuned_functions_nest_under_transformations(count_tunings):
    inner = tuned(smooth)
    outer = tuned(lambda x, *, factor: inner(x) * factor / factor)
    same(jax.jit(jax.vmap(jax.grad(lambda x: outer(x).sum())))(X[0]), jnp.cos(X[0]))
    assert count_tunings() == 2


def test_a_closure_over_a_differentiated_value_agrees():
    def program(w):
        return tuned(lambda x, *, factor: jnp.sum(x * w) * factor / factor)(Y)

    same(jax.grad(program)(np.float32(2)), jnp.sum(Y))


def test_a_closure_over_a_traced_value_agrees():
    def program(w):
        return tuned(lambda x, *, factor: jnp.sum(x * w) * factor / factor)(Y)

    same(jax.jit(program)(np.float32(2)), 2 * jnp.sum(Y))


# Kinds of arguments under transformations


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Node:
    left: Any
    right: Any = None


KINDS = {
    "complex64": np.arange(6, dtype=np.complex64).reshape(3, 2) * 1j,
    "float8": np.arange(6).reshape(3, 2).astype(jnp.float8_e4m3fn),
    "int4": np.arange(6).reshape(3, 2).astype(jnp.int4),
    "bool": np.array([[True, False], [True, True], [False, False]]),
    "no elements": np.zeros((3, 0, 2), np.float32),
    "keys": jax.random.split(jax.random.key(1), 3),
    "a dataclass with None": Node((np.ones((3, 2), np.float16), None), Node({"b": np.arange(3, dtype=np.uint8)})),
    "nothing": (None, {}, []),
}
KIND_USES = {
    "jit": (jax.jit, ""),
    "vmap": (lambda f: lambda x: jax.vmap(f, axis_size=3)(x), "mapped"),
    "vmap of jit": (lambda f: lambda x: jax.vmap(jax.jit(f), axis_size=3)(x), "mapped"),
    "scan": (lambda f: lambda x: lax.scan(lambda c, row: (c, f(row)), 0, x, length=3), ""),
    "cond": (lambda f: jax.jit(lambda x: lax.cond(jnp.ones(()) > 0, f, lambda x: f(x), x)), ""),
    "checkpoint": (jax.checkpoint, ""),
    "grad": (lambda f: lambda x: jax.grad(lambda s: (f(x)[1] * s).sum())(1.0), ""),
    "shard_map": (lambda f: jax.jit(_over_rows(f)), ""),
}


def _over_rows(f):
    rows = jax.make_mesh((3,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    return jax.shard_map(f, mesh=rows, in_specs=P("d"), out_specs=(P("d"), P()), check_vma=False)


@pytest.mark.parametrize("use", KIND_USES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.filterwarnings("ignore:.*has no value while tuning, so random integers:UserWarning")
def test_every_kind_of_argument_is_transformed(kind, use, count_tunings):
    def passed(x, *, factor=1):
        return x, jnp.arange(2.0) * factor / factor

    value, (transform, mapped) = KINDS[kind], KIND_USES[use]
    candidate = tuned(passed)
    with jax.checking_leaks():
        came = transform(candidate)(value)
    same(came, transform(passed)(value))
    (key,) = memory_of(candidate._tunable).results
    assert [batch.size for batch in key.call.batches] == ([3] if mapped and jax.tree.leaves(value) else [])
    assert count_tunings() == 1


# Tracers in pytrees


@pytest.mark.parametrize("transform", [jax.jit, jax.grad, jax.vmap, lambda f: jax.jit(jax.grad(f))])
def test_tracers_nested_in_a_keyword_arguments_pytree_are_inputs(transform, count_tunings):
    def layer(x, *, params, factor=1):
        return jnp.sum(x * params["w"][0] + params["b"]["c"]) * factor / factor

    def program(f):
        return transform(lambda w: f(Y, params={"w": (w, None), "b": {"c": w * 2}}))

    check(program, layer, [Y], ["[4] [4] [4]" + " 4@[None, 0, 0]" * (transform is jax.vmap)], count_tunings)


# What is shared between threads, and what is let go


def test_threads_that_call_under_different_transformations_tune_each_key_once(count_tunings, background):
    function = tuned(energy)
    programs = [
        lambda: jax.jit(function)(X[0], Y),
        lambda: ROWS(function)(X[0], Y),
        lambda: jax.grad(function)(X[0], Y),
    ]
    futures = [background.submit(programs[index % 3]) for index in range(9)]
    concurrent.futures.wait(futures)
    for index, future in enumerate(futures):
        same(future.result(), [energy, ROWS(energy), jax.grad(energy)][index % 3](X[0], Y))
    assert count_tunings() == 2


def test_settings_that_change_a_result_are_not_mixed_up(count_tunings):
    def count(*, factor=1):
        return jnp.arange(4) * factor // factor

    function = tuned(count)
    assert function().dtype == np.int32
    with jax.enable_x64(True):
        assert function().dtype == np.int64
    assert jax.jit(function)().dtype == np.int32
    assert count_tunings() == 2


USES = {
    "eager": lambda f, x: f(x),
    "jit": lambda f, x: jax.jit(f)(x),
    "vmap": lambda f, x: jax.vmap(f)(x),
    "vmap of jit": lambda f, x: jax.vmap(jax.jit(f))(x),
    "grad": lambda f, x: jax.grad(lambda x: f(x).sum())(x),
    "jit of grad": lambda f, x: jax.jit(jax.grad(lambda x: f(x).sum()))(x),
}


@pytest.mark.parametrize("use", USES)
def test_a_tuned_function_that_is_dropped_is_let_go(use):
    def function(x, *, factor):
        return jnp.sin(x) * factor

    alive = weakref.ref(function)
    USES[use](tuned(function), X[0])
    del function
    # The first pass drops the compiled call, and with it what JAX's caches hold of it.
    gc.collect()
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize(
    "use",
    [
        lambda f, y: f(X[0], y),
        lambda f, y: jax.jit(lambda x: f(x, y))(X[0]),
        lambda f, y: jax.vmap(lambda x: f(x, y))(X[0]),
        lambda f, y: jax.grad(lambda x: f(x, y))(X[0]),
    ],
    ids=["eager", "jit", "vmap", "grad"],
)
def test_a_tuned_function_does_not_keep_arguments_alive(use):
    function = tuned(energy)
    value = jax.device_put(Y)
    alive = weakref.ref(value)
    use(function, value)
    del value
    jax.clear_caches()
    gc.collect()
    assert alive() is None


# What tunes nothing


def test_eval_shape_and_trace_tune_nothing(count_tunings):
    function = tuned(energy)
    for program in (function, jax.jit(function), ROWS(function), jax.jit(_scan(function))):
        jax.eval_shape(program, X[0], Y)
        jax.jit(program).trace(X[0], Y)
    function.eval_shape(X[0], Y)
    function.trace(X[0], Y)
    assert count_tunings() == 0


def test_lower_tunes_once_and_running_tunes_no_more(count_tunings):
    function = tuned(energy)
    jax.jit(function).lower(X[0], Y)
    function.lower(X[0], Y)
    jax.jit(function)(X[0], Y)
    assert count_tunings() == 1


def _make_method():
    class Layer:
        @functools.partial(tune_jax.tune, hyperparams={"factor": [1, 2]}, progress=False)
        def apply(self, x, y, *, factor=1):
            return energy(x, y, factor=factor)

    return Layer().apply


STAGED = {
    "tuned": (lambda: tuned(energy), lambda f: f),
    "jit of tuned": (lambda: tuned(energy), jax.jit),
    "jit of jit": (lambda: tuned(energy), lambda f: jax.jit(jax.jit(f))),
    "method": (_make_method, lambda f: f),
    "jit of method": (_make_method, jax.jit),
}


@pytest.mark.parametrize("name", STAGED)
def test_a_tuned_function_is_staged_as_a_jitted_one(name, count_tunings):
    make, around = STAGED[name]
    staged, plain = around(make()), jax.jit(energy)
    assert staged.eval_shape(X[0], Y) == plain.eval_shape(X[0], Y)
    assert staged.trace(X[0], Y).out_info == plain.trace(X[0], Y).out_info
    assert count_tunings() == 0
    same(staged.lower(X[0], Y).compile()(X[0], Y), energy(X[0], Y))
    same(staged.trace(X[0], Y).lower().compile()(X[0], Y), energy(X[0], Y))
    assert count_tunings() == 1


def test_trace_of_a_differentiated_call_tunes_and_lower_tunes_no_more(count_tunings):
    program = jax.jit(jax.grad(tuned(energy)))
    traced = program.trace(X[0], Y)
    assert count_tunings() == 1
    traced.lower()
    program.lower(X[0], Y)
    assert count_tunings() == 1


def test_a_jaxpr_shows_the_call_in_a_few_words():
    text = str(jax.make_jaxpr(lambda x: tuned(energy)(x, jnp.asarray(Y)))(X[0]))
    assert "tuned_call[call=energy(x, y)]" in text
