"""Which backends there are, what each can do, and which one answers a call."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from .call import Operands, Spec
from .choice import Attend, Choice, Route
from .device import Device, find_device
from .features import asked
from .tables import rank_backends, settle_tiles

Limits = Callable[[Spec, Operands, Device], "str | None"]


@dataclass(frozen=True)
class Backend:
    """A module of this folder with a function `attend(spec, operands)`, and what that can do.

    The module is imported when it is first used, never to find out what it can do.

    Attributes:
        name: the module's name, and that of the implementation.
        tiles: the hyperparameters that it takes.
        platforms: where it runs, empty for everywhere.
        capability: the least compute capability of an NVIDIA GPU.
        is_interpreted_on_cpu: whether it also runs on a CPU, slowly, where it is named.
        needs: a module of JAX that a version of JAX may lack.
        dtypes: what q, k and v may be.
        lacks: the names of features that it has not.
        limits: says why a call's shapes are beyond it, None if they are not.
        has_backward: whether calls can be differentiated.
    """

    name: str
    tiles: tuple[str, ...] = ()
    platforms: tuple[str, ...] = ()
    capability: float | None = None
    is_interpreted_on_cpu: bool = False
    needs: str | None = None
    dtypes: tuple[str, ...] = ("float32", "bfloat16", "float16")
    lacks: tuple[str, ...] = ()
    limits: Limits | None = None
    has_backward: bool = True

    def load(self) -> Attend:
        """The backend's function."""
        return importlib.import_module(f".{self.name}", __package__).attend  # type: ignore[no-any-return]

    def runs_natively(self, device: Device) -> bool:
        """Whether it runs on such a device other than by interpreting."""
        return not self.platforms or device.platform in self.platforms


def _cudnn_limits(spec: Spec, operands: Operands, device: Device) -> str | None:
    _, q_length, _, depth = operands.q.shape
    kv_length = operands.k.shape[1]
    widest = 128 if device.capability is not None and device.capability < 9 else 256
    if depth % 8 or depth > widest:
        return f"takes head_dims that are multiples of 8 up to {widest}, not {depth}"
    if 0 in (*operands.q.shape, *operands.k.shape):
        return "takes no arrays without elements"
    if spec.left is not None and q_length - spec.left > kv_length:
        return "gives no zeros to queries whose window lies past the last key"
    return None


_FORWARD_TILES = ("block_q", "block_k")
_TRITON_TILES = tuple(
    f"{name}{walk}" for walk in ("", "_dkv", "_dq") for name in ("block_q", "block_k", "num_warps", "num_stages")
)

# Where no table says which is the fastest, the first that can do a call answers it.
BACKENDS = (
    Backend(
        "cudnn",
        platforms=("gpu",),
        capability=8.0,
        dtypes=("bfloat16", "float16"),
        lacks=(
            "window to the right",
            "q_offset",
            "segment_ids",
            "q_lengths",
            "kv_lengths",
            "mask",
            "bias",
            "array scale",
            "softcap",
            "sinks",
            "return_lse",
            "deterministic",
            "Dv other than D",
        ),
        limits=_cudnn_limits,
    ),
    Backend(
        "pallas_triton",
        tiles=_TRITON_TILES,
        platforms=("gpu",),
        capability=8.0,
        is_interpreted_on_cpu=True,
        needs="jax.experimental.pallas.triton",
    ),
    Backend(
        "pallas_tpu",
        tiles=("block_q", "block_k", "block_q_dkv", "block_k_dkv", "block_q_dq", "block_k_dq"),
        platforms=("tpu",),
        is_interpreted_on_cpu=True,
        needs="jax.experimental.pallas.tpu",
        dtypes=("float32", "bfloat16"),
    ),
    Backend("xla", tiles=_FORWARD_TILES),
)
IMPLEMENTATIONS = tuple(sorted(backend.name for backend in BACKENDS))


