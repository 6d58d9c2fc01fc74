"""Where a call's winner comes from: what this process knows, else a tuning; one tuning a key, whoever asks."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from tune_jax._alone import Alone, stand_alone, with_names
from tune_jax._build.gate import GATE
from tune_jax._call import Call
from tune_jax._config import CONFIG
from tune_jax._coordinator import find_coordinator
from tune_jax._errors import NoCandidateError
from tune_jax._failure import summarise
from tune_jax._inputs import values_in_key
from tune_jax._key import Key, default_device, describe_arguments, device_of, make_key, on_device
from tune_jax._outline import UNTRACEABLE, Untraceable, candidates_of, outline
from tune_jax._placement import placement_of
from tune_jax._recording import Note, Recording, current_recording
from tune_jax._records import Candidate, Tunable
from tune_jax._results import Results, make_results
from tune_jax._session import run_session
from tune_jax._shardings import committed_devices, trial_shardings
from tune_jax._sharing import is_common, place_of
from tune_jax._together import find_span, tune_together
from tune_jax._warn import warn_user


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
    call: Call,
    avals: Sequence[Any],
    given: Sequence[Any],
    *,
    platforms: Sequence[str] | None = None,
    devices: Sequence[jax.Device] = (),
) -> Candidate:
    """Return the candidate that this call shall run, tuning if nobody has.

    `platforms` and `devices` are those of the program that the call is in, where they are known.

    A call with nothing to choose is not tuned. One that cannot be run here takes the first candidate, with a warning.
    A thread that meets a key which it is tuning already takes the first candidate too. While a program is recorded,
    nothing is tuned, and the first candidate stands in for a winner that is not known.
    """
    if call.fixed and len(choices := candidates_of(call)) == 1:
        return choices[0]
    wanted = platforms or [default_device().platform]
    devices = devices or committed_devices(given)
    with _on_platform(wanted, devices) as here:
        obstacle = _find_obstacle(call, avals, given) if here else f"no {' or '.join(wanted)} device is here to tune on"
        alone = Alone(call, tuple(avals), obstacle) if obstacle else stand_alone(call, avals, devices)
        if (recording := current_recording()) is not None:
            return _note(recording, call, avals, given, alone)
        if alone.obstacle is None:
            results = tune_alone(alone, given, devices)
            return outline(call, avals).first if results is None else _as_candidate(results)
    first = outline(call, avals).first
    warn_user(f"{call.tunable.name}: {alone.obstacle}, so the first candidate, {dict(first.hyperparams)}, is used.")
    return first


def _note(recording: Recording, call: Call, avals: Sequence[Any], given: Sequence[Any], alone: Alone) -> Candidate:
    key = key_of(alone.call, alone.avals, given)
    known = None if alone.obstacle else known_results(memory_of(call.tunable), key)
    stand_in = outline(call, avals).first if known is None else _as_candidate(known)
    note = Note(alone.call, alone.avals, tuple(given), stand_in, alone.obstacle, place_of(call, avals))
    recording.add((key, alone.obstacle), note)
    return stand_in


def tune_once(call: Call, avals: Sequence[Any], given: Sequence[Any]) -> Results | None:
    """Return the results for a call, tuning if nobody has.

    None where this thread is tuning this key already, or cannot wait for it: a program being timed calls it back, or
    the thread that is tuning it waits, by way of others perhaps, for one that this thread is tuning.

    Under `jax.distributed` every process must ask for them, and all get those of process 0.

    Raises:
      NoCandidateError: every candidate failed; the latest results then show how.
      AgreementError: another process does not ask for them, has ended, or had an error of its own.
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
            if not _wait_for(key):
                return None
        else:
            if key not in memory.results:
                memory.keep(key, known)
            return known
    try:
        store = find_coordinator()
        results = run_session(call, avals, given) if store is None else tune_together(store, key, call, avals, given)
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


# What each thread that waits is waiting for.
_AWAITED: dict[threading.Thread, Key] = {}


def _wait_for(key: Key) -> bool:
    """Wait for a change, with the lock held; False, at once, where threads would wait for each other in a circle."""
    caller = threading.current_thread()
    if caller in _find_waiting(key):
        return False
    _AWAITED[caller] = key
    try:
        _CHANGED.wait()
    finally:
        del _AWAITED[caller]
    return True


def _find_waiting(key: Key) -> Iterator[threading.Thread]:
    """The thread that is tuning a key, the one tuning what that one waits for, and so on."""
    awaited: Key | None = key
    while awaited is not None and (thread := _RUNNING.get(awaited)) is not None:
        yield thread
        awaited = _AWAITED.get(thread)


def tune_alone(alone: Alone, given: Sequence[Any], devices: Sequence[jax.Device] = ()) -> Results | None:
    """The same, for a call that was taken out of a program; again under its mesh if some candidates need it."""
    results = tune_once(alone.call, alone.avals, given)
    failures = [] if results is None else [row.failure for row in results.rows if row.failure]
    again = with_names(alone, failures, devices)
    return results if again is alone else tune_once(again.call, again.avals, given)


def key_of(call: Call, avals: Sequence[Any], given: Sequence[Any]) -> Key:
    """The key of a call on the device that it would run on."""
    shardings = trial_shardings(call, avals, values_in_key(call, avals, given))
    placement = [s and placement_of(s, aval.shape) for s, aval in zip(shardings, avals, strict=True)]
    return make_key(call, avals, placement=placement, device=device_of(shardings).device_kind)


def _is_called_back(call: Call) -> bool:
    if not GATE.is_held_around_caller():
        return False
    warn_user(
        f"{call.tunable.name} is called back by a program that is being timed, and cannot be tuned meanwhile, so its "
        "first candidate is used; call it before, with arguments like these."
    )
    return True


def _find_obstacle(call: Call, avals: Sequence[Any], given: Sequence[Any]) -> str | None:
    return None if find_coordinator() is None else find_span(call, avals, given)


@contextlib.contextmanager
def _on_platform(platforms: Sequence[str], devices: Sequence[jax.Device]) -> Iterator[bool]:
    """Make a device of the program's the default one, of its platform at least; yields whether there is one here."""
    local = [device for platform in platforms for device in _local_devices(platform)]
    fitting = [device for device in devices if device in local] or local
    if not fitting:
        yield False
        return
    with on_device(default_device() if default_device() in fitting else fitting[0]):
        yield True


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
