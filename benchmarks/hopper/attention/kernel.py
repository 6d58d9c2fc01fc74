"""Flash attention forward for Hopper in Pallas Mosaic GPU: q [B, Tq, H, D], k and v [B, Tk, Hk, D], bf16 or fp16.

One block of threads holds `compute` warpgroups of 64 query rows each and a loader warpgroup. The loader streams q, k
and v through shared memory by TMA; the compute warpgroups keep logits, weights and output in registers. Keys are
walked from the last visible block to the first, so that the blocks that need a mask (causal edge, end of the keys)
come first and the loop over full blocks has no mask at all. Blocks outside the masks are never loaded.

The work of each thread block is a list made at trace time (`schedule`), read from global memory.

docs/kernels/attention.md says why it is as it is, how fast, and where it ends. `attention` is the entry.
"""

import dataclasses
import functools
import heapq
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

LOG2_E = math.log2(math.e)
ROWS = 64  # query rows of one compute warpgroup
H200_MULTIPROCESSORS = 132
SHARED_BYTES = 227 * 1024


@dataclasses.dataclass(frozen=True)
class Config:
    """Hyperparameters; none of them changes the result beyond rounding."""

    block_k: int = 128
    stages: int = 2
    compute: int = 2  # warpgroups that compute
    dealing: str = "static"  # tiles of a thread block: "single", "pairs", or "static" lists, one a multiprocessor
    own_output: bool = True  # output staged in its own shared memory, so that q of the next tile loads early
    tolerance: float = 8.0  # the maximum may lag by so many powers of two; then the output is rescaled only when needed
    swizzle: int = 128
    registers: int | None = 240  # of a compute warpgroup; None: all get the same
    loader_registers: int = 24
    section_bytes: int = 24 * 2**20  # keys and values walked together, to stay in the L2
    tail: float = 0.5  # tiles shorter than this part of the longest come last

    def shared_bytes(self, d, itemsize=2):
        rows = self.compute * ROWS * (2 if self.own_output else 1) + 2 * self.stages * self.block_k
        return rows * d * itemsize + 1024


