"""A call with its shapes, devices and settings -> the one key that memory, stores and locks go by."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from tune_jax._call import Call
from tune_jax._digest import lasting_text
from tune_jax._jax import ShapedArray, default_device_setting, settings
from tune_jax._leaves import describe_aval
from tune_jax._placement import Placement, mesh_devices
from tune_jax._sharing import common_call

# What a digest goes by. Not the examples, which are data, nor the seed, nor what changes no program.
_TUNABLE_FIELDS = (
    "function",
    "name",
    "where",
    "sample_num",
    "static_names",
    "donated_names",
    "compiler_options",
    "in_shardings",
    "out_shardings",
    "kernel_filter",
    "with_vjp",
)
_CALL_FIELDS = ("space", "names", "tree", "batches", "moving", "mesh")


@dataclasses.dataclass(frozen=True)
class Key:
    """What makes two calls the same tuning. `str(key)` is for people, `key.digest` for file names.

    `call` is what it has in common with calls of equal tuned functions.
    """

    call: Call
    avals: tuple[Any, ...]
    placement: tuple[Placement | None, ...]
    device: str
    settings: tuple[tuple[str, Any], ...]

    def __str__(self) -> str:
        names = self.call.input_names
        parts = [f"{self.call.tunable.name}({describe_arguments(self.call, self.avals)})"]
        parts += [f"{name}={static.value!r}" for name, static in self.call.fixed]
        parts += [f"vmap {batch.size} over {batch.dims}" for batch in self.call.batches]
        parts += [str(self.call.mesh)] if self.call.mesh else []
        parts += [f"{name} on {place}" for name, place in zip(names, self.placement, strict=False) if place]
        parts.append(self.device)
        return "; ".join([*parts, *(f"{name}={value}" for name, value in self.settings if value is not None)])


def make_key(call: Call, avals: Sequence[Any], *, placement: Sequence[Placement | None], device: str) -> Key:
    """Make the key of a call under the caller's present settings; `placement` has an entry an input."""
    plain = tuple(ShapedArray(aval.shape, aval.dtype) for aval in avals)
    return Key(common_call(call, avals), plain, tuple(placement) if any(placement) else (), device, settings())


def digest_of(key: Key, call: Call) -> str:
    """Hexadecimal digest of a key of this call, equal in every process that runs the same program."""
    tunable = call.tunable
    own = {name: getattr(tunable, name) for name in _TUNABLE_FIELDS}
    own |= {name: getattr(call, name) for name in _CALL_FIELDS}
    statics = [(name, static.value) for name, static in (*call.statics, *call.fixed)]
    programs = call.traced and call.traced.digest()
    text = lasting_text((own, statics, programs, key.avals, key.placement, key.device, key.settings))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def describe_arguments(call: Call, avals: Sequence[Any]) -> str:
    """The call's arguments in words: `q: bfloat16[2,4096,8,128], causal: True`, and by which it is differentiated."""
    inputs = dict(zip(call.dynamic_indices, avals, strict=True))
    statics = {index: repr(static.value) for index, static in call.statics}
    words = {**{i: describe_aval(aval) for i, aval in inputs.items()}, **statics}
    moving = [f"with its vjp by {' and '.join(call.input_names[index] for index in call.moving)}"] * bool(call.moving)
    return ", ".join([*(f"{call.paths[index]}: {words[index]}" for index in sorted(words)), *moving])


def device_of(shardings: Sequence[Any]) -> jax.Device:
    """The first device of this process that a program of inputs with these shardings, or None, runs on."""
    devices = {device for sharding in shardings if sharding for device in sharding.addressable_devices}
    return min(devices, key=lambda device: device.id) if devices else default_device()


def default_device() -> jax.Device:
    """The device where programs of uncommitted arrays run under the caller's settings; of a mesh, the first."""
    own = _own_default_device()
    among = [device for device in mesh_devices() if device.process_index == own.process_index]
    return own if own in among or not among else among[0]


@contextlib.contextmanager
def on_device(device: jax.Device) -> Iterator[None]:
    """Make a device the one that new arrays go to."""
    if device == _own_default_device():
        # Another setting, though of the same device, would have JAX trace everything again.
        yield
    else:
        with jax.default_device(device):
            yield


def _own_default_device() -> jax.Device:
    chosen = default_device_setting()
    return chosen if isinstance(chosen, jax.Device) else jax.local_devices(backend=chosen)[0]
