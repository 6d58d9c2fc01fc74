"""Tables of what our tuner found on a kind of device: which backend is the fastest for a call, and its tiles.

A table is a file in `tuned/`, named for the device's kind, that `benchmarks/tune_attention.py` writes:

    {"format": 1, "device_kind": "NVIDIA H200", "made_by": {...}, "entries": [entry, ...]}

An entry has the fields of `Situation`, `walk` ("forward", or "backward" for forward and backward together),
`fastest`, and for each backend that was timed, under `backends`, its time relative to the fastest and its best tiles:

    {"walk": "forward", "dtype": "bfloat16", "depth": 128, ..., "fastest": "cudnn",
     "backends": {"cudnn": {"relative": 1.0, "tiles": {}}, "pallas_triton": {"relative": 1.3, "tiles": {...}}}}
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import pathlib
import re
from collections.abc import Mapping
from typing import Any

from .call import Operands, Spec, Tiles
from .resources import WALKS, Block, Sizes, power_of_two, works

FOLDER = pathlib.Path(__file__).parent / "tuned"
FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Situation:
    """What an entry is for, and what a call looks like to a table."""

    dtype: str
    depth: int
    v_depth: int
    causal: bool
    windowed: bool
    q_length: int
    kv_length: int
    group: int
    rows: int  # batch times query heads

    @classmethod
    def of(cls, spec: Spec, operands: Operands) -> Situation:
        """That of a call."""
        batch, q_length, heads, depth = operands.q.shape
        return cls(
            dtype=str(operands.q.dtype),
            depth=depth,
            v_depth=operands.v.shape[3],
            causal=spec.causal,
            windowed=spec.left is not None,
            q_length=q_length,
            kv_length=operands.k.shape[1],
            group=operands.group,
            rows=batch * heads,
        )


@dataclasses.dataclass(frozen=True)
class Entry:
    """What was found for one situation."""

    walk: str
    situation: Situation
    relative: Mapping[str, float]  # to the fastest backend, by name
    tiles: Mapping[str, Mapping[str, int]]

    @property
    def ranking(self) -> tuple[str, ...]:
        """The backends, fastest first."""
        return tuple(sorted(self.relative, key=lambda name: self.relative[name]))


def rank_backends(walk: str, spec: Spec, operands: Operands, device_kind: str) -> tuple[str, ...]:
    """The backends in the table's nearest entry, fastest first; none where there is no such entry."""
    entry = _look_up(device_kind, walk, Situation.of(spec, operands), None)
    return entry.ranking if entry is not None else ()


def settle_tiles(backend: str, spec: Spec, operands: Operands, device_kind: str) -> Tiles:
    """A call's tiles, with those of the table's nearest entry for each walk of which none is given.

    Where the call has more in shared memory than what was timed (a bias, a mask), so that the table's tiles may not
    fit, they are left to the backend.
    """
    situation = Situation.of(spec, operands)
    settled: dict[str, int] = {}
    for walk in WALKS:
        entry = _look_up(device_kind, "backward" if walk else "forward", situation, backend)
        found = {} if entry is None else {n: t for n, t in entry.tiles[backend].items() if walk_of(n) == walk}
        is_given = any(walk_of(name) == walk for name in spec.tiles.given)
        if found and not is_given and _fits(walk, found, operands):
            settled |= found
    return dataclasses.replace(spec.tiles, **settled)


def walk_of(tile: str) -> str:
    """The suffix of the walk that a hyperparameter belongs to, empty for the forward pass."""
    return next((walk for walk in WALKS if walk and tile.endswith(walk)), "")


def sizes_of(operands: Operands) -> Sizes:
    """What a call's blocks hold."""
    pair_bytes = sum(array.dtype.itemsize for array in (operands.bias, operands.mask) if array is not None)
    return Sizes(operands.q.shape[3], operands.v.shape[3], operands.q.dtype.itemsize, pair_bytes)


def _fits(walk: str, tiles: Mapping[str, int], operands: Operands) -> bool:
    if operands.bias is None and operands.mask is None:
        return True
    plain = {name.removesuffix(walk): value for name, value in tiles.items()}
    if not {"block_q", "block_k"} <= set(plain):
        return True
    return works(Block(walk, **plain), sizes_of(operands), None)


# Eager calls ask each time.
@functools.lru_cache(maxsize=4096)
def _look_up(device_kind: str, walk: str, situation: Situation, backend: str | None) -> Entry | None:
    return nearest(read_table(device_kind), walk, situation, backend)


def nearest(table: tuple[Entry, ...], walk: str, situation: Situation, backend: str | None = None) -> Entry | None:
    """The entry that is nearest to a situation, of those with times of `backend` if one is given."""
    fitting = [
        entry
        for entry in table
        if entry.walk == walk
        and _could_serve(entry.situation, situation)
        and (backend is None or backend in entry.tiles)
    ]
    return min(fitting, key=lambda entry: _distance(entry.situation, situation), default=None)


def _could_serve(known: Situation, wanted: Situation) -> bool:
    """Whether tiles of one situation fit into shared memory in another: no wider elements, no wider heads."""
    is_half = {"bfloat16", "float16"}
    same_width = known.dtype == wanted.dtype or {known.dtype, wanted.dtype} <= is_half
    return same_width and all(
        power_of_two(here) >= power_of_two(there)
        for here, there in ((known.depth, wanted.depth), (known.v_depth, wanted.v_depth))
    )


def _distance(known: Situation, wanted: Situation) -> float:
    """How unlike two situations are: 1 for twice the length; weights by what changes the best tiles most."""
    return (
        4 * _doublings(power_of_two(known.depth), power_of_two(wanted.depth))
        + 4 * _doublings(power_of_two(known.v_depth), power_of_two(wanted.v_depth))
        + 2 * (known.causal != wanted.causal)
        + 3 * (known.windowed != wanted.windowed)
        + _doublings(known.q_length, wanted.q_length)
        + 0.5 * _doublings(known.kv_length, wanted.kv_length)
        + 0.5 * _doublings(known.group, wanted.group)
        + 0.25 * _doublings(known.rows, wanted.rows)
        + 0.5 * (known.dtype != wanted.dtype)
    )


def _doublings(one: int, other: int) -> float:
    return abs(math.log2(max(one, 1) / max(other, 1)))


@functools.cache
def read_table(device_kind: str) -> tuple[Entry, ...]:
    """The table of a kind of device, without entries if there is none."""
    path = FOLDER / file_name(device_kind)
    return parse_table(json.loads(path.read_text())) if path.exists() else ()


def parse_table(stored: Mapping[str, Any]) -> tuple[Entry, ...]:
    """The entries of a table as it is stored."""
    if stored["format"] != FORMAT:
        raise ValueError(f"the table has format {stored['format']}, expected {FORMAT}; make it anew.")
    return tuple(map(_parse_entry, stored["entries"]))


def _parse_entry(stored: Mapping[str, Any]) -> Entry:
    fields = {field.name: stored[field.name] for field in dataclasses.fields(Situation)}
    backends = stored["backends"]
    return Entry(
        walk=stored["walk"],
        situation=Situation(**fields),
        relative={name: found["relative"] for name, found in backends.items()},
        tiles={name: found["tiles"] for name, found in backends.items()},
    )


def file_name(device_kind: str) -> str:
    """The name of a device kind's table."""
    return re.sub(r"\W+", "_", device_kind) + ".json"
