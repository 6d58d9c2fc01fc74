"""The one door to JAX's internals: everything outside the stable public API is imported here and nowhere else.

Each name is exercised by `tests/test_jax.py` on every supported version, so that a JAX release that moves one of
them fails there first.
"""

from __future__ import annotations

import jax

try:
    from tune_jax._jax.context import (
        Surroundings,
        axis_names,
        concrete_mesh,
        default_device_setting,
        outside_traces,
        restored,
        settings,
        surroundings,
        trace_context,
        trace_state_clean,
    )
    from tune_jax._jax.functions import (
        custom_derivative,
        has_host_callbacks,
        is_jitted,
        jit_compiler_options,
        jit_donations,
        jit_statics,
        lowered_devices,
    )
    from tune_jax._jax.jaxprs import (
        closed_over,
        current_source,
        dynamic_grid_bounds,
        eval_closed,
        inner_jaxprs,
        placed_parts,
        says_what_varies,
        source_frames,
        used_inputs,
        vary_as,
        vary_over,
    )
    from tune_jax._jax.primitives import (
        SymbolicZero,
        batch_size,
        hold_weakly,
        instantiate,
        is_batched,
        is_linear_input,
        is_named,
        lower_inline,
        lowering_devices,
        lowering_platforms,
        make_primitive,
        register_batching,
        register_jvp,
        register_lowering,
        register_transpose,
        takes_cotangent,
        zero_tangent,
    )
    from tune_jax._jax.services import (
        abandon_trace,
        distributed_client,
    )
    from tune_jax._jax.values import (
        ShapedArray,
        Tracer,
        as_weak,
        is_explicit,
        is_key_dtype,
        key_impl_name,
        shaped,
        struct_of,
    )
except ImportError as error:
    raise ImportError(f"tune-jax needs jax 0.10.2 or newer, and found {jax.__version__}: {error}") from error

__all__ = [
    "ShapedArray",
    "Surroundings",
    "SymbolicZero",
    "Tracer",
    "abandon_trace",
    "as_weak",
    "axis_names",
    "batch_size",
    "closed_over",
    "concrete_mesh",
    "current_source",
    "custom_derivative",
    "default_device_setting",
    "distributed_client",
    "dynamic_grid_bounds",
    "eval_closed",
    "has_host_callbacks",
    "hold_weakly",
    "inner_jaxprs",
    "instantiate",
    "is_batched",
    "is_explicit",
    "is_jitted",
    "is_key_dtype",
    "is_linear_input",
    "is_named",
    "jit_compiler_options",
    "jit_donations",
    "jit_statics",
    "key_impl_name",
    "lower_inline",
    "lowered_devices",
    "lowering_devices",
    "lowering_platforms",
    "make_primitive",
    "outside_traces",
    "placed_parts",
    "register_batching",
    "register_jvp",
    "register_lowering",
    "register_transpose",
    "restored",
    "says_what_varies",
    "settings",
    "shaped",
    "source_frames",
    "struct_of",
    "surroundings",
    "takes_cotangent",
    "trace_context",
    "trace_state_clean",
    "used_inputs",
    "vary_as",
    "vary_over",
    "zero_tangent",
]
