"""Which backends there are, what each can do, and which one answers a call."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax

from .call import Operands, Spec
from .choice import Attend, Choice, Route
from .device import Device, find_device
from .features import asked
from .resources import WALKS
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
        backward_limits: says likewise why such a call cannot be differentiated.
        hushes: how a warning of JAX's begins that whoever is given this backend can do nothing about.
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
    backward_limits: Limits | None = None
    hushes: str | None = None

    def load(self) -> Attend:
        """The backend's function."""
        return importlib.import_module(f".{self.name}", __package__).attend  # type: ignore[no-any-return]

    def runs_natively(self, device: Device) -> bool:
        """Whether it runs on such a device other than by interpreting."""
        return not self.platforms or device.platform in self.platforms


def _cudnn_limits(spec: Spec, operands: Operands, device: Device) -> str | None:
    batch, q_length, heads, depth = operands.q.shape
    kv_length = operands.k.shape[1]
    widest = 128 if device.capability is not None and device.capability < 9 else 256
    if depth % 8 or depth > widest:
        return f"takes head_dims that are multiples of 8 up to {widest}, not {depth}"
    if 0 in (*operands.q.shape, *operands.k.shape):
        return "takes no arrays without elements"
    if max(batch, heads) > _CUDA_GRID:
        return f"takes batches and heads up to {_CUDA_GRID}, not {max(batch, heads)}"
    if spec.left is not None and q_length > kv_length:
        return f"takes a window only with no more queries than keys, not {q_length} and {kv_length}"
    if spec.left is not None and (operands.q_lengths is not None or operands.kv_lengths is not None):
        return "makes NaN of rows whose window lies past the last key, as lengths may have them"
    return None


def _cudnn_backward_limits(spec: Spec, operands: Operands, device: Device) -> str | None:
    lengths = operands.q.shape[1], operands.k.shape[1]
    if lengths[0] % 2 or lengths[1] % 2:
        return f"has a backward pass for even lengths only, not for {lengths[0]} queries and {lengths[1]} keys"
    return None


# The most blocks along the second and third axis of a launch.
_CUDA_GRID = 65535
_FORWARD_TILES = ("block_q", "block_k")
_TRITON_TILES = tuple(f"{name}{walk}" for walk in WALKS for name in ("block_q", "block_k", "num_warps", "num_stages"))

# Where no table says which is the fastest, the first that can do a call answers it.
BACKENDS = (
    Backend(
        "cudnn",
        platforms=("gpu",),
        capability=8.0,
        dtypes=("bfloat16", "float16"),
        lacks=(
            "window past the query",
            "q_offset",
            "segment_ids",
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
        backward_limits=_cudnn_backward_limits,
    ),
    Backend(
        "pallas_triton",
        tiles=_TRITON_TILES,
        platforms=("gpu",),
        capability=8.0,
        is_interpreted_on_cpu=True,
        needs="jax.experimental.pallas.triton",
        # At each lowering; with warnings as errors programs would stop.
        hushes="The Pallas Triton backend is deprecated",
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
    if implementation is not None and not isinstance(implementation, str):
        raise _unknown(implementation)  # what cannot be hashed would not get as far
    device = find_device(operands.q, operands.k, operands.v)
    abstract: Any = (None if x is None else jax.ShapeDtypeStruct(x.shape, x.dtype) for x in operands)
    choice = _decide(implementation, spec, Operands(*abstract), return_lse, device)
    for message in choice.hushed:
        _hush(message)
    return choice


def _hush(message: str) -> None:
    """Ignores a deprecation that JAX announces; not in the backend, since JAX keeps what it has traced once."""
    rule = ("ignore", message, DeprecationWarning)
    known = ((action, getattr(pattern, "pattern", None), kind) for action, pattern, kind, *_ in warnings.filters)
    if rule not in known:  # a new filter makes Python forget what it has shown once
        warnings.filterwarnings(*rule)


# Eager calls ask each time.
@functools.lru_cache(maxsize=4096)
def _decide(implementation: str | None, spec: Spec, operands: Any, return_lse: bool, device: Device) -> Choice:
    if implementation is not None:
        plain = trained = _find(implementation)
        _check(plain, spec, operands, return_lse, device)
        able: tuple[Backend, ...] = (plain,)
    else:
        able = supporting(spec, operands, return_lse, device)
        if not able:
            raise ValueError(_none_message(spec, operands, return_lse, device))
        plain = _fastest("forward", able, spec, operands, device)
        trainable = tuple(each for each in able if training_refusal(each, spec, operands, device) is None)
        trained = _fastest("backward", trainable or able, spec, operands, device)
    hushed = tuple({each.hushes for each in (plain, trained) if each.hushes})
    routes = [_route(each, spec, operands, return_lse, device) for each in (plain, trained)]
    reason = training_refusal(trained, spec, operands, device)
    if reason is not None:
        routes[1] = replace(routes[1], function=_Refusal(f"implementation {trained.name!r} {reason}; name another."))
    return Choice(*routes, hushed=hushed)


@dataclass(frozen=True)
class _Refusal:
    """Stands in for a backend's function where a call may be made and not be differentiated."""

    message: str

    def __call__(self, spec: Spec, operands: Operands) -> Any:
        raise ValueError(self.message)


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


def training_refusal(backend: Backend, spec: Spec, operands: Operands, device: Device) -> str | None:
    """Why a call that a backend can do cannot be differentiated with it; None if it can."""
    return None if backend.backward_limits is None else backend.backward_limits(spec, operands, device)


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
    raise _unknown(name)


def _unknown(implementation: object) -> ValueError:
    available = ", ".join(repr(each) for each in IMPLEMENTATIONS)
    return ValueError(
        f"implementation {implementation!r} is unknown; available: {available}, or None for the best one."
    )


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


def _route(backend: Backend, spec: Spec, operands: Operands, return_lse: bool, device: Device) -> Route:
    tiles = settle_tiles(backend.name, spec, operands, device.kind)
    return Route(backend.load(), replace(spec, tiles=tiles), return_lse)
