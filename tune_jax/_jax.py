"""The one door to JAX's internals: everything outside the stable public API is imported here and nowhere else.

Each name is exercised by `tests/test_jax.py` on every supported version, so that a JAX release that moves one of
them fails there first.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from jax._src import core as _core
from jax.extend.core import Primitive, subjaxprs
from jax.interpreters import ad, batching, mlir, partial_eval

SymbolicZero = ad.Zero
ShapedArray = jax.core.ShapedArray
Tracer = jax.core.Tracer
trace_state_clean: Callable[[], bool] = _core.trace_state_clean

_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)


def make_primitive(name: str) -> Primitive:
    """Return a new primitive with several results."""
    primitive = Primitive(name)
    primitive.multiple_results = True
    return primitive


def register_batching(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Register `rule(axis, args, dims, **params)`; `axis` has `size`, `name` and `spmd_name`."""
    batching.fancy_primitive_batchers[primitive] = rule


def register_jvp(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Register `rule(primals, tangents, **params)`; tangents may be symbolic zeros."""
    ad.primitive_jvps[primitive] = rule


def register_lowering(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Register `rule(context, *args, **params)` for every platform."""
    mlir.register_lowering(primitive, rule)


def lower_inline(context: Any, function: Callable[..., Sequence[Any]], args: Sequence[Any]) -> Any:
    """Lower `function` in place, as if the program had called it itself."""
    return mlir.lower_fun(function, multiple_results=True)(context, *args)


def lowering_platforms(context: Any) -> tuple[str, ...]:
    """The platforms that a lowering rule's program is meant for; several only when exporting."""
    return tuple(context.platforms or context.module_context.platforms)


def used_inputs(closed_jaxpr: Any) -> tuple[bool, ...]:
    """Which inputs of a traced program its outputs or effects depend on."""
    jaxpr = closed_jaxpr.jaxpr
    return tuple(partial_eval.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))[1])


def dynamic_grid_bounds(closed_jaxpr: Any) -> int:
    """How many bounds of Pallas grids in a traced program are computed rather than known."""
    return _dynamic_bounds(closed_jaxpr.jaxpr)


def _dynamic_bounds(jaxpr: Any) -> int:
    own = sum(getattr(e.params.get("grid_mapping"), "num_dynamic_grid_bounds", 0) for e in jaxpr.eqns)
    return own + sum(_dynamic_bounds(inner) for inner in subjaxprs(jaxpr))


def shaped(aval: Any) -> Any:
    """The shape, dtype and weak type of an abstract value, without what only its own trace knows."""
    return ShapedArray(aval.shape, aval.dtype, weak_type=getattr(aval, "weak_type", False))


def key_impl_name(dtype: Any) -> str:
    """The name of the generator behind a PRNG key dtype, as `jax.random.wrap_key_data` takes it."""
    return str(dtype._impl.name)


@contextlib.contextmanager
def outside_traces() -> Iterator[None]:
    """Leave the ambient trace: inside, arrays are concrete, and programs compile, run and may return NaN."""
    with jax.core.eval_context(), jax.debug_nans(False), jax.disable_jit(False):
        yield


def jit_is_disabled() -> bool:
    """Whether the caller runs under `jax.disable_jit`."""
    return bool(jax.config.jax_disable_jit)  # type: ignore[attr-defined]


def default_device_setting() -> Any:
    """The caller's default device: a device, a platform's name, or None."""
    return jax.config.jax_default_device  # type: ignore[attr-defined]


def settings() -> tuple[tuple[str, Any], ...]:
    """The caller's settings that change what a function computes or compiles to."""
    return tuple((name, getattr(jax.config, name)) for name in _SETTINGS)


def is_jitted(function: Any) -> bool:
    """Whether `function` is the result of `jax.jit`."""
    return hasattr(function, "_jit_info") and hasattr(function, "lower")


def jit_statics(function: Any) -> frozenset[str]:
    """Names of a jitted function's static parameters."""
    return _named_parameters(function, "static_argnames", "static_argnums")


def jit_donations(function: Any) -> frozenset[str]:
    """Names of a jitted function's donated parameters."""
    return _named_parameters(function, "donate_argnames", "donate_argnums")


def _named_parameters(function: Any, names_field: str, numbers_field: str) -> frozenset[str]:
    info = function._jit_info
    parameters = list(info.fun_signature.parameters) if info.fun_signature else []
    by_number = {parameters[i] for i in getattr(info, numbers_field) if -len(parameters) <= i < len(parameters)}
    return frozenset(getattr(info, names_field)) | by_number
