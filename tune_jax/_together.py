"""One tuning by all processes of a job: each builds and runs the candidates, process 0 times them for all.

What process 0 tries and what it found go to all, so that they hold equal results and run the same program. Results
stay in the store: a process that has forgotten them, or was interrupted, finds them there.
"""

from __future__ import annotations

import base64
import collections
import dataclasses
import json
import threading
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from tune_jax._agree import LEADER, Round, Store, Topic
from tune_jax._call import Call
from tune_jax._config import CONFIG
from tune_jax._errors import AgreementError, ArgumentError
from tune_jax._jax import outside_traces
from tune_jax._key import Key, digest_of
from tune_jax._records import Candidate, Failure
from tune_jax._results import Results
from tune_jax._session import Session, finish_session, start_session
from tune_jax._shardings import spanning_arguments
from tune_jax._sharing import is_common
from tune_jax._space import list_candidates


@dataclasses.dataclass
class _Attempts:
    """Where this process is with a key: which of the keys of its digest it is, and how often its tuning has failed."""

    place: int
    failed: int = 0


# A function that is made anew at each call goes on where an equal one has left off.
_common: dict[Key, _Attempts] = {}
_places: collections.Counter[str] = collections.Counter()
_places_lock = threading.Lock()


def tune_together(store: Store, key: Key, call: Call, avals: Sequence[Any], given: Sequence[Any]) -> Results:
    """Return the results of a call, which all processes must ask for; in them, all rows may be failures.

    Raises:
      AgreementError: another process does not come to the same call, has ended, or had an error of its own.
      ArgumentError: inputs lie on devices of several processes.
      NoCandidateError: no candidate can be traced, here or on another process.
      ExampleError: the example arguments do not fit the call.
    """
    obstacle = find_span(call, avals, given)
    if obstacle is not None:
        raise ArgumentError(f"{call.tunable.name}: {obstacle}.")
    digest = digest_of(key, call)
    attempts = _attempts_at(key, call, digest)
    topic = Topic(f"{digest}/{attempts.place}/{attempts.failed}", str(key))
    round = Round(store, topic, timeout_s=CONFIG.agreement_timeout_s)
    try:
        with round:
            text = round.find_outcome()
            if text is None:
                work = _lead if store.process == LEADER else _follow
                text = work(round, call, avals, given)
            results = _read_results(call, text)
    finally:
        attempts.failed += round.has_failed
    attempts.failed += not results.timed
    return results


def find_span(call: Call, avals: Sequence[Any], given: Sequence[Any]) -> str | None:
    """Why a call on devices of several processes is not timed and what to do, None for one on this process's."""
    with outside_traces():
        spanning = spanning_arguments(call, avals, given)
    if not spanning:
        return None
    return (
        f"devices of several processes hold {' and '.join(spanning)}, and programs that all must launch together are "
        "not timed (give the call its hyperparameters, such as those that .tune finds for jax.ShapeDtypeStructs)"
    )


def _attempts_at(key: Key, call: Call, digest: str) -> _Attempts:
    """Keys of one digest, of functions that cannot be told to be equal, are told apart by which came first."""
    own: dict[Key, _Attempts] = call.tunable.state.setdefault("attempts", {})
    known = _common if is_common(key.call) else own
    with _places_lock:
        if key not in known:
            known[key] = _Attempts(_places[digest])
            _places[digest] += 1
        return known[key]


def _lead(round: Round, call: Call, avals: Sequence[Any], given: Sequence[Any]) -> str:
    round.hear_others("here")
    seed = call.tunable.seed
    candidates = _draw(call, seed)
    round.say("try", json.dumps({"seed": seed, "ids": [candidate.id for candidate in candidates]}))
    session = start_session(call, avals, given, candidates)
    for process, text in round.hear_others("failed").items():
        session.built.drop(_read_failures(text, process))
    return round.conclude(_pack({"seed": seed, "results": finish_session(session).to_dict()}))


def _follow(round: Round, call: Call, avals: Sequence[Any], given: Sequence[Any]) -> str:
    round.say("here")
    candidates = _draw_alike(call, **json.loads(round.hear("try", LEADER)))
    session = start_session(call, avals, given, candidates)
    round.say("failed", _pack_failures(session))
    return round.hear_outcome()


def _draw(call: Call, seed: int) -> list[Candidate]:
    asked = call.tunable
    return list_candidates(
        call.space, fixed=call.fixed_values, where=asked.where, sample_num=asked.sample_num, seed=seed
    )


def _draw_alike(call: Call, *, seed: int, ids: Sequence[int]) -> list[Candidate]:
    """The candidates that process 0 has drawn with its seed."""
    candidates = _draw(call, seed)
    own = {candidate.id for candidate in candidates}
    if own != set(ids):
        raise AgreementError(
            f"{call.tunable.name}: process {LEADER} tries {len(ids)} candidates, and `where` leaves {len(own)} here, "
            f"of which {len(own - set(ids))} are others; let `where` say the same on every process."
        )
    return candidates


def _read_results(call: Call, text: str) -> Results:
    """The results in a text; values of hyperparameters are this process's own, which a text may not hold."""
    outcome = _unpack(text)
    results = Results.from_dict(outcome["results"])
    candidates = _draw_alike(call, seed=outcome["seed"], ids=[row.id for row in results.rows])
    own = {candidate.id: dict(candidate.hyperparams) for candidate in candidates}
    rows = tuple(dataclasses.replace(row, hyperparams=own[row.id]) for row in results.rows)
    return dataclasses.replace(results, rows=rows)


def _pack_failures(session: Session) -> str:
    return _pack({str(id): dataclasses.asdict(failure) for id, failure in session.built.failures.items()})


def _read_failures(text: str, process: int) -> dict[int, Failure]:
    failures = {int(id): Failure(**fields) for id, fields in _unpack(text).items()}
    return {
        id: dataclasses.replace(failure, message=f"on process {process}: {failure.message}")
        for id, failure in failures.items()
    }


def _pack(value: Mapping[str, Any]) -> str:
    # A failure of each candidate has a traceback much like the others'.
    return base64.b64encode(zlib.compress(json.dumps(value).encode())).decode()


def _unpack(text: str) -> Any:
    return json.loads(zlib.decompress(base64.b64decode(text)))
