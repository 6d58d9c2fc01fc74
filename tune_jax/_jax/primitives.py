"""Primitives of our own: their rules, and what JAX tells these."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax._src import core as _core
from jax._src import util as _util
from jax._src.interpreters import batching as _batching
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir, partial_eval

SymbolicZero = ad.Zero


def make_primitive(name: str) -> Primitive:
    """Return a new primitive with several results."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    return primitive


def hold_weakly(kind: type) -> None:
    """Keep parameters of this type out of JAX's global cache of abstract values, which would keep them alive."""
    _util.weakref_cache_key_types.add(kind)


def register_batching(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Register `rule(axis, args, dims, **params)`; `axis` has `size`, `name` and `spmd_name`."""
    batching.fancy_primitive_batchers[primitive] = rule


def is_named(axis: Any) -> bool:
    """Whether a batching rule's axis has a name that collectives can use."""
    return axis.name is not _core.no_axis_name


def is_batched(value: Any) -> bool:
    """Whether a value inside a function under `jax.vmap` has the mapped axis."""
    return isinstance(value, _batching.BatchTracer) and value.batch_dim is not None


def batch_size(value: Any) -> int | None:
    """The size of the axis that `jax.vmap` maps a value over; None where it is not mapped."""
    if not isinstance(value, _batching.BatchTracer) or not isinstance(value.batch_dim, int):
        return None
    return int(value.val.shape[value.batch_dim])


def register_jvp(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Register `rule(primals, tangents, **params)`; tangents may be symbolic zeros."""
    ad.primitive_jvps[primitive] = rule


def register_transpose(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Register `rule(cotangents, *args, **params)`, where the linear ones among `args` are placeholders."""
    ad.primitive_transposes[primitive] = rule


def is_linear_input(value: Any) -> bool:
    """Whether an argument of a transpose rule stands for an input to be transposed."""
    return bool(ad.is_undefined_primal(value))


def zero_tangent(value: Any) -> Any:
    """The symbolic zero among the tangents of `value`."""
    return ad.Zero(jax.typeof(value).to_tangent_aval())


def takes_cotangent(aval: Any) -> bool:
    """Whether values like this can be differentiated: floats and complex numbers, not integers or keys."""
    return bool(aval.to_tangent_aval().dtype != jax.dtypes.float0)


def instantiate(cotangent: Any) -> Any:
    """A cotangent as an array, symbolic zeros included."""
    return ad.instantiate_zeros(cotangent)


def register_lowering(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Register `rule(context, *args, **params)` for every platform."""
    mlir.register_lowering(primitive, rule)


def lower_inline(context: Any, function: Callable[..., Sequence[Any]], args: Sequence[Any]) -> Any:
    """Lower `function` in place, as if the program had called it itself: without what its results do not need."""

    def needed(*values: Any) -> Sequence[Any]:
        closed = jax.make_jaxpr(function)(*values)
        wanted = [True] * len(closed.jaxpr.outvars)
        jaxpr, _ = partial_eval.dce_jaxpr(closed.jaxpr, wanted, instantiate=True)
        return _core.eval_jaxpr(jaxpr, closed.consts, *values)

    within = _with_devices(context)
    results = mlir.lower_fun(needed, multiple_results=True)(within, *args)
    if within.tokens_out is not None and within is not context:
        context.set_tokens_out(within.tokens_out)
    return results


def _with_devices(context: Any) -> Any:
    """The context with the devices that JAX leaves out unless it sees an equation that asks for them.

    What is lowered in place of one of our primitives may ask: callbacks and `custom_partitioning` do.
    """
    axes = context.module_context.axis_context
    devices = lowering_devices(context)
    if not devices or getattr(axes, "device_assignment", devices) is not None:
        return context
    axes = dataclasses.replace(axes, device_assignment=devices, abstract_mesh=_mesh_of_caller())
    return context.replace(module_context=context.module_context.replace(axis_context=axes))


def lowering_platforms(context: Any) -> tuple[str, ...]:
    """The platforms that a lowering rule's program is meant for; several only when exporting."""
    return tuple(context.platforms or context.module_context.platforms)


def lowering_devices(context: Any) -> tuple[jax.Device, ...]:
    """The devices that a lowering rule's program is meant for, empty where JAX does not know them."""
    axes = context.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if isinstance(mesh, jax.sharding.Mesh):
        return tuple(mesh.devices.flat)
    return tuple(getattr(axes, "device_assignment", None) or _variables_of_caller().get("device_assignment") or ())


def _mesh_of_caller() -> jax.sharding.AbstractMesh | None:
    """The mesh of the shardings that JAX lowers a program with, None where they have none in common."""
    variables = _variables_of_caller()
    names = ("unique_in_shardings", "unique_out_shardings", "unique_intermediate_shardings")
    shardings = (each for name in names for each in variables.get(name, ()))
    meshes = {each.mesh.abstract_mesh for each in shardings if isinstance(each, jax.NamedSharding)}
    return meshes.pop() if len(meshes) == 1 else None


def _variables_of_caller() -> Mapping[str, Any]:
    """What JAX knows of the devices that it lowers a program for.

    It tells rules only of how many there are, since it then lowers once for several; the function that does it knows.
    To mark a primitive as one that needs devices would tell its rule, but refuses programs over two meshes, and over
    meshes without devices.
    """
    frame = inspect.currentframe()
    while frame is not None:
        if frame.f_code.co_name == "lower_sharding_computation":
            return frame.f_locals
        frame = frame.f_back
    return {}
