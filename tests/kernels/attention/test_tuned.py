"""Tuned tables: which entry is nearest, and what a call takes from it."""

from __future__ import annotations

import dataclasses
import json
import pathlib
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax.kernels.attention import backends, tables
from tune_jax.kernels.attention.backends import BACKENDS
from tune_jax.kernels.attention.call import Tiles
from tune_jax.kernels.attention.checks import read_call
from tune_jax.kernels.attention.device import Device
from tune_jax.kernels.attention.tables import Entry, Situation, file_name, nearest, parse_table, walk_of

SHIPPED = sorted(tables.FOLDER.glob("*.json"))
BASE = Situation("bfloat16", 128, 128, True, False, 4096, 4096, 1, 32)


def entry(walk: str = "forward", relative: Any = None, tiles: Any = None, **fields: Any) -> Entry:
    relative = relative or {"pallas_triton": 1.0}
    return Entry(walk, dataclasses.replace(BASE, **fields), relative, tiles or {name: {} for name in relative})


def find(wanted: dict[str, Any], *entries: Entry, walk: str = "forward", backend: str | None = None) -> Entry | None:
    return nearest(entries, walk, dataclasses.replace(BASE, **wanted), backend)


def stored(situation: Situation = BASE, walk: str = "forward", **backends: Any) -> dict[str, Any]:
    fastest = min(backends, key=lambda name: backends[name]["relative"])
    return {"walk": walk, **dataclasses.asdict(situation), "fastest": fastest, "backends": backends}


