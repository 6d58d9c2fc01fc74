"""Grouped products for Hopper in Pallas Mosaic GPU: forward, gradient for lhs, gradient for rhs.

`grouped(lhs [M, K], rhs [G, K, N], sizes [G])` -> [M, N]; with `transpose_rhs`, rhs is [G, N, K], read in place: that
is the gradient for lhs. `grouped_outer(lhs [M, K], dout [M, N], sizes [G])` -> [G, K, N]: the gradient for rhs.
16-bit types, float32 accumulators. K must be a multiple of 64 (forward) or 128 (outer), N of half a block (forward) or
of one (outer).

One block an SM. XLA makes one list of tiles from the group sizes (`schedule`); a block takes the next tile of it when
it is nearly through with the loads of the one before, from a counter that all blocks share (`Dealer`). A tile of the
forward is 128 rows that begin at a multiple of 8; two compute warpgroups take 64 rows each, one loader runs ahead
through the buffers. Outer: a fourth warpgroup zeroes the rows of other groups in shared memory before the products
read them.

docs/kernels/grouped.md says how fast each pass is, and where it ends.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import llvm

TILE, HALF, CHUNK, DEPTH = 128, 64, 64, 64  # rows of a tile, of a warpgroup; columns stored at a time; one step of K
AHEAD = 8  # the next tile is taken this many steps before the end of the loads of this one
H200_MULTIPROCESSORS = 132
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


@dataclasses.dataclass(frozen=True)
class Config:
    """Of the forward."""

    block_n: int = 256
    stages: int = 4
    chunks: int = 2  # staging buffers of 64 x 64 a warpgroup
    cut: int = 0  # so many tiles at the end of the list are cut in two along n
    deal: str = "counter"  # or "turns": every block has its tiles from the start


@dataclasses.dataclass(frozen=True)
class OuterConfig:
    """Of the gradient for rhs: tiles of 128 (K) x block_n, down k in bands of `width` blocks of n, or the reverse."""

    block_n: int = 256
    stages: int = 4
    chunks: int = 2
    width: int = 8
    along: str = "k"
    registers: tuple = (216, 40)
    deal: str = "turns"


class Tile(NamedTuple):
    """What a block does next: rows begin to end of a group. A negative group: the list is through.

    Of the forward: inside the 128 rows that start at begin rounded down to 8; place is twice the first column, counted
    in half column blocks, plus 1 where the tile is only half a block wide. Of the gradient for rhs: all rows of the
    group; place is k * (blocks of n) + n.
    """

    group: Any
    begin: Any
    end: Any
    place: Any

    @property
    def first(self):
        return lax.div(self.begin, jnp.int32(8)) * 8

    @property
    def real(self):
        return self.group >= 0


def multiprocessors():
    return getattr(jax.devices()[0], "core_count", None) or H200_MULTIPROCESSORS


def running(x):
    """Running sums of a short int32 vector, as one fused reduction: on the GPU a cumsum is several kernels."""
    i = jnp.arange(x.size, dtype=jnp.int32)
    return jnp.where(i[:, None] >= i[None], x[None], 0).sum(1, dtype=jnp.int32)


def find(upto, item):
    """The first group whose running sum is past the item."""
    return (upto[None] <= item[:, None]).sum(1, dtype=jnp.int32).clip(0, upto.size - 1)


def schedule(group_sizes, rows, halves, units, cut):
    """The list of the forward, [most, 4] as in Tile: by groups, then column blocks, then rows; unused rows last.

    So neighbours in the list share weights, and a group's lhs stays in the L2 while its column blocks go by. `halves`
    counts half column blocks; an odd last one is a narrow tile. The last `cut` tiles are cut in two along n.
    """
    n_blocks = (halves + 1) // 2
    sizes = jnp.append(group_sizes.astype(jnp.int32), rows)
    ends = running(sizes)
    starts, ends = ends - sizes, jnp.minimum(ends, rows)
    tiles = jnp.where(ends > starts, (ends - starts // 8 * 8 + TILE - 1) // TILE, 0)
    upto = running(tiles * n_blocks)
    total = upto[-1]
    most = -(-(rows + (TILE + 6) * ends.size) // TILE) * n_blocks + cut + units
    item = jnp.arange(most, dtype=jnp.int32)
    past = item - jnp.maximum(total - cut, 0)
    narrow = (past >= 0) & (cut > 0)
    item = jnp.where(narrow, item - past + past // 2, item)
    group = find(upto, item)
    down = jnp.maximum(tiles[group], 1)
    rest = item - upto[group] + tiles[group] * n_blocks
    first = starts[group] // 8 * 8 + TILE * (rest % down)
    begin, end = jnp.maximum(first, starts[group]), jnp.minimum(first + TILE, ends[group])
    column = 2 * (rest // down) + jnp.where(narrow, past % 2, 0)
    place = 2 * column + (narrow | (column + 1 == halves))
    return jnp.stack([jnp.where(item < total, group, -1), begin, end, place], axis=1)


def outer_schedule(group_sizes, blocks, units, config):
    """The list of the gradient for rhs, by groups; the empty ones are in it."""
    ends = running(group_sizes.astype(jnp.int32))
    begin = ends - group_sizes.astype(jnp.int32)
    item = jnp.arange(ends.size * blocks[0] * blocks[1] + units, dtype=jnp.int32)
    group, rest = item // (blocks[0] * blocks[1]), item % (blocks[0] * blocks[1])
    across, down = blocks[::-1] if config.along == "n" else blocks
    band = rest // (config.width * down) * config.width
    here, rest = jnp.minimum(config.width, across - band), rest - band * down
    a, b = band + rest % here, rest // here
    place = a * blocks[1] + b if config.along == "k" else b * blocks[1] + a
    return jnp.stack([jnp.where(group < ends.size, group, -1), begin[group], ends[group], place], axis=1)


TAKE = """{{
.reg .pred mine; .reg .b32 thread, index, group, begin, end, place; .reg .b64 entry;
mov.u32 thread, %tid.x; and.b32 thread, thread, 127; setp.eq.u32 mine, thread, 96;
{index}
@mine mad.wide.u32 entry, index, 16, $1;
@mine ld.global.v4.u32 {{group, begin, end, place}}, [entry];
@mine st.shared.v4.u32 [$2], {{group, begin, end, place}};
}}"""


def assembly(code, constraints, *operands):
    """Emits PTX; operands are references, which stand for their addresses, and scalars."""
    values = [utils.memref_ptr(x) if isinstance(x, ir.Value) else x.registers.item() for x in operands]
    llvm.inline_asm(ir.Type.parse("!llvm.void"), values, code, constraints + ",~{memory}", has_side_effects=True)


@plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
def take_counted(_, counter, work, entry):
    """Copies the next entry of the list to shared memory, by one thread of the last warp; the others do not wait."""
    assembly(TAKE.format(index="@mine atom.global.add.u32 index, [$0], 1;"), "l,l,r", counter, work, entry)


@plgpu.inline_mgpu(arg_types=(plgpu.Layout.WG_SPLAT, plgpu.RefType(), plgpu.RefType()))
def take_at(_, index, work, entry):
    """The same for the entry of that index."""
    assembly(TAKE.format(index="mov.b32 index, $0;"), "r,l,r", index, work, entry)


class Dealer:
    """Gives this block its tiles: the loader takes one, and every warpgroup reads it, from one of two places."""

    def __init__(self, refs, units, deal, interpreted):
        self.refs, self.units, self.interpreted = refs, units, interpreted
        counted = deal == "counter" and not interpreted
        self.counter = pl.get_global(plgpu.SemaphoreType.REGULAR) if counted else None  # zero at the start

    def take(self, turn):
        slot = turn & 1
        entry, index = self.refs.entries.at[slot], turn * self.units + lax.axis_index("sm")
        pl.when(turn >= 2)(lambda: plgpu.barrier_wait(self.refs.read.at[slot]))
        if self.interpreted:
            for i in range(4):
                self.refs.entries[slot, i] = self.refs.work[index, i]
        elif self.counter is None:
            take_at(index, self.refs.work, entry)
        else:
            take_counted(self.counter, self.refs.work, entry)
        plgpu.barrier_arrive(self.refs.taken.at[slot])

    def read(self, turn):
        slot = turn & 1
        plgpu.barrier_wait(self.refs.taken.at[slot])
        tile = Tile(*(self.refs.entries[slot, i] for i in range(4)))
        plgpu.barrier_arrive(self.refs.read.at[slot])
        return tile

    def for_tiles(self, visit):
        """visit(tile, buffers used, turn) -> buffers used, for each; then how many buffers and turns it took."""

        def body(carry):
            tile, used, turn = carry
            used = visit(tile, used, turn)
            return self.read(turn + 1), used, turn + 1

        return lax.while_loop(lambda x: x[0].real, body, (self.read(jnp.int32(0)), jnp.int32(0), jnp.int32(0)))[1:]

    def load_tiles(self, pipe, steps_of, load_step):
        """The loader's: load_step(tile, i, slot) for each step, the next tile taken before the last few of them."""
        self.take(jnp.int32(0))

        def load(tile, used, turn):
            steps = steps_of(tile)

            def step(i, _):
                pl.when(used + i >= pipe.stages)(lambda: pipe.wait_free(used + i))
                load_step(tile, i, pipe.slot(used + i))

            early = jnp.maximum(steps - AHEAD, 0)
            lax.fori_loop(0, early, step, None)
            self.take(turn + 1)
            lax.fori_loop(early, steps, step, None)
            return used + steps

        used, turns = self.for_tiles(load)
        pipe.drain(used)
        lax.fori_loop(
            jnp.maximum(turns - 1, 0), turns + 1, lambda i, _: plgpu.barrier_wait(self.refs.read.at[i & 1]), None
        )


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

    def pass_on(self, begin, end):
        def one(step, _):
            self.wait_ready(step)
            self.release(step)

        lax.fori_loop(begin, end, one, None)

    def drain(self, total):
        lax.fori_loop(jnp.maximum(total - self.stages, 0), total, lambda step, _: self.wait_free(step), None)


