"""Samples to an order, a noise and ties."""

from __future__ import annotations

import time

import numpy as np
import pytest

from tune_jax._errors import ResultsError, TuneError
from tune_jax._rank import (
    check_clocks,
    contenders,
    is_usable,
    rank,
    relative_spread,
    valid_durations,
)
from tune_jax._records import Samples


def device(*durations_ns):
    return Samples("device", durations_ns)


def host(*durations_ns):
    return Samples("host", durations_ns)


def draw(rng, *, median_ns, noise=0.01, count=5, outliers=0.0):
    durations_ns = median_ns * (1 + noise * rng.standard_normal(count))
    return Samples("device", tuple(np.where(rng.random(count) < outliers, 20 * durations_ns, durations_ns)))


# Order


def test_ranks_fastest_first():
    samples = {0: device(300.0), 1: device(100.0), 2: device(200.0)}
    assert rank(samples, separation=3.0).order == (1, 2, 0)


def test_ranks_by_median_not_mean():
    samples = {0: device(100.0, 101.0, 2000.0), 1: device(150.0, 151.0, 152.0)}
    assert rank(samples, separation=3.0).order == (0, 1)


def test_ranks_by_median_not_fastest_launch():
    samples = {0: device(50.0, 200.0, 201.0), 1: device(100.0, 101.0, 102.0)}
    assert rank(samples, separation=3.0).order == (1, 0)


def test_takes_the_mean_of_the_two_middle_samples():
    ranking = rank({7: device(1.0, 4.0, 2.0, 9.0)}, separation=3.0)
    assert ranking.median_ns == {7: 3.0}


def test_equal_medians_go_by_id():
    samples = {5: device(100.0, 100.0), 2: device(100.0, 100.0), 9: device(99.0, 101.0)}
    assert rank(samples, separation=3.0).order == (2, 5, 9)


def test_order_does_not_depend_on_the_order_of_the_mapping():
    samples = {key: device(100.0 + key % 3, 101.0 + key % 3) for key in range(9)}
    backwards = dict(reversed(samples.items()))
    assert rank(samples, separation=3.0) == rank(backwards, separation=3.0)


def test_order_does_not_depend_on_the_order_of_the_samples():
    first = rank({0: device(1.0, 2.0, 3.0), 1: device(2.0, 2.5, 2.2)}, separation=3.0)
    second = rank({0: device(3.0, 1.0, 2.0), 1: device(2.2, 2.0, 2.5)}, separation=3.0)
    assert first == second


def test_one_launch_in_twenty_being_slow_does_not_change_the_order():
    rng = np.random.default_rng(0)
    samples = {key: draw(rng, median_ns=1000.0 * (key + 1), count=20, outliers=0.05) for key in range(8)}
    assert rank(samples, separation=3.0).order == tuple(range(8))


@pytest.mark.parametrize("bad_ns", [float("nan"), float("inf"), float("-inf"), 0.0, -5.0])
def test_a_duration_that_is_no_time_is_left_out(bad_ns):
    ranking = rank({0: device(bad_ns, 100.0, bad_ns), 1: device(50.0, 50.0)}, separation=3.0)
    assert ranking.median_ns == {1: 50.0, 0: 100.0}


def test_single_candidate_wins():
    ranking = rank({3: device(10.0)}, separation=3.0)
    assert (ranking.order, ranking.ties) == ((3,), frozenset())


def test_ids_are_python_integers():
    ranking = rank({0: device(1.0), 1: device(1.0)}, separation=3.0)
    assert {type(key) for key in (*ranking.order, *ranking.ties, *ranking.error_ns)} == {int}


def test_samples_of_different_lengths_rank_together():
    samples = {0: device(*[100.0] * 30), 1: device(90.0, 90.0, 90.0), 2: device(95.0)}
    assert rank(samples, separation=3.0).order == (1, 2, 0)


# What cannot be ranked


def test_refuses_to_mix_clocks():
    with pytest.raises(ResultsError, match=r"two clocks \(device: candidates \[0, 2\]; host: candidates \[1\]\)"):
        rank({0: device(1.0), 1: host(1.0), 2: device(2.0)}, separation=3.0)


def test_mixed_clocks_error_says_what_to_do():
    with pytest.raises(ResultsError, match="time all candidates with the same clock"):
        check_clocks({0: device(1.0), 1: host(1.0)})


def test_host_clock_alone_ranks():
    assert rank({0: host(2.0), 1: host(1.0)}, separation=3.0).order == (1, 0)


def test_one_clock_passes_the_check():
    check_clocks({0: host(2.0), 1: host(1.0)})


def test_refuses_nothing():
    with pytest.raises(ResultsError, match="nothing to rank"):
        rank({}, separation=3.0)


def test_refuses_candidates_without_usable_samples_by_name():
    samples = {0: device(1.0), 3: device(float("nan")), 5: device(), 6: device(0.0, -1.0)}
    with pytest.raises(ResultsError, match=r"candidates \[3, 5, 6\] have no finite duration above zero"):
        rank(samples, separation=3.0)


