"""Where a call's winner comes from: what this process knows, else a tuning; one tuning a key, whoever asks."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from tune_jax._build.gate import GATE
from tune_jax._call import Call
from tune_jax._config import CONFIG
from tune_jax._errors import NoCandidateError
from tune_jax._failure import summarise
from tune_jax._jax import axis_names, outside_traces
from tune_jax._key import Key, default_device, describe_arguments, describe_placement, device_of, make_key
from tune_jax._outline import UNTRACEABLE, Untraceable, candidates_of, outline
from tune_jax._records import Candidate, Tunable
from tune_jax._results import Results, make_results
from tune_jax._session import run_session
from tune_jax._sharing import is_common


@dataclasses.dataclass(eq=False)
class Memory:
    """What this process knows of one tuned function; the two dicts are what users hold and change in place."""

    results: dict[Key, Results] = dataclasses.field(default_factory=dict)
    latest: Results | None = None
    timing_results: dict[int, Any] = dataclasses.field(default_factory=dict)
    optimal_hyperparams: dict[str, Any] = dataclasses.field(default_factory=dict)

    def keep(self, key: Key, results: Results) -> None:
        """Remember results as the latest, and show them in the two dicts."""
        with _CHANGED:
            self.results[key] = results
            self.latest = results
            _replace(self.timing_results, results.timing_results())
            _replace(self.optimal_hyperparams, dict(results.best.hyperparams))


class Shared:
    """The results that equal tuned functions have in common; of so many keys the ones used last."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._results: collections.OrderedDict[Key, Results] = collections.OrderedDict()

    def __len__(self) -> int:
        return len(self._results)

    def get(self, key: Key) -> Results | None:
        """The results of any function of this key, None if there are none."""
        with _CHANGED:
            if key in self._results:
                self._results.move_to_end(key)
            return self._results.get(key)

    def keep(self, key: Key, results: Results) -> None:
        """Remember results that no single function owns."""
        with _CHANGED:
            if is_common(key.call):
                self._results[key] = results
            while len(self._results) > self._most:
                self._results.popitem(last=False)

    def clear(self) -> None:
        """Forget all."""
        with _CHANGED:
            self._results.clear()


_CHANGED = threading.Condition()
_RUNNING: dict[Key, threading.Thread] = {}
SHARED = Shared(most=512)


def memory_of(tunable: Tunable) -> Memory:
    """The memory of a tuned function."""
    memory: Memory = tunable.state.setdefault("memory", Memory())
    untraceable: Untraceable | None = tunable.state.pop(UNTRACEABLE, None)
    if untraceable is not None:
        memory.latest = _as_results(untraceable)
    return memory


def find_winner(
    call: Call, avals: Sequence[Any], given: Sequence[Any], *, platforms: Sequence[str] | None = None
) -> Candidate:
    """Return the candidate that this call shall run, tuning if nobody has.

    A call with nothing to choose is not tuned. One that cannot be run here takes the first candidate, with a warning.
    A thread that meets a key which it is tuning already takes the first candidate too.
    """
    if call.fixed and len(choices := candidates_of(call)) == 1:
        return choices[0]
    wanted = platforms or [default_device().platform]
    with _on_platform(wanted) as here:
        obstacle = _find_obstacle(call, avals) if here else f"no {' or '.join(wanted)} device is here to tune on"
        if obstacle is None:
            results = tune_once(call, avals, given)
            return outline(call, avals).first if results is None else _as_candidate(results)
    first = outline(call, avals).first
    warnings.warn(
        f"{call.tunable.name}: {obstacle}, so the first candidate, {dict(first.hyperparams)}, is used.",
        stacklevel=2,
    )
    return first


def tune_once(call: Call, avals: Sequence[Any], given: Sequence[Any]) -> Results | None:
    """Return the results for a call, tuning if nobody has.

    None where this thread is tuning this key already, or where it cannot because a program being timed calls it back.

    Raises:
      NoCandidateError: every candidate failed; the latest results then show how.
    """
    memory = memory_of(call.tunable)
    key = key_of(call, avals, given)
    with _CHANGED:
        while (known := known_results(memory, key)) is None:
            if _RUNNING.get(key) is threading.current_thread() or _is_called_back(call):
                return None
            if key not in _RUNNING:
                _RUNNING[key] = threading.current_thread()
                break
            _CHANGED.wait()
        else:
            if key not in memory.results:
                memory.keep(key, known)
            return known
    try:
        results = run_session(call, avals, given)
        if not results.timed:
            memory.latest = results
            raise NoCandidateError(summarise({row.id: row.failure for row in results.rows if row.failure}))
        memory.keep(key, results)
        SHARED.keep(key, results)
        return results
    finally:
        with _CHANGED:
            del _RUNNING[key]
            _CHANGED.notify_all()


def known_results(memory: Memory, key: Key) -> Results | None:
    """The results that a tuned function with this memory goes by, its own or those of an equal one."""
    return memory.results.get(key) or SHARED.get(key)


def key_of(call: Call, avals: Sequence[Any], given: Sequence[Any]) -> Key:
    """The key of a call on the device that it would run on."""
    return make_key(call, avals, placement=describe_placement(given), device=device_of(given).device_kind)


def _is_called_back(call: Call) -> bool:
    if not GATE.is_held_around_caller():
        return False
    warnings.warn(
        f"{call.tunable.name} is called back by a program that is being timed, and cannot be tuned meanwhile, so its "
        "first candidate is used; call it before, with arguments like these.",
        stacklevel=2,
    )
    return True


def _find_obstacle(call: Call, avals: Sequence[Any]) -> str | None:
    """Why a call cannot be run on its own, or None if it can."""
    if not all(isinstance(size, int) for aval in avals for size in aval.shape):
        return "its shapes are left open"
    names = axis_names()
    if names and not _stands_alone(call, avals):
        return f"it needs the axis names around it ({', '.join(map(str, names))}), which are not there while tuning"
    return None


def _stands_alone(call: Call, avals: Sequence[Any]) -> bool:
    before = call.tunable.state.get(UNTRACEABLE)
    try:
        with outside_traces():
            outline(call, avals)
    except NoCandidateError:
        # It was only a question, so nothing has failed.
        call.tunable.state[UNTRACEABLE] = before
        return False
    return True


@contextlib.contextmanager
def _on_platform(platforms: Sequence[str]) -> Iterator[bool]:
    """Make a device of the program's platform the default one; yields whether there is one here."""
    devices = [device for platform in platforms for device in _local_devices(platform)]
    if default_device() in devices:
        yield True
    elif devices:
        with jax.default_device(devices[0]):
            yield True
    else:
        yield False


def _local_devices(platform: str) -> list[jax.Device]:
    try:
        return list(jax.local_devices(backend=platform))
    except RuntimeError:
        return []


def _as_candidate(results: Results) -> Candidate:
    return Candidate(results.best.id, results.best.hyperparams)


def _as_results(untraceable: Untraceable) -> Results:
    """Results of a call that was never tuned because none of its candidates can be traced."""
    call = untraceable.call
    return make_results(
        function=call.tunable.name,
        call=describe_arguments(call, untraceable.avals),
        candidates=untraceable.candidates,
        samples={},
        failures=untraceable.failures,
        device_kind=None,
        wall_s=None,
        separation=CONFIG.separation,
    )


def _replace(target: dict[Any, Any], source: dict[Any, Any]) -> None:
    target.clear()
    target.update(source)
