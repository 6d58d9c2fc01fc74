"""Candidates, samples and failures to one row each."""

from __future__ import annotations

import pytest

from tune_jax._errors import ResultsError
from tune_jax._records import Candidate, Failure, Samples
from tune_jax._results import make_results

FAILURE = Failure("compile", "ValueError", "too large")


def build(count, samples, *, failures=None, groups=None, separation=3.0):
    return make_results(
        function="f",
        call="",
        candidates=[Candidate(i, {"block": i}) for i in range(count)],
        samples=samples,
        failures=failures or {},
        groups=groups or {},
        device_kind="cpu",
        wall_s=1.0,
        separation=separation,
    )


def device(*durations_ns):
    return Samples("device", durations_ns)


def test_orders_by_median_not_mean():
    results = build(2, {0: device(100.0, 100.0, 9000.0), 1: device(200.0, 200.0, 200.0)})
    assert [row.id for row in results] == [0, 1]


def test_slowdown_is_relative_to_the_fastest_median():
    results = build(3, {0: device(300.0), 1: device(100.0), 2: device(250.0)})
    assert [row.slowdown for row in results] == [1.0, 2.5, 3.0]


def test_ties_with_the_winner_are_marked():
    results = build(3, {0: device(100.0, 101.0), 1: device(100.5, 101.5), 2: device(900.0, 901.0)})
    assert [row.tied for row in results] == [False, True, False]


def test_separation_decides_what_is_a_tie():
    samples = {0: device(100.0, 101.0, 99.0), 1: device(103.0, 104.0, 102.0)}
    assert [build(2, samples, separation=width)[1].tied for width in (1.0, 6.0)] == [False, True]


def test_every_candidate_has_one_row():
    results = build(5, {1: device(1.0), 3: device(2.0)}, failures={0: FAILURE, 2: FAILURE, 4: FAILURE})
    assert sorted(row.id for row in results) == [0, 1, 2, 3, 4]


def test_no_candidates_give_no_rows():
    assert len(build(0, {})) == 0


def test_all_failed_is_no_error():
    results = build(2, {}, failures={0: FAILURE, 1: FAILURE})
    assert ([row.id for row in results], results.timed) == ([0, 1], ())


def test_zero_and_nan_never_win():
    samples = {0: device(0.0, 50.0), 1: device(float("nan"), 40.0), 2: device(10.0)}
    assert build(3, samples).best.id == 2


def test_hyperparams_are_the_candidates():
    assert build(2, {0: device(1.0), 1: device(2.0)})[1].hyperparams == {"block": 1}


# Programs that several candidates share


def test_a_shared_program_gives_each_candidate_the_samples():
    results = build(3, {0: device(5.0, 6.0), 2: device(1.0, 1.0)}, groups={1: 0})
    assert [(row.id, row.samples_ns) for row in results] == [
        (2, (1.0, 1.0)),
        (0, (5.0, 6.0)),
        (1, (5.0, 6.0)),
    ]


def test_rows_name_those_they_share_with():
    results = build(4, {0: device(1.0), 2: device(9.0)}, groups={0: 0, 1: 0, 3: 0})
    assert {row.id: row.shares_with for row in results} == {0: (1, 3), 1: (0, 3), 3: (0, 1), 2: ()}


def test_a_candidate_with_the_winners_program_is_tied_with_it():
    results = build(2, {0: device(1.0)}, groups={1: 0})
    assert [(row.id, row.slowdown, row.tied) for row in results] == [(0, 1.0, False), (1, 1.0, True)]


def test_the_lowest_id_of_a_program_wins_whoever_represents_it():
    results = build(2, {1: device(1.0)}, groups={0: 1})
    assert [(row.id, row.tied) for row in results] == [(0, False), (1, True)]


def test_a_shared_program_fails_for_all():
    results = build(3, {2: device(1.0)}, failures={0: FAILURE}, groups={1: 0})
    assert [(row.id, row.failure) for row in results.failures] == [(0, FAILURE), (1, FAILURE)]


def test_samples_keyed_by_every_candidate_are_taken_too():
    results = build(2, {0: device(1.0), 1: device(1.0)}, groups={1: 0})
    assert [row.id for row in results.timed] == [0, 1]


def test_a_program_weighs_once_in_the_noise_however_many_share_it():
    # Of five programs three are noisy, so 10 is within the pooled noise; ten times 0 would make that calm.
    noisy = device(970.0, 1000.0, 1030.0)
    samples = {
        0: device(100.0, 100.1, 100.2),
        10: device(103.0, 103.1, 103.2),
        11: noisy,
        12: noisy,
        13: noisy,
    }
    results = build(14, samples, groups=dict.fromkeys(range(1, 10), 0))
    assert {row.id for row in results if row.tied} == {*range(1, 10), 10}


# What does not add up


def test_a_candidate_without_an_outcome_is_an_error_that_names_it():
    with pytest.raises(ResultsError, match="candidate 1 has neither samples nor a failure"):
        build(2, {0: device(1.0)})


def test_a_candidate_with_two_outcomes_is_an_error_that_names_it():
    with pytest.raises(ResultsError, match="candidate 0 has both samples and a failure"):
        build(1, {0: device(1.0)}, failures={0: FAILURE})


SHARED_ONCE = "candidates 0 and 1 share a program but not its samples or failure"


def test_candidates_of_one_program_with_other_samples_are_an_error():
    with pytest.raises(ResultsError, match=SHARED_ONCE):
        build(2, {0: device(1.0), 1: device(2.0)}, groups={1: 0})


def test_a_failure_of_one_candidate_of_a_timed_program_does_not_vanish():
    with pytest.raises(ResultsError, match=SHARED_ONCE):
        build(2, {0: device(1.0)}, failures={1: FAILURE}, groups={1: 0})


@pytest.mark.parametrize(
    ("samples", "failures", "groups"),
    [
        ({0: device(1.0), 7: device(1.0)}, {}, {}),
        ({0: device(1.0)}, {7: FAILURE}, {}),
        ({0: device(1.0)}, {}, {0: 7}),
    ],
)
def test_an_unknown_id_is_an_error_that_names_it(samples, failures, groups):
    with pytest.raises(ResultsError, match=r"ids \[7\]"):
        build(1, samples, failures=failures, groups=groups)


def test_a_repeated_candidate_id_is_an_error_that_names_it():
    with pytest.raises(ResultsError, match=r"ids \[4\] come more than once"):
        make_results(
            function="f",
            call="",
            candidates=[Candidate(4, {}), Candidate(4, {})],
            samples={4: device(1.0)},
            failures={},
            device_kind=None,
            wall_s=None,
            separation=3.0,
        )


def test_samples_without_a_usable_duration_are_an_error():
    with pytest.raises(ResultsError, match="make them failures before ranking"):
        build(1, {0: device(float("nan"))})


def test_two_clocks_are_an_error():
    with pytest.raises(ResultsError, match="two clocks"):
        build(2, {0: device(1.0), 1: Samples("host", (1.0,))})