def test_contenders_refuses_the_same():
    with pytest.raises(ResultsError, match=r"candidates \[1\]"):
        contenders({0: device(1.0), 1: device()}, separation=3.0, tie_tolerance=0.005)


def test_its_error_is_a_value_error_of_the_library():
    with pytest.raises(TuneError) as caught:
        rank({}, separation=3.0)
    assert isinstance(caught.value, ValueError)


def test_valid_durations_keep_their_order():
    samples = device(3.0, float("nan"), 1.0, 0.0, 2.0)
    assert valid_durations(samples).tolist() == [3.0, 1.0, 2.0]


def test_valid_durations_of_nothing_are_nothing():
    assert valid_durations(device()).tolist() == []


@pytest.mark.parametrize(
    ("durations_ns", "usable"),
    [((1.0,), True), ((float("nan"), 1.0), True), ((), False), ((0.0,), False), ((float("inf"),), False)],
)
def test_usable_means_one_possible_time(durations_ns, usable):
    assert is_usable(device(*durations_ns)) is usable


# Ties


def test_clearly_slower_is_no_tie():
    samples = {0: device(100.0, 101.0, 99.0), 1: device(200.0, 202.0, 198.0)}
    assert rank(samples, separation=3.0).ties == frozenset()


def test_difference_within_the_noise_is_a_tie():
    samples = {0: device(100.0, 103.0, 97.0), 1: device(101.0, 104.0, 98.0)}
    assert rank(samples, separation=3.0).ties == {1}


def test_the_winner_is_not_among_the_ties():
    samples = {key: device(100.0, 101.0) for key in range(4)}
    assert rank(samples, separation=3.0).ties == {1, 2, 3}


def test_more_samples_tell_a_small_difference_apart():
    few = {0: device(990.0, 1000.0, 1010.0), 1: device(1005.0, 1015.0, 1025.0)}
    many = {0: device(*[990.0, 1000.0, 1010.0] * 20), 1: device(*[1005.0, 1015.0, 1025.0] * 20)}
    assert (rank(few, separation=3.0).ties, rank(many, separation=3.0).ties) == ({1}, frozenset())


def test_a_wider_separation_ties_more():
    samples = {0: device(100.0, 101.0, 99.0), 1: device(103.0, 104.0, 102.0)}
    assert (rank(samples, separation=1.0).ties, rank(samples, separation=6.0).ties) == (frozenset(), {1})


def test_a_coarse_clock_does_not_make_a_hair_a_difference():
    samples = {0: device(*[100_000.0] * 5), 1: device(*[100_010.0] * 5)}
    assert rank(samples, separation=3.0).ties == {1}


def test_identical_samples_one_percent_apart_are_no_tie():
    samples = {0: device(*[100.0] * 5), 1: device(*[101.0] * 5)}
    assert rank(samples, separation=3.0).ties == frozenset()


# Noise


def test_standard_error_is_that_of_a_median():
    # Deviations 2, 1, 0, 1, 2: MAD 1; b_5 = 1.206; 1.2533 = sqrt(pi / 2).
    ranking = rank({0: device(98.0, 99.0, 100.0, 101.0, 102.0)}, separation=3.0)
    assert ranking.error_ns[0] == pytest.approx(1.2533 * 1.4826 * 1.206 * 1.0 / 5**0.5, rel=1e-4)


def test_standard_error_agrees_with_a_simulation():
    rng = np.random.default_rng(2)
    table = 1000 + 10 * rng.standard_normal((400, 25))
    ranking = rank({key: device(*row) for key, row in enumerate(table)}, separation=3.0)
    seen_ns = float(np.std(np.median(table, axis=1)))
    assert float(np.median(list(ranking.error_ns.values()))) == pytest.approx(seen_ns, rel=0.15)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 9, 10, 20])
def test_noise_is_unbiased_for_few_samples(count):
    rng = np.random.default_rng(count)
    spreads = [relative_spread(1000 + 10 * rng.standard_normal(count)) for _ in range(4000)]
    assert float(np.mean(spreads)) == pytest.approx(0.01, rel=0.05)


def test_noise_shrugs_off_a_launch_twenty_times_as_long():
    assert relative_spread(np.array([98.0, 99.0, 100.0, 101.0, 2000.0])) < 0.03


def test_one_sample_has_no_spread():
    assert relative_spread(np.array([100.0])) is None


def test_no_sample_has_no_spread():
    assert relative_spread(np.array([])) is None


def test_a_lucky_candidate_gets_the_noise_of_the_others():
    noisy = {key: device(95.0 + key, 100.0 + key, 105.0 + key) for key in range(1, 4)}
    ranking = rank({0: device(100.0, 100.0, 100.0), **noisy}, separation=3.0)
    assert ranking.error_ns[0] > 3.0