def choose(implementation: str | None, spec: Spec, operands: Operands, return_lse: bool) -> Choice:
    """What answers a call, with its tiles settled; an error where none can, or not the one named.

    Without a name, a plain call and one that is differentiated each get the first backend that can do it out of
    the tuned table's nearest entry, fastest first, and then out of `BACKENDS`.
    """
    device = find_device(operands.q, operands.k, operands.v)
    abstract: Any = (None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
    return _decide(implementation, spec, Operands(*abstract), return_lse, device)


# Eager calls ask each time.
@functools.lru_cache(maxsize=4096)
def _decide(implementation: str | None, spec: Spec, operands: Any, return_lse: bool, device: Device) -> Choice:
    if implementation is not None:
        backend = _find(implementation)
        _check(backend, spec, operands, return_lse, device)
        route = _route(backend, spec, operands, device)
        return Choice(route, route)
    able = supporting(spec, operands, return_lse, device)
    if not able:
        raise ValueError(_none_message(spec, operands, return_lse, device))
    plain = _fastest("forward", able, spec, operands, device)
    differentiable = tuple(backend for backend in able if backend.has_backward)
    trained = _fastest("backward", differentiable, spec, operands, device) if differentiable else plain
    return Choice(_route(plain, spec, operands, device), _route(trained, spec, operands, device))


def supporting(spec: Spec, operands: Operands, return_lse: bool, device: Device) -> tuple[Backend, ...]:
    """The backends that can do a call on a device, other than by interpreting, and take its hyperparameters."""
    return tuple(
        backend
        for backend in BACKENDS
        if backend.runs_natively(device) and _obstacle(backend, spec, operands, return_lse, device) is None
    )


def refusal(backend: Backend, spec: Spec, operands: Operands, return_lse: bool, device: Device) -> str | None:
    """Why a backend cannot do a call on a device, as the end of a sentence about it; None if it can."""
    beyond = _refuse_device(backend, device)
    if beyond is not None:
        return beyond
    dtype = str(operands.q.dtype)
    if dtype not in backend.dtypes:
        return f"does not take {dtype}, only {listed(backend.dtypes)}"
    missing = [name for name in asked(spec, operands, return_lse) if name in backend.lacks]
    if missing:
        return f"has no {', no '.join(missing)}"
    return None if backend.limits is None else backend.limits(spec, operands, device)


def _refuse_device(backend: Backend, device: Device) -> str | None:
    if not (backend.runs_natively(device) or (backend.is_interpreted_on_cpu and device.platform == "cpu")):
        return f"runs on {' and '.join(map(_plural, backend.platforms))}, and the call is for {device}"
    least = backend.capability
    if least is not None and device.platform == "gpu":
        if not device.kind.startswith("NVIDIA"):
            return f"runs on NVIDIA GPUs, and the call is for {device}"
        if device.capability is not None and device.capability < least:
            return f"needs compute capability {least}, and the {device.kind} has {device.capability}"
    if backend.needs is not None and not _has_module(backend.needs):
        return f"needs {backend.needs}, which this version of JAX does not have"
    return None


@functools.cache
def _has_module(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def _obstacle(backend: Backend, spec: Spec, operands: Operands, return_lse: bool, device: Device) -> str | None:
    refused = [name for name in spec.tiles.given if name not in backend.tiles]
    if refused:
        taken = f"only {listed(backend.tiles)}" if backend.tiles else "nor any other hyperparameter"
        return f"takes no {', no '.join(refused)}, {taken}"
    return refusal(backend, spec, operands, return_lse, device)


def _find(name: str) -> Backend:
    for backend in BACKENDS:
        if backend.name == name:
            return backend
    available = ", ".join(repr(each) for each in IMPLEMENTATIONS)
    raise ValueError(f"implementation {name!r} is unknown; available: {available}, or None for the best one.")


def _check(backend: Backend, spec: Spec, operands: Operands, return_lse: bool, device: Device) -> None:
    obstacle = _obstacle(backend, spec, operands, return_lse, device)
    if obstacle is None:
        return
    able = supporting(spec, operands, return_lse, device) or tuple(
        other for other in BACKENDS if _obstacle(other, spec, operands, return_lse, device) is None
    )
    names = [repr(other.name) for other in able]
    advice = f"{listed(names)} can do this call" if names else "no other can do this call either"
    raise ValueError(f"implementation {backend.name!r} {obstacle}; {advice}.")


def _none_message(spec: Spec, operands: Operands, return_lse: bool, device: Device) -> str:
    reasons = [
        f"{each.name!r} {_obstacle(each, spec, operands, return_lse, device) or 'is interpreted here, if named'}"
        for each in BACKENDS
    ]
    return f"no implementation can do this call on {device}: {'; '.join(reasons)}."


def _plural(platform: str) -> str:
    return f"{platform.upper()}s"


def listed(names: Sequence[str]) -> str:
    """Names as English lists them."""
    return " and ".join(filter(None, [", ".join(names[:-1]), *names[-1:]]))


def _fastest(walk: str, able: tuple[Backend, ...], spec: Spec, operands: Operands, device: Device) -> Backend:
    by_name = {backend.name: backend for backend in able}
    ranked = rank_backends(walk, spec, operands, device.kind)
    return next((by_name[name] for name in ranked if name in by_name), able[0])


def _route(backend: Backend, spec: Spec, operands: Operands, device: Device) -> Route:
    tiles = settle_tiles(backend.name, spec, operands, device.kind)
    return Route(backend.load(), replace(spec, tiles=tiles))
