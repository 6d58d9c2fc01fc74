"""The functions that the benchmarks tune, with their grids, inputs and a check of what they return.

Nothing here imports a tuner: the same function and grid go to ours and to the peer.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import math
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from _common import ROOT


@dataclasses.dataclass(frozen=True)
class Case:
    """A function to tune; `expected` computes a part of the right result, at `part` of the output.

    `tolerance` bounds each element's error relative to its size plus the typical size of all.
    """

    function: Callable[..., Any]
    hyperparams: Mapping[str, list[Any]]
    inputs: tuple[jax.Array, ...]
    expected: Callable[[], jax.Array]
    part: tuple[Any, ...]
    tolerance: float

    @property
    def size(self) -> int:
        """Number of candidates."""
        return math.prod(len(choices) for choices in self.hyperparams.values())

    def settings(self) -> list[dict[str, Any]]:
        """Every candidate's hyperparameters, in the order of the grid."""
        return [dict(zip(self.hyperparams, row, strict=True)) for row in itertools.product(*self.hyperparams.values())]

    def check(self, output: Any) -> float:
        """Return the largest relative error of a result.

        Raises:
          ValueError: it is above the tolerance.
        """
        came, right = np.asarray(output[self.part], np.float32), np.asarray(self.expected(), np.float32)
        typical = np.sqrt(np.mean(right**2))
        error = float(np.max(np.abs(came - right) / (np.abs(right) + typical)))
        if not error <= self.tolerance:
            raise ValueError(f"the result is wrong by {error:.3g}, more than {self.tolerance:g}")
        return error


def load_case(name: str) -> Case:
    """Make a case's inputs on the device and wait for them."""
    case = CASES[name]()
    jax.block_until_ready(case.inputs)
    return case


def _mha108() -> Case:
    blocks = [32, 64, 128]
    grid = {"block_q": blocks, "block_k": blocks, "num_warps": [2, 4, 8, None], "num_stages": [1, 2, 3]}
    return _mha_case(grid, q_shape=(2, 4096, 8, 128), kv_length=4096)


def _mha36() -> Case:
    blocks = [4, 8, 16, 32, 64, 128]
    return _mha_case({"block_q": blocks, "block_k": blocks}, q_shape=(8, 32, 8, 512), kv_length=128)


def _mha_case(grid: Mapping[str, list[Any]], *, q_shape: tuple[int, ...], kv_length: int) -> Case:
    if jax.default_backend() != "gpu":
        raise SystemExit("this case tunes a Pallas-Triton kernel and needs a GPU")
    with warnings.catch_warnings():
        # The module says on import that it is deprecated; it is still what the target names.
        warnings.simplefilter("ignore", DeprecationWarning)
        from jax.experimental.pallas.ops.gpu import attention as pallas_attention
    scale = q_shape[-1] ** -0.5

    def mha(q, k, v, *, block_q, block_k, num_warps=None, num_stages=2):
        sizes = pallas_attention.BlockSizes(block_q=block_q, block_k=block_k)
        return pallas_attention.mha(
            q, k, v, None, sm_scale=scale, block_sizes=sizes, num_warps=num_warps, num_stages=num_stages
        )

    inputs = _normals(jnp.bfloat16, q_shape, *[(q_shape[0], kv_length, *q_shape[2:])] * 2)
    return _attention_case(mha, grid, inputs, causal=False, tolerance=0.03)


def _quickstart() -> Case:
    module, function, grid = _load_quickstart()
    inputs = _normals(module.DTYPE, *[module.SHAPE] * 3)
    tolerance = 0.03 if jnp.dtype(module.DTYPE) == jnp.bfloat16 else 1e-4
    return _attention_case(function, grid, inputs, causal=True, tolerance=tolerance)


def _tiny() -> Case:
    """For smoke tests: four distinct programs that compile in no time."""

    def sines(x, *, parts):
        return jnp.concatenate([jnp.sin(part) for part in jnp.split(x, parts)])

    (x,) = _normals(jnp.float32, (256, 256))
    return Case(sines, {"parts": [1, 2, 8, 32]}, (x,), lambda: jnp.sin(x), (slice(None),), 1e-5)


CASES: dict[str, Callable[[], Case]] = {"mha108": _mha108, "mha36": _mha36, "quickstart": _quickstart, "tiny": _tiny}


def _attention_case(
    function: Callable[..., Any], grid: Any, inputs: tuple[jax.Array, ...], *, causal: bool, tolerance: float
) -> Case:
    # One head of one batch entry is checked: plain attention over all of them would fill the memory.
    part = (0, slice(None), 0)
    expected = functools.partial(_plain_attention, *(value[part] for value in inputs), causal=causal)
    return Case(function, grid, inputs, expected, part, tolerance)


def _plain_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, causal: bool) -> jax.Array:
    q, k, v = (value.astype(jnp.float32) for value in (q, k, v))
    with jax.default_matmul_precision("highest"):
        scores = q @ k.T * q.shape[-1] ** -0.5
        scores = jnp.where(jnp.tri(*scores.shape, dtype=bool), scores, -jnp.inf) if causal else scores
        return jax.nn.softmax(scores) @ v


def _normals(dtype: Any, *shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    keys = jax.random.split(jax.random.key(0), len(shapes))
    return tuple(jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True))


def _load_quickstart() -> tuple[types.ModuleType, Callable[..., Any], Mapping[str, list[Any]]]:
    """Read the quickstart with stand-ins for the tuner, and take the function and the grid that it hands to `tune`."""
    taken: list[tuple[Callable[..., Any], Mapping[str, list[Any]]]] = []

    def tune(function: Any = None, hyperparams: Any = None, **_: Any) -> Any:
        if function is None:
            return functools.partial(tune, hyperparams=hyperparams)
        taken.append((function, hyperparams))
        return function

    kernels = _load(ROOT / "kernels" / "__init__.py", "benchmarked_kernels")
    tuner = types.ModuleType("tune_jax")
    tuner.tune, tuner.tabulate, tuner.kernels = tune, str, kernels
    with _standing_in({"tune_jax": tuner, "tune_jax.kernels": kernels}):
        module = _load(ROOT / "examples" / "quickstart.py", "benchmarked_quickstart")
    function, grid = taken[0]
    return module, function, grid


@contextmanager
def _standing_in(stand_ins: Mapping[str, types.ModuleType]) -> Iterator[None]:
    hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.split(".")[0] == "tune_jax"}
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        for name in stand_ins:
            del sys.modules[name]
        sys.modules.update(hidden)


def _load(path: Any, name: str) -> types.ModuleType:
    """Import a file under a name of our choice; it stays imported, for what it imports later."""
    folders = [str(path.parent)] if path.name == "__init__.py" else None
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=folders)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
