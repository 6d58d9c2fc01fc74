"""The attention oracle: float64 NumPy, written from the formulas, blind to how any backend computes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

FORWARD_TOLERANCE = {"float32": 2e-5, "float16": 2e-3, "bfloat16": 1e-2}
GRADIENT_TOLERANCE = {"float32": 5e-5, "float16": 2e-2, "bfloat16": 2e-2}
# A float32 sum or function is off by a few units of its terms, wherever it is computed.
FLOAT32 = 8 * 2.0**-24
# What dtypes lose below their smallest normal number.
TINY = {"float16": 2.0**-24}


@dataclass(frozen=True)
class Shape:
    q_length: int
    kv_length: int
    batch: int = 2
    heads: int = 2
    kv_heads: int = 2
    depth: int = 16
    v_depth: int | None = None

    @property
    def q(self) -> tuple[int, ...]:
        return (self.batch, self.q_length, self.heads, self.depth)

    @property
    def k(self) -> tuple[int, ...]:
        return (self.batch, self.kv_length, self.kv_heads, self.depth)

    @property
    def v(self) -> tuple[int, ...]:
        return (*self.k[:3], self.v_depth or self.depth)

    @property
    def out(self) -> tuple[int, ...]:
        return (*self.q[:3], self.v[3])

    @property
    def pairs(self) -> tuple[int, ...]:
        return (self.batch, self.heads, self.q_length, self.kv_length)


@dataclass(frozen=True)
class Answer:
    """Exact values by name (out, lse, dq, dk, dv, dbias, dsinks, dscale), and by how much rounding may move each."""

    values: dict[str, np.ndarray]
    slack: dict[str, np.ndarray]


class Oracle:
    """Inputs, exact answers and the verdict; `**call` is whatever `flash_attention` takes besides q, k and v."""

    Shape = Shape

    def jit(self, function: Any, **options: Any) -> Any:
        """`jax.jit` at half its compile time: tests compile hundreds of programs and run each once."""
        return jax.jit(function, compiler_options={"xla_backend_optimization_level": 0}, **options)

    def inputs(self, shape: Shape, dtype: str = "float32", seed: int = 0) -> tuple[Any, Any, Any]:
        rng = np.random.default_rng(seed)
        return tuple(jnp.asarray(rng.standard_normal(s), dtype) for s in (shape.q, shape.k, shape.v))

    def cotangent(self, shape: Shape, dtype: str = "float32", seed: int = 0) -> Any:
        return jnp.asarray(np.random.default_rng(seed + 10_000).standard_normal(shape.out), dtype)

    def seen(self, shape: Shape, **call: Any) -> np.ndarray:
        """Which query sees which key, `[batch, heads, Tq, Tk]`."""
        return _seen(shape.pairs, **call)

    def answer(self, q: Any, k: Any, v: Any, dout: Any = None, dlse: Any = None, **call: Any) -> Answer:
        """Everything there is to know of a call; gradients if a cotangent is given."""
        forward = _Forward(q, k, v, **call)
        if dout is None:
            return forward.answer()
        return _Backward(forward, dout, dlse).answer()

    def forward(self, q: Any, k: Any, v: Any, **call: Any) -> np.ndarray:
        return self.answer(q, k, v, **call).values["out"]

    def gradients(self, q: Any, k: Any, v: Any, dout: Any, **call: Any) -> tuple[np.ndarray, ...]:
        values = self.answer(q, k, v, dout, **call).values
        return values["dq"], values["dk"], values["dv"]

    def check(
        self,
        got: dict[str, Any],
        q: Any,
        k: Any,
        v: Any,
        dout: Any = None,
        dlse: Any = None,
        *,
        leeway: float = 1,
        **call: Any,
    ) -> None:
        """Each result that is given is as exact as its dtype and float32 sums allow, element by element.

        `leeway` allows a multiple of that.
        """
        answer = self.answer(q, k, v, dout, dlse, **call)
        dtypes = dict.fromkeys(("lse", "dsinks", "dscale"), np.float32)
        dtypes["dbias"] = getattr(call.get("bias"), "dtype", None)
        for name, value in got.items():
            assert value.dtype == dtypes.get(name, q.dtype), name
            _assert_within(name, _double(value), answer.values[name], leeway * answer.slack[name])

    def check_forward(self, out: Any, q: Any, k: Any, v: Any, tolerance: float | None = None, **call: Any) -> None:
        want = self.forward(q, k, v, **call)
        assert out.shape == want.shape
        assert out.dtype == q.dtype
        assert np.isfinite(_double(out)).all()
        error = np.abs(_double(out) - want).max() / _largest(v)
        assert error <= (tolerance or FORWARD_TOLERANCE[str(q.dtype)])

    def check_gradients(
        self, grads: Any, q: Any, k: Any, v: Any, dout: Any, tolerance: float | None = None, **call: Any
    ) -> None:
        answer = self.answer(q, k, v, dout, **call)
        for name, got, operand in zip(("dq", "dk", "dv"), grads, (q, k, v), strict=True):
            want = answer.values[name]
            assert got.shape == operand.shape
            assert got.dtype == operand.dtype
            assert np.isfinite(_double(got)).all(), name
            error = np.abs(_double(got) - want).max()
            # Gradients may cancel, with few rows, keys or values all of them: rounding is what is left then.
            allowed = (tolerance or GRADIENT_TOLERANCE[str(q.dtype)]) * np.abs(want).max()
            assert error <= max(allowed, answer.slack[name].max()), f"{name}: {error} > {allowed}"


def _seen(
    pairs: tuple[int, ...],
    causal: bool = False,
    q_offset: Any = 0,
    window: tuple[int | None, int | None] | None = None,
    segment_ids: Any = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    mask: Any = None,
    bias: Any = None,
    **_: Any,
) -> np.ndarray:
    q_length, kv_length = pairs[2:]
    row, column = np.arange(q_length)[:, None], np.arange(kv_length)
    behind = row + _per_batch(q_offset) - column
    left, right = window or (None, None)
    seen = np.ones(pairs, bool)
    if causal:
        seen &= behind >= 0
    if left is not None:
        seen &= behind <= left
    if right is not None:
        seen &= -behind <= right
    if q_lengths is not None:
        seen &= row < _per_batch(q_lengths)
    if kv_lengths is not None:
        seen &= column < _per_batch(kv_lengths)
    if segment_ids is not None:
        q_ids, kv_ids = (np.asarray(ids) for ids in segment_ids)
        seen &= (q_ids[:, :, None] == kv_ids[:, None, :])[:, None]
    if mask is not None:
        seen &= np.asarray(mask)
    if bias is not None:
        seen &= _double(bias) != -np.inf
    return seen


class _Forward:
    """One call, heads first, `[batch, heads, time, depth]`; a name with `_slack` is how far off the value may be."""

    def __init__(self, q: Any, k: Any, v: Any, **call: Any) -> None:
        self.dtype, self.call = str(q.dtype), call
        self.unit = float(ml_dtypes.finfo(q.dtype).eps) / 2
        self.group = q.shape[2] // k.shape[2]
        self.scale = q.shape[3] ** -0.5 if call.get("scale") is None else float(call["scale"])
        self.seen = seen = _seen((q.shape[0], q.shape[2], q.shape[1], k.shape[1]), **call)
        self.row_sees = seen.any(3, keepdims=True)
        key_seen = self.per_kv_head(seen).any((2, 3))[..., None].repeat(self.group, 1)
        # What nobody sees counts for nothing, whatever it holds.
        self.q = np.where(self.row_sees, _heads_first(q), 0)
        self.k, self.v = (np.where(key_seen, _heads_first(x).repeat(self.group, 1), 0) for x in (k, v))
        self.products = self.q @ _transpose(self.k)
        self._score()
        self._average()

    def per_kv_head(self, x: np.ndarray) -> np.ndarray:
        """Splits the heads into [kv_heads, group]."""
        return x.reshape(x.shape[0], -1, self.group, *x.shape[2:])

    def _score(self) -> None:
        softcap, bias = self.call.get("softcap"), self.call.get("bias")
        scores = self.scale * self.products
        sizes = abs(self.scale) * (abs(self.q) @ _transpose(abs(self.k)))
        self.slope = np.ones_like(scores)
        if softcap is not None:
            capped = np.tanh(scores / softcap)
            self.slope = 1 - capped**2
            scores, sizes = softcap * capped, sizes * self.slope + softcap * abs(capped)
        if bias is not None:
            bias = np.where(self.seen, _double(bias), 0)
            scores, sizes = scores + bias, sizes + abs(bias)
        self.scores, self.scores_slack = scores, FLOAT32 * (sizes + abs(scores))

    def _average(self) -> None:
        scores = np.where(self.seen, self.scores, -np.inf)
        highest = scores.max(3, keepdims=True, initial=-np.inf)
        self.sinks = self.call.get("sinks")
        if self.sinks is not None:
            self.sinks = _double(self.sinks)[:, None, None]
            highest = np.maximum(highest, self.sinks)
        highest = np.where(np.isfinite(highest), highest, 0)
        total = np.exp(scores - highest).sum(3, keepdims=True)
        if self.sinks is not None:
            total += np.exp(self.sinks - highest)
        total = np.where(self.row_sees, total, 1)
        self.lse = np.where(self.row_sees, np.log(total) + highest, -np.inf)
        self.weights = np.exp(scores - highest) / total
        self.out = self.weights @ self.v
        shift = (self.weights * self.scores_slack).sum(3, keepdims=True)
        finite_lse = np.where(self.row_sees, abs(self.lse), 0)
        self.lse_slack = shift + FLOAT32 * (1 + finite_lse)
        self.weights_slack = self.weights * (self.scores_slack + self.lse_slack + FLOAT32)
        # The product with the values may take weights in their dtype.
        self.rounded_slack = self.weights_slack + self.seen * self.rounded(self.weights)
        self.out_slack = self.rounded_slack @ abs(self.v) + self.rounded(self.out)

    def rounded(self, x: np.ndarray) -> np.ndarray:
        """How far a value moves when it is cast to the dtype of the operands."""
        return self.unit * abs(x) + TINY.get(self.dtype, 1e-30)

    def answer(self) -> Answer:
        values = {"out": _time_first(self.out), "lse": self.lse[..., 0].swapaxes(1, 2)}
        slack = {"out": _time_first(self.out_slack), "lse": self.lse_slack[..., 0].swapaxes(1, 2)}
        return Answer(values, slack)


class _Backward:
    """The gradients of a call, and how far off each may be."""

    def __init__(self, forward: _Forward, dout: Any, dlse: Any) -> None:
        self.forward = forward
        self.dout = np.where(forward.row_sees, _heads_first(dout), 0)
        dlse = np.zeros(forward.lse.shape) if dlse is None else _double(dlse).swapaxes(1, 2)[..., None]
        self.dlse = np.where(forward.row_sees, dlse, 0)
        self._differentiate_scores()

    def _differentiate_scores(self) -> None:
        forward, dout, dlse = self.forward, self.dout, self.dlse
        self.delta = (dout * forward.out).sum(3, keepdims=True) - dlse
        inner = dout @ _transpose(forward.v) - self.delta
        self.dscores = forward.weights * inner
        sizes = (abs(dout * forward.out)).sum(3, keepdims=True) + abs(dlse)
        self.delta_slack = (abs(dout) * forward.out_slack).sum(3, keepdims=True) + FLOAT32 * sizes
        inner_slack = self.delta_slack + FLOAT32 * (abs(dout) @ _transpose(abs(forward.v)))
        self.dscores_slack = forward.weights_slack * abs(inner) + forward.weights * inner_slack

    def answer(self) -> Answer:
        values, slack = self.forward.answer().values, self.forward.answer().slack
        pairs = {**self._operands(), "dsinks": self._sinks(), "dscale": self._scale(), "dbias": self._bias()}
        for name, pair in pairs.items():
            values[name], slack[name] = pair
        return Answer(values, slack)

    def _operands(self) -> dict[str, tuple[np.ndarray, np.ndarray]]:
        forward = self.forward
        raw, raw_slack = self._raw()
        raw_slack = raw_slack + FLOAT32 * abs(raw) + forward.seen * forward.rounded(raw)
        dv_slack = _transpose(forward.rounded_slack + FLOAT32 * forward.weights) @ abs(self.dout)
        scale = forward.scale
        dq = self._finish(scale * (raw @ forward.k), abs(scale) * (raw_slack @ abs(forward.k)), 1)
        group, turned, turned_slack = forward.group, _transpose(raw), _transpose(raw_slack)
        dk = self._finish(scale * (turned @ forward.q), abs(scale) * (turned_slack @ abs(forward.q)), group)
        dv = self._finish(_transpose(forward.weights) @ self.dout, dv_slack, group)
        return {"dq": dq, "dk": dk, "dv": dv}

    def _raw(self) -> tuple[np.ndarray, np.ndarray]:
        """The gradient of the scores before softcap and bias."""
        slope = self.forward.slope
        return self.dscores * slope, self.dscores_slack * slope + FLOAT32 * abs(self.dscores)

    def _finish(self, grad: np.ndarray, slack: np.ndarray, group: int) -> tuple[np.ndarray, np.ndarray]:
        grad, slack = (x.reshape(x.shape[0], -1, group, *x.shape[2:]).sum(2) for x in (grad, slack))
        return _time_first(grad), _time_first(slack + self.forward.rounded(grad))

    def _sinks(self) -> tuple[np.ndarray, np.ndarray]:
        if self.forward.sinks is None:
            return np.zeros(()), np.zeros(())
        weights = np.exp(self.forward.sinks - np.where(self.forward.row_sees, self.forward.lse, np.inf))
        grad = -(weights * self.delta)
        slack = abs(grad) * (self.forward.lse_slack + FLOAT32) + weights * self.delta_slack
        return grad.sum((0, 2, 3)), _sum_of_rows(slack, (0, 2, 3))

    def _scale(self) -> tuple[np.ndarray, np.ndarray]:
        forward = self.forward
        raw, raw_slack = self._raw()
        sizes = abs(forward.q) @ _transpose(abs(forward.k))
        slack = (raw_slack + FLOAT32 * abs(raw) + forward.seen * forward.rounded(raw)) * sizes
        return (raw * forward.products).sum(), _sum_of_rows(slack, (0, 1, 2, 3))

    def _bias(self) -> tuple[np.ndarray, np.ndarray]:
        bias = self.forward.call.get("bias")
        if bias is None:
            return np.zeros(()), np.zeros(())
        shape = (1,) * (4 - bias.ndim) + bias.shape
        axes = tuple(axis for axis, size in enumerate(shape) if size == 1)
        slack = self.dscores_slack + FLOAT32 * abs(self.dscores) + self.forward.rounded(self.dscores)
        grad = self.dscores.sum(axes, keepdims=True).reshape(bias.shape)
        return grad, _sum_of_rows(slack, axes).reshape(bias.shape) + abs(grad) * float(
            ml_dtypes.finfo(bias.dtype).eps
        ) / 2


def _assert_within(name: str, got: np.ndarray, want: np.ndarray, slack: np.ndarray) -> None:
    assert got.shape == want.shape, f"{name} has shape {got.shape}, expected {want.shape}"
    # Infinities must be equal; NaN is never within anything.
    with np.errstate(invalid="ignore"):
        error = np.where(got == want, 0, abs(got - want))
    bad = ~(error <= slack)
    if bad.any():
        place = np.unravel_index(np.argmax(np.where(bad, np.nan_to_num(error / slack, nan=np.inf), 0)), error.shape)
        raise AssertionError(
            f"{name}{[int(i) for i in place]} is {got[place]:.6g}, not {want[place]:.6g} to within {slack[place]:.2g}; "
            f"so are {bad.sum()} of {bad.size}"
        )


def _sum_of_rows(slack: np.ndarray, axes: tuple[int, ...]) -> np.ndarray:
    """How far off a sum is: errors within a row go together, those of different rows do not."""
    rows = slack.sum(3, keepdims=True) if 3 in axes else slack
    others = tuple(axis for axis in axes if axis != 3)
    total = np.minimum(rows.sum(others, keepdims=True), 4 * np.sqrt((rows**2).sum(others, keepdims=True)))
    return total.squeeze(axes)


def _double(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def _per_batch(x: Any) -> np.ndarray:
    return np.asarray(x, np.int64).reshape(-1, 1, 1, 1)


def _largest(x: Any) -> float:
    return float(np.nanmax(np.where(np.isinf(_double(x)), np.nan, abs(_double(x)))))


def _heads_first(x: Any) -> np.ndarray:
    return _double(x).swapaxes(1, 2)


def _time_first(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(1, 2)


def _transpose(x: np.ndarray) -> np.ndarray:
    return x.swapaxes(2, 3)


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle()
