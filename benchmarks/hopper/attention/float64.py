"""Attention and its gradients in float64 with numpy: what the checks compare with."""

from __future__ import annotations

import numpy as np


def logits_of(q, k, scale, causal, window, q_offset, softcap):
    """Logits [B, H, Tq, Tk] of q [B, H, Tq, D] and k [B, H, Tk, D]; minus infinity where the masks forbid."""
    logits = q @ k.swapaxes(-1, -2) * scale
    if softcap is not None:
        logits = softcap * np.tanh(logits / softcap)
    behind = np.arange(q.shape[2])[:, None] + q_offset - np.arange(k.shape[2])[None]
    keep = np.ones_like(behind, bool)
    if causal:
        keep &= behind >= 0
    if window is not None:
        keep &= behind < window
    return np.where(keep, logits, -np.inf)


def heads_first(x, repeat):
    return np.repeat(np.asarray(x, np.float64).swapaxes(1, 2), repeat, axis=1)


def attention(q, k, v, do=None, *, scale=None, causal=False, window=None, q_offset=0, softcap=None):
    """(output, log-sum-exp) and, if the output's gradient is given and there is no softcap, the three gradients.

    Rows without keys give 0 and minus infinity.
    """
    group, scale = q.shape[2] // k.shape[2], 1 / np.sqrt(q.shape[3]) if scale is None else scale
    q, k, v = heads_first(q, 1), heads_first(k, group), heads_first(v, group)
    logits = logits_of(q, k, scale, causal, window, q_offset, softcap)
    top = logits.max(axis=-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(top), top, 0))
    total = weights.sum(axis=-1, keepdims=True)
    with np.errstate(divide="ignore"):
        lse = (np.log(total) + top)[..., 0]
    weights /= np.where(total == 0, 1, total)
    out = weights @ v
    if do is None:
        return out.swapaxes(1, 2), lse
    do = heads_first(do, 1)
    gradients = weights * (do @ v.swapaxes(-1, -2) - (do * out).sum(axis=-1, keepdims=True)) * scale
    dk, dv = (x.swapaxes(-1, -2) @ y for x, y in ((gradients, q), (weights, do)))
    dk, dv = (x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(axis=2) for x in (dk, dv))
    return out.swapaxes(1, 2), lse, *(x.swapaxes(1, 2) for x in (gradients @ k, dk, dv))


def distance(out, expected):
    """Relative error in the 2-norm; infinite where what is infinite differs, or something is not a number."""
    out, expected = np.asarray(out, np.float64), np.asarray(expected, np.float64)
    finite = np.isfinite(expected)
    if not np.array_equal(out[~finite], expected[~finite]) or not np.isfinite(out[finite]).all():
        return np.inf
    return np.linalg.norm(out[finite] - expected[finite]) / max(np.linalg.norm(expected[finite]), 1e-30)
