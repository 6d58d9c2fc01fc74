"""Traced programs: what they read, close over, say of devices, and where they come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax import lax
from jax._src import core as _core
from jax._src import dispatch as _dispatch
from jax._src import source_info_util as _source_info
from jax.extend.core import jaxprs_in_params, subjaxprs
from jax.interpreters import partial_eval

from tune_jax._jax.context import axis_names


def used_inputs(closed_jaxpr: Any) -> tuple[bool, ...]:
    """Which inputs of a traced program its outputs or effects depend on."""
    jaxpr = closed_jaxpr.jaxpr
    return tuple(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1])


def closed_over(traced: Any) -> tuple[Any, ...]:
    """What a traced program closes over, if tracers are among it; the program's first inputs stand for these."""
    return tuple(traced._consts)


def eval_closed(closed_jaxpr: Any, inputs: Sequence[Any]) -> list[Any]:
    """Run a traced program in the ambient trace; outside of the mesh it was traced under, nothing varies over that."""
    jaxpr, given = closed_jaxpr.jaxpr, [*closed_jaxpr.consts, *inputs]
    variables = [*jaxpr.constvars, *jaxpr.invars]
    results = [variable for equation in jaxpr.eqns for variable in equation.outvars]
    if not set().union(*(_varying_axes(v.aval) for v in (*variables, *results))) <= set(axis_names()):
        return _eval_unvarying(jaxpr, dict(zip(variables, given, strict=True)))
    given = [vary_as(v.aval, value) for v, value in zip(variables, given, strict=True)]
    split = len(closed_jaxpr.consts)
    return list(_core.eval_jaxpr(jaxpr, given[:split], *given[split:]))


def _varying_axes(aval: Any) -> frozenset[Any]:
    """The mesh axes in whose places an array inside `jax.shard_map` may have different values."""
    return frozenset(getattr(getattr(aval, "manual_axis_type", None), "varying", ()))


def says_what_varies(closed_jaxpr: Any) -> bool:
    """Whether a program was traced where JAX checks what varies over a mesh, and has values that do."""
    jaxpr = closed_jaxpr.jaxpr
    results = [variable for equation in jaxpr.eqns for variable in equation.outvars]
    return any(_varying_axes(variable.aval) for variable in (*jaxpr.constvars, *jaxpr.invars, *results))


def vary_as(aval: Any, value: Any) -> Any:
    """A value that varies over the axes of a mesh that an abstract value does."""
    return vary_over(_varying_axes(aval), value)


def vary_over(axes: Iterable[Any], value: Any) -> Any:
    """A value that varies over these axes of the mesh around."""
    missing = tuple(axis for axis in axes if axis not in _varying_axes(jax.typeof(value)))
    return lax.pcast(value, missing, to="varying") if missing else value


def _eval_unvarying(jaxpr: Any, values: dict[Any, Any]) -> list[Any]:
    def read(atom: Any) -> Any:
        return values[atom] if isinstance(atom, _core.Var) else atom.val

    for equation in jaxpr.eqns:
        primitive, operands = equation.primitive, [read(atom) for atom in equation.invars]
        if primitive.name in ("pvary", "pcast"):
            results = operands
        elif primitive.name in ("jit", "pjit"):
            results = eval_closed(equation.params["jaxpr"], operands)
        else:
            with equation.ctx.manager:
                found = primitive.bind(*operands, **primitive.get_bind_params(equation.params))
            results = found if primitive.multiple_results else [found]
        values.update(zip(equation.outvars, results, strict=True))
    return [read(atom) for atom in jaxpr.outvars]


def dynamic_grid_bounds(closed_jaxpr: Any) -> int:
    """How many bounds of Pallas grids in a traced program are computed rather than known."""
    return _dynamic_bounds(closed_jaxpr.jaxpr)


def _dynamic_bounds(jaxpr: Any) -> int:
    own = sum(getattr(e.params.get("grid_mapping"), "num_dynamic_grid_bounds", 0) for e in jaxpr.eqns)
    return own + sum(_dynamic_bounds(inner) for inner in subjaxprs(jaxpr))


def placed_parts(closed_jaxpr: Any) -> tuple[Any, ...]:
    """The jaxpr of a traced program that says on which devices it runs, as by a mesh; nothing if it does not.

    JAX looks for this in the parameters of every primitive before it lowers.
    """
    found = _dispatch.get_intermediate_shardings(closed_jaxpr.jaxpr)
    return (closed_jaxpr.jaxpr,) if any(isinstance(one, jax.sharding.Sharding) for one, _ in found) else ()


def inner_jaxprs(equation: Any) -> tuple[Sequence[Any], int]:
    """The programs inside an equation, and how often it runs them; a `while` counts as once."""
    length = equation.params["length"] if equation.primitive.name == "scan" else 1
    return tuple(jaxprs_in_params(equation.params)), length


def current_source() -> Any:
    """Where the equation comes from that is being made or lowered, as equations have it in `source_info`."""
    return _source_info.current()


def source_frames(source_info: Any) -> list[tuple[str, int, str]]:
    """File, line and function of the frames that led to an equation, innermost first, without JAX's own."""
    frames = _source_info.user_frames(source_info.traceback)
    return [(frame.file_name, frame.start_line, frame.function_name) for frame in frames]
