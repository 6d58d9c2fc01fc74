"""Which device a call is for, as far as that can be known when it is traced."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Device:
    """The kind of device that a call will run on.

    `platform` is "cpu", "gpu", "tpu" or another that JAX knows, `kind` the model, such as "NVIDIA H200", and
    `capability` an NVIDIA GPU's compute capability, None where it is unknown or there is no such thing.
    """

    platform: str
    kind: str
    capability: float | None = None

    def __str__(self) -> str:
        return self.kind if self.kind.lower() == self.platform else f"{self.kind} ({self.platform})"


def find_device(*arrays: Any) -> Device:
    """The device of a call with these arrays.

    That is the abstract device of the mesh around the call if it has one, else the device of the first array that has
    values, else the default device.
    """
    abstract = getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None)
    if abstract is not None:
        return Device(abstract.platform, abstract.device_kind)
    placed = next(filter(None, map(_device_of, arrays)), None)
    return describe(placed or _default_device())


def describe(device: jax.Device) -> Device:
    """The kind of a device of this process."""
    return Device(device.platform, device.device_kind, _capability(device))


def _device_of(array: Any) -> jax.Device | None:
    if not isinstance(array, jax.Array):
        return None
    try:
        return min(array.devices(), key=lambda device: device.id)
    except jax.errors.ConcretizationTypeError:  # a traced array lies nowhere yet
        return None


def _default_device() -> jax.Device:
    default = jax.config.jax_default_device
    if default is None or isinstance(default, str):
        return jax.local_devices(backend=default)[0]
    return default


def _capability(device: jax.Device) -> float | None:
    # AMD's GPUs have an architecture's name here.
    try:
        return float(getattr(device, "compute_capability", ""))
    except ValueError:
        return None
