"""Bounds and masks by position against every pair written out."""

from __future__ import annotations

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tune_jax.kernels.attention import visible
from tune_jax.kernels.attention.call import Spec

ROWS, KEYS, MORE = 5, 6, 7  # lengths of arrays; blocks may end past them
FAR = 2**29  # the furthest offset or window that a checked call has
SPECS = [Spec(window=window) for window in itertools.product((None, 0, 1, 3), (None, 0, 2))]
SPECS += [Spec(causal=True, window=window) for window in ((None, None), (1, None), (3, 2))]


@pytest.fixture(params=SPECS, ids=lambda spec: f"{'causal' if spec.causal else 'full'}-{spec.window}")
def spec(request: pytest.FixtureRequest) -> Spec:
    return request.param


def cases(along: int) -> tuple[np.ndarray, ...]:
    """All blocks [start, end), offsets, lengths of queries and lengths of keys, one column each."""
    blocks = [(start, end) for start in range(along) for end in range(start + 1, MORE + 1)]
    offsets, q_lengths, kv_lengths = range(-MORE, MORE + 1), range(ROWS + 1), range(KEYS + 1)
    rows = [(*block, *rest) for block, *rest in itertools.product(blocks, offsets, q_lengths, kv_lengths)]
    return tuple(np.array(rows, np.int32).T)


def pairs(spec: Spec, offset: np.ndarray, q_length: np.ndarray, kv_length: np.ndarray) -> np.ndarray:
    """Who sees whom, `[case, row, key]`, as the contract says it."""
    rows, keys = np.arange(MORE)[None, :, None], np.arange(MORE)[None, None, :]
    position = rows + offset[:, None, None]
    left, right = spec.window
    seen = (rows < q_length[:, None, None]) & (keys < kv_length[:, None, None])
    if spec.causal:
        seen &= keys <= position
    if left is not None:
        seen &= keys >= position - left
    if right is not None:
        seen &= keys <= position + right
    return seen


def inside(low: Any, high: Any) -> np.ndarray:
    places = np.arange(MORE)
    return (places >= np.asarray(low)[..., None]) & (places < np.asarray(high)[..., None])


def test_pairs_by_position(spec: Spec) -> None:
    offset = np.arange(-MORE, MORE + 1)
    everywhere = np.full_like(offset, MORE)
    rows, columns = jnp.arange(MORE)[None, :, None], jnp.arange(MORE)[None, None, :]
    got = visible.sees_by_position(spec, rows, columns, offset[:, None, None])
    want = pairs(spec, offset, everywhere, everywhere)
    assert want.all() if got is None else np.array_equal(got, want)


def test_key_bounds_hold_all_visible_keys_and_begin_and_end_with_one(spec: Spec) -> None:
    start, end, offset, q_length, kv_length = cases(ROWS)
    low, high = visible.key_bounds(spec, start, end, offset, q_length, kv_length)
    seen = (pairs(spec, offset, q_length, kv_length) & inside(start, end)[:, :, None]).any(1)
    assert np.array_equal(inside(low, high), seen)
    assert (low <= high).all()


def test_full_key_bounds_hold_the_keys_that_all_rows_see(spec: Spec) -> None:
    start, end, offset, q_length, kv_length = cases(ROWS)
    low, high = visible.full_key_bounds(spec, start, end, offset, q_length, kv_length)
    seen = (pairs(spec, offset, q_length, kv_length) | ~inside(start, end)[:, :, None]).all(1)
    assert np.array_equal(inside(low, high), seen)
    assert (low <= high).all()


def test_query_bounds_hold_all_rows_that_see_a_key_and_begin_and_end_with_one(spec: Spec) -> None:
    start, end, offset, q_length, kv_length = cases(KEYS)
    low, high = visible.query_bounds(spec, start, end, offset, q_length, kv_length)
    seen = (pairs(spec, offset, q_length, kv_length) & inside(start, end)[:, None, :]).any(2)
    assert np.array_equal(inside(low, high), seen)
    assert (low <= high).all()