def multiply(pipe, begin, steps, product, acc, dtype):
    """Add `steps` products to acc, each left running while the next is issued: a buffer goes back a step later."""

    def step(i, _):
        pipe.wait_ready(begin + i)
        product(acc, pipe.slot(begin + i))
        plgpu.wgmma_wait(len(acc))
        pl.when(i > 0)(lambda: pipe.release(begin + i - 1))

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
    lhs: Any
    rhs: Any
    out: Any
    lhs_smem: Any
    rhs_smem: Any
    staging: Any
    ready: Any
    free: Any
    entries: Any
    taken: Any
    read: Any


class Forward:
    """The body of the forward kernel."""

    def __init__(self, config, groups, steps, transpose_rhs, dtype, units, narrow, interpreted):
        self.config, self.groups, self.steps, self.dtype, self.units = config, groups, steps, dtype, units
        self.transpose_rhs, self.narrow, self.interpreted = transpose_rhs, narrow, interpreted

    def __call__(self, *refs):
        refs = Refs(*refs)
        warpgroup = lax.axis_index("warpgroup")
        pipe = Pipe(self.config.stages, refs.ready, refs.free)
        dealer = Dealer(refs, self.units, self.config.deal, self.interpreted)
        for half in range(2):
            pl.when(warpgroup == half)(functools.partial(self.compute, refs, pipe, dealer, half))
        pl.when(warpgroup == 2)(functools.partial(self.load, refs, pipe, dealer))

    def steps_of(self, tile):
        return jnp.where(tile.group < self.groups, jnp.int32(self.steps), jnp.int32(0))

    def column(self, tile):
        return lax.shift_right_logical(tile.place, 1) * (self.config.block_n // 2)

    def for_widths(self, tile, visit):
        """visit(columns) with the width of the tile: that of a block, or half of it."""
        whole = self.config.block_n
        if not self.narrow:
            return visit(whole)
        pl.when(tile.place & 1 == 0)(lambda: visit(whole))
        pl.when(tile.place & 1 == 1)(lambda: visit(whole // 2))

    def load(self, refs, pipe, dealer):
        plgpu.set_max_registers(40, action="decrease")
        dealer.load_tiles(pipe, self.steps_of, functools.partial(self.load_step, refs))

    def load_step(self, refs, tile, i, slot):
        depth = pl.ds(i * DEPTH, DEPTH)
        for half in range(2):
            self.load_half(refs, tile, slot, depth, half)
        self.for_widths(tile, functools.partial(self.load_rhs, refs, tile, slot, depth))

    def load_rhs(self, refs, tile, slot, depth, columns):
        wanted = pl.ds(self.column(tile), columns)
        place = (tile.group, wanted, depth) if self.transpose_rhs else (tile.group, depth, wanted)
        plgpu.copy_gmem_to_smem(refs.rhs.at[place], self.rhs_buffer(refs, slot, columns), refs.ready.at[slot])

    def rhs_buffer(self, refs, slot, columns):
        whole, halves = refs.rhs_smem
        return whole.at[slot] if columns == self.config.block_n else halves.at[2 * slot]

    def load_half(self, refs, tile, slot, depth, half):
        """64 rows of lhs, if this warpgroup needs any."""
        row = tile.first + half * HALF
        needed = (tile.begin < row + HALF) & (tile.end > row)

        @pl.when(needed)
        def copy():
            plgpu.copy_gmem_to_smem(
                refs.lhs.at[pl.ds(pl.multiple_of(row, 8), HALF), depth],
                refs.lhs_smem.at[slot, half * HALF : (half + 1) * HALF],
                refs.ready.at[slot],
            )

        pl.when(~needed)(lambda: plgpu.barrier_arrive(refs.ready.at[slot]))

    def compute(self, refs, pipe, dealer, half):
        plgpu.set_max_registers(232, action="increase")
        dealer.for_tiles(functools.partial(self.compute_tile, refs, pipe, half))
        plgpu.wait_smem_to_gmem(0)

    def compute_tile(self, refs, pipe, half, tile, used, _):
        row = tile.first + half * HALF
        low, high = (jnp.clip(x - row, 0, HALF) for x in (tile.begin, tile.end))
        steps = self.steps_of(tile)
        mine = jnp.where(low < high, steps, 0)

        def visit(columns):
            def product(acc, slot):
                rhs = self.rhs_buffer(refs, slot, columns)
                plgpu.wgmma(
                    acc[0],
                    refs.lhs_smem.at[slot, half * HALF : (half + 1) * HALF],
                    rhs.transpose((1, 0)) if self.transpose_rhs else rhs,
                )

            out = pl.run_scoped(
                lambda acc: multiply(pipe, used, mine, product, [acc], self.dtype), plgpu.ACC((HALF, columns))
            )
            pl.when(mine > 0)(lambda: pipe.release(used + mine - 1))
            pipe.pass_on(used + mine, used + steps)
            self.store(refs, half, out, row, low, high, self.column(tile))

        self.for_widths(tile, visit)
        return used + steps

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


def launch(body, name, out_type, scratch, units, threads, interpret, arguments):
    """Runs a kernel of `threads` warpgroups on each of `units` multiprocessors; the dealer's scratch comes last."""

    def kernel(*refs):
        body(*refs)

    kernel.__name__ = name  # the name of the kernel in profiles
    dealer = [
        plgpu.SMEM((2, 4), jnp.int32),
        plgpu.Barrier(num_barriers=2),
        plgpu.Barrier(num_arrivals=threads, num_barriers=2),
    ]
    return plgpu.kernel(
        kernel,
        out_type=out_type,
        scratch_types=[*scratch, *dealer],
        grid=(units,),
        grid_names=("sm",),
        num_threads=threads,
        thread_name="warpgroup",
        **({} if interpret is None else {"interpret": interpret}),
    )(*arguments)


def tiles(dtype, *shape):
    return plgpu.SMEM(shape, dtype, transforms=SWIZZLED)


def grouped(lhs, rhs, group_sizes, *, transpose_rhs=False, config=Config(), interpret=None, sms=None, name="grouped"):
    """Row i of lhs times the matrix of its group; rows past the sum of the sizes are zero."""
    (m, k), groups, dtype = lhs.shape, rhs.shape[0], lhs.dtype
    n, units = rhs.shape[1 if transpose_rhs else 2], sms or multiprocessors()
    halves, rest = divmod(n, config.block_n // 2)
    if k % DEPTH or rest or (config.cut and halves % 2):
        raise ValueError(f"K={k} must be a multiple of {DEPTH}, N={n} of half of {config.block_n}, of all of it to cut")
    rows = max(-(-m // 8) * 8, TILE)
    lhs = jnp.pad(lhs, ((0, rows - m), (0, 0))) if rows > m else lhs

    # One memory, two views; the interpreter's check for races knows such a union as a whole only, not by slots.
    both_ways = plgpu.RefUnion if interpret is None else lambda *views: views

    def block(columns):
        return (columns, DEPTH) if transpose_rhs else (DEPTH, columns)

    staging = plgpu.RefUnion(tiles(dtype, HALF, CHUNK), plgpu.SMEM((HALF, CHUNK), dtype))
    out = launch(
        Forward(
            config,
            groups,
            k // DEPTH,
            transpose_rhs,
            dtype,
            units,
            narrow=config.cut > 0 or halves % 2 == 1,
            interpreted=interpret is not None,
        ),
        name,
        jax.ShapeDtypeStruct((rows, n), dtype),
        [
            tiles(dtype, config.stages, TILE, DEPTH),
            both_ways(
                tiles(dtype, config.stages, *block(config.block_n)),
                tiles(dtype, 2 * config.stages, *block(config.block_n // 2)),
            ),
            [[staging] * config.chunks] * 2,
            plgpu.Barrier(num_arrivals=3, num_barriers=config.stages),  # the halves of lhs, and rhs
            plgpu.Barrier(num_arrivals=2, num_barriers=config.stages),
        ],
        units,
        3,
        interpret,
        (schedule(group_sizes, rows, halves, units, config.cut), lhs, rhs),
    )
    return out[:m] if rows > m else out


def zero_code(*columns):
    """PTX that zeroes rows of tiled buffers of so many columns: all but $n to $n + $m, n and m after the buffers."""
    low, count = len(columns), len(columns) + 1
    lines = [
        ".reg .pred dead; .reg .b32 thread, own, row, zero; mov.u32 thread, %tid.x; and.b32 thread, thread, 127;",
        "shr.u32 own, thread, 3; and.b32 own, own, 7; shl.b32 thread, thread, 4; mov.b32 zero, 0;",
        *(f".reg .b32 at{i}; add.u32 at{i}, ${i}, thread;" for i in range(len(columns))),
    ]
    for strip in range(DEPTH // 8):  # 8 rows lie together, a row of 64 columns in 128 bytes, wherever swizzling puts it
        lines.append(f"add.u32 row, own, {8 * strip}; sub.u32 row, row, ${low}; setp.ge.u32 dead, row, ${count};")
        for i, width in enumerate(columns):
            for offset in range(strip * 16 * width, (strip + 1) * 16 * width, 2048):
                lines.append(f"@dead st.shared.v4.u32 [at{i}+{offset}], {{zero, zero, zero, zero}};")
    return "{\n" + "\n".join(lines) + "\n}"


@plgpu.inline_mgpu(arg_types=(*[plgpu.RefType(SWIZZLED)] * 2, *[plgpu.Layout.WG_SPLAT] * 2))
def zero_rows(_, lhs, dout, low, count):
    """Zeroes the rows of a step that are not `count` from `low`; without reading them."""
    assembly(zero_code(*(x.type.shape[1] * CHUNK for x in (lhs, dout))), "r,r,r,r", lhs, dout, low, count)


class OuterRefs(NamedTuple):
    work: Any
    lhs: Any
    dout: Any
    out: Any
    lhs_smem: Any
    dout_smem: Any
    staging: Any
    ready: Any
    clean: Any
    free: Any
    entries: Any
    taken: Any
    read: Any


class Outer:
    """The body of the kernel for rhs's gradient: for each group lhs_i^T dout_i."""

    def __init__(self, config, n_blocks, dtype, units, interpreted):
        self.config, self.n_blocks, self.dtype, self.units = config, n_blocks, dtype, units
        self.interpreted = interpreted

    def __call__(self, *refs):
        refs = OuterRefs(*refs)
        warpgroup = lax.axis_index("warpgroup")
        dealer = Dealer(refs, self.units, self.config.deal, self.interpreted)
        raw = Pipe(self.config.stages, refs.ready, refs.free)
        cleaned = Pipe(self.config.stages, refs.clean, refs.free)
        for half in range(2):
            pl.when(warpgroup == half)(functools.partial(self.compute, refs, cleaned, dealer, half))
        pl.when(warpgroup == 2)(functools.partial(self.load, refs, raw, dealer))
        pl.when(warpgroup == 3)(functools.partial(self.sweep, refs, raw, dealer))

    def steps_of(self, tile):
        return jnp.where(tile.begin < tile.end, lax.div(tile.end - tile.first + DEPTH - 1, jnp.int32(DEPTH)), 0)

    def corner(self, tile):
        """First row (of K) and first column."""
        n_blocks = jnp.int32(self.n_blocks)
        return lax.div(tile.place, n_blocks) * TILE, lax.rem(tile.place, n_blocks) * self.config.block_n

    def load(self, refs, pipe, dealer):
        plgpu.set_max_registers(self.config.registers[1], action="decrease")

        def load_step(tile, i, slot):
            k, n = self.corner(tile)
            rows = pl.ds(pl.multiple_of(tile.first + i * DEPTH, 8), DEPTH)
            for gmem, smem, column in ((refs.lhs, refs.lhs_smem, k), (refs.dout, refs.dout_smem, n)):
                columns = pl.ds(column, smem.shape[2])
                plgpu.copy_gmem_to_smem(gmem.at[rows, columns], smem.at[slot], refs.ready.at[slot])

        dealer.load_tiles(pipe, self.steps_of, load_step)

    def sweep(self, refs, pipe, dealer):
        """Passes buffers on, the rows of other groups zeroed."""
        plgpu.set_max_registers(self.config.registers[1], action="decrease")

        def visit(tile, used, _):
            steps = self.steps_of(tile)

            def look(i, _):
                slot, row = pipe.slot(used + i), tile.first + i * DEPTH
                pipe.wait_ready(used + i)
                low, high = (jnp.clip(x - row, 0, DEPTH) for x in (tile.begin, tile.end))
                pl.when(high - low < DEPTH)(lambda: self.zero(refs, slot, low, high))
                plgpu.barrier_arrive(refs.clean.at[slot])

            lax.fori_loop(0, steps, look, None)
            return used + steps

        dealer.for_tiles(visit)

    def zero(self, refs, slot, low, high):
        """Zeroes all rows of the two buffers but low to high."""
        if not self.interpreted:
            zero_rows(refs.lhs_smem.at[slot], refs.dout_smem.at[slot], low, high - low)
            return plgpu.commit_smem()
        for smem in (refs.lhs_smem, refs.dout_smem):
            for column in range(0, smem.shape[2], CHUNK):
                part = smem.at[slot, :, column : column + CHUNK]
                row = plgpu.broadcasted_iota(jnp.int32, (DEPTH, CHUNK), 0, layout=plgpu.Layout.WGMMA)
                value = plgpu.load(part, layout=plgpu.Layout.WGMMA)
                part[...] = jnp.where((row >= low) & (row < high), value, jnp.zeros_like(value))
        plgpu.commit_smem()

    def compute(self, refs, pipe, dealer, half):
        plgpu.set_max_registers(self.config.registers[0], action="increase")

        def visit(tile, used, _):
            steps = self.steps_of(tile)
            k, n = self.corner(tile)

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
                rows, columns = pl.ds(k + half * HALF, HALF), pl.ds(n + i * CHUNK, CHUNK)
                plgpu.copy_smem_to_gmem(smem, refs.out.at[tile.group, rows, columns], commit_group=False)

            store_chunks(out, refs.staging[half], self.config.chunks, send)
            return used + steps

        dealer.for_tiles(visit)
        plgpu.wait_smem_to_gmem(0)


def grouped_outer(lhs, dout, group_sizes, *, config=OuterConfig(), interpret=None, sms=None, name="grouped_outer"):
    """For each group lhs_i^T dout_i, [G, K, N]; zero for empty groups."""
    (m, k), (_, n), groups, dtype = lhs.shape, dout.shape, group_sizes.shape[0], lhs.dtype
    if k % TILE or n % config.block_n:
        raise ValueError(f"K={k} must be a multiple of {TILE} and N={n} of {config.block_n}")
    rows, units = max(-(-m // 8) * 8, DEPTH), sms or multiprocessors()
    if rows > m:
        lhs, dout = (jnp.pad(x, ((0, rows - m), (0, 0))) for x in (lhs, dout))
    ready = plgpu.Barrier(num_arrivals=2, num_barriers=config.stages)
    return launch(
        Outer(config, n // config.block_n, dtype, units, interpret is not None),
        name,
        jax.ShapeDtypeStruct((groups, k, n), dtype),
        [
            tiles(dtype, config.stages, DEPTH, TILE),
            tiles(dtype, config.stages, DEPTH, config.block_n),
            [[tiles(dtype, HALF, CHUNK)] * config.chunks] * 2,
            ready,
            plgpu.Barrier(num_barriers=config.stages),
            ready,
        ],
        units,
        4,
        interpret,
        (outer_schedule(group_sizes, (k // TILE, n // config.block_n), units, config), lhs, dout),
    )
