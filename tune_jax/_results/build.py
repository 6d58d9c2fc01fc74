"""Candidates, samples and failures to `Results`: every candidate ends as exactly one row."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType

from tune_jax._errors import ResultsError
from tune_jax._rank import Ranking, rank
from tune_jax._records import Candidate, Failure, Samples
from tune_jax._results.results import Results
from tune_jax._results.row import Row, make_row

_NO_GROUPS: Mapping[int, int] = MappingProxyType({})


def make_results(
    *,
    function: str,
    call: str,
    candidates: Sequence[Candidate],
    samples: Mapping[int, Samples],
    failures: Mapping[int, Failure],
    groups: Mapping[int, int] = _NO_GROUPS,
    device_kind: str | None,
    wall_s: float | None,
    separation: float,
    warnings: Sequence[str] = (),
) -> Results:
    """Rank the samples and give every candidate its row.

    `groups` maps a candidate's id to the id of the representative whose program it shares; a candidate that
    is not in it stands for itself. One without samples or failure of its own gets its representative's.

    Raises ResultsError if a candidate ends with neither samples nor a failure, or with both, if candidates of
    one program end differently, if an id belongs to no candidate, if samples hold no usable duration, or if
    they come from two clocks.
    """
    _check_ids(candidates, [*samples, *failures, *groups, *groups.values()])
    programs = _list_programs(candidates, groups)
    outcomes = {
        candidate.id: _find_outcome(candidate.id, groups.get(candidate.id, candidate.id), samples, failures)
        for candidate in candidates
    }
    _check_programs(outcomes, programs)
    ranked = _take_one_a_program(outcomes, programs)
    ranking = rank(ranked, separation=separation) if ranked else None
    rows = [_rank_row(c, outcomes[c.id], programs[c.id], ranking) for c in candidates]
    rows.sort(key=_place_row)
    return Results(function, tuple(rows), call, device_kind, wall_s, tuple(warnings))


def _check_ids(candidates: Sequence[Candidate], used: Collection[int]) -> None:
    known = [candidate.id for candidate in candidates]
    repeated = sorted({key for key in known if known.count(key) > 1})
    if repeated:
        raise ResultsError(f"candidate ids {repeated} come more than once, expected each id once")
    unknown = sorted(set(used) - set(known))
    if unknown:
        raise ResultsError(f"samples, failures or groups name ids {unknown}, expected ids of candidates only")


def _list_programs(candidates: Sequence[Candidate], groups: Mapping[int, int]) -> dict[int, tuple[int, ...]]:
    """Each candidate's id to the ids of all the candidates of its program, its own included, ascending."""
    members: dict[int, list[int]] = {}
    for key in sorted(candidate.id for candidate in candidates):
        members.setdefault(groups.get(key, key), []).append(key)
    return {key: tuple(program) for program in members.values() for key in program}


def _find_outcome(
    candidate_id: int, representative: int, samples: Mapping[int, Samples], failures: Mapping[int, Failure]
) -> Samples | Failure:
    own = _get_both(candidate_id, samples, failures)
    found = own or _get_both(representative, samples, failures)
    if len(found) != 1:
        what = "both samples and a failure" if found else "neither samples nor a failure"
        raise ResultsError(f"candidate {candidate_id} has {what}, expected exactly one of the two")
    return found[0]


def _get_both(key: int, samples: Mapping[int, Samples], failures: Mapping[int, Failure]) -> list[Samples | Failure]:
    return [found for found in (samples.get(key), failures.get(key)) if found is not None]


def _check_programs(outcomes: Mapping[int, Samples | Failure], programs: Mapping[int, tuple[int, ...]]) -> None:
    for key, program in programs.items():
        if outcomes[key] != outcomes[program[0]]:
            raise ResultsError(
                f"candidates {program[0]} and {key} share a program but not its samples or failure, "
                "expected the same for both; give those of the representative only"
            )


def _take_one_a_program(
    outcomes: Mapping[int, Samples | Failure], programs: Mapping[int, tuple[int, ...]]
) -> dict[int, Samples]:
    """The samples to rank: a program that many candidates share must weigh once in the pooled noise."""
    firsts = {program[0]: outcomes[program[0]] for program in programs.values()}
    return {key: outcome for key, outcome in firsts.items() if isinstance(outcome, Samples)}


def _rank_row(
    candidate: Candidate, outcome: Samples | Failure, program: tuple[int, ...], ranking: Ranking | None
) -> Row:
    first = program[0]
    shares_with = tuple(key for key in program if key != candidate.id)
    slowdown, tied = None, False
    if ranking is not None and first in ranking.median_ns:
        best = ranking.order[0]
        slowdown = ranking.median_ns[first] / ranking.median_ns[best]
        tied = first in ranking.ties or (first == best and candidate.id != best)
    return make_row(
        id=candidate.id,
        hyperparams=candidate.hyperparams,
        outcome=outcome,
        slowdown=slowdown,
        tied=tied,
        shares_with=shares_with,
    )


def _place_row(row: Row) -> tuple[bool, float, int]:
    return row.failure is not None, row.slowdown or 0.0, row.id
