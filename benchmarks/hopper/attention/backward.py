"""Flash attention backward for Hopper in Pallas Mosaic GPU: gradients of q [B, Tq, H, D], k and v [B, Tk, Hk, D].

`KeyKernel` keeps a block of 128 keys in shared memory, 64 a warpgroup, and streams the blocks of q and dO of all query
heads that share it: S^T = K Q^T and dP^T = V dO^T, so that the weights and their gradients are left operands in
registers for dV and dK. For dQ the gradients of the logits pass through shared memory, where each of the two
warpgroups makes half of a block's dQ one step later, and are added to a float32 array in global memory by TMA: one
pass, five products, sums of dQ in no fixed order.

`QueryKernel` is the deterministic way to dQ: a pass of its own, like the forward, with three products. D 256 always
takes it, with `WideKeyKernel` for dK and dV.

docs/kernels/attention.md says how fast. `attention_gradients` is the entry.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from kernel import (
    LOG2_E,
    ROWS,
    SHARED_BYTES,
    Config,
    Kernel,
    Problem,
    Products,
    across,
    constant,
    least_loaded,
    multiprocessors,
    padded,
    schedule,
    table,
    tile_order,
)

WARPGROUPS = 2  # that compute
LONGEST = 128  # rows of a copy
COLUMN = plgpu.Layout.WGMMA.reduce(0)  # of values by column of a tile


@dataclasses.dataclass(frozen=True)
class KeyConfig:
    """Hyperparameters of the pass over keys; none of them changes the result beyond rounding."""

    block_q: int = 64
    stages: int = 2
    with_dq: bool = True  # in one pass, dQ summed in no fixed order
    registers: int = 240
    loader_registers: int = 24
    section_bytes: int = 24 * 2**20  # of q and dO walked together, to stay in the L2
    tail: float = 0.5  # tiles shorter than this part of the longest come last
    auto_barriers: bool = True  # False: none around accesses to shared memory but those written here
    early: bool = True  # dV's product is issued before dS^T is made, and dQ's sums leave under the products
    wide: bool = False  # the warpgroups share out the products of 64 keys, not 128 keys

    @property
    def keys(self):
        return ROWS if self.wide else WARPGROUPS * ROWS

    @property
    def passes(self):
        """Whether something goes from one warpgroup to the other through shared memory."""
        return self.with_dq or self.wide

    def shared_bytes(self, d):
        rows = 2 * self.keys + 2 * self.stages * self.block_q
        dq = self.with_dq * self.block_q * d * 4 + self.passes * 2 * self.keys * self.block_q * 2
        return rows * d * 2 + 2 * self.stages * self.block_q * 4 + dq + 1024


def query_blocks(problem, key, config, ops=jnp):
    """(first, first_full, end_full, end): query blocks that see some of a tile's keys; the full ones need no mask."""
    block_q, keys = config.block_q, config.keys
    key = key - problem.q_offset
    total = -(-problem.tq // block_q)
    first, first_full, end_full, end = 0, 0, total, total
    if problem.causal:
        first = ops.clip(key // block_q, 0, total - 1)
        first_full = (key + keys + block_q - 2) // block_q
    if problem.window is not None:
        end = ops.clip((key + keys + problem.window + block_q - 2) // block_q, first + 1, total)
        end_full = (key + problem.window) // block_q
    ragged = key + problem.q_offset + keys > problem.tk
    first_full = ops.where(ragged, end, ops.clip(first_full, first, end))
    return first, first_full, ops.clip(end_full, first_full, end), end


def key_schedule(problem, config, multiprocessor_count):
    """Work lists as of the forward; a tile is a block of keys of a key head."""
    count, group = -(-problem.tk // config.keys), problem.heads // problem.kv_heads
    first, _, _, end = (
        np.broadcast_to(x, (count,)) for x in query_blocks(problem, np.arange(count) * config.keys, config, np)
    )
    cost = (end - first) * config.block_q * group + 128
    section = max(1, int(config.section_bytes // (problem.tq * problem.d * 4 * group)))
    order = tile_order(problem.batch * problem.kv_heads, section, config.tail, cost)
    return table(least_loaded(order, cost, min(multiprocessor_count, len(order))), count)


class KeyRefs(NamedTuple):
    """Arguments and scratch of the pass over keys, in order; those of dQ are None when it is not made here."""

    work: Any
    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any
    delta: Any
    dk: Any
    dv: Any
    q_smem: Any
    do_smem: Any
    lse_smem: Any
    delta_smem: Any
    k_smem: Any
    v_smem: Any
    passed: Any  # two slots: dS^T, or P^T when wide
    dq_smem: Any
    q_ready: Any  # one a stage, with lse
    do_ready: Any  # one a stage, with delta
    q_free: Any
    do_free: Any
    kv_ready: Any
    kv_free: Any
    passed_ready: Any  # one a slot
    passed_free: Any


class Place(NamedTuple):
    """A step's query block: `count` blocks came before it."""

    count: Any
    head: Any
    block: Any


class KeyKernel:
    """dK and dV of the tiles of a list, and the sums of dQ."""

    def __init__(self, problem, config, dtype, interpreted, dq=None):
        self.problem, self.config, self.dtype, self.interpreted, self.dq = problem, config, dtype, interpreted, dq
        self.unit = Products(interpreted)
        self.group = problem.heads // problem.kv_heads
        self.keys, self.key_blocks = config.keys, -(-problem.tk // config.keys)
        self.masked = problem.needs_mask(config.keys)

    def body(self, *refs):
        refs, warpgroup = KeyRefs(*refs), lax.axis_index("warpgroup")
        pl.when(warpgroup < WARPGROUPS)(lambda: self.compute(refs, warpgroup))
        pl.when(warpgroup == WARPGROUPS)(lambda: self.load(refs))

    def for_tiles(self, refs, visit):
        """visit((batch, key head, key block), blocks streamed so far) -> blocks streamed, over this block's list."""
        cta = lax.axis_index("cta")

        def step(i, count):
            item, heads = refs.work[cta, i + 1], jnp.int32(self.problem.kv_heads)
            head, block = lax.div(item, jnp.int32(self.key_blocks)), lax.rem(item, jnp.int32(self.key_blocks))
            return visit((lax.div(head, heads), lax.rem(head, heads), block), count)

        return lax.fori_loop(0, refs.work[cta, 0], step, jnp.int32(0))

    def slot(self, count):
        return lax.rem(count, jnp.int32(self.config.stages))

    # The loader.

    def load(self, refs):
        plgpu.set_max_registers(self.config.loader_registers, action="decrease")
        self.for_tiles(refs, functools.partial(self.load_tile, refs))
        plgpu.barrier_wait(refs.kv_free)
        for s in range(self.config.stages):
            plgpu.barrier_wait(refs.q_free.at[s])
            plgpu.barrier_wait(refs.do_free.at[s])

    def load_tile(self, refs, place, count):
        batch, kv_head, key_block = place
        first, _, _, end = query_blocks(self.problem, key_block * self.keys, self.config)
        plgpu.barrier_wait(refs.kv_free)
        for w in range(self.keys // ROWS):
            key = key_block * self.keys + w * ROWS
            keys = pl.ds(jnp.where(key < self.problem.tk, key, 0), ROWS)
            plgpu.copy_gmem_to_smem(refs.k.at[batch, keys, kv_head], refs.k_smem.at[w], refs.kv_ready)
            plgpu.copy_gmem_to_smem(refs.v.at[batch, keys, kv_head], refs.v_smem.at[w], refs.kv_ready)

        def stream(i, _):
            g, t = lax.div(i, end - first), lax.rem(i, end - first)
            self.load_block(refs, batch, kv_head * self.group + g, first + t, self.slot(count + i))

        blocks = (end - first) * self.group
        lax.fori_loop(0, blocks, stream, None)
        return count + blocks

    def load_block(self, refs, batch, head, block, s):
        rows = pl.ds(block * self.config.block_q, self.config.block_q)
        for free, ready, tile, tile_smem, row, row_smem in (
            (refs.q_free, refs.q_ready, refs.q, refs.q_smem, refs.lse, refs.lse_smem),
            (refs.do_free, refs.do_ready, refs.do, refs.do_smem, refs.delta, refs.delta_smem),
        ):
            plgpu.barrier_wait(free.at[s])
            plgpu.copy_gmem_to_smem(tile.at[batch, rows, head], tile_smem.at[s], ready.at[s])
            plgpu.copy_gmem_to_smem(row.at[batch, head, rows], row_smem.at[s], ready.at[s])

    # The compute warpgroups.

    def compute(self, refs, warpgroup):
        plgpu.set_max_registers(self.config.registers, action="increase")
        plgpu.barrier_arrive(refs.kv_free)
        for s in range(self.config.stages):
            plgpu.barrier_arrive(refs.q_free.at[s])
            plgpu.barrier_arrive(refs.do_free.at[s])
        if self.config.with_dq:
            for s in range(2):
                plgpu.barrier_arrive(refs.passed_free.at[s])
        self.for_tiles(refs, functools.partial(self.compute_tile, refs, warpgroup))
        if self.config.with_dq:
            for s in range(2):
                plgpu.barrier_wait(refs.passed_free.at[s])
        plgpu.wait_smem_to_gmem(0)

    def for_blocks(self, visit, key_block, kv_head, count, carry, skipped=0):
        """Give visit(place, carry, masked) -> carry over a tile's query blocks, but the first `skipped`."""
        first, first_full, end_full, end = query_blocks(self.problem, key_block * self.keys, self.config)
        start = count - first  # blocks streamed before block 0 of the first head, were it streamed

        def step(g, masked, t, carry):
            return visit(Place(start + g * (end - first) + t, kv_head * self.group + g, t), carry, masked)

        def walk(g, carry):
            begin = jnp.where(g == 0, first + skipped, first)
            begin_full = jnp.maximum(first_full, begin)
            if self.masked:
                carry = lax.fori_loop(begin, begin_full, functools.partial(step, g, True), carry)
            carry = lax.fori_loop(begin_full, end_full, functools.partial(step, g, False), carry)
            if self.problem.window is not None:
                begin = jnp.maximum(end_full, begin_full)
                carry = lax.fori_loop(begin, end, functools.partial(step, g, True), carry)
            return carry

        return lax.fori_loop(0, self.group, walk, carry)

    def compute_tile(self, refs, warpgroup, place, count):
        batch, kv_head, key_block = place
        first, _, _, end = query_blocks(self.problem, key_block * self.keys, self.config)
        key = key_block * self.keys + warpgroup * ROWS
        plgpu.barrier_wait(refs.kv_ready)
        zero = constant((ROWS, self.problem.d), 0.0, plgpu.Layout.WGMMA)
        first_place = Place(count, kv_head * self.group, first)
        sums = self.step(refs, warpgroup, batch, key, first_place, None, (zero, zero), masked=self.masked)

        def visit(here, carry, masked):
            *sums, before = carry
            return *self.step(refs, warpgroup, batch, key, here, before, sums, masked=masked), here

        *sums, last = self.for_blocks(visit, key_block, kv_head, count, (*sums, first_place), skipped=1)
        if self.config.with_dq:
            self.store_dq(refs, warpgroup, batch, key, last, self.dq_alone(refs, warpgroup, last))
        self.store_tile(refs, warpgroup, (batch, key, kv_head), sums)
        return count + (end - first) * self.group

    def step(self, refs, warpgroup, batch, key, here, before, sums, *, masked):
        """(dV, dK) with one more query block; dQ of the block before on its way, and this block's logit gradients."""
        s = self.slot(here.count)
        plgpu.barrier_wait(refs.q_ready.at[s])
        plgpu.barrier_wait(refs.do_ready.at[s])
        warpgroup = warpgroup if self.interpreted else renewed(warpgroup)
        row, lse = here.block * self.config.block_q, plgpu.load(refs.lse_smem.at[s], layout=COLUMN)

        def weigh(logits):
            if masked:
                logits = self.mask(logits, key, row)
            return jnp.exp2(logits * (self.problem.scale * LOG2_E) - down(lse, logits.shape))

        def finish(weights, dp):
            """dS^T, 16 bits, also where both warpgroups read it."""
            delta = plgpu.load(refs.delta_smem.at[s], layout=COLUMN)
            gradients = (weights * (dp - down(delta, dp.shape))).astype(self.dtype)
            if self.config.with_dq:
                self.share(refs, warpgroup, here, gradients)
            return gradients

        room = functools.partial(self.wait_for_room, refs, here)
        with_dq = self.config.with_dq and before is not None
        add_dq = functools.partial(self.store_dq, refs, warpgroup, batch, key, before) if with_dq else None
        products = self.plain_products if self.interpreted else self.products
        sums, dq = products(refs, warpgroup, s, sums, weigh, room, finish, before, add_dq)
        plgpu.barrier_arrive(refs.q_free.at[s])
        plgpu.barrier_arrive(refs.do_free.at[s])
        if dq is not None:
            add_dq(dq)
        return sums

    def plain_products(self, refs, warpgroup, s, sums, weigh, room, finish, before, add_dq):
        k, v, q, do = refs.k_smem[warpgroup], refs.v_smem[warpgroup], refs.q_smem[s], refs.do_smem[s]
        weights = weigh(plain(k, q.T))
        room(weights)
        gradients = finish(weights, plain(v, do.T))
        dq = None if add_dq is None else self.dq_alone(refs, warpgroup, before)
        return (sums[0] + plain(weights.astype(self.dtype), do), sums[1] + plain(gradients, q)), dq

    def products(self, refs, warpgroup, s, sums, weigh, room, finish, before, add_dq):
        """((dV, dK) with a block's products, this warpgroup's part of the block before's dQ if not added yet).

        When early, the exponentials run under dP^T's product, the logit gradients under dV's, and `add_dq` under dK's.
        For that `room` must branch, and depend on the weights: otherwise ptxas waits for dP^T first.
        """
        early = self.config.early
        k, v, q, do = refs.k_smem.at[warpgroup], refs.v_smem.at[warpgroup], refs.q_smem.at[s], refs.do_smem.at[s]

        def body(logits_ref, dp_ref, dv_ref, dk_ref, *dq_ref):
            dv_ref[...], dk_ref[...] = sums
            plgpu.wgmma(logits_ref, k, q.transpose((1, 0)))
            plgpu.wgmma(dp_ref, v, do.transpose((1, 0)))
            weights = weigh(lax.optimization_barrier(plgpu.wgmma_accumulator_load(logits_ref, wait_n=1)))
            weights = lax.optimization_barrier(weights)
            room(weights)
            add_dv, dq = functools.partial(plgpu.wgmma, dv_ref, weights.astype(self.dtype), do), None
            if early:
                add_dv()
            dp = lax.optimization_barrier(plgpu.wgmma_accumulator_load(dp_ref, wait_n=int(early)))
            gradients = finish(weights, dp)
            if add_dq is not None:
                self.issue_dq(refs, warpgroup, before, *dq_ref)
            if not early:
                add_dv()
            plgpu.wgmma(dk_ref, gradients, q)
            if add_dq is not None:
                dq = lax.optimization_barrier(plgpu.wgmma_accumulator_load(*dq_ref, wait_n=1 if early else 2))
                self.free_passed(refs, before)
            if dq is not None and early:
                dq = add_dq(dq)
            new_sums = plgpu.wgmma_accumulator_load(dv_ref), plgpu.wgmma_accumulator_load(dk_ref)
            return lax.optimization_barrier(new_sums), dq

        shapes = [(ROWS, self.config.block_q)] * 2 + [x.shape for x in sums] + [(ROWS, ROWS)] * (add_dq is not None)
        return pl.run_scoped(body, *map(plgpu.ACC, shapes))

    def wait_for_room(self, refs, here, weights):
        if self.config.with_dq:
            zero = hold(weights) if self.config.early and not self.interpreted else 0
            plgpu.barrier_wait(refs.passed_free.at[lax.rem(here.count, jnp.int32(2)) + zero])

    def mask(self, logits, key, row):
        """Minus infinity where the mask forbids; key and row are those of the corner."""
        problem, shape = self.problem, logits.shape
        own = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=plgpu.Layout.WGMMA.reduce(1))
        least = own + (key - row - problem.q_offset) if problem.causal else jnp.zeros_like(own)
        if problem.tk % self.keys:
            least = jnp.where(own < problem.tk - key, least, shape[1])
        column = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        logits = jnp.where(column >= across(least, shape), logits, -jnp.inf)
        if problem.window is not None:
            end = own + (key - row - problem.q_offset + problem.window)
            logits = jnp.where(column < across(end, shape), logits, -jnp.inf)
        return logits

    def share(self, refs, warpgroup, here, gradients):
        """Puts dS^T where both warpgroups read it."""
        slot = lax.rem(here.count, jnp.int32(2))
        refs.passed[slot, warpgroup] = gradients
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.passed_ready.at[slot])

    def issue_dq(self, refs, warpgroup, place, dq_ref):
        for left, right in self.dq_operands(refs, warpgroup, place):
            plgpu.wgmma(dq_ref, left.transpose((1, 0)), right)

    def dq_operands(self, refs, warpgroup, place):
        """[(dS^T, K)] by warpgroup that made dS: the columns of K at D 128, those of dS^T (rows of dQ) at D 64."""
        slot = lax.rem(place.count, jnp.int32(2))
        plgpu.barrier_wait(refs.passed_ready.at[slot])
        part = pl.ds(pl.multiple_of(warpgroup * ROWS, ROWS), ROWS)
        if self.config.block_q == ROWS:
            return [(refs.passed.at[slot, j], refs.k_smem.at[j, :, part]) for j in range(WARPGROUPS)]
        return [(refs.passed.at[slot, j, :, part], refs.k_smem.at[j]) for j in range(WARPGROUPS)]

    def dq_alone(self, refs, warpgroup, place):
        if self.interpreted:
            pairs = self.dq_operands(refs, warpgroup, place)
            dq = sum(plain(left[...].T, right[...]) for left, right in pairs)
        else:

            def body(dq_ref):
                self.issue_dq(refs, warpgroup, place, dq_ref)
                return lax.optimization_barrier(plgpu.wgmma_accumulator_load(dq_ref))

            dq = pl.run_scoped(body, plgpu.ACC((ROWS, ROWS)))
        self.free_passed(refs, place)
        return dq

    def free_passed(self, refs, place):
        plgpu.barrier_arrive(refs.passed_free.at[lax.rem(place.count, jnp.int32(2))])

    def store_dq(self, refs, warpgroup, batch, key, place, dq):
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        refs.dq_smem[warpgroup] = dq
        plgpu.commit_smem()
        row, column = place.block * self.config.block_q, warpgroup * ROWS
        if self.config.block_q > ROWS:
            row, column = row + column, 0
        place = batch, pl.ds(row, ROWS), place.head, pl.ds(column, ROWS)
        if self.interpreted:  # it cannot add: each block of keys has its own array
            plgpu.copy_smem_to_gmem(refs.dq_smem.at[warpgroup], self.dq.at[lax.div(key, jnp.int32(self.keys)), *place])
        else:
            plgpu.copy_smem_to_gmem(refs.dq_smem.at[warpgroup], self.dq.at[place], reduction_op="add")

    def store_tile(self, refs, warpgroup, place, sums):
        """dV, then dK, through this warpgroup's part of v, which no other reads."""
        (batch, key, kv_head), (dv, dk) = place, sums
        for out, value in ((refs.dv, dv), (refs.dk, dk * self.problem.scale)):
            self.store(refs.v_smem.at[warpgroup], out.at[batch, pl.ds(key, ROWS), kv_head], value, key)
        plgpu.barrier_arrive(refs.kv_free)

    def store(self, tile, target, value, key):
        tile[...] = value.astype(self.dtype)
        plgpu.commit_smem()
        pl.when(key < self.problem.tk)(lambda: plgpu.copy_smem_to_gmem(tile, target))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)


class WideKeyKernel(KeyKernel):
    """dK and dV at D 256, where both are too many registers for one warpgroup.

    The first warpgroup makes the weights and dV, and passes the weights, 16 bits, to the second, which makes dK.
    """

    def compute(self, refs, warpgroup):
        plgpu.set_max_registers(self.config.registers, action="increase")
        plgpu.barrier_arrive(refs.kv_free)
        for s in range(self.config.stages):
            plgpu.barrier_arrive(refs.q_free.at[s])
            plgpu.barrier_arrive(refs.do_free.at[s])
        pl.when(warpgroup == 0)(lambda: self.compute_dv(refs))
        pl.when(warpgroup == 1)(lambda: self.compute_dk(refs))

    def compute_dv(self, refs):
        self.for_tiles(refs, functools.partial(self.compute_side, refs, self.dv_step, refs.k_smem, refs.dv, 1.0))
        for s in range(2):
            plgpu.barrier_wait(refs.passed_free.at[s])
        plgpu.wait_smem_to_gmem(0)

    def compute_dk(self, refs):
        for s in range(2):
            plgpu.barrier_arrive(refs.passed_free.at[s])
        scale = self.problem.scale
        self.for_tiles(refs, functools.partial(self.compute_side, refs, self.dk_step, refs.v_smem, refs.dk, scale))
        plgpu.wait_smem_to_gmem(0)

    def compute_side(self, refs, step, tile, out, scale, place, count):
        """One gradient of a tile, on its way out through the operand that only this warpgroup reads."""
        batch, kv_head, key_block = place
        first, _, _, end = query_blocks(self.problem, key_block * self.keys, self.config)
        key = key_block * self.keys
        plgpu.barrier_wait(refs.kv_ready)
        total = constant((ROWS, self.problem.d), 0.0, plgpu.Layout.WGMMA)
        total = self.for_blocks(functools.partial(step, refs, key), key_block, kv_head, count, total)
        self.store(tile.at[0], out.at[batch, pl.ds(key, ROWS), kv_head], total * scale, key)
        plgpu.barrier_arrive(refs.kv_free)
        return count + (end - first) * self.group

    def dv_step(self, refs, key, here, dv, masked):
        s, slot = self.slot(here.count), lax.rem(here.count, jnp.int32(2))
        plgpu.barrier_wait(refs.q_ready.at[s])
        lse = plgpu.load(refs.lse_smem.at[s], layout=COLUMN)
        logits = self.unit.logits(refs.k_smem.at[0], refs.q_smem.at[s])
        plgpu.barrier_arrive(refs.q_free.at[s])
        if masked:
            logits = self.mask(logits, key, here.block * self.config.block_q)
        weights = jnp.exp2(logits * (self.problem.scale * LOG2_E) - down(lse, logits.shape)).astype(self.dtype)
        plgpu.barrier_wait(refs.passed_free.at[slot])
        refs.passed[slot, 0] = weights
        plgpu.commit_smem()
        plgpu.barrier_arrive(refs.passed_ready.at[slot])
        plgpu.barrier_wait(refs.do_ready.at[s])
        dv = self.unit.add(dv, weights, refs.do_smem.at[s])
        plgpu.barrier_arrive(refs.do_free.at[s])
        return dv

    def dk_step(self, refs, key, here, dk, masked):
        del key, masked  # the weights are 0 where the mask forbids
        s, slot = self.slot(here.count), lax.rem(here.count, jnp.int32(2))
        plgpu.barrier_wait(refs.do_ready.at[s])
        delta = plgpu.load(refs.delta_smem.at[s], layout=COLUMN)
        dp = self.unit.logits(refs.v_smem.at[0], refs.do_smem.at[s])
        plgpu.barrier_arrive(refs.do_free.at[s])
        plgpu.barrier_wait(refs.passed_ready.at[slot])
        weights = plgpu.load(refs.passed.at[slot, 0], layout=plgpu.Layout.WGMMA)
        plgpu.barrier_arrive(refs.passed_free.at[slot])
        gradients = (weights.astype(jnp.float32) * (dp - down(delta, dp.shape))).astype(self.dtype)
        plgpu.barrier_wait(refs.q_ready.at[s])
        dk = self.unit.add(dk, gradients, refs.q_smem.at[s])
        plgpu.barrier_arrive(refs.q_free.at[s])
        return dk


def renewed(value):
    """The same int32, but no constant of the loop to the compiler.

    Otherwise LLVM computes all descriptors of k and v before the loop, 64 bits for 16 columns, and ptxas spills them.
    """
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import llvm

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WG_SPLAT,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT),
    )
    def copy(_, array):
        [register] = array.registers.flat
        i32 = ir.IntegerType.get_signless(32)
        same = llvm.inline_asm(i32, [register], "mov.b32 $0, $1;", "=r,r", has_side_effects=True)
        return mgpu.FragmentedArray.splat(same, (), is_signed=True)

    return copy(value)


def hold(weights):
    """int32 0 that is known only when all these weights are, which are not negative (nor a negative not-a-number)."""
    from jax._src.lib.mlir import ir
    from jax._src.lib.mlir.dialects import arith, llvm, vector

    @plgpu.inline_mgpu(
        arg_types=(plgpu.Layout.WGMMA,),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, plgpu.Layout.WG_SPLAT),
    )
    def vote(_, array):
        i32 = ir.IntegerType.get_signless(32)
        found = None
        for register in array.registers.flat:
            for i in range(register.type.shape[0]):
                value = vector.extract(register, dynamic_position=[], static_position=[i])
                bits = arith.bitcast(i32, value)
                found = bits if found is None else arith.ori(found, bits)
        negative = "{ .reg .pred a, b; setp.lt.s32 a, $1, 0; vote.sync.any.pred b, a, -1; selp.b32 $0, 1, 0, b; }"
        return mgpu.FragmentedArray.splat(
            llvm.inline_asm(i32, [found], negative, "=r,r", has_side_effects=True), (), is_signed=True
        )

    return vote(weights)


def down(column_values, shape):
    return lax.broadcast_in_dim(column_values, shape, [1])


def plain(a, b):
    """What stands for a product in the interpreter, which lacks operands and accumulators in registers."""
    plgpu.commit_smem()
    return jnp.dot(a, b, preferred_element_type=jnp.float32)


class QueryRefs(NamedTuple):
    """Arguments and scratch of the pass over queries, in order."""

    work: Any
    q: Any
    k: Any
    v: Any
    do: Any
    lse: Any
    delta: Any
    dq: Any
    q_smem: Any
    do_smem: Any
    lse_smem: Any
    delta_smem: Any
    k_smem: Any
    v_smem: Any
    q_ready: Any  # one a warpgroup, as is q_free; also of do, lse and delta
    q_free: Any
    k_ready: Any  # one a stage, as are those below
    v_ready: Any
    k_free: Any
    v_free: Any


class QueryKernel(Kernel):
    """dQ in a fixed order of sums: the forward's walk, loader and masks, with another step."""

    lag = 0

    def body(self, *refs):
        refs, warpgroup = QueryRefs(*refs), lax.axis_index("warpgroup")
        pl.when(warpgroup < self.config.compute)(lambda: self.compute(refs, warpgroup))
        pl.when(warpgroup == self.config.compute)(lambda: self.load(refs))

    def load_q(self, refs, batch, head, row, w):
        if self.empty_warpgroups:
            row = jnp.where(self.inside(row), row, 0)
        plgpu.barrier_wait(refs.q_free.at[w])
        rows, ready = pl.ds(row, ROWS), refs.q_ready.at[w]
        plgpu.copy_gmem_to_smem(refs.q.at[batch, rows, head], refs.q_smem.at[w], ready)
        plgpu.copy_gmem_to_smem(refs.do.at[batch, rows, head], refs.do_smem.at[w], ready)
        plgpu.copy_gmem_to_smem(refs.lse.at[batch, head, rows], refs.lse_smem.at[w], ready)
        plgpu.copy_gmem_to_smem(refs.delta.at[batch, head, rows], refs.delta_smem.at[w], ready)

    def first_step(self, refs, warpgroup, walk, t):
        """(sum of dQ, dS) after the logits of the first block."""
        zero = constant((ROWS, self.problem.d), 0.0, plgpu.Layout.WGMMA)
        return zero, self.gradients(refs, warpgroup, walk, t, self.needs_mask)

    def step(self, refs, warpgroup, walk, t, carry, *, masked):
        """Block t's dS, and under it block t - 1's product with k."""
        dq, gradients = carry
        before = self.slot(walk.count + t - 1)
        dq, gradients = self.gradients(refs, warpgroup, walk, t, masked, (dq, gradients, refs.k_smem.at[before]))
        plgpu.barrier_arrive(refs.k_free.at[before])
        return dq, gradients

    def gradients(self, refs, warpgroup, walk, t, masked, product=None):
        """Block t's dS, 16 bits; with a `product` (sum of dQ, dS, k) of the block before: (that sum, dS)."""
        s, by_row = self.slot(walk.count + t), functools.partial(plgpu.load, layout=plgpu.Layout.WGMMA.reduce(1))
        plgpu.barrier_wait(refs.k_ready.at[s])
        plgpu.barrier_wait(refs.v_ready.at[s])

        def weigh(logits):
            if masked:
                logits = self.softmax.mask(logits, walk.row, (walk.end - 1 - t) * self.config.block_k)
            return jnp.exp2(logits * self.softmax.factor - across(by_row(refs.lse_smem.at[warpgroup]), logits.shape))

        def finish(weights, dp):
            plgpu.barrier_arrive(refs.v_free.at[s])
            return weights * (dp - across(by_row(refs.delta_smem.at[warpgroup]), dp.shape))

        operands = refs.q_smem.at[warpgroup], refs.k_smem.at[s], refs.do_smem.at[warpgroup], refs.v_smem.at[s]
        products = self.plain_products if self.products.interpreted else self.overlapped_products
        dq, gradients = products(operands, weigh, finish, product)
        return gradients.astype(self.dtype) if dq is None else (dq, gradients.astype(self.dtype))

    def plain_products(self, operands, weigh, finish, product):
        q, k, do, v = (x[...] for x in operands)
        dq = None if product is None else product[0] + plain(product[1], product[2][...])
        return dq, finish(weigh(plain(q, k.T)), plain(do, v.T))

    def overlapped_products(self, operands, weigh, finish, product):
        """The new dS stays float32 until the product of the old is through; `Products.both` says why."""
        q, k, do, v = operands
        others = 0 if product is None else 1

        def body(logits_ref, dp_ref, *dq_ref):
            plgpu.wgmma(logits_ref, q, k.transpose((1, 0)))
            plgpu.wgmma(dp_ref, do, v.transpose((1, 0)))
            if others:
                dq_ref[0][...] = product[0]
                plgpu.wgmma(dq_ref[0], product[1], product[2])
            weights = weigh(lax.optimization_barrier(plgpu.wgmma_accumulator_load(logits_ref, wait_n=1 + others)))
            gradients = finish(weights, lax.optimization_barrier(plgpu.wgmma_accumulator_load(dp_ref, wait_n=others)))
            gradients = lax.optimization_barrier(gradients)
            return lax.optimization_barrier(plgpu.wgmma_accumulator_load(dq_ref[0])) if others else None, gradients

        tile = plgpu.ACC((ROWS, self.config.block_k))
        return pl.run_scoped(body, tile, tile, *[plgpu.ACC((ROWS, self.problem.d))] * others)

    def last_step(self, refs, warpgroup, walk, t, carry, place):
        """The last product, and the output's way out, through q's memory."""
        (batch, head), rows, s = place, pl.ds(walk.row, ROWS), self.slot(walk.count + t)
        dq = self.products.add(*carry, refs.k_smem.at[s])
        plgpu.barrier_arrive(refs.k_free.at[s])
        refs.q_smem[warpgroup] = (dq * self.problem.scale).astype(self.dtype)
        plgpu.commit_smem()

        @pl.when(self.inside(walk.row))
        def _():
            plgpu.copy_smem_to_gmem(refs.q_smem.at[warpgroup], refs.dq.at[batch, rows, head])

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        plgpu.barrier_arrive(refs.q_free.at[warpgroup])


def row_values(o, do, lse, dlse, rows):
    """(lse in base 2, sums of dO * O minus lse's gradient), float32 [B, H, rows].

    Rows without keys and those that pad get an infinite lse, so that their weights are 0.
    """
    delta = jnp.einsum("bthd,bthd->bht", do, o, preferred_element_type=jnp.float32)
    if dlse is not None:
        delta = delta - dlse
    extra = (0, 0), (0, 0), (0, rows - lse.shape[2])
    lse = jnp.where(lse == -jnp.inf, jnp.inf, lse * LOG2_E)
    return jnp.pad(lse, extra, constant_values=jnp.inf), jnp.pad(delta, extra)


def tiles(dtype):
    """Shared memory of a shape for tiles that TMA writes and products read."""
    minor = 128 // jnp.dtype(dtype).itemsize
    transforms = plgpu.TilingTransform((8, minor)), plgpu.SwizzleTransform(128)
    return functools.partial(plgpu.SMEM, dtype=dtype, transforms=transforms)


def launch(kernel, name, work, arguments, out_type, scratch_types, compute, interpret, auto_barriers=True):
    def body(*refs):
        kernel.body(*refs)

    body.__name__ = name  # the name of the kernel in profiles
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch_types,
        grid=(len(work),),
        grid_names=("cta",),
        num_threads=compute + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=True, unsafe_no_auto_barriers=not auto_barriers),
        **({} if interpret is None else {"interpret": interpret}),
    )(jnp.asarray(work), *arguments)


