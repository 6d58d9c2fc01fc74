"""`flash_attention`: one call, checked, computed by one of the backends next to this file."""

from __future__ import annotations

from typing import Any

import jax

from .backends import choose
from .call import Array
from .checks import read_call, read_flag, read_tiles
from .choice import Choice


def flash_attention(
    q: Array,
    k: Array,
    v: Array,
    *,
    causal: bool = False,
    q_offset: int | Array = 0,
    window: tuple[int | None, int | None] | None = None,
    segment_ids: tuple[Array, Array] | None = None,
    q_lengths: Array | None = None,
    kv_lengths: Array | None = None,
    mask: Array | None = None,
    bias: Array | None = None,
    scale: float | Array | None = None,
    softcap: float | None = None,
    sinks: Array | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    implementation: str | None = None,
    block_q: int | None = None,
    block_k: int | None = None,
    num_warps: int | None = None,
    num_stages: int | None = None,
    block_q_dkv: int | None = None,
    block_k_dkv: int | None = None,
    num_warps_dkv: int | None = None,
    num_stages_dkv: int | None = None,
    block_q_dq: int | None = None,
    block_k_dq: int | None = None,
    num_warps_dq: int | None = None,
    num_stages_dq: int | None = None,
) -> Any:
    """Exact attention, softmax(scale * q k') v, computed block by block in memory linear in the lengths.

    The softmax is built up over blocks of keys (online softmax, Milakov and Gimelshein 2018,
    arXiv:1805.02867) and the backward pass computes the blocks again instead of keeping them
    (FlashAttention, Dao et al. 2022, arXiv:2205.14135). Sums are float32 in every dtype. The score of query
    i and key j is `softcap * tanh(scale * q_i k_j / softcap) + bias_ij`. All masks that are given hold
    together; blocks that causal, window and lengths rule out are never loaded. Differentiable once, in
    reverse mode, with respect to `q`, `k`, `v`, `bias`, `sinks` and an array `scale`; works under `jit`,
    `vmap`, `grad`, `jax.checkpoint` and `shard_map`. Under `jax.checkpoint` the output and the log-sum-exp
    carry the names "flash_attention_out" and "flash_attention_lse", for policies that keep them.

    Args:
        q: queries, `[batch, Tq, heads, D]`; float32, bfloat16 or float16; D at most 256.
        k: keys, `[batch, Tk, kv_heads, D]`, same dtype. `heads` is a multiple of `kv_heads`: query head h
            reads key and value head `h // (heads // kv_heads)`.
        v: values, `[batch, Tk, kv_heads, Dv]`, same dtype. `Dv` may differ from `D`, and is at most 256.
        causal: query i sees the keys up to its own position, i + `q_offset`. With offset 0 positions are
            counted from the first of each, also when Tq and Tk differ (as in
            `jax.nn.dot_product_attention`).
        q_offset: the position of the first query among the keys, a whole number or one per batch row,
            `[batch]`: for decoding against a cache, the number of keys before it. Moves `causal` and
            `window`.
        window: `(left, right)`: a query sees the keys from `left` before its position to `right` after it,
            both included; None for a side without limit.
        segment_ids: `(q_segments, kv_segments)`, integers `[batch, Tq]` and `[batch, Tk]`: queries see keys
            of their own segment only. Any order is right; blocks are skipped where ids are sorted.
        q_lengths: integers `[batch]`; queries from there on are padding and see nothing.
        kv_lengths: integers `[batch]`; keys from there on are padding and are seen by none.
        mask: booleans that broadcast to `[batch, heads, Tq, Tk]`, True where a query may see a key.
        bias: added to the scores; floating point, broadcasts to `[batch, heads, Tq, Tk]`. -inf is a mask. Its
            gradient is summed in float32 over the axes along which it is broadcast. Mask by booleans or -inf
            rather than by huge numbers: gradients of a row all of whose scores lie near -1e5 or beyond lose
            digits, as its log-sum-exp does.
        scale: factor on the scores, 1/sqrt(D) if None; a number, or a scalar array, which has a gradient.
        softcap: bound on the scores, a positive number, by tanh as in Gemma 2 (arXiv:2408.00118).
        sinks: one logit a head, `[heads]`: a key without value that each query sees besides its keys.
        return_lse: also return the natural logarithm of each row's sum of exponentials of scores (sinks
            included), to join partial results with `merge_attention`, which says how to join sinks.
        deterministic: ask for a backward pass that repeats bit for bit.
        implementation: the backend, "cudnn", "pallas_tpu", "pallas_triton" or "xla"; if None, the one that is
            known or expected to be the fastest of those that can do what is asked on this device. A call that
            is differentiated may then get another one than the same call without.
        block_q: queries a block of the forward pass, a positive whole number, also one that does not divide Tq.
            With "xla" it holds for the backward pass too, and with "pallas_tpu" where that is given nothing
            else. All hyperparameters change speed and memory, not the result; those that are not given come
            from the tuned table of this device, if none of their pass is given, or from the backend.
        block_k: keys a block, likewise.
        num_warps: warps a block, of the backends on GPUs.
        num_stages: loads under way at a time, of the backends on GPUs.
        block_q_dkv: queries a block where the backward pass computes the gradients of keys and values.
        block_k_dkv: keys a block there.
        num_warps_dkv: warps a block there.
        num_stages_dkv: loads under way there.
        block_q_dq: queries a block where the backward pass computes the gradients of queries and of a bias.
        block_k_dq: keys a block there.
        num_warps_dq: warps a block there.
        num_stages_dq: loads under way there.

    Returns:
        `[batch, Tq, heads, Dv]` in the dtype of `q`; with `return_lse=True` a pair of that and the
        log-sum-exp, `[batch, Tq, heads]`, float32. A query row that sees no key is zero, its log-sum-exp
        -inf, and it takes no part in any gradient.

    Raises:
        ValueError: shapes that do not fit each other, an unknown implementation, one that cannot do what is
            asked or does not take a hyperparameter that is given, a hyperparameter that is not a positive
            whole number.
        TypeError: a dtype other than the three, dtypes that differ, flags that are not bools, a `scale` that
            is not a real scalar; forward-mode differentiation, which `reference_attention` has.
        NotImplementedError: second derivatives; `reference_attention` has them.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> q = jax.random.normal(jax.random.key(0), (2, 100, 8, 64))
        >>> k, v = q[:, :, :2], q[:, :, 2:4]
        >>> out = flash_attention(q, k, v, causal=True, block_q=32, block_k=64)
        >>> out.shape
        (2, 100, 8, 64)
        >>> bool(jnp.allclose(out[:, 0, :4], v[:, 0, :1], atol=1e-5))  # the first query sees one key
        True
    """
    tiles = read_tiles(
        block_q=block_q,
        block_k=block_k,
        num_warps=num_warps,
        num_stages=num_stages,
        block_q_dkv=block_q_dkv,
        block_k_dkv=block_k_dkv,
        num_warps_dkv=num_warps_dkv,
        num_stages_dkv=num_stages_dkv,
        block_q_dq=block_q_dq,
        block_k_dq=block_k_dq,
        num_warps_dq=num_warps_dq,
        num_stages_dq=num_stages_dq,
    )
    spec, operands = read_call(
        q,
        k,
        v,
        causal=causal,
        q_offset=q_offset,
        window=window,
        segment_ids=segment_ids,
        q_lengths=q_lengths,
        kv_lengths=kv_lengths,
        mask=mask,
        bias=bias,
        scale=scale,
        softcap=softcap,
        sinks=sinks,
        deterministic=deterministic,
        tiles=tiles,
    )
    return_lse = read_flag("return_lse", return_lse)
    choice = choose(implementation, spec, operands, return_lse)
    out, lse = _attend(choice, operands)
    return (out, lse) if return_lse else out


# Eager calls would otherwise trace a backend each time.
_attend = jax.jit(Choice.attend, static_argnums=0)
