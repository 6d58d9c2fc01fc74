"""The plain forward of a grouped product that kernel.py is compared with; Pallas Mosaic GPU for Hopper.

lhs [M, K], rhs [G, K, N], group_sizes [G] int32 -> [M, N]; bf16, float32 accumulators; rows past the sum are zero.
Assumes M % 8 == 0, M >= 128, K % block_k == 0, N % block_n == 0, block_n 128 or 256.

One block an SM takes tiles of 128 rows in turn from a list made by XLA from the cumulative sizes: (group, first row,
begin, end). The first row is floored to a multiple of 8, as tiled TMA wants; the tile owns rows begin to end. Two
compute warpgroups take 64 rows each, and one that owns none of its rows only passes the buffers on. One loader streams
lhs and rhs through `stages` buffers and runs on into the next tile while this one is stored. Unused rows are tiles of a
group G without steps: a zero accumulator, stored. A half tile owned whole leaves by swizzled TMA; a ragged one is
written plain into the same shared memory and leaves as a ladder of 32, 16, .. 1 rows.

It has no clusters, no path for few rows, no gradients, and no balance: a tile with an empty half takes a whole turn.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

TILE, HALF, CHUNK = 128, 64, 64  # rows of a tile, rows of a warpgroup, columns stored at a time
SWIZZLED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


def work_list(group_sizes, rows):
    """The tiles as rows of (group, first row, begin, end), and how many they are; the unused tail is a last group."""
    sizes = group_sizes.astype(jnp.int32)
    sizes = jnp.append(sizes, rows - sizes.sum(dtype=jnp.int32))
    ends = jnp.cumsum(sizes, dtype=jnp.int32)
    starts = ends - sizes
    floors = starts // 8 * 8
    tiles = jnp.where(sizes > 0, (ends - floors + TILE - 1) // TILE, 0)
    tile_ends = jnp.cumsum(tiles, dtype=jnp.int32)
    tile = jnp.arange((rows + (TILE + 6) * sizes.size) // TILE, dtype=jnp.int32)
    group = (tile_ends[None] <= tile[:, None]).sum(1, dtype=jnp.int32).clip(0, sizes.size - 1)
    first = floors[group] + TILE * (tile - (tile_ends - tiles)[group])
    begin, end = jnp.maximum(first, starts[group]), jnp.minimum(first + TILE, ends[group])
    return jnp.stack([group, first, begin, end], axis=1), tile_ends[-1:]


def ragged_dot(
    lhs,
    rhs,
    group_sizes,
    *,
    name="prototype",
    block_n=256,
    block_k=64,
    stages=4,
    tile_width=8,
    along="n",
    sms=None,
    interpret=None,
):
    """Tiles are walked in bands of `tile_width` along n or m, down the other dimension; `sms` None: the device's."""
    (m, k), (groups, _, n), dtype = lhs.shape, rhs.shape, lhs.dtype
    sms = sms or getattr(jax.devices()[0], "core_count", None) or 132
    n_tiles = n // block_n

    def kernel(work_gmem, count_gmem, lhs_gmem, rhs_gmem, out_gmem, lhs_smem, rhs_smem, out_smem, ready, free):
        warpgroup = lax.axis_index("warpgroup")
        count = count_gmem[0]

        def for_each_tile(body):
            """Calls body(n_tile, group, first, begin, end, steps, step) and carries step: buffers used so far."""

            @plgpu.nd_loop((count * n_tiles,), collective_axes="sm", init_carry=jnp.int32(0))
            def total(loop, carry):
                m_tile, n_tile = plgpu.planar_snake(loop.index[0], (count, n_tiles), "mn".index(along), tile_width)
                group, first, begin, end = (work_gmem[m_tile, i] for i in range(4))
                steps = jnp.where(group < groups, jnp.int32(k // block_k), jnp.int32(0))
                return body(n_tile, group, pl.multiple_of(first, 8), begin, end, steps, carry)

            return total

        def slot_of(step):
            return lax.rem(step, jnp.int32(stages))

        def release(step):
            plgpu.barrier_arrive(free.at[slot_of(step)])

        def compute(half):
            plgpu.set_max_registers(232, action="increase")
            swizzled, plain = zip(*out_smem[half], strict=True)  # two views of each of two buffers

            def tile(n_tile, group, first, begin, end, steps, step):
                row = first + half * HALF
                low, high = (jnp.clip(x - row, 0, HALF) for x in (begin, end))
                mine = jnp.where(low < high, steps, 0)

                def product(acc):
                    def multiply(i, _):
                        slot = slot_of(step + i)
                        plgpu.barrier_wait(ready.at[slot])
                        plgpu.wgmma(acc, lhs_smem.at[slot, half * HALF : (half + 1) * HALF], rhs_smem.at[slot])
                        plgpu.wgmma_wait(1)  # leaves this product running: the one before is done with its buffers
                        pl.when(i > 0)(lambda: release(step + i - 1))

                    lax.fori_loop(0, mine, multiply, None)
                    return acc[...].astype(dtype)

                out = pl.run_scoped(product, plgpu.ACC((HALF, block_n)))
                pl.when(mine > 0)(lambda: release(step + mine - 1))

                def pass_on(i, _):
                    plgpu.barrier_wait(ready.at[slot_of(step + i)])
                    release(step + i)

                lax.fori_loop(mine, steps, pass_on, None)

                def store(staging, send):
                    for i in range(block_n // CHUNK):
                        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the chunk before last has left this slot
                        staging[i % 2][...] = out[:, i * CHUNK : (i + 1) * CHUNK]
                        plgpu.commit_smem()
                        send(staging[i % 2], out_gmem.at[:, pl.ds(n_tile * block_n + i * CHUNK, CHUNK)])
                        plgpu.commit_smem_to_gmem_group()

                def send_whole(smem, gmem):
                    plgpu.copy_smem_to_gmem(smem, gmem.at[pl.ds(pl.multiple_of(row, 8), HALF)], commit_group=False)

                def send_ladder(smem, gmem):
                    for size in (32, 16, 8, 4, 2, 1):
                        at = low + (high - low) // (2 * size) * (2 * size)  # past the larger pieces
                        copy = functools.partial(
                            plgpu.copy_smem_to_gmem,
                            smem.at[pl.ds(at, size)],
                            gmem.at[pl.ds(row + at, size)],
                            commit_group=False,
                        )
                        pl.when((high - low) & size != 0)(copy)

                pl.when(high - low == HALF)(lambda: store(swizzled, send_whole))
                pl.when((low < high) & (high - low < HALF))(lambda: store(plain, send_ladder))
                return step + steps

            for_each_tile(tile)
            plgpu.wait_smem_to_gmem(0)

        for half in range(2):
            pl.when(warpgroup == half)(functools.partial(compute, half))

        @pl.when(warpgroup == 2)
        def load():
            plgpu.set_max_registers(40, action="decrease")

            def wait_free(step):
                plgpu.barrier_wait(free.at[slot_of(step)])

            def tile(n_tile, group, first, begin, end, steps, step):
                def stream(i, _):
                    slot = slot_of(step + i)
                    depth, columns = pl.ds(i * block_k, block_k), pl.ds(n_tile * block_n, block_n)
                    pl.when(step + i >= stages)(lambda: wait_free(step + i))
                    plgpu.copy_gmem_to_smem(lhs_gmem.at[pl.ds(first, TILE), depth], lhs_smem.at[slot], ready.at[slot])
                    plgpu.copy_gmem_to_smem(rhs_gmem.at[group, depth, columns], rhs_smem.at[slot], ready.at[slot])

                lax.fori_loop(0, steps, stream, None)
                return step + steps

            total = for_each_tile(tile)
            lax.fori_loop(jnp.maximum(total - stages, 0), total, lambda step, _: wait_free(step), None)

    kernel.__name__ = name
    tiles = functools.partial(plgpu.SMEM, dtype=dtype, transforms=SWIZZLED)
    # Two copies make a slot ready, two warpgroups free it.
    barriers = plgpu.Barrier(num_arrivals=2, num_barriers=stages)
    staging = plgpu.RefUnion(tiles((HALF, CHUNK)), plgpu.SMEM((HALF, CHUNK), dtype))
    return plgpu.kernel(
        kernel,
        out_type=jax.ShapeDtypeStruct((m, n), dtype),
        scratch_types=[
            tiles((stages, TILE, block_k)),
            tiles((stages, block_k, block_n)),
            [[staging] * 2] * 2,
            barriers,
            barriers,
        ],
        grid=(sms,),
        grid_names=("sm",),
        num_threads=3,
        thread_name="warpgroup",
        **({} if interpret is None else {"interpret": interpret}),
    )(*work_list(group_sizes, m), lhs, rhs)