def key_pass(problem, config, arguments, out_type, dq, multiprocessor_count, interpret, name):
    """(dK, dV); dQ without its scale is added to the reference `dq` if the configuration says so."""
    d, dtype, bq = problem.d, arguments[0].dtype, config.block_q
    if config.shared_bytes(d) > SHARED_BYTES:
        raise ValueError(f"{config.shared_bytes(d)} bytes of shared memory: more than {SHARED_BYTES}")
    tile, single = tiles(dtype), tiles(jnp.float32)
    streamed, row = tile((config.stages, bq, d)), plgpu.SMEM((config.stages, bq), jnp.float32)
    parts = config.keys // ROWS
    resident = tile((parts, ROWS, d))
    ready = plgpu.Barrier(num_arrivals=2, num_barriers=config.stages)
    free = plgpu.Barrier(num_arrivals=WARPGROUPS, num_barriers=config.stages)
    passed = plgpu.Barrier(num_arrivals=parts, num_barriers=2) if config.passes else None
    scratch = [
        *(streamed, streamed, row, row, resident, resident),
        tile((2, parts, ROWS, bq)) if config.passes else None,
        single((WARPGROUPS, ROWS, ROWS)) if config.with_dq else None,
        *(ready, ready, free, free),
        *(plgpu.Barrier(num_arrivals=2 * parts), plgpu.Barrier(num_arrivals=WARPGROUPS)),
        *(passed, passed),
    ]
    work = key_schedule(problem, config, multiprocessor_count)
    kernel = (WideKeyKernel if config.wide else KeyKernel)(problem, config, dtype, interpret is not None, dq)
    return launch(kernel, name, work, arguments, out_type, scratch, WARPGROUPS, interpret, config.auto_barriers)


