"""What JAX's own wrappers of functions know of themselves, and lowered programs."""

from __future__ import annotations

from typing import Any

import jax


def is_jitted(function: Any) -> bool:
    """Whether `function` is the result of `jax.jit`."""
    return hasattr(function, "_jit_info") and hasattr(function, "lower")


def jit_statics(function: Any) -> frozenset[str]:
    """Names of a jitted function's static parameters."""
    return _named_parameters(function, "static_argnames", "static_argnums")


def jit_donations(function: Any) -> frozenset[str]:
    """Names of a jitted function's donated parameters."""
    return _named_parameters(function, "donate_argnames", "donate_argnums")


def jit_compiler_options(function: Any) -> dict[str, Any]:
    """The compiler options of a jitted function."""
    return dict(function._jit_info.compiler_options_kvs)


def _named_parameters(function: Any, names_field: str, numbers_field: str) -> frozenset[str]:
    info = function._jit_info
    parameters = list(info.fun_signature.parameters.values()) if info.fun_signature else []
    numbered = [parameters[i] for i in getattr(info, numbers_field) if -len(parameters) <= i < len(parameters)]
    # One of *args cannot be said by name, and the name would mean all of them.
    named = {parameter.name for parameter in numbered if parameter.kind is not parameter.VAR_POSITIONAL}
    return frozenset(getattr(info, names_field)) | named


def custom_derivative(function: Any) -> tuple[str, tuple[str, ...]] | None:
    """The name of what gives `function` its own derivative, and of the attributes that hold its rules."""
    if isinstance(function, jax.custom_vjp):
        return "custom_vjp", ("fwd", "bwd")
    return ("custom_jvp", ("jvp",)) if isinstance(function, jax.custom_jvp) else None


def lowered_devices(lowered: Any) -> tuple[int, ...]:
    """Ids of the devices that a lowered program is to be compiled for; its text does not say them."""
    return tuple(device.id for device in lowered._lowering._device_list or ())


def has_host_callbacks(lowered: Any) -> bool:
    """Whether a lowered program calls Python functions of the host; its text does not say which."""
    return bool(lowered._lowering.compile_args["host_callbacks"])
