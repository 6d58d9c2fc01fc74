"""`tabulate` of whatever a person hands to it."""

from __future__ import annotations

import pytest

from tune_jax._errors import ArgumentError
from tune_jax._records import Candidate, Failure, KernelTime, Samples
from tune_jax._report import tabulate
from tune_jax._results import make_results

KERNELS = (KernelTime("dot", "a", 2, 300.0), KernelTime("add", "b", 4, 100.0))


def build(count=3, *, failed=(), kernels=KERNELS):
    """Candidate i takes 100 (i + 1) ns a launch, in two launches."""
    return make_results(
        function="attention",
        call="",
        candidates=[Candidate(i, {"block": 64 * (i + 1)}) for i in range(count)],
        samples={i: Samples("device", (100.0 * (i + 1),) * 2, (), kernels) for i in range(count) if i not in failed},
        failures={i: Failure("trace", "TypeError", "no") for i in failed},
        device_kind="cpu",
        wall_s=1.0,
        separation=3.0,
    )


class Tuned:
    """A function with results, as `tune` makes it."""

    __name__ = "attention"

    def __init__(self, results):
        self.results = results


class JittedTuned:
    """What `jax.jit` leaves of it: the entries of its dict."""

    def __init__(self, timing_results):
        self.timing_results = timing_results


def ids_of(text):
    return [line.split()[0] for line in text.splitlines() if line.startswith(("   ", " ..."))]


def test_takes_results():
    assert tabulate(build()) == str(build())


def test_takes_a_tuned_function():
    assert tabulate(Tuned(build())) == str(build())


def test_takes_timing_results():
    text = tabulate(build().timing_results())
    assert ids_of(text) == ["0", "1", "2"]
    assert text.splitlines()[-1] == "The fastest setting runs 3.00 times as fast as the slowest."


def test_takes_a_jitted_tuned_function():
    held = build().timing_results()
    assert tabulate(JittedTuned(held)) == tabulate(held)


def test_takes_a_slice():
    assert ids_of(tabulate(build()[1:])) == ["1", "2"]


def test_before_the_first_call_it_says_so():
    assert tabulate(Tuned(None)) == "Nothing has been tuned yet: call attention, or its .tune(...), first."


@pytest.mark.parametrize("target", [None, {}, JittedTuned({})], ids=["none", "dict", "jitted"])
def test_nothing_at_all_says_so_as_well(target):
    assert tabulate(target).startswith("Nothing has been tuned yet: call the function")


@pytest.mark.parametrize("target", [3, "attention", len, Tuned(5), [1]], ids=["int", "str", "plain", "odd", "list"])
def test_anything_else_is_an_error_that_says_what_to_pass(target):
    with pytest.raises(ArgumentError, match="expected a tuned function, its results or its timing_results"):
        tabulate(target)


def test_a_dict_of_other_things_is_an_error_that_names_their_types():
    with pytest.raises(ArgumentError, match="values of type float, str, expected the TimingResult"):
        tabulate({0: 1.0, 1: "x"})


def test_its_error_is_a_type_error():
    with pytest.raises(TypeError):
        tabulate(3)


def test_head_and_tail_leave_dots_between():
    assert ids_of(tabulate(build(9), head=2, tail=1)) == ["0", "1", "...", "8"]


def test_failures_are_listed_whatever_the_ends():
    assert "id 4 (block=320): failed at trace: TypeError: no" in tabulate(build(9, failed=(4,)), head=1)


def test_the_comparison_is_of_all_rows_whatever_the_ends():
    assert "9.00 times" in tabulate(build(9), head=2)


def test_a_wrong_count_is_an_error():
    with pytest.raises(ArgumentError, match="head=-1"):
        tabulate(build(), head=-1)


def test_takes_the_formats_of_the_library():
    assert "|   id |   block |" in tabulate(build(), tablefmt="github")


def test_html_is_what_a_notebook_shows():
    assert tabulate(build(), tablefmt="html") == build()._repr_html_()


def test_a_wrong_format_is_an_error():
    with pytest.raises(ArgumentError, match="tablefmt='pdf'"):
        tabulate(build(), tablefmt="pdf")


def test_kernels_come_after_the_ranking():
    text = tabulate(build(), kernels=True)
    assert text.index("median [s]") < text.index("per launch") < text.index("The fastest")


def test_kernels_are_left_out_unless_asked_for():
    assert "per launch" not in tabulate(build())


def test_kernels_in_html_have_a_table_of_their_own():
    assert tabulate(build(), kernels=True, tablefmt="html").count("<table>") == 2


def test_kernels_follow_the_ends():
    text = tabulate(build(9), kernels=True, head=1, tail=1)
    assert ids_of(text) == ["0", "...", "8", "0", "0", "...", "8", "8"]


def test_no_kernels_say_so():
    assert "Kernels: none were seen" in tabulate(build(kernels=()), kernels=True)