@dataclasses.dataclass(frozen=True)
class Problem:
    """Static shape and masks of one call."""

    batch: int
    tq: int
    tk: int
    heads: int
    kv_heads: int
    d: int
    scale: float
    causal: bool
    window: int | None
    q_offset: int
    softcap: float | None = None  # logits become softcap * tanh(logits / softcap)

    @property
    def masked(self):
        return self.causal or self.window is not None

    def shift(self, rows):
        """Rows by which tiles begin before the first query: when causal, the tile that is not full is a short one."""
        return -self.tq % rows // ROWS * ROWS if self.causal else 0

    def blocks(self, row, rows, block_k, ops=jnp):
        """(first, first_full, end_full, end): key blocks seen by `rows` query rows; the full ones need no mask."""
        row = row + self.q_offset
        total = -(-self.tk // block_k)
        end = end_full = first = first_full = None
        if self.causal:
            end = ops.clip((row + rows + block_k - 1) // block_k, 1, total)
            end_full = ops.minimum((row + 1) // block_k, self.tk // block_k)
        else:
            end, end_full = total, self.tk // block_k
        if self.window is not None:
            low = row - self.window + 1
            first = ops.minimum(ops.maximum(low, 0) // block_k, end - 1)
            first_full = (ops.maximum(low + rows - 1, 0) + block_k - 1) // block_k
        else:
            first = first_full = 0
        end_full = ops.clip(end_full, first, end - 1 if self.needs_mask(block_k) else end)
        return first, ops.clip(first_full, first, end_full), end_full, end

    def needs_mask(self, block_k):
        return self.masked or self.tk % block_k != 0


def tile_order(heads, section, tail, cost):
    """[(head, block)] in the order of walking, section after section of heads whose streamed tiles fit in the L2.

    Uneven tiles: longest first within a section; those shorter than `tail` of the longest wait until all sections
    are through, to even out the end.
    """
    parts = [range(start, min(start + section, heads)) for start in range(0, heads, section)]
    if (cost == cost[0]).all():
        return [(h, b) for part in parts for h in part for b in range(len(cost))]
    blocks = [int(b) for b in np.argsort(-cost, kind="stable")]
    early = [b for b in blocks if cost[b] >= tail * cost.max()]
    late = [b for b in blocks if cost[b] < tail * cost.max()]
    return [(h, b) for part in parts for b in early for h in part] + [(h, b) for b in late for h in range(heads)]


def least_loaded(order, cost, count):
    """Static lists for `count` thread blocks: each tile goes to the one with the least work so far."""
    lists, heap = [[] for _ in range(count)], [(0, i) for i in range(count)]
    for h, b in order:
        load, i = heapq.heappop(heap)
        lists[i].append((h, b))
        heapq.heappush(heap, (load + int(cost[b]), i))
    return lists


def paired(order, cost, multiprocessors):
    """Lists of two tiles, a long and a short one of a head, then single tiles: the hardware deals them out."""
    count = len(order) // 2 - multiprocessors
    if count <= 0:
        return [[tile] for tile in order]
    if (cost == cost[0]).all():
        twos = zip(order[: 2 * count : 2], order[1 : 2 * count : 2], strict=True)
        return [list(x) for x in twos] + [[x] for x in order[2 * count :]]
    longest_first, shortest_first = np.argsort(-cost, kind="stable"), np.argsort(cost, kind="stable")
    partner = dict(zip(longest_first.tolist(), shortest_first.tolist(), strict=True))
    lists, used = [], set()
    for h, b in order:
        if (h, b) not in used:
            pair = [(h, b)] if len(lists) >= count or partner[b] == b else [(h, b), (h, partner[b])]
            lists.append(pair)
            used.update(pair)
    return lists


def schedule(problem, config, multiprocessors):
    """Work lists, int32 [thread blocks, 1 + longest]: how many tiles, then the tiles (head * q blocks + q block)."""
    rows = config.compute * ROWS
    q_blocks = -(-problem.tq // rows)
    first, _, _, end = (
        np.broadcast_to(x, (q_blocks,))
        for x in problem.blocks(np.arange(q_blocks) * rows - problem.shift(rows), rows, config.block_k, np)
    )
    cost = (end - first) * config.block_k + 96
    kv_bytes = problem.tk * problem.d * 4 * problem.kv_heads / problem.heads
    section = max(1, int(config.section_bytes // kv_bytes))
    order = tile_order(problem.batch * problem.heads, section, config.tail, cost)
    if config.dealing == "static":
        lists = least_loaded(order, cost, min(multiprocessors, len(order)))
    elif config.dealing == "pairs":
        lists = paired(order, cost, multiprocessors)
    else:
        lists = [[tile] for tile in order]
    return table(lists, q_blocks)


def table(lists, blocks):
    """Lists of (head, block) as int32 [lists, 1 + longest]: the length, then head * blocks + block."""
    longest = max(map(len, lists))
    return np.array([[len(x)] + [h * blocks + b for h, b in x] + [0] * (longest - len(x)) for x in lists], np.int32)


def multiprocessors():
    device = jax.devices()[0]
    return getattr(device, "core_count", None) or H200_MULTIPROCESSORS


def constant(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)


def across(row_values, shape):
    return lax.broadcast_in_dim(row_values, shape, [0])


def any_below_one(values):
    """int32 scalar, not 0 where some value held by this warp (not warpgroup) is below 1."""
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import arith, nvvm, vector

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA.reduce(1),),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT),
    )
    def vote(_, array):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        one = arith.constant(f32, ir.FloatAttr.get(f32, 1.0))
        found = None
        for register in array.registers.flat:
            value = register
            if isinstance(value.type, ir.VectorType):
                value = vector.extract(register, dynamic_position=[], static_position=[0])
            below = arith.cmpf(arith.CmpFPredicate.OLT, value, one)
            found = below if found is None else arith.ori(found, below)
        everyone = arith.constant(i32, ir.IntegerAttr.get(i32, -1))
        any_lane = nvvm.vote_sync(everyone, found, "any")
        return mgpu.FragmentedArray.splat(arith.extui(i32, any_lane), (), is_signed=True)

    return vote(values)


class Products:
    """The tensor core products.

    The interpreter lacks operands and accumulators in registers and gets plain dots.
    """

    def __init__(self, interpreted):
        self.interpreted = interpreted

    def logits(self, q_ref, k_ref):
        if self.interpreted:
            return self._plain(q_ref[...], k_ref[...].T)

        def body(ref):
            plgpu.wgmma(ref, q_ref, k_ref.transpose((1, 0)))
            return lax.optimization_barrier(plgpu.wgmma_accumulator_load(ref))

        return pl.run_scoped(body, plgpu.ACC((q_ref.shape[0], k_ref.shape[0])))

    def add(self, acc, weights, v_ref):
        """Give acc + weights @ v."""
        if self.interpreted:
            return acc + self._plain(weights, v_ref[...])

        def body(ref):
            ref[...] = acc
            plgpu.wgmma(ref, weights, v_ref)
            return lax.optimization_barrier(plgpu.wgmma_accumulator_load(ref))

        return pl.run_scoped(body, plgpu.ACC(acc.shape))

    def both(self, q_ref, k_ref, acc, weights, v_ref, softmax, fence):
        """(acc + weights @ v, softmax(q @ k^T)): the softmax runs while the product with v is in flight.

        `fence` must branch (a barrier wait does): without it ptxas moves the wait for the product up into the softmax.
        The new weights must stay float32 until then: ptxas serialises the products when 16-bit registers that one
        in flight reads are written.
        """
        if self.interpreted:
            logits = self._plain(q_ref[...], k_ref[...].T)
            acc = acc + self._plain(weights, v_ref[...])
            out = softmax(logits)
            fence()
            return acc, out

        def body(logits_ref, acc_ref):
            acc_ref[...] = acc
            plgpu.wgmma(logits_ref, q_ref, k_ref.transpose((1, 0)))
            plgpu.wgmma(acc_ref, weights, v_ref)
            out = softmax(lax.optimization_barrier(plgpu.wgmma_accumulator_load(logits_ref, wait_n=1)))
            out = lax.optimization_barrier(out)
            fence()
            return lax.optimization_barrier((plgpu.wgmma_accumulator_load(acc_ref), out))

        return pl.run_scoped(body, plgpu.ACC((q_ref.shape[0], k_ref.shape[0])), plgpu.ACC(acc.shape))

    def rescaled(self, acc, factor, sometimes):
        """Give acc * factor by row; `sometimes`: the factor is mostly 1, which a warp can tell at once."""
        if not sometimes or self.interpreted:
            return acc * across(factor, acc.shape)
        return lax.cond(any_below_one(factor) != 0, lambda: acc * across(factor, acc.shape), lambda: acc)

    def _plain(self, a, b):
        plgpu.commit_smem()
        return jnp.dot(a, b, preferred_element_type=jnp.float32)


class Softmax:
    """Online softmax over blocks of logits of one warpgroup; base 2, scale folded in."""

    def __init__(self, problem, config, dtype):
        self.problem, self.config, self.dtype = problem, config, dtype
        self.factor = (problem.softcap or problem.scale) * LOG2_E

    def capped(self, logits):
        """The logits, or tanh of them by the cap; what is missing of the scale is `factor`.

        By exp2 and the root, two instructions: the hardware's own tanh is right to 2^-11, and its division is slow.
        """
        if self.problem.softcap is None:
            return logits
        root = lax.rsqrt(1.0 + jnp.exp2(logits * (2 * LOG2_E * self.problem.scale / self.problem.softcap)))
        return 1.0 - 2.0 * root * root

    def mask(self, logits, row, key):
        """Minus infinity where the mask forbids; row and key are those of the corner."""
        problem, shape = self.problem, logits.shape
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        if problem.masked:  # the column that each row stands at
            own = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=plgpu.Layout.WGMMA.reduce(1))
            own = own + (row + problem.q_offset - key)
        if problem.causal:
            last = jnp.minimum(own, problem.tk - key - 1) if problem.tk % self.config.block_k else own
            logits = jnp.where(column <= across(last, shape), logits, -jnp.inf)
        elif problem.tk % self.config.block_k:
            logits = jnp.where(column < problem.tk - key, logits, -jnp.inf)
        if problem.window is not None:
            logits = jnp.where(column > across(own - problem.window, shape), logits, -jnp.inf)
        return logits

    def step(self, logits, state, masked):
        """((maximum, total), weights in float32, factor for what was summed before)."""
        maximum, total = state
        new = jnp.maximum(maximum, logits.max(axis=1) * self.factor)
        if self.config.tolerance:
            new = jnp.where(new > maximum + self.config.tolerance, new, maximum)
        shift = jnp.where(new == -jnp.inf, 0.0, new) if masked else new
        rescale = jnp.exp2(maximum - shift)
        weights = jnp.exp2(logits * self.factor - across(shift, logits.shape))
        return (new, total * rescale + weights.sum(axis=1)), weights, rescale

    def start(self):
        row = plgpu.Layout.WGMMA.reduce(1)
        return constant((ROWS,), -jnp.inf, row), constant((ROWS,), 0.0, row)


class Refs(NamedTuple):
    """Arguments and scratch of the kernel, in order."""

    work: Any
    q: Any
    k: Any
    v: Any
    o: Any
    lse: Any  # or None, as lse_smem
    q_smem: Any
    k_smem: Any
    v_smem: Any
    o_smem: Any
    lse_smem: Any
    q_ready: Any  # one a warpgroup, as is q_free
    q_free: Any
    k_ready: Any  # one a stage, as are those below
    v_ready: Any
    k_free: Any
    v_free: Any


class Walk(NamedTuple):
    """Where one warpgroup is: `count` blocks streamed before this tile, whose blocks run down from `end`."""

    count: Any
    end: Any
    row: Any  # first query row of the warpgroup


class Kernel:
    """The kernel's body for one problem and configuration."""

    lag = 1  # v is used so many blocks after k, and loaded in that order

    def __init__(self, problem, config, dtype, interpreted, with_lse):
        self.problem, self.config, self.dtype, self.with_lse = problem, config, dtype, with_lse
        self.rows = config.compute * ROWS
        self.q_blocks = -(-problem.tq // self.rows)
        self.products, self.softmax = Products(interpreted), Softmax(problem, config, dtype)
        self.needs_mask = problem.needs_mask(config.block_k)
        self.empty_warpgroups = -problem.tq % self.rows >= ROWS  # some lie outside the queries: any rows, no store

    def body(self, *refs):
        refs, warpgroup = (
            Refs(*refs) if self.with_lse else Refs(*refs[:5], None, *refs[5:]),
            lax.axis_index("warpgroup"),
        )
        pl.when(warpgroup < self.config.compute)(lambda: self.compute(refs, warpgroup))
        pl.when(warpgroup == self.config.compute)(lambda: self.load(refs))

    def for_tiles(self, refs, visit):
        """visit((batch, head, q block), blocks streamed so far) -> blocks streamed, over this block's list."""
        cta = lax.axis_index("cta")

        def step(i, count):
            item = refs.work[cta, i + 1]
            head, heads = lax.div(item, jnp.int32(self.q_blocks)), jnp.int32(self.problem.heads)
            return visit((lax.div(head, heads), lax.rem(head, heads), lax.rem(item, jnp.int32(self.q_blocks))), count)

        if self.config.dealing == "single":
            return step(0, jnp.int32(0))
        return lax.fori_loop(0, refs.work[cta, 0], step, jnp.int32(0))

    def row(self, q_block, warpgroup=0):
        return q_block * self.rows - self.problem.shift(self.rows) + warpgroup * ROWS

    def inside(self, row):
        return (row >= 0) & (row < self.problem.tq)

    def slot(self, count):
        return lax.rem(count, jnp.int32(self.config.stages))

    # The loader.

    def load(self, refs):
        if self.config.registers is not None:
            plgpu.set_max_registers(self.config.loader_registers, action="decrease")
        self.for_tiles(refs, functools.partial(self.load_tile, refs))
        for w in range(self.config.compute):
            plgpu.barrier_wait(refs.q_free.at[w])
        for s in range(self.config.stages):
            plgpu.barrier_wait(refs.k_free.at[s])
            plgpu.barrier_wait(refs.v_free.at[s])

    def load_tile(self, refs, place, count):
        batch, head, q_block = place
        block_k = self.config.block_k
        first, _, _, end = self.problem.blocks(self.row(q_block), self.rows, block_k)
        kv_head = lax.div(head, jnp.int32(self.problem.heads // self.problem.kv_heads))

        def fetch(gmem, smem, ready, free, t):
            s = self.slot(count + t)
            plgpu.barrier_wait(free.at[s])
            plgpu.copy_gmem_to_smem(
                gmem.at[batch, pl.ds((end - 1 - t) * block_k, block_k), kv_head], smem.at[s], ready.at[s]
            )

        fetch_k = functools.partial(fetch, refs.k, refs.k_smem, refs.k_ready, refs.k_free)
        fetch_v = functools.partial(fetch, refs.v, refs.v_smem, refs.v_ready, refs.v_free)

        def stream(t, _):
            fetch_k(t)
            fetch_v(t - self.lag)

        fetch_k(jnp.int32(0))
        for w in range(self.config.compute):
            self.load_q(refs, batch, head, self.row(q_block, w), w)
        if not self.lag:
            fetch_v(jnp.int32(0))
        lax.fori_loop(1, end - first, stream, None)
        if self.lag:
            fetch_v(end - first - 1)
        return count + end - first

    def load_q(self, refs, batch, head, row, w):
        if self.empty_warpgroups:
            row = jnp.where(self.inside(row), row, 0)
        plgpu.barrier_wait(refs.q_free.at[w])
        plgpu.copy_gmem_to_smem(refs.q.at[batch, pl.ds(row, ROWS), head], refs.q_smem.at[w], refs.q_ready.at[w])

    # The compute warpgroups.

    def compute(self, refs, warpgroup):
        if self.config.registers is not None:
            plgpu.set_max_registers(self.config.registers, action="increase")
        plgpu.barrier_arrive(refs.q_free.at[warpgroup])
        for s in range(self.config.stages):
            plgpu.barrier_arrive(refs.k_free.at[s])
            plgpu.barrier_arrive(refs.v_free.at[s])
        self.for_tiles(refs, functools.partial(self.compute_tile, refs, warpgroup))
        plgpu.wait_smem_to_gmem(0)

    def compute_tile(self, refs, warpgroup, place, count):
        batch, head, q_block = place
        problem, block_k = self.problem, self.config.block_k
        first, _, _, end = problem.blocks(self.row(q_block), self.rows, block_k)
        row = self.row(q_block, warpgroup)
        mine = problem.blocks(row, ROWS, block_k) if problem.masked else problem.blocks(0, self.rows, block_k)
        start, full_from, full_to, stop = end - mine[3], end - mine[2], end - mine[1], end - mine[0]
        walk = Walk(count, end, row)
        if problem.causal:
            lax.fori_loop(0, start, functools.partial(self.skip, refs, walk), None)
        plgpu.barrier_wait(refs.q_ready.at[warpgroup])
        carry = self.first_step(refs, warpgroup, walk, start)
        step = functools.partial(self.step, refs, warpgroup, walk)
        full_from = jnp.maximum(full_from, start + 1)
        if problem.masked:
            carry = lax.fori_loop(start + 1, full_from, functools.partial(step, masked=True), carry)
        carry = lax.fori_loop(full_from, full_to, functools.partial(step, masked=False), carry)
        if problem.window is not None:
            full_to = jnp.maximum(full_to, full_from)
            carry = lax.fori_loop(full_to, stop, functools.partial(step, masked=True), carry)
        if self.config.own_output:
            plgpu.barrier_arrive(refs.q_free.at[warpgroup])
        self.last_step(refs, warpgroup, walk, stop - 1, carry, (batch, head))
        if problem.window is not None:
            lax.fori_loop(stop, end - first, functools.partial(self.skip, refs, walk), None)
        return count + end - first

    def skip(self, refs, walk, t, _):
        """Lets a block go that only other warpgroups need."""
        s = self.slot(walk.count + t)
        plgpu.barrier_wait(refs.k_ready.at[s])
        plgpu.barrier_arrive(refs.k_free.at[s])
        plgpu.barrier_wait(refs.v_ready.at[s])
        plgpu.barrier_arrive(refs.v_free.at[s])

    def weigh(self, logits, state, walk, t, masked):
        logits = self.softmax.capped(logits)
        if masked:
            logits = self.softmax.mask(logits, walk.row, (walk.end - 1 - t) * self.config.block_k)
        return self.softmax.step(logits, state, masked)

    def first_step(self, refs, warpgroup, walk, t):
        """(output, softmax state, weights) after the logits of the first block."""
        s = self.slot(walk.count + t)
        plgpu.barrier_wait(refs.k_ready.at[s])
        logits = self.products.logits(refs.q_smem.at[warpgroup], refs.k_smem.at[s])
        plgpu.barrier_arrive(refs.k_free.at[s])
        state, weights, _ = self.weigh(logits, self.softmax.start(), walk, t, self.needs_mask)
        plgpu.barrier_wait(refs.v_ready.at[s])
        return constant((ROWS, self.problem.d), 0.0, plgpu.Layout.WGMMA), state, weights.astype(self.dtype)

    def step(self, refs, warpgroup, walk, t, carry, *, masked):
        """Block t's logits and softmax, and under them block t - 1's product with v."""
        acc, state, weights = carry
        s, before = self.slot(walk.count + t), self.slot(walk.count + t - 1)
        plgpu.barrier_wait(refs.k_ready.at[s])

        def under_product(logits):
            plgpu.barrier_arrive(refs.k_free.at[s])
            return self.weigh(logits, state, walk, t, masked)

        acc, (state, weights, rescale) = self.products.both(
            refs.q_smem.at[warpgroup],
            refs.k_smem.at[s],
            acc,
            weights,
            refs.v_smem.at[before],
            under_product,
            lambda: plgpu.barrier_wait(refs.v_ready.at[s]),
        )
        plgpu.barrier_arrive(refs.v_free.at[before])
        acc = self.products.rescaled(acc, rescale, self.config.tolerance > 0)
        return acc, state, weights.astype(self.dtype)

    def last_step(self, refs, warpgroup, walk, t, carry, place):
        """The last product with v, and the output's way out."""
        (acc, (maximum, total), weights), s = carry, self.slot(walk.count + t)
        acc = self.products.add(acc, weights, refs.v_smem.at[s])
        plgpu.barrier_arrive(refs.v_free.at[s])
        inverse = 1.0 / (jnp.where(total == 0.0, 1.0, total) if self.needs_mask else total)
        out = refs.o_smem if self.config.own_output else refs.q_smem
        if self.config.own_output:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        out[warpgroup] = (acc * across(inverse, acc.shape)).astype(self.dtype)
        if self.with_lse:
            refs.lse_smem[warpgroup] = maximum * math.log(2) + jnp.log(total)
        plgpu.commit_smem()

        def store():
            (batch, head), rows = place, pl.ds(walk.row, ROWS)
            if self.with_lse:
                plgpu.copy_smem_to_gmem(refs.lse_smem.at[warpgroup], refs.lse.at[batch, head, rows])
            plgpu.copy_smem_to_gmem(out.at[warpgroup], refs.o.at[batch, rows, head])

        pl.when(self.inside(walk.row))(store) if self.empty_warpgroups else store()
        if not self.config.own_output:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.barrier_arrive(refs.q_free.at[warpgroup])


def padded(x, least):
    """Give x [B, T, H, D] with T a multiple of 8, as swizzled TMA wants it, and no shorter than one copy."""
    extra = max(-x.shape[1] % 8, least - x.shape[1])
    return jnp.pad(x, ((0, 0), (0, extra), (0, 0), (0, 0))) if extra else x


def default_config(d):
    """The fastest seen on the H200 for a head dimension."""
    if d <= 64:
        return Config(compute=3, registers=160, loader_registers=32)
    return Config() if d <= 128 else Config(block_k=64, own_output=False)


def attention(
    q,
    k,
    v,
    *,
    scale=None,
    causal=False,
    window=None,
    q_offset=0,
    softcap=None,
    with_lse=False,
    config=None,
    interpret=None,
    multiprocessor_count=None,
    name="attention_forward",
):
    """softmax(scale * q k^T, masked) v; row i of q sees key j when i + q_offset - window < j <= i + q_offset.

    `with_lse` gives (output, log of the sum of the exponentials, float32 [B, H, Tq]; -inf for rows without keys).
    """
    (batch, tq, heads, d), (_, tk, kv_heads, _), dtype = q.shape, k.shape, q.dtype
    scale = 1 / math.sqrt(d) if scale is None else scale
    problem = Problem(batch, tq, tk, heads, kv_heads, d, scale, causal, window, q_offset, softcap)
    config = config or default_config(d)
    if config.shared_bytes(d) > SHARED_BYTES:
        raise ValueError(f"{config.shared_bytes(d)} bytes of shared memory: more than {SHARED_BYTES}")
    work = schedule(problem, config, multiprocessor_count or multiprocessors())
    q, k, v = padded(q, ROWS), padded(k, config.block_k), padded(v, config.block_k)
    kernel = Kernel(problem, config, dtype, interpret is not None, with_lse)

    def body(*refs):
        kernel.body(*refs)

    body.__name__ = name  # the name of the kernel in profiles
    tiles = functools.partial(
        plgpu.SMEM,
        dtype=dtype,
        transforms=(plgpu.TilingTransform((8, config.swizzle // 2)), plgpu.SwizzleTransform(config.swizzle)),
    )
    q_tiles = tiles((config.compute, ROWS, d))
    kv_tiles = tiles((config.stages, config.block_k, d))
    ready = plgpu.Barrier(num_barriers=config.stages)
    free = plgpu.Barrier(num_arrivals=config.compute, num_barriers=config.stages)
    lse_type = jax.ShapeDtypeStruct((batch, heads, -(-q.shape[1] // ROWS) * ROWS), jnp.float32)  # TMA may not clip it
    out, *lse = plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct(q.shape, dtype)] + [lse_type] * with_lse,
        scratch_types=[
            q_tiles,
            kv_tiles,
            kv_tiles,
            q_tiles if config.own_output else None,
            plgpu.SMEM((config.compute, ROWS), jnp.float32) if with_lse else None,
            plgpu.Barrier(num_barriers=config.compute),
            plgpu.Barrier(num_barriers=config.compute),
            ready,
            ready,
            free,
            free,
        ],
        grid=(len(work),),
        grid_names=("cta",),
        num_threads=config.compute + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=False),
        **({} if interpret is None else {"interpret": interpret}),
    )(jnp.asarray(work), q, k, v)
    return (out[:, :tq], lse[0][:, :, :tq]) if with_lse else out[:, :tq]
