"""A call with its shapes, devices and settings -> the one key that memory, stores and locks go by."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax

from tune_jax._call import Call
from tune_jax._jax import ShapedArray, default_device_setting, settings
from tune_jax._leaves import describe_aval
from tune_jax._sharing import common_call


@dataclasses.dataclass(frozen=True)
class Key:
    """What makes two calls the same tuning. `str(key)` is for people, `key.digest` for file names.

    `call` is what it has in common with calls of equal tuned functions.
    """

    call: Call
    avals: tuple[Any, ...]
    placement: tuple[str, ...]
    device: str
    settings: tuple[tuple[str, Any], ...]

    @property
    def digest(self) -> str:
        """Hexadecimal digest of the readable form."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:32]

    def __str__(self) -> str:
        parts = [f"{self.call.tunable.name}({describe_arguments(self.call, self.avals)})"]
        parts += [f"{name}={static.value!r}" for name, static in self.call.fixed]
        parts += [f"vmap {batch.size} over {batch.dims}" for batch in self.call.batches]
        parts += [*self.placement, self.device]
        return "; ".join([*parts, *(f"{name}={value}" for name, value in self.settings if value is not None)])


def make_key(call: Call, avals: Sequence[Any], *, placement: Sequence[str], device: str) -> Key:
    """Make the key of a call under the caller's present settings."""
    plain = tuple(ShapedArray(aval.shape, aval.dtype) for aval in avals)
    return Key(common_call(call, avals), plain, tuple(placement), device, settings())


def describe_arguments(call: Call, avals: Sequence[Any]) -> str:
    """The call's arguments in words: `q: bfloat16[2,4096,8,128], causal: True`."""
    inputs = dict(zip(call.dynamic_indices, avals, strict=True))
    statics = {index: repr(static.value) for index, static in call.statics}
    words = {**{i: describe_aval(aval) for i, aval in inputs.items()}, **statics}
    return ", ".join(f"{call.paths[index]}: {words[index]}" for index in sorted(words))


def device_of(values: Sequence[Any]) -> jax.Device:
    """The device that a program of these inputs runs on: theirs where they are committed, else the default one."""
    committed = [value for value in values if isinstance(value, jax.Array) and value.committed]
    if committed:
        return min((device for value in committed for device in value.devices()), key=lambda device: device.id)
    return default_device()


def default_device() -> jax.Device:
    """The device that uncommitted arrays go to under the caller's settings."""
    chosen = default_device_setting()
    if isinstance(chosen, jax.Device):
        return chosen
    return jax.local_devices(backend=chosen)[0]


def describe_placement(values: Sequence[Any]) -> tuple[str, ...]:
    """Say how inputs are laid out over devices; empty where each lies on a single one."""
    shardings = [getattr(value, "sharding", None) for value in values]
    if all(sharding is None or len(sharding.device_set) == 1 for sharding in shardings):
        return ()
    return tuple(_describe_sharding(sharding) for sharding in shardings)


def _describe_sharding(sharding: Any) -> str:
    if sharding is None or len(sharding.device_set) == 1:
        return "one device"
    if isinstance(sharding, jax.sharding.NamedSharding):
        return f"{dict(sharding.mesh.shape)} {sharding.spec} {sharding.memory_kind}"
    return str(sharding)