def test_full_query_bounds_hold_the_rows_that_see_all_keys(spec: Spec) -> None:
    start, end, offset, q_length, kv_length = cases(KEYS)
    low, high = visible.full_query_bounds(spec, start, end, offset, q_length, kv_length)
    seen = (pairs(spec, offset, q_length, kv_length) | ~inside(start, end)[:, None, :]).all(2)
    assert np.array_equal(inside(low, high), seen)
    assert (low <= high).all()


@pytest.mark.parametrize("name", ["key_bounds", "full_key_bounds", "query_bounds", "full_query_bounds"])
@pytest.mark.parametrize("offset", [-FAR, FAR])
def test_the_furthest_offsets_and_windows_do_not_overflow(name: str, offset: int) -> None:
    length = 2**20
    spec = Spec(causal=True, window=(FAR - 1, FAR - 1))
    function = getattr(visible, name)
    got = function(spec, *(jnp.int32(x) for x in (length - 128, length, offset, length, length)))
    # Ahead of all keys nobody sees one; the other way round a window of FAR - 1 is one too short for the first row.
    assert [int(x) for x in got] == [int(x) for x in wide(function, spec, length, offset)]


def wide(function: Any, spec: Spec, length: int, offset: int) -> Any:
    with jax.enable_x64(True):
        return function(spec, *(jnp.int64(x) for x in (length - 128, length, offset, length, length)))


# Segments


def matches(of: np.ndarray, among: np.ndarray, block_of: int, block_among: int) -> np.ndarray:
    """Which blocks hold an equal pair, `[batch, block of, block among]`."""
    equal = of[:, :, None] == among[:, None, :]
    padding = ((0, 0), (0, -of.shape[1] % block_of), (0, -among.shape[1] % block_among))
    equal = np.pad(equal, padding)
    shape = (equal.shape[0], equal.shape[1] // block_of, block_of, equal.shape[2] // block_among, block_among)
    return equal.reshape(shape).any((2, 4))


def ranges(of: np.ndarray, among: np.ndarray, block_of: int, block_among: int) -> np.ndarray:
    first, end = visible.segment_blocks(jnp.asarray(of), jnp.asarray(among), block_of, block_among)
    assert first.dtype == end.dtype == jnp.int32
    assert (first <= end).all()
    blocks = np.arange(-(-among.shape[1] // block_among))
    return (blocks >= np.asarray(first)[..., None]) & (blocks < np.asarray(end)[..., None])


def draw(rng: np.random.Generator, shape: tuple[int, int], values: list[int], is_sorted: bool) -> np.ndarray:
    segments = rng.choice(values, shape).astype(np.int32)
    return np.sort(segments, axis=1) if is_sorted else segments


@pytest.mark.parametrize("is_sorted", [False, True])
@pytest.mark.parametrize("blocks", [(1, 1), (3, 5), (64, 2)])
@pytest.mark.parametrize("values", [[0, 1, 2, 3], [-(2**31), -1, 0, 2**31 - 1]], ids=["small", "extreme"])
def test_segment_ranges_hold_all_blocks_with_a_match(
    is_sorted: bool, blocks: tuple[int, int], values: list[int]
) -> None:
    rng = np.random.default_rng(0)
    of, among = draw(rng, (8, 21), values, is_sorted), draw(rng, (8, 18), values, is_sorted)
    held = ranges(of, among, *blocks)
    assert not (matches(of, among, *blocks) & ~held).any()


def test_consecutive_sorted_segments_keep_only_blocks_with_a_match() -> None:
    lengths = np.array([[5, 7, 1, 8], [21, 0, 0, 0], [1, 1, 1, 18]])
    segments = np.stack([np.repeat(np.arange(4), row) for row in lengths]).astype(np.int32)
    held = ranges(segments, segments, 4, 3)
    assert np.array_equal(held, matches(segments, segments, 4, 3))


def test_blocks_without_a_match_on_either_side_have_an_empty_range() -> None:
    of, among = np.array([[5, 5, 9, 9]], np.int32), np.array([[1, 2, 6, 7]], np.int32)
    assert not ranges(of, among, 2, 2).any()


def test_segment_ranges_are_the_same_in_x64_mode() -> None:
    segments = np.array([[0, 0, 1, 2, 2]], np.int32)
    want = ranges(segments, segments, 2, 2)
    with jax.enable_x64(True):
        assert np.array_equal(ranges(segments, segments, 2, 2), want)