@pytest.fixture
def write_table(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Puts entries into the table of the kind of device "Test GPU"."""
    monkeypatch.setattr(tables, "FOLDER", tmp_path)

    def write(*entries: dict[str, Any]) -> None:
        table = {"format": tables.FORMAT, "device_kind": "Test GPU", "made_by": {}, "entries": entries}
        (tmp_path / file_name("Test GPU")).write_text(json.dumps(table))
        _forget()

    yield write
    _forget()


def _forget() -> None:
    tables.read_table.cache_clear()
    tables._look_up.cache_clear()
    backends._decide.cache_clear()


def call(
    q_length: int = 64, depth: int = 128, dtype: str = "bfloat16", tiles: Tiles | None = None, **options: Any
) -> Any:
    q = jnp.zeros((1, q_length, 2, depth), dtype)
    return read_call(q, q, q, tiles=tiles, **options)


def settle(*parts: Any, backend: str = "pallas_triton") -> dict[str, int]:
    return tables.settle_tiles(backend, *parts, "Test GPU").given


# Nearest


@pytest.mark.parametrize(
    ("wanted", "near", "far"),
    [
        ({"q_length": 6000}, {"q_length": 4096}, {"q_length": 1024}),
        ({"q_length": 1, "kv_length": 9000}, {"q_length": 1}, {}),
        ({"depth": 80, "v_depth": 80}, {"depth": 128}, {"depth": 256, "v_depth": 256}),
        ({"depth": 64}, {"depth": 64}, {}),
        ({"causal": False}, {"causal": False, "q_length": 8192}, {}),
        ({"windowed": True}, {"windowed": True, "q_length": 16384}, {}),
        ({"group": 8}, {"group": 4}, {"group": 1}),
        ({"rows": 16}, {}, {"rows": 512}),
        ({"dtype": "float16"}, {"dtype": "float16", "rows": 64}, {}),
    ],
)
def test_the_nearest_entry_is_alike_in(wanted: Any, near: Any, far: Any) -> None:
    for order in ((near, far), (far, near)):
        found = find(wanted, *(entry(**fields) for fields in order))
        assert found == entry(**near)


def test_tiles_for_narrower_heads_or_elements_do_not_serve() -> None:
    assert find({"depth": 136}, entry()) is None
    assert find({"v_depth": 256}, entry()) is None
    assert find({"dtype": "float32"}, entry()) is None


def test_half_precision_types_serve_each_other() -> None:
    assert find({"dtype": "float16"}, entry()) is not None


def test_passes_are_apart() -> None:
    assert find({}, entry("backward")) is None
    assert find({}, entry("backward"), walk="backward") is not None


def test_a_backend_is_looked_up_among_entries_that_have_it() -> None:
    near, far = entry(relative={"xla": 1.0}), entry(q_length=64)
    assert find({}, near, far) is near
    assert find({}, near, far, backend="pallas_triton") is far


def test_backends_are_ranked_by_time_not_by_place() -> None:
    ranked = entry(relative={"xla": 3.0, "cudnn": 1.0, "pallas_triton": 1.2}).ranking
    assert ranked == ("cudnn", "pallas_triton", "xla")


def test_sizes_of_nothing_have_a_distance() -> None:
    assert find({"q_length": 0, "kv_length": 0, "rows": 0}, entry()) is not None


@pytest.mark.parametrize(
    ("tile", "walk"), [("block_q", ""), ("num_stages", ""), ("block_k_dkv", "_dkv"), ("num_warps_dq", "_dq")]
)
def test_a_hyperparameter_belongs_to_a_walk(tile: str, walk: str) -> None:
    assert walk_of(tile) == walk


# What a call takes


def test_a_call_is_described_by_its_shapes_and_masks() -> None:
    q, k, v = (jnp.zeros(shape, jnp.float16) for shape in ((3, 8, 4, 16), (3, 9, 2, 16), (3, 9, 2, 32)))
    got = Situation.of(*read_call(q, k, v, causal=True, window=(3, None)))
    assert got == Situation("float16", 16, 32, True, True, 8, 9, 2, 12)


FORWARD = {"block_q": 128, "block_k": 64, "num_warps": 8, "num_stages": 4}
DKV = {f"{name}_dkv": value for name, value in FORWARD.items()}
DQ = {f"{name}_dq": value for name, value in FORWARD.items()}


@pytest.fixture
def both_passes(write_table: Any) -> None:
    write_table(
        stored(pallas_triton={"relative": 1.0, "tiles": FORWARD}),
        stored(walk="backward", pallas_triton={"relative": 1.0, "tiles": DKV | DQ}),
    )


@pytest.mark.usefixtures("both_passes")
def test_tiles_come_from_the_entries_of_both_passes() -> None:
    assert settle(*call()) == FORWARD | DKV | DQ


@pytest.mark.usefixtures("both_passes")
def test_a_walk_of_which_one_tile_is_given_is_left_alone() -> None:
    assert settle(*call(tiles=Tiles(block_q=32))) == {"block_q": 32} | DKV | DQ
    assert settle(*call(tiles=Tiles(num_stages_dq=2))) == FORWARD | DKV | {"num_stages_dq": 2}


@pytest.mark.usefixtures("both_passes")
def test_tiles_that_may_not_fit_with_a_bias_are_left_to_the_backend() -> None:
    bias = np.zeros((64, 64), np.float32)
    assert settle(*call(bias=bias)) == {}
    assert settle(*call(mask=bias == 0, depth=64)) == FORWARD | DKV | DQ


@pytest.mark.usefixtures("both_passes")
def test_other_backends_and_devices_get_nothing() -> None:
    assert settle(*call(), backend="xla") == {}
    assert tables.settle_tiles("pallas_triton", *call(), "Another GPU") == Tiles()
    assert tables.rank_backends("forward", *call(), "Another GPU") == ()


def test_backends_come_fastest_first(write_table: Any) -> None:
    write_table(stored(xla={"relative": 2.0, "tiles": {}}, cudnn={"relative": 1.0, "tiles": {}}))
    assert tables.rank_backends("forward", *call(), "Test GPU") == ("cudnn", "xla")
    assert tables.rank_backends("backward", *call(), "Test GPU") == ()


def test_a_choice_has_the_tables_tiles(write_table: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    write_table(
        stored(xla={"relative": 1.0, "tiles": {"block_q": 16}}),
        stored(walk="backward", xla={"relative": 1.0, "tiles": {"block_q": 32}}),
    )
    monkeypatch.setattr(backends, "find_device", lambda *arrays: Device("other", "Test GPU"))
    choice = backends.choose(None, *call(), False)
    assert choice.plain.spec.tiles.given == {"block_q": 16}
    assert choice.trained == choice.plain


def test_a_table_of_another_format_is_an_error() -> None:
    with pytest.raises(ValueError, match="has format 0, expected 1; make it anew"):
        parse_table({"format": 0, "entries": []})


@pytest.mark.parametrize(("kind", "name"), [("NVIDIA H200", "NVIDIA_H200.json"), ("TPU v5 lite", "TPU_v5_lite.json")])
def test_tables_are_named_for_the_kind_of_device(kind: str, name: str) -> None:
    assert file_name(kind) == name


# What is shipped


def test_shipped_tables_can_be_read() -> None:
    for path in SHIPPED:
        table = json.loads(path.read_text())
        assert file_name(table["device_kind"]) == path.name
        check_entries(table)


def check_entries(table: Any) -> None:
    entries = parse_table(table)
    assert len({(each.walk, each.situation) for each in entries}) == len(entries) > 0
    tiles_of = {backend.name: set(backend.tiles) for backend in BACKENDS}
    for found, raw in zip(entries, table["entries"], strict=True):
        assert found.walk in ("forward", "backward")
        assert raw["fastest"] == found.ranking[0]
        assert min(found.relative.values()) == 1
        assert all(set(tiles) <= tiles_of[name] for name, tiles in found.tiles.items())
        assert all(Tiles(**tiles).given == tiles for tiles in found.tiles.values())
