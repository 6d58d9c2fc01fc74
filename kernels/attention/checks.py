"""From the arguments of a call to its checked form, or an error that says what to do."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .call import Array, Operands, Spec, Tiles
from .values import as_array, clip, is_whole_number, kind_of, read_integers, show

_DTYPES = ("float32", "bfloat16", "float16")
_LARGEST_HEAD_DIM = 256
# Positions, windows and their sums must fit int32 with room to spare; past this there is no difference.
_FAR = 2**29
# A cap this far off changes no score, and scores divided by it come close to what float32 flushes to zero.
_NO_SOFTCAP = 1e30
_LARGEST_FLOAT, _SMALLEST_FLOAT = float(np.finfo(np.float32).max), float(np.finfo(np.float32).tiny)


def read_call(
    q: Any,
    k: Any,
    v: Any,
    *,
    causal: Any = False,
    q_offset: Any = 0,
    window: Any = None,
    segment_ids: Any = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    mask: Any = None,
    bias: Any = None,
    scale: Any = None,
    softcap: Any = None,
    sinks: Any = None,
    deterministic: Any = False,
    tiles: Tiles | None = None,
) -> tuple[Spec, Operands]:
    """The checked form of a call; arguments as in `flash_attention`. Raises for what no backend can mean."""
    q, k, v = (as_array(name, x, "an array") for name, x in (("q", q), ("k", k), ("v", v)))
    check_arrays(q, k, v)
    scale, scale_array = _read_scale(scale, q.shape[3])
    batch, q_length, kv_length = q.shape[0], q.shape[1], k.shape[1]
    q_segments, kv_segments = _read_segments(segment_ids, batch, q_length, kv_length)
    spec = Spec(
        causal=read_flag("causal", causal),
        window=_read_window(window),
        scale=scale,
        softcap=_read_softcap(softcap),
        deterministic=read_flag("deterministic", deterministic),
        tiles=tiles or Tiles(),
    )
    pairs = (batch, q.shape[2], q_length, kv_length)
    operands = Operands(
        q=q,
        k=k,
        v=v,
        bias=_read_bias(bias, pairs),
        mask=_read_mask(mask, pairs),
        sinks=_read_sinks(sinks, q.shape[2]),
        scale=scale_array,
        q_offset=_read_offset(q_offset, batch),
        q_lengths=_read_lengths("q_lengths", q_lengths, batch, q_length),
        kv_lengths=_read_lengths("kv_lengths", kv_lengths, batch, kv_length),
        q_segments=q_segments,
        kv_segments=kv_segments,
    )
    return spec, operands


def check_arrays(q: Any, k: Any, v: Any) -> None:
    """Raises unless shapes and dtypes fit each other; abstract arrays will do."""
    _check_ranks(q, k, v)
    _check_sizes(q.shape, k.shape, v.shape)
    _check_dtypes(q, k, v)


def _check_ranks(q: Any, k: Any, v: Any) -> None:
    for name, array in (("q", q), ("k", k), ("v", v)):
        if len(array.shape) != 4:
            raise ValueError(
                f"{name} must have 4 axes, [batch, time, heads, head_dim], got shape {array.shape}; "
                f"add an axis of size 1 for each that is missing, or use jax.vmap for more."
            )


def _check_sizes(q: tuple[int, ...], k: tuple[int, ...], v: tuple[int, ...]) -> None:
    shapes = f"got q {q}, k {k}, v {v}"
    if not q[0] == k[0] == v[0]:
        raise ValueError(f"q, k and v must have the same batch (axis 0), {shapes}; broadcast the smaller one.")
    if k[1:3] != v[1:3]:
        raise ValueError(
            f"k and v must have the same time and heads (axes 1 and 2), {shapes}; "
            f"arrays are [batch, time, heads, head_dim]."
        )
    if q[3] != k[3] or q[3] == 0:
        raise ValueError(
            f"q and k must have the same head_dim (axis 3), at least 1, {shapes}; "
            f"only v may have a head_dim of its own."
        )
    if k[2] == 0 or q[2] % k[2]:
        raise ValueError(
            f"q's heads must be a multiple of k's (axis 2): {q[2]} is not a multiple of {k[2]}, {shapes}; "
            f"arrays are [batch, time, heads, head_dim], so time and heads may be swapped."
        )
    if max(q[3], v[3]) > _LARGEST_HEAD_DIM:
        raise ValueError(
            f"head_dim (axis 3) may be at most {_LARGEST_HEAD_DIM}, {shapes}; "
            f"arrays are [batch, time, heads, head_dim]; split wider heads, or use reference_attention."
        )


def _check_dtypes(q: Any, k: Any, v: Any) -> None:
    names = tuple(str(array.dtype) for array in (q, k, v))
    if len(set(names)) > 1 or names[0] not in _DTYPES:
        raise TypeError(
            f"q, k and v must share one dtype out of {', '.join(_DTYPES)}, got {', '.join(names)}; cast with .astype."
        )


def read_flag(name: str, value: Any) -> bool:
    """A flag that is fixed when the call is traced."""
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name} must be True or False, got {show(value)}; under jit, make it static.")
    return bool(value)


def _is_real_number(value: Any) -> bool:
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, (bool, np.bool_))


def _read_scale(scale: Any, head_dim: int) -> tuple[float | None, Array | None]:
    """The number or the array, one of them None."""
    if scale is None:
        return head_dim**-0.5, None
    if _is_real_number(scale) and abs(scale) <= _LARGEST_FLOAT:
        return float(scale), None
    is_array = isinstance(scale, (np.ndarray, jax.Array)) and np.ndim(scale) == 0
    if not is_array or jnp.iscomplexobj(scale) or scale.dtype == bool:
        raise TypeError(f"scale must be a finite real scalar or None, got {show(scale)}; None is 1/sqrt(head_dim).")
    return None, jnp.asarray(scale, jnp.float32)


def _read_softcap(softcap: Any) -> float | None:
    if softcap is None:
        return None
    if not _is_real_number(softcap) or not _SMALLEST_FLOAT <= softcap <= _LARGEST_FLOAT:
        raise ValueError(
            f"softcap must be a positive number or None, got {show(softcap)}; None leaves it out, and under jit "
            f"it must be static."
        )
    return float(softcap) if softcap < _NO_SOFTCAP else None


def _read_window(window: Any) -> tuple[int | None, int | None]:
    if window is None:
        return None, None
    sides = tuple(window) if isinstance(window, (tuple, list)) else ()
    if len(sides) != 2 or not all(side is None or (is_whole_number(side) and side >= 0) for side in sides):
        raise ValueError(
            f"window must be (left, right): two whole numbers from 0 up, or None for a side without limit; "
            f"got {show(window)}. (255, 0) sees the query's own position and the 255 before it; under jit, "
            f"make it static."
        )
    left, right = (None if side is None or side >= _FAR else int(side) for side in sides)
    return left, right


def _read_offset(offset: Any, batch: int) -> Array | None:
    if is_whole_number(offset) and offset == 0:
        return None
    array = read_integers("q_offset", offset, ((), (batch,)), "a whole number or one per batch row")
    return jnp.broadcast_to(clip(array, -_FAR, _FAR), (batch,))


def _read_lengths(name: str, lengths: Any, batch: int, length: int) -> Array | None:
    if lengths is None:
        return None
    array = read_integers(name, lengths, ((batch,),), "one whole number per batch row, or None")
    return clip(array, 0, length)


def _read_segments(ids: Any, batch: int, q_length: int, kv_length: int) -> tuple[Array | None, Array | None]:
    if ids is None:
        return None, None
    if not isinstance(ids, (tuple, list)) or len(ids) != 2:
        raise ValueError(
            f"segment_ids must be a pair, (q_segment_ids, kv_segment_ids), got {show(ids)}; "
            f"for self-attention give the same array twice."
        )
    q_ids = _read_side("segment_ids[0]", ids[0], (batch, q_length))
    return q_ids, _read_side("segment_ids[1]", ids[1], (batch, kv_length))


def _read_side(name: str, ids: Any, shape: tuple[int, int]) -> Array:
    array = read_integers(name, ids, (shape,), "whole numbers, one per position")
    if isinstance(ids, np.ndarray) and not np.array_equal(ids, np.asarray(ids, np.int32)):
        raise ValueError(f"{name} must fit int32, got {ids.min()} to {ids.max()}; number the segments from 0.")
    return array.astype(jnp.int32)


def _read_sinks(sinks: Any, heads: int) -> Array | None:
    if sinks is None:
        return None
    array = as_array("sinks", sinks, "one logit a head")
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"sinks must be floating point, got {kind_of(array)}; cast with .astype(jnp.float32).")
    if array.shape != (heads,):
        raise ValueError(
            f"sinks must be one logit a head, of shape {(heads,)}, got shape {array.shape}; heads are q's axis 2."
        )
    return array.astype(jnp.float32)


def _read_mask(mask: Any, pairs: tuple[int, ...]) -> Array | None:
    if mask is None:
        return None
    array = as_array("mask", mask, "a boolean array")
    if array.dtype != bool:
        raise TypeError(
            f"mask must be boolean, True where a query may see a key, got {kind_of(array)}; "
            f"give numbers that are added to the scores as bias."
        )
    return _as_pairs("mask", array, pairs)


def _read_bias(bias: Any, pairs: tuple[int, ...]) -> Array | None:
    if bias is None:
        return None
    array = as_array("bias", bias, "a floating-point array")
    if str(array.dtype) not in _DTYPES:
        raise TypeError(
            f"bias must have a dtype out of {', '.join(_DTYPES)}, got {kind_of(array)}; cast with .astype, or give "
            f"booleans as mask."
        )
    return _as_pairs("bias", array, pairs)


def _as_pairs(name: str, array: Array, pairs: tuple[int, ...]) -> Array:
    """With 4 axes, each 1 or that of [batch, heads, Tq, Tk]."""
    shape = (1,) * (4 - array.ndim) + array.shape
    if len(shape) != 4 or any(size not in (1, full) for size, full in zip(shape, pairs, strict=True)):
        raise ValueError(
            f"{name} must broadcast to [batch, heads, Tq, Tk] = {list(pairs)}, got shape {array.shape}; "
            f"use axes of size 1 for what is shared."
        )
    return array.reshape(shape)


def read_tiles(**choices: Any) -> Tiles:
    """Checked hyperparameters: positive whole numbers or None."""
    return Tiles(**{name: _read_choice(name, value) for name, value in choices.items()})


def _read_choice(name: str, value: Any) -> int | None:
    if value is None:
        return None
    if not is_whole_number(value) or value < 1:
        advice = "a power of two such as 128" if name.startswith("block") else "a small number such as 4"
        raise ValueError(
            f"{name} must be a positive whole number or None, got {show(value)}; try {advice}, and make it "
            f"static under jit."
        )
    return int(value)
