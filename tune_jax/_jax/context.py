"""What is around a call: the ambient trace, settings, mesh, axis names and devices."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax._src import config as _config
from jax._src import core as _core
from jax._src import mesh as _mesh

trace_state_clean: Callable[[], bool] = _core.trace_state_clean
# All that JAX's own caches of traces go by besides the arguments: settings, axis names and sizes, mesh.
trace_context: Callable[[], tuple[Any, ...]] = _config.trace_context
# The mesh of `jax.set_mesh`, seen inside of traces too; empty where there is none.
concrete_mesh: Callable[[], jax.sharding.Mesh] = _mesh.get_concrete_mesh

_SETTINGS = (
    "jax_default_matmul_precision",
    "jax_enable_x64",
    "jax_numpy_dtype_promotion",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
)


@contextlib.contextmanager
def outside_traces() -> Iterator[None]:
    """Leave the ambient trace: inside, arrays are concrete, and programs compile, run and may return NaN or inf."""
    names = _core.trace_ctx.axis_env
    with (
        jax.core.eval_context(),
        _outside_manual_axes(),
        jax.debug_nans(False),
        jax.debug_infs(False),
        jax.disable_jit(False),
    ):
        # Axis names stay when the trace goes, and what uses one could then be traced, but not lowered.
        _core.trace_ctx.set_axis_env(_core.top_axis_env)
        try:
            yield
        finally:
            _core.trace_ctx.set_axis_env(names)


def _outside_manual_axes() -> contextlib.AbstractContextManager[Any]:
    """Leave the mesh of the `shard_map` around, if there is one."""
    mesh = jax.sharding.get_abstract_mesh()
    if jax.sharding.AxisType.Manual not in mesh.axis_types:
        return contextlib.nullcontext()
    return jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ()))


def axis_names() -> tuple[Any, ...]:
    """The names of the axes that collectives can use here."""
    return tuple(_core.get_axis_env().axis_sizes)


def default_device_setting() -> Any:
    """The caller's default device: a device, a platform's name, or None."""
    return jax.config.jax_default_device  # type: ignore[attr-defined]


def settings() -> tuple[tuple[str, Any], ...]:
    """The caller's settings that change what a function computes or compiles to."""
    return tuple((name, getattr(jax.config, name)) for name in _SETTINGS)


@dataclasses.dataclass(frozen=True)
class Surroundings:
    """What a tuning depends on besides its call: settings, the default device, the mesh and the axis names."""

    settings: tuple[tuple[str, Any], ...]
    mesh: Any
    axes: Any


def surroundings() -> Surroundings:
    """The caller's surroundings, to come back to."""
    device = ("jax_default_device", default_device_setting())
    return Surroundings((*settings(), device), jax.sharding.get_abstract_mesh(), _core.trace_ctx.axis_env)


@contextlib.contextmanager
def restored(around: Surroundings) -> Iterator[None]:
    """Be in these surroundings again."""
    before = _core.trace_ctx.axis_env
    with contextlib.ExitStack() as stack:
        for name, value in around.settings:
            stack.enter_context(_config.config_states[name](value))
        stack.enter_context(jax.sharding.use_abstract_mesh(around.mesh))
        stack.callback(_core.trace_ctx.set_axis_env, before)
        _core.trace_ctx.set_axis_env(around.axes)
        yield