def query_pass(problem, config, arguments, out_type, multiprocessor_count, interpret, name):
    """Give dQ."""
    d, dtype = problem.d, arguments[0].dtype
    tile = tiles(dtype)
    resident, row = tile((config.compute, ROWS, d)), plgpu.SMEM((config.compute, ROWS), jnp.float32)
    streamed = tile((config.stages, config.block_k, d))
    ready = plgpu.Barrier(num_barriers=config.stages)
    free = plgpu.Barrier(num_arrivals=config.compute, num_barriers=config.stages)
    scratch = [
        *(resident, resident, row, row, streamed, streamed),
        plgpu.Barrier(num_arrivals=4, num_barriers=config.compute),
        plgpu.Barrier(num_barriers=config.compute),
        *(ready, ready, free, free),
    ]
    work = schedule(problem, config, multiprocessor_count)
    kernel = QueryKernel(problem, config, dtype, interpret is not None, with_lse=False)
    return launch(kernel, name, work, arguments, out_type, scratch, config.compute, interpret)


def default_key_config(d, with_dq=True):
    """The fastest seen on the H200 for a head dimension."""
    return KeyConfig(wide=True, with_dq=False) if d > 128 else KeyConfig(block_q=64 * 128 // d, with_dq=with_dq)


def default_query_config(d):
    """The fastest seen on the H200 for a head dimension."""
    if d > 128:  # one warpgroup computes; then no register is taken from the loader
        return Config(own_output=False, block_k=64, compute=1, registers=None)
    if d > 64:
        return Config(own_output=False, block_k=64, stages=4)
    return Config(own_output=False, block_k=64, stages=3, compute=3, registers=160, loader_registers=32)


def attention_gradients(
    q,
    k,
    v,
    o,
    lse,
    do,
    *,
    dlse=None,
    scale=None,
    causal=False,
    window=None,
    q_offset=0,
    deterministic=False,
    key_config=None,
    query_config=None,
    interpret=None,
    multiprocessor_count=None,
    name="attention_backward",
):
    """(dq, dk, dv) of `kernel.attention`, from its output, its log-sum-exp and their gradients.

    In jax 0.11 one pass works inside jax.jit only.
    """
    (batch, tq, heads, d), (_, tk, kv_heads, _), dtype = q.shape, k.shape, q.dtype
    scale = 1 / math.sqrt(d) if scale is None else scale
    problem = Problem(batch, tq, tk, heads, kv_heads, d, scale, causal, window, q_offset)
    key_config = key_config or default_key_config(d, not deterministic)
    query_config = query_config or default_query_config(d)
    count = multiprocessor_count or multiprocessors()
    rows = row_values(o, do, lse, dlse, -(-tq // LONGEST) * LONGEST)
    q, k, v, do = (padded(x, LONGEST) for x in (q, k, v, do))
    arguments = q, k, v, do, *rows
    key_types = [jax.ShapeDtypeStruct(k.shape, dtype)] * 2
    common = count, interpret
    if key_config.with_dq:
        arrays = -(-tk // key_config.keys) if interpret is not None else None
        sums = jax.new_ref(jnp.zeros(q.shape if arrays is None else (arrays, *q.shape), jnp.float32))
        dk, dv = key_pass(problem, key_config, arguments, key_types, sums, *common, f"{name}_dqkv")
        total = sums[...] if arrays is None else sums[...].sum(axis=0)
        dq = (total * scale).astype(dtype)
    else:
        dk, dv = key_pass(problem, key_config, arguments, key_types, None, *common, f"{name}_dkv")
        dq_type = jax.ShapeDtypeStruct(q.shape, dtype)
        dq = query_pass(problem, query_config, arguments, dq_type, *common, f"{name}_dq")
    return dq[:, :tq], dk[:, :tk], dv[:, :tk]
