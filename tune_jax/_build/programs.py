"""A candidate's way to an executable: trace, check what it returns, lower, compile."""

from __future__ import annotations

import dataclasses
import re
import time
from collections.abc import Sequence
from typing import Any

import jax

from tune_jax._call import Call
from tune_jax._jax import has_host_callbacks, lowered_devices
from tune_jax._outline import Outline
from tune_jax._records import Candidate
from tune_jax._wrap import wrap

_MODULE = re.compile(r"module @(\S+)")
_CALLBACK = re.compile(r"custom_call @\w*callback")


class MismatchError(ValueError):
    """A candidate returns something else than the first one does."""


@dataclasses.dataclass(frozen=True)
class Lowering:
    """A lowered candidate; two with the same `text` are the same program, None is like no other."""

    candidate: Candidate
    module: str
    text: str | None
    lowered: Any


@dataclasses.dataclass(frozen=True)
class Program:
    """An executable, compiled once and used for the timing, with the candidates that share it."""

    id: int
    module: str
    compiled: Any
    compile_s: float
    donated: tuple[bool, ...]

    def laid_out(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs in the layouts that XLA chose, where that was left to it; the others as they are."""
        formats, _ = self.compiled.input_formats
        return [_lay_out(value, wanted) for value, wanted in zip(inputs, formats, strict=True)]

    def launch(self, inputs: Sequence[Any]) -> None:
        """Run once and wait for every output, which is then let go; donated inputs are copied first."""
        fresh = [
            jax.block_until_ready(value.copy()) if donated else value
            for value, donated in zip(inputs, self.donated, strict=True)
        ]
        jax.block_until_ready(self.compiled(*fresh))


def _lay_out(value: Any, wanted: Any) -> Any:
    """Move a value only if it must: PRNG keys have no layout of their own, and unused inputs are asked for none."""
    is_key = jax.dtypes.issubdtype(value.dtype, jax.dtypes.prng_key)
    if is_key or wanted.layout is None or wanted.layout.major_to_minor == value.format.layout.major_to_minor:
        return value
    return jax.device_put(value, wanted)


def lower_candidate(
    call: Call, candidate: Candidate, expected: Outline, inputs: Sequence[Any], jit_options: dict[str, Any], name: str
) -> Lowering:
    """Trace a candidate for these inputs, check its result against `expected`, and lower it.

    Raises:
      MismatchError: it returns another structure, shape or dtype than the first candidate.
    """
    jitted = jax.jit(wrap(call, candidate.hyperparams, name=name), **jit_options)
    traced = jitted.trace(*inputs)
    check_result(traced, expected)
    lowered = traced.lower()
    return read_lowering(candidate, lowered)


def read_lowering(candidate: Candidate, lowered: Any) -> Lowering:
    """Read a lowered program's name, and its text without the name unless it calls back to the host.

    The devices are in front of the text, because the same text can be meant for others.
    """
    text = lowered.as_text()
    found = _MODULE.search(text)
    module = found.group(1) if found else ""
    if has_host_callbacks(lowered) or _CALLBACK.search(text):
        return Lowering(candidate, module, None, lowered)
    anonymous = text.replace(f"module @{module}", "module", 1)
    return Lowering(candidate, module, f"devices {lowered_devices(lowered)}\n{anonymous}", lowered)


def compile_program(lowering: Lowering, donated: tuple[bool, ...]) -> Program:
    """Compile a lowered candidate."""
    started = time.perf_counter()
    compiled = lowering.lowered.compile()
    return Program(lowering.candidate.id, lowering.module, compiled, time.perf_counter() - started, donated)


def check_result(traced: Any, expected: Outline) -> None:
    """Raise MismatchError if a traced candidate returns something else than the first one."""
    tree = jax.tree.structure(traced.out_info)
    if tree != expected.tree:
        raise MismatchError(
            f"returns the structure {tree}, but the first candidate, {dict(expected.first.hyperparams)}, returns "
            f"{expected.tree}; all candidates must return the same."
        )
    for index, (came, aval) in enumerate(zip(traced.jaxpr.out_avals, expected.avals, strict=True)):
        if came.shape != aval.shape or came.dtype != aval.dtype:
            raise MismatchError(
                f"returns {came.dtype}{list(came.shape)} as its output {index}, but the first candidate, "
                f"{dict(expected.first.hyperparams)}, returns {aval.dtype}{list(aval.shape)}; all candidates must "
                "return the same shapes and dtypes."
            )