def test_a_noisy_candidate_keeps_its_own_noise():
    calm = {key: device(99.9, 100.0, 100.1) for key in range(1, 4)}
    ranking = rank({0: device(80.0, 100.0, 120.0), **calm}, separation=3.0)
    assert ranking.error_ns[0] > 50 * ranking.error_ns[1]


def test_a_candidate_with_one_sample_gets_the_noise_of_the_others():
    ranking = rank({0: device(100.0), 1: device(100.0, 101.0, 99.0, 100.5, 99.5)}, separation=3.0)
    assert ranking.error_ns[0] == pytest.approx(5**0.5 * ranking.error_ns[1])


def test_noise_is_relative_so_that_slow_candidates_do_not_drown_fast_ones():
    slow = {key: device(99e6, 100e6, 101e6) for key in range(1, 6)}
    ranking = rank({0: device(99.0, 100.0, 101.0), **slow}, separation=3.0)
    assert ranking.error_ns[0] < 3.0


# Contenders


def test_the_best_is_always_a_contender():
    decision = contenders({4: device(10.0, 10.0), 5: device(90.0, 90.0)}, separation=3.0, tie_tolerance=0.005)
    assert decision.ids == {4}


def test_settled_when_one_is_left():
    samples = {0: device(100.0, 101.0, 99.0), 1: device(200.0, 201.0, 199.0)}
    assert contenders(samples, separation=3.0, tie_tolerance=0.0).settled


def test_single_candidate_is_settled():
    assert contenders({0: device(100.0)}, separation=3.0, tie_tolerance=0.005).settled


def test_not_settled_while_two_are_within_the_noise():
    samples = {0: device(100.0, 103.0, 97.0), 1: device(101.0, 104.0, 98.0)}
    decision = contenders(samples, separation=3.0, tie_tolerance=0.005)
    assert (decision.ids, decision.settled) == ({0, 1}, False)


def test_settled_when_shown_tied():
    rng = np.random.default_rng(3)
    samples = {key: draw(rng, median_ns=1000.0, noise=0.002, count=30) for key in range(2)}
    decision = contenders(samples, separation=3.0, tie_tolerance=0.005)
    assert (decision.ids, decision.settled) == ({0, 1}, True)


def test_a_tighter_tolerance_is_not_yet_settled():
    rng = np.random.default_rng(3)
    samples = {key: draw(rng, median_ns=1000.0, noise=0.002, count=30) for key in range(2)}
    assert not contenders(samples, separation=3.0, tie_tolerance=0.0005).settled


def test_one_contender_with_few_samples_keeps_it_open():
    samples = {0: device(*[100.0] * 30), 1: device(*[100.0] * 30), 2: device(100.0)}
    assert not contenders(samples, separation=3.0, tie_tolerance=0.003).settled


def test_with_one_sample_each_those_nearby_stay():
    samples = {0: device(100.0), 1: device(115.0), 2: device(300.0)}
    decision = contenders(samples, separation=3.0, tie_tolerance=0.005)
    assert (decision.ids, decision.settled) == ({0, 1}, False)


def test_two_samples_of_which_one_is_an_outlier_do_not_drop_the_fastest():
    samples = {0: device(100.0, 2000.0), 1: device(150.0, 151.0), 2: device(152.0, 150.0)}
    assert 0 in contenders(samples, separation=3.0, tie_tolerance=0.005).ids


def test_the_truly_fastest_hardly_ever_drops_out():
    rng = np.random.default_rng(4)
    dropped = 0
    for _ in range(200):
        samples = {key: draw(rng, median_ns=1000.0 * (1 + 0.005 * key), outliers=0.05) for key in range(30)}
        dropped += 0 not in contenders(samples, separation=3.0, tie_tolerance=0.005).ids
    assert dropped <= 4


def test_most_of_a_wide_field_drops_out_after_five_samples():
    rng = np.random.default_rng(5)
    samples = {key: draw(rng, median_ns=1000.0 * (1 + 0.02 * key), outliers=0.05) for key in range(100)}
    assert len(contenders(samples, separation=3.0, tie_tolerance=0.005).ids) <= 6


def test_contenders_are_the_winner_and_its_ties():
    rng = np.random.default_rng(6)
    samples = {key: draw(rng, median_ns=1000.0 * (1 + 0.01 * key)) for key in range(20)}
    ranking = rank(samples, separation=3.0)
    decision = contenders(samples, separation=3.0, tie_tolerance=0.005)
    assert decision.ids == {ranking.order[0], *ranking.ties}


def test_four_hundred_candidates_take_milliseconds():
    rng = np.random.default_rng(7)
    samples = {key: draw(rng, median_ns=1000.0 + key, count=30) for key in range(400)}
    start_s = time.perf_counter()
    contenders(samples, separation=3.0, tie_tolerance=0.005)
    assert time.perf_counter() - start_s < 0.5
