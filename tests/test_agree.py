"""Processes that agree: threads stand for processes here, and a dict for the store."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from tune_jax._agree import Round, Topic
from tune_jax._errors import AgreementError, NoCandidateError

TOPIC = Topic("a1/0/0", "f(x)")
SHORT_S = 0.3
LONG_S = 30.0


@pytest.fixture
def stores(make_stores) -> list[Any]:
    return make_stores(3)


@pytest.fixture(autouse=True)
def no_threads_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    left = [t for t in set(threading.enumerate()) - before if t.name == "tune-jax-heartbeat" and t.is_alive()]
    assert left == []


def in_round(store: Any, action: Callable[[Round], Any], topic: Topic = TOPIC, timeout_s: float = LONG_S) -> Any:
    with Round(store, topic, timeout_s=timeout_s) as round:
        return action(round)


def run_all(*actions: Callable[[], Any]) -> list[Any]:
    """What each action returns or raises, all run at the same time."""
    with concurrent.futures.ThreadPoolExecutor(len(actions)) as pool:
        running = [pool.submit(action) for action in actions]
        return [future.exception(LONG_S) or future.result() for future in running]


# Saying and hearing


def test_what_one_says_another_hears_before_and_after(stores):
    def lead(round: Round) -> list[str]:
        round.say("first", "one")
        time.sleep(0.05)
        round.say("second", "two")
        return round.hear("back", 1)

    def follow(round: Round) -> list[str]:
        time.sleep(0.02)
        heard = [round.hear("first", 0), round.hear("second", 0)]
        round.say("back", "three")
        return heard

    assert run_all(lambda: in_round(stores[0], lead), lambda: in_round(stores[1], follow)) == ["three", ["one", "two"]]


def test_the_others_are_heard_by_process(stores):
    heard = run_all(
        lambda: in_round(stores[0], lambda round: round.hear_others("here")),
        lambda: in_round(stores[1], lambda round: round.say("here", "b")),
        lambda: in_round(stores[2], lambda round: round.say("here", "c")),
    )
    assert heard == [{1: "b", 2: "c"}, None, None]


def test_rounds_of_other_topics_do_not_mix(stores):
    other = Topic("b2/0/0", "g(x)")
    with Round(stores[0], TOPIC, timeout_s=LONG_S) as one, Round(stores[0], other, timeout_s=LONG_S) as two:
        two.say("word", "of g")
        one.say("word", "of f")
        assert in_round(stores[1], lambda round: round.hear("word", 0)) == "of f"
        assert in_round(stores[1], lambda round: round.hear("word", 0), other) == "of g"


# The outcome


def test_all_see_the_outcome(stores):
    def follow(store: Any) -> str:
        return in_round(store, lambda round: round.hear_outcome())

    outcomes = run_all(
        lambda: in_round(stores[0], lambda round: round.conclude("64")),
        lambda: follow(stores[1]),
        lambda: follow(stores[2]),
    )
    assert outcomes == ["64", "64", "64"]


def test_the_first_outcome_stands(stores):
    assert in_round(stores[0], lambda round: round.conclude("64")) == "64"
    assert in_round(stores[0], lambda round: round.conclude("128")) == "64"


def test_an_outcome_is_found_later(stores):
    assert in_round(stores[1], lambda round: round.find_outcome()) is None
    in_round(stores[0], lambda round: round.conclude(""))
    assert in_round(stores[1], lambda round: round.find_outcome()) == ""


def test_only_the_outcome_is_kept(stores):
    def lead(round: Round) -> None:
        round.say("try", "0 1 2")
        round.conclude("64")

    in_round(stores[0], lead)
    assert list(stores[0].shelf.texts) == ["tune_jax/rounds/a1/0/0/outcome"]


def test_a_round_that_ends_well_has_not_failed(stores):
    round = Round(stores[0], TOPIC, timeout_s=LONG_S)
    with round:
        round.conclude("64")
    assert round.has_failed is False


# Errors


def fail(error: BaseException) -> Callable[[Round], Any]:
    def raise_it(round: Round) -> None:
        raise error

    return raise_it


def test_an_error_of_one_ends_the_waiting_of_the_others(stores):
    came = run_all(
        lambda: in_round(stores[0], lambda round: round.hear_others("here")),
        lambda: in_round(stores[1], fail(OSError("disk is full"))),
        lambda: in_round(stores[2], lambda round: round.hear("try", 0)),
    )
    assert [type(error) for error in came] == [AgreementError, OSError, AgreementError]
    assert str(came[0]) == str(came[2]) == "process 1 could not tune [f(x)]: OSError: disk is full"


@pytest.mark.parametrize("error", [KeyboardInterrupt(), SystemExit(3)])
def test_leaving_early_is_told_too(stores, error):
    with pytest.raises(type(error)):
        in_round(stores[0], fail(error))
    with pytest.raises(AgreementError, match=rf"process 0 could not tune \[f\(x\)\]: {type(error).__name__}"):
        in_round(stores[1], lambda round: round.hear("try", 0))


@pytest.mark.parametrize("error", [NoCandidateError("none works"), AgreementError("process 1 waited")])
def test_errors_of_the_library_stay_what_they_are(stores, error):
    with pytest.raises(type(error)):
        in_round(stores[1], fail(error))
    with pytest.raises(type(error), match=f"^{error}$"):
        in_round(stores[0], lambda round: round.hear_others("here"))


def test_an_error_after_the_outcome_changes_nothing_for_the_others(stores):
    round = Round(stores[1], TOPIC, timeout_s=LONG_S)
    in_round(stores[0], lambda round: round.conclude("64"))
    with pytest.raises(KeyboardInterrupt), round:
        raise KeyboardInterrupt
    assert round.has_failed is False
    assert in_round(stores[2], lambda round: round.hear_outcome()) == "64"


def test_a_round_knows_that_it_failed_by_its_own_error(stores):
    round = Round(stores[0], TOPIC, timeout_s=LONG_S)
    with pytest.raises(OSError, match="disk"), round:
        raise OSError("disk")
    assert round.has_failed is True


def test_a_round_knows_that_it_failed_by_anothers_error(stores):
    with pytest.raises(OSError, match="disk"):
        in_round(stores[1], fail(OSError("disk")))
    round = Round(stores[0], TOPIC, timeout_s=LONG_S)
    with pytest.raises(AgreementError), round:
        round.find_outcome()
    assert round.has_failed is True


def test_a_round_knows_that_it_failed_if_both_had_an_error(stores):
    with pytest.raises(OSError, match="disk"):
        in_round(stores[1], fail(OSError("disk")))
    round = Round(stores[0], TOPIC, timeout_s=LONG_S)
    with pytest.raises(ValueError, match="own"), round:
        raise ValueError("own")
    assert round.has_failed is True


def test_results_cannot_be_concluded_over_an_error(stores):
    with pytest.raises(OSError, match="disk"):
        in_round(stores[1], fail(OSError("disk")))
    with pytest.raises(AgreementError, match="process 1 could not tune"):
        in_round(stores[0], lambda round: round.conclude("64"))


# Waiting


def test_who_never_comes_is_an_error_in_time(stores):
    started = time.monotonic()
    with pytest.raises(AgreementError) as caught:
        in_round(stores[0], lambda round: round.hear_others("here"), timeout_s=SHORT_S)
    assert SHORT_S <= time.monotonic() - started < 4 * SHORT_S
    assert str(caught.value) == (
        "process 0 waited 0.3 s for process 1 to tune together [f(x)]. It came to no tuned call: it went another way, "
        "is late, or has ended. Every process must make the same tuned calls: let all make this one, or give its "
        "hyperparameters in the call, so that it is not tuned. If that process is only late, raise "
        "CONFIG.agreement_timeout_s."
    )


def test_who_comes_late_gets_the_same_error_at_once(stores):
    with pytest.raises(AgreementError) as early:
        in_round(stores[0], lambda round: round.hear_others("here"), timeout_s=SHORT_S)
    with pytest.raises(AgreementError) as late:
        in_round(stores[1], lambda round: round.find_outcome())
    assert str(late.value) == str(early.value)


ELSEWHERE = "It came to another call: "
ALIKE = "It came to a call that reads the same, but whose function, grid or static values differ."


@pytest.mark.parametrize(
    ("words", "on_0", "on_1"),
    [("g(x)", f"{ELSEWHERE}[g(x)].", f"{ELSEWHERE}[f(x)]."), ("f(x)", ALIKE, ALIKE)],
    ids=["another call", "another digest"],
)
def test_processes_at_different_keys_are_told_so(stores, words, on_0, on_1):
    other = Topic("b2/0/0", words)
    errors = run_all(
        lambda: in_round(stores[0], lambda round: round.hear_others("here"), timeout_s=SHORT_S),
        lambda: in_round(stores[1], lambda round: round.hear("try", 0), other, timeout_s=2 * SHORT_S),
    )
    assert [type(error) for error in errors] == [AgreementError, AgreementError]
    assert f"process 0 waited 0.3 s for process 1 to tune together [f(x)]. {on_0} Every" in str(errors[0])
    assert f"process 1 waited 0.6 s for process 0 to tune together [{words}]. {on_1} Every" in str(errors[1])


def test_who_works_is_waited_for_beyond_the_timeout(stores):
    def work(round: Round) -> None:
        time.sleep(4 * SHORT_S)
        round.say("done", "at last")

    heard = run_all(
        lambda: in_round(stores[0], lambda round: round.hear("done", 1), timeout_s=SHORT_S),
        lambda: in_round(stores[1], work, timeout_s=SHORT_S),
    )
    assert heard == ["at last", None]


def test_who_came_and_fell_silent_is_an_error(stores):
    stores[1].put("tune_jax/signs/1/a1/0/0", "7 f(x)")
    with pytest.raises(AgreementError, match="It came, but gives no more signs of life: it has ended, or hangs"):
        in_round(stores[0], lambda round: round.hear("here", 1), timeout_s=SHORT_S)


# The store out of reach


def test_a_store_out_of_reach_is_an_error_that_says_so(stores):
    stores[1].is_cut = True
    with pytest.raises(AgreementError) as caught:
        in_round(stores[1], lambda round: round.say("here"))
    assert str(caught.value) == (
        "process 1 cannot reach the coordinator of jax.distributed, which process 0 runs, to tune [f(x)]: connection "
        "refused. That process may have ended; see what it printed last."
    )


def test_a_store_that_goes_out_of_reach_ends_the_waiting(stores):
    def cut() -> None:
        time.sleep(0.1)
        stores[1].is_cut = True

    came, _ = run_all(lambda: in_round(stores[1], lambda round: round.hear("try", 0), timeout_s=1.0), cut)
    assert isinstance(came, AgreementError)


def test_an_error_is_not_lost_where_it_cannot_be_told(stores):
    stores[1].is_cut = True
    with pytest.raises(OSError, match="disk"):
        in_round(stores[1], fail(OSError("disk")))
