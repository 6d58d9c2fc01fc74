"""Grouped products for Hopper in Pallas Mosaic GPU: forward, gradient for lhs, gradient for rhs.

`grouped(lhs [M, K], rhs [G, K, N], sizes [G])` -> [M, N]; with `transpose_rhs`, rhs is [G, N, K], read in place: that
is the gradient for lhs. `grouped_outer(lhs [M, K], dout [M, N], sizes [G])` -> [G, K, N]: the gradient for rhs.
16-bit types, float32 accumulators. K must be a multiple of 64 (forward) or 128 (outer), N of the block (of block and
cluster together).

Forward: one block an SM walks its own list of tiles, made by XLA from the group sizes (`schedule`). A tile is 128 rows
that begin at a multiple of 8; two compute warpgroups take 64 rows each, one loader runs ahead through the buffers.
Outer: a fourth warpgroup zeroes the rows of other groups in shared memory before the products read them.

docs/kernels/grouped.md says how fast each pass is, and where it ends. On uneven sizes the plain forward of prototype.py
was faster on all four large shapes.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE, HALF, CHUNK, DEPTH = 128, 64, 64, 64  # rows of a tile, of a warpgroup; columns stored at a time; one step of K
SHARED_BYTES = 227 * 1024
H200_MULTIPROCESSORS = 132
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


@dataclasses.dataclass(frozen=True)
class Config:
    """Of the forward. Tiles go in bands `width` column blocks ("n") or groups ("m") wide, down the other way."""

    block_n: int = 256
    stages: int = 4
    chunks: int = 2  # staging buffers of 64 x 64 a warpgroup
    width: int = 8
    along: str = "n"
    pair: bool = True  # two tiles with an empty half count as one whole tile
    split: bool = True  # tiles of a short last round are cut in two
    cluster: int = 1  # blocks side by side along n that share lhs

    def shared_bytes(self):
        return self.stages * 2 * DEPTH * (TILE + self.block_n) + 2 * self.chunks * 2 * HALF * CHUNK


@dataclasses.dataclass(frozen=True)
class OuterConfig:
    """Of the gradient for rhs: tiles of 128 (K) x block_n, in bands `width` wide along k or n."""

    block_n: int = 256
    stages: int = 3
    chunks: int = 4
    width: int = 8
    along: str = "k"
    registers: tuple = (216, 40)


class Tile(NamedTuple):
    """What a block does next: rows begin to end of a group, inside the tile that starts at `first`, in column block n.

    Whole tiles have 128 rows, 64 for each warpgroup. A pair (pair == 1) has 64 rows: the first warpgroup multiplies
    them into column block n, the second into n + 1, with their steps interleaved.
    """

    group: Any
    first: Any
    begin: Any
    end: Any
    n: Any
    pair: Any


def multiprocessors():
    return getattr(jax.devices()[0], "core_count", None) or H200_MULTIPROCESSORS


def running(x):
    """Running sums of a short int32 vector, as one fused reduction: on the GPU a cumsum is several kernels."""
    i = jnp.arange(x.size, dtype=jnp.int32)
    return jnp.where(i[:, None] >= i[None], x[None], 0).sum(1, dtype=jnp.int32)


class Groups(NamedTuple):
    """By group, the unused rows being a last one: rows, first row of its tiles, 64-row pieces, sums of weights."""

    starts: Any
    ends: Any
    floors: Any
    pieces: Any
    weights: Any
    upto: Any


def groups_of(group_sizes, rows, pair):
    """A group's weight is what its tiles cost in units of two: its pieces, or twice its tiles without pairs."""
    ends = running(group_sizes.astype(jnp.int32))
    edge = jnp.zeros(1, jnp.int32)
    starts, ends = jnp.concatenate([edge, ends]), jnp.concatenate([ends, edge + rows])
    floors = starts // 8 * 8
    pieces = jnp.where(ends > starts, (ends - floors + HALF - 1) // HALF, 0)
    weights = pieces if pair else (pieces + 1) // 2 * 2
    return Groups(starts, ends, floors, pieces, weights, running(weights))


def place(item, groups, pairs, config):
    """(group, tile in the group, pair of column blocks, which of the pair) of items, in the configured order."""
    before = groups.upto - groups.weights
    if config.along == "n":
        wide = max(config.width // 2, 1)
        total = groups.upto[-1]
        band = item // (total * wide)
        here = jnp.minimum(wide, pairs - band * wide)
        rest = item - band * wide * total
        rest = jnp.where(band % 2 == 1, total * here - 1 - rest, rest)
        group = (groups.upto[None] * here[:, None] <= rest[:, None]).sum(1, dtype=jnp.int32).clip(0, before.size - 1)
        rest -= before[group] * here
        row = rest // (2 * here)
        rest -= row * 2 * here
        two = 2 * row + 2 <= groups.weights[group]
        return group, row, band * wide + jnp.where(two, rest // 2, rest), jnp.where(two, rest % 2, 0)
    edges = jnp.append(before[:: config.width], groups.upto[-1])  # weight before each band
    band = (edges[None, 1:] * pairs <= item[:, None]).sum(1, dtype=jnp.int32).clip(0, edges.size - 2)
    here = jnp.maximum(edges[band + 1] - edges[band], 1)
    rest = item - edges[band] * pairs
    pair = rest // here
    at = edges[band] + rest - pair * here
    group = (groups.upto[None] <= at[:, None]).sum(1, dtype=jnp.int32).clip(0, before.size - 1)
    at -= before[group]
    return group, at // 2, jnp.where(band % 2 == 1, pairs - 1 - pair, pair), at % 2


def schedule(group_sizes, rows, n_blocks, units, config):
    """The tiles of each unit (block or cluster), [round, unit, field], and how many rounds are in use.

    Whole tiles and pairs count the same and go round the units in turn. When at most half of the units get one in the
    last round, those are cut in two. An empty entry has begin == end. Four small kernels on the GPU.
    """
    groups, pairs = groups_of(group_sizes, rows, config.pair), -(-n_blocks // 2)
    total = groups.upto[-1] * pairs
    rounds, left = total // units, total % units
    most = -(-(rows // HALF + 3 * groups.ends.size) * pairs // units) + 2
    turn, unit = (x.reshape(-1) for x in jnp.mgrid[:most, :units].astype(jnp.int32))
    cut = (2 * left <= units) & (turn == rounds) & config.split
    item = turn * units + jnp.where(cut, unit // 2, unit)
    real = (item < total) & (turn <= rounds)
    group, row, pair, which = place(jnp.clip(item, 0, total - 1), groups, pairs, config)
    two, second = 2 * row + 2 <= groups.weights[group], unit % 2 == 1
    n = 2 * pair + jnp.where(two, which, (cut & second).astype(jnp.int32))
    paired = ~two & ~cut & (n + 1 < n_blocks)
    first = groups.floors[group] + TILE * row
    begin, end = jnp.maximum(first, groups.starts[group]), jnp.minimum(first + TILE, groups.ends[group])
    begin, end = (
        jnp.where(two & cut & second, jnp.maximum(begin, first + HALF), begin),
        jnp.where(two & cut & ~second, jnp.minimum(end, first + HALF), end),
    )
    end = jnp.where(real & (n < n_blocks), jnp.maximum(end, begin), begin)
    fields = jnp.stack([group, first, begin, end, n, paired.astype(jnp.int32)], axis=1)
    return fields.reshape(most, units, 6), (rounds + (left > 0))[None].astype(jnp.int32)


class Pipe:
    """Buffers in turn: `stages` slots, a barrier each that says filled and one that says free again."""

    def __init__(self, stages, ready, free):
        self.stages, self.ready, self.free = stages, ready, free

    def slot(self, step):
        return lax.rem(step, jnp.int32(self.stages))

    def wait_ready(self, step):
        plgpu.barrier_wait(self.ready.at[self.slot(step)])

    def wait_free(self, step):
        plgpu.barrier_wait(self.free.at[self.slot(step)])

    def release(self, step):
        plgpu.barrier_arrive(self.free.at[self.slot(step)])

    def pass_on(self, step):
        self.wait_ready(step)
        self.release(step)

    def drain(self, total):
        lax.fori_loop(jnp.maximum(total - self.stages, 0), total, lambda step, _: self.wait_free(step), None)


def multiply(pipe, begin, steps, product, acc, dtype, *, pair=0, second=False):
    """Add `steps` products to acc, each left running while the next is issued: a buffer goes back a step later.

    When pair is 1, every other buffer is the other warpgroup's and is only passed on; `second` says which are ours.
    """

    def step(i, _):
        at = begin + i * (1 + pair)
        if second:
            pl.when(pair == 1)(lambda: pipe.pass_on(at))
        own = at + pair if second else at
        pipe.wait_ready(own)
        product(acc, pipe.slot(own))
        plgpu.wgmma_wait(len(acc))
        pl.when(i > 0)(lambda: pipe.release(own - 1 - pair))
        if not second:
            pl.when(pair == 1)(lambda: pipe.pass_on(at + 1))

    lax.fori_loop(0, steps, step, None)
    return [part[...].astype(dtype) for part in acc]


def store_chunks(out, staging, chunks, send):
    """Writes column chunks through `chunks` staging buffers, each sent off by send(buffer, i).

    With a buffer for every chunk they go all at once; else one by one, each waiting for its buffer.
    """
    pieces = [part[:, i : i + CHUNK] for part in out for i in range(0, part.shape[1], CHUNK)]
    batch = len(pieces) if chunks >= len(pieces) else 1
    for begin in range(0, len(pieces), batch):
        plgpu.wait_smem_to_gmem(0 if batch > 1 else chunks - 1, wait_read_only=True)
        for i in range(begin, begin + batch):
            staging[i % chunks][...] = pieces[i]
        plgpu.commit_smem()
        for i in range(begin, begin + batch):
            send(staging[i % chunks], i)
        plgpu.commit_smem_to_gmem_group()


def send_ladder(smem, gmem, row, low, high):
    """Rows low to high of the buffer, in pieces of 32, 16, .. 1 rows."""
    for size in (32, 16, 8, 4, 2, 1):
        at = low + (high - low) // (2 * size) * (2 * size)  # past the larger pieces
        pl.when((high - low) & size != 0)(
            functools.partial(
                plgpu.copy_smem_to_gmem, smem.at[pl.ds(at, size)], gmem.at[pl.ds(row + at, size)], commit_group=False
            )
        )


class Refs(NamedTuple):
    work: Any
    count: Any
    lhs: Any
    rhs: Any
    out: Any
    lhs_smem: Any
    rhs_smem: Any
    staging: Any
    ready: Any
    free: Any


class Forward:
    """The body of the forward kernel."""

    def __init__(self, config, groups, steps, transpose_rhs, dtype):
        self.config, self.groups, self.steps, self.dtype = config, groups, steps, dtype
        self.transpose_rhs = transpose_rhs

    def __call__(self, *refs):
        refs = Refs(*refs)
        warpgroup = lax.axis_index("warpgroup")
        pipe = Pipe(self.config.stages, refs.ready, refs.free)
        for half in range(2):
            pl.when(warpgroup == half)(functools.partial(self.compute, refs, pipe, half))
        pl.when(warpgroup == 2)(functools.partial(self.load, refs, pipe))

    def for_tiles(self, refs, visit):
        """visit(tile, buffers used) -> buffers used, over this block's list, each entry read one tile ahead."""
        unit = lax.axis_index("sm")

        def read(i):
            return Tile(*(refs.work[i, unit, f] for f in range(6)))

        def step(i, carry):
            tile, used = carry
            return read(i + 1), visit(tile, used)

        return lax.fori_loop(0, refs.count[0], step, (read(0), jnp.int32(0)))[1]

    def steps_of(self, tile):
        return jnp.where((tile.group < self.groups) & (tile.begin < tile.end), jnp.int32(self.steps), jnp.int32(0))

    def column(self, n):
        if self.config.cluster > 1:
            n = n * self.config.cluster + lax.axis_index("cluster")
        return n * self.config.block_n

    def load(self, refs, pipe):
        plgpu.set_max_registers(40, action="decrease")
        pipe.drain(self.for_tiles(refs, functools.partial(self.load_tile, refs, pipe)))

    def load_tile(self, refs, pipe, tile, used):
        count = self.steps_of(tile) * (1 + tile.pair)

        def stream(i, _):
            slot, turn = pipe.slot(used + i), i & tile.pair  # whose step it is, in a pair
            depth = pl.ds(lax.shift_right_logical(i, tile.pair) * DEPTH, DEPTH)
            pl.when(used + i >= self.config.stages)(lambda: pipe.wait_free(used + i))
            for half in range(2):
                self.load_half(refs, tile, slot, turn, depth, half)
            columns = pl.ds(self.column(tile.n + turn), self.config.block_n)
            place = (tile.group, columns, depth) if self.transpose_rhs else (tile.group, depth, columns)
            plgpu.copy_gmem_to_smem(refs.rhs.at[place], refs.rhs_smem.at[slot], refs.ready.at[slot])

        lax.fori_loop(0, count, stream, None)
        return used + count

    def row(self, tile, half):
        return tile.first + jnp.where(tile.pair == 1, 0, half * HALF)

    def load_half(self, refs, tile, slot, turn, depth, half):
        """64 rows of lhs, if this warpgroup needs any: half a tile takes less from L2."""
        row = self.row(tile, half)
        needed = (tile.begin < row + HALF) & (tile.end > row) & ((tile.pair == 0) | (turn == half))
        shared = {"collective_axes": "cluster"} if self.config.cluster > 1 else {}

        @pl.when(needed)
        def copy():
            rows = pl.ds(pl.multiple_of(row, 8), HALF)
            plgpu.copy_gmem_to_smem(
                refs.lhs.at[rows, depth],
                refs.lhs_smem.at[slot, half * HALF : (half + 1) * HALF],
                refs.ready.at[slot],
                **shared,
            )

        pl.when(~needed)(lambda: plgpu.barrier_arrive(refs.ready.at[slot]))

    def compute(self, refs, pipe, half):
        plgpu.set_max_registers(232, action="increase")
        self.for_tiles(refs, functools.partial(self.compute_tile, refs, pipe, half))
        plgpu.wait_smem_to_gmem(0)

    def compute_tile(self, refs, pipe, half, tile, used):
        row, pair = self.row(tile, half), tile.pair
        low, high = (jnp.clip(x - row, 0, HALF) for x in (tile.begin, tile.end))
        count = self.steps_of(tile) * (1 + pair)
        mine = jnp.where(low < high, self.steps_of(tile), 0)
        passed = mine * (1 + pair)

        def product(acc, slot):
            rhs = refs.rhs_smem.at[slot]
            plgpu.wgmma(
                acc[0],
                refs.lhs_smem.at[slot, half * HALF : (half + 1) * HALF],
                rhs.transpose((1, 0)) if self.transpose_rhs else rhs,
            )

        out = pl.run_scoped(
            lambda acc: multiply(pipe, used, mine, product, [acc], self.dtype, pair=pair, second=half == 1),
            plgpu.ACC((HALF, self.config.block_n)),
        )
        pl.when(mine > 0)(lambda: pipe.release(used + passed - 1 - (0 if half else pair)))
        lax.fori_loop(passed, count, lambda i, _: pipe.pass_on(used + i), None)
        self.store(refs, half, out, row, low, high, self.column(tile.n + pair * half))
        return used + count

    def store(self, refs, half, out, row, low, high, column):
        swizzled, plain = zip(*refs.staging[half], strict=True)  # two views of each buffer

        def target(i):
            return refs.out.at[:, pl.ds(column + i * CHUNK, CHUNK)]

        def whole(smem, i):
            plgpu.copy_smem_to_gmem(smem, target(i).at[pl.ds(pl.multiple_of(row, 8), HALF)], commit_group=False)

        def ragged(smem, i):
            send_ladder(smem, target(i), row, low, high)

        chunks = self.config.chunks
        pl.when(high - low == HALF)(lambda: store_chunks(out, swizzled, chunks, whole))
        pl.when((low < high) & (high - low < HALF))(lambda: store_chunks(out, plain, chunks, ragged))


def launch(body, name, out_type, scratch, units, cluster, threads, interpret, arguments):
    def kernel(*refs):
        body(*refs)

    kernel.__name__ = name  # the name of the kernel in profiles
    clusters = {"cluster": (cluster,), "cluster_names": ("cluster",)} if cluster > 1 else {}
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=scratch,
        grid=(units,),
        grid_names=("sm",),
        num_threads=threads,
        thread_name="warpgroup",
        **clusters,
        **({} if interpret is None else {"interpret": interpret}),
    )(*arguments)


def tiles(dtype, *shape):
    return plgpu.SMEM(shape, dtype, transforms=SWIZZLED)


def grouped(lhs, rhs, group_sizes, *, transpose_rhs=False, config=Config(), interpret=None, sms=None, name="grouped"):
    """Row i of lhs times the matrix of its group; rows past the sum of the sizes are zero."""
    (m, k), groups, dtype = lhs.shape, rhs.shape[0], lhs.dtype
    n = rhs.shape[1 if transpose_rhs else 2]
    if k % DEPTH or n % (config.block_n * config.cluster):
        raise ValueError(f"K={k} must be a multiple of {DEPTH} and N={n} of {config.block_n * config.cluster}")
    rows = max(-(-m // 8) * 8, TILE)
    lhs = jnp.pad(lhs, ((0, rows - m), (0, 0))) if rows > m else lhs
    units = (sms or multiprocessors()) // config.cluster
    work, count = schedule(group_sizes, rows, n // config.block_n // config.cluster, units, config)
    block = (config.block_n, DEPTH) if transpose_rhs else (DEPTH, config.block_n)
    staging = plgpu.RefUnion(tiles(dtype, HALF, CHUNK), plgpu.SMEM((HALF, CHUNK), dtype))
    ready = plgpu.Barrier(num_arrivals=3, num_barriers=config.stages)  # the halves of lhs, and rhs
    free = (
        plgpu.Barrier(num_arrivals=2, num_barriers=config.stages)
        if config.cluster == 1
        else plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=2, num_barriers=config.stages)
    )
    out = launch(
        Forward(config, groups, k // DEPTH, transpose_rhs, dtype),
        name,
        jax.ShapeDtypeStruct((rows, n), dtype),
        [
            tiles(dtype, config.stages, TILE, DEPTH),
            tiles(dtype, config.stages, *block),
            [[staging] * config.chunks] * 2,
            ready,
            free,
        ],
        units,
        config.cluster,
        3,
        interpret,
        (work, count, lhs, rhs),
    )
    return out[:m] if rows > m else out


class OuterRefs(NamedTuple):
    bounds: Any
    lhs: Any
    dout: Any
    out: Any
    lhs_smem: Any
    dout_smem: Any
    staging: Any
    ready: Any
    clean: Any
    free: Any


class Outer:
    """The body of the kernel for rhs's gradient: for each group lhs_i^T dout_i."""

    def __init__(self, config, groups, k, n, dtype):
        self.config, self.groups, self.dtype = config, groups, dtype
        self.blocks = (k // TILE, n // config.block_n)

    def __call__(self, *refs):
        refs = OuterRefs(*refs)
        warpgroup = lax.axis_index("warpgroup")
        raw = Pipe(self.config.stages, refs.ready, refs.free)
        cleaned = Pipe(self.config.stages, refs.clean, refs.free)
        for half in range(2):
            pl.when(warpgroup == half)(functools.partial(self.compute, refs, cleaned, half))
        pl.when(warpgroup == 2)(functools.partial(self.load, refs, raw))
        pl.when(warpgroup == 3)(functools.partial(self.sweep, refs, raw))

    def for_tiles(self, refs, visit):
        """visit(group, k block, n block, (first row, begin, end), steps, buffers used)."""
        per_group = self.blocks[0] * self.blocks[1]
        width = min(self.config.width, self.blocks["kn".index(self.config.along)])

        @plgpu.nd_loop((self.groups * per_group,), collective_axes="sm", init_carry=jnp.int32(0))
        def total(loop, carry):
            group = lax.div(loop.index[0], jnp.int32(per_group))
            k, n = plgpu.planar_snake(
                lax.rem(loop.index[0], jnp.int32(per_group)), self.blocks, "kn".index(self.config.along), width
            )
            begin, end = refs.bounds[group], refs.bounds[group + 1]
            first = lax.div(begin, jnp.int32(8)) * 8
            steps = jnp.where(begin < end, lax.div(end - first + DEPTH - 1, jnp.int32(DEPTH)), 0)
            visit(group, k, n, (first, begin, end), steps, carry)
            return carry + steps

        return total

    def load(self, refs, pipe):
        plgpu.set_max_registers(self.config.registers[1], action="decrease")

        def visit(group, k, n, bounds, steps, used):
            def stream(i, _):
                slot = pipe.slot(used + i)
                rows = pl.ds(pl.multiple_of(bounds[0] + i * DEPTH, 8), DEPTH)
                pl.when(used + i >= self.config.stages)(lambda: pipe.wait_free(used + i))
                plgpu.copy_gmem_to_smem(
                    refs.lhs.at[rows, pl.ds(k * TILE, TILE)], refs.lhs_smem.at[slot], refs.ready.at[slot]
                )
                plgpu.copy_gmem_to_smem(
                    refs.dout.at[rows, pl.ds(n * self.config.block_n, self.config.block_n)],
                    refs.dout_smem.at[slot],
                    refs.ready.at[slot],
                )

            lax.fori_loop(0, steps, stream, None)

        pipe.drain(self.for_tiles(refs, visit))

    def sweep(self, refs, pipe):
        """Passes buffers on, the rows of other groups zeroed."""
        plgpu.set_max_registers(self.config.registers[1], action="decrease")

        def visit(group, k, n, bounds, steps, used):
            def look(i, _):
                slot, row = pipe.slot(used + i), bounds[0] + i * DEPTH
                pipe.wait_ready(used + i)
                low, high = (jnp.clip(x - row, 0, DEPTH) for x in bounds[1:])
                pl.when(high - low < DEPTH)(lambda: self.zero(refs, slot, low, high))
                plgpu.barrier_arrive(refs.clean.at[slot])

            lax.fori_loop(0, steps, look, None)

        self.for_tiles(refs, visit)

    def zero(self, refs, slot, low, high):
        """Zeroes all rows of the two buffers but low to high."""
        for smem in (refs.lhs_smem, refs.dout_smem):
            for column in range(0, smem.shape[2], CHUNK):
                part = smem.at[slot, :, column : column + CHUNK]
                row = plgpu.broadcasted_iota(jnp.int32, (DEPTH, CHUNK), 0, layout=plgpu.Layout.WGMMA)
                value = plgpu.load(part, layout=plgpu.Layout.WGMMA)
                part[...] = jnp.where((row >= low) & (row < high), value, jnp.zeros_like(value))
        plgpu.commit_smem()

    def compute(self, refs, pipe, half):
        plgpu.set_max_registers(self.config.registers[0], action="increase")

        def visit(group, k, n, bounds, steps, used):
            def product(acc, slot):
                lhs = refs.lhs_smem.at[slot, :, half * HALF : (half + 1) * HALF].transpose((1, 0))
                for i, part in enumerate(acc):
                    plgpu.wgmma(part, lhs, refs.dout_smem.at[slot, :, i * 128 : (i + 1) * 128])

            out = pl.run_scoped(
                lambda *acc: multiply(pipe, used, steps, product, acc, self.dtype),
                *[plgpu.ACC((HALF, 128))] * (self.config.block_n // 128),
            )
            pl.when(steps > 0)(lambda: pipe.release(used + steps - 1))

            def send(smem, i):
                rows, columns = pl.ds(k * TILE + half * HALF, HALF), pl.ds(n * self.config.block_n + i * CHUNK, CHUNK)
                plgpu.copy_smem_to_gmem(smem, refs.out.at[group, rows, columns], commit_group=False)

            store_chunks(out, refs.staging[half], self.config.chunks, send)

        self.for_tiles(refs, visit)
        plgpu.wait_smem_to_gmem(0)


def grouped_outer(lhs, dout, group_sizes, *, config=OuterConfig(), interpret=None, sms=None, name="grouped_outer"):
    """For each group lhs_i^T dout_i, [G, K, N]; zero for empty groups."""
    (m, k), (_, n), groups, dtype = lhs.shape, dout.shape, group_sizes.shape[0], lhs.dtype
    if k % TILE or n % config.block_n:
        raise ValueError(f"K={k} must be a multiple of {TILE} and N={n} of {config.block_n}")
    rows = max(-(-m // 8) * 8, DEPTH)
    if rows > m:
        lhs, dout = (jnp.pad(x, ((0, rows - m), (0, 0))) for x in (lhs, dout))
    bounds = jnp.concatenate([jnp.zeros(1, jnp.int32), running(group_sizes.astype(jnp.int32))])
    ready = plgpu.Barrier(num_arrivals=2, num_barriers=config.stages)
    clean = plgpu.Barrier(num_barriers=config.stages)
    return launch(
        Outer(config, groups, k, n, dtype),
        name,
        jax.ShapeDtypeStruct((groups, k, n), dtype),
        [
            tiles(dtype, config.stages, DEPTH, TILE),
            tiles(dtype, config.stages, DEPTH, config.block_n),
            [[tiles(dtype, HALF, CHUNK)] * config.chunks] * 2,
            ready,
            clean,
            ready,
        ],
        sms or multiprocessors(),
        1,
        4,
        interpret,
        (bounds, lhs, dout),
    )
