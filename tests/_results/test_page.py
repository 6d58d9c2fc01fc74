"""A whole report, as printed and as a notebook shows it."""

from __future__ import annotations

import html.parser

import pytest

from tune_jax._records import Candidate, Failure, Samples
from tune_jax._results import Results, Table, compose, make_results


def build(times_ns, *, failures=None, clock="device", warnings=()):
    """Candidate i takes times_ns[i] a launch, or failed where that is None."""
    return make_results(
        function="attention",
        call="q: f32[8]",
        candidates=[Candidate(i, {"block": 64 * (i + 1), "warps": None}) for i in range(len(times_ns))],
        samples={i: Samples(clock, (t, t)) for i, t in enumerate(times_ns) if t is not None},
        failures={i: Failure("compile", "ValueError", "<too large>") for i, t in enumerate(times_ns) if t is None},
        device_kind="cpu",
        wall_s=1.5,
        separation=3.0,
        warnings=warnings,
    )


class Balance(html.parser.HTMLParser):
    """Counts open tags; a notebook would swallow what follows an unclosed one."""

    def __init__(self):
        super().__init__()
        self.open = []

    def handle_starttag(self, tag, attrs):
        if tag != "br":
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_printing_shows_caption_table_failures_and_comparison():
    assert str(build([38098e3, 76196e3, None])) == (
        "attention(q: f32[8]) on cpu: 3 candidates, 1 failed, device time, tuned in 1.5 s\n"
        "\n"
        "  id    block    warps    median [s]    spread    slowdown\n"
        "----  -------  -------  ------------  --------  ----------\n"
        "   0       64             3.8098e-02     ±0.0%       1.00x\n"
        "   1      128             7.6196e-02     ±0.0%       2.00x\n"
        "\n"
        "id 2 (block=192, warps=None): failed at compile: ValueError: <too large>\n"
        "\n"
        "The fastest setting runs 2.00 times as fast as the slowest."
    )


def test_all_failed_shows_no_table():
    assert str(build([None, None])).splitlines() == [
        "attention(q: f32[8]) on cpu: 2 candidates, 2 failed, tuned in 1.5 s",
        "",
        "ids 0, 1 (2 candidates): failed at compile: ValueError: <too large>",
        "",
        "No setting could be timed.",
    ]


def test_single_candidate_has_its_line():
    assert "1.0000e-07" in str(build([100.0]))


def test_no_rows_at_all_print():
    assert str(Results("f", ())) == "f: 0 candidates\n\nNo setting could be timed."


def test_host_clock_shows_in_the_print():
    assert "host clock" in str(build([1.0, 2.0], clock="host"))


def test_the_comparison_stays_the_last_line():
    text = compose(build([1.0, 1.0, None], warnings=["w"]), head=1)
    assert text.splitlines()[-1].startswith("The fastest setting runs")


def test_no_line_ends_in_blanks():
    lines = str(build([1.0, 1.0, 9.0, None], warnings=["w"])).splitlines()
    assert [line for line in lines if line != line.rstrip()] == []


def test_more_tables_come_before_the_failures():
    text = compose(build([1.0, None]), more=[Table("another")])
    assert text.index("1.0000e-09") < text.index("another") < text.index("failed at compile")


def test_repr_is_one_line():
    assert repr(build([100.0, 200.0, None])) == (
        "<Results of attention: 2 timed, 1 failed, best 1.0000e-07 s with {block=64, warps=None}>"
    )


def test_repr_without_a_best():
    assert repr(build([None])) == "<Results of attention: 0 timed, 1 failed, best none>"


@pytest.mark.parametrize("times_ns", [[1.0, 2.0, None], [None], [], [5.0]], ids=str)
def test_html_closes_every_tag(times_ns):
    parser = Balance()
    parser.feed(build(times_ns)._repr_html_())
    assert parser.open == []


def test_html_lists_the_failures_escaped():
    text = build([1.0, None])._repr_html_()
    assert "<li>id 1 (block=128, warps=None): failed at compile: ValueError: &lt;too large&gt;</li>" in text


def test_html_escapes_warnings():
    assert "Warning: a &lt; b &amp; c" in build([1.0], warnings=["a < b & c"])._repr_html_()


def test_html_has_the_winner_in_bold():
    assert "<b>1.0000e-09</b>" in build([1.0, 2.0])._repr_html_()


def test_ipython_shows_it_as_html():
    formatters = pytest.importorskip("IPython.core.formatters")
    results = build([1.0, 2.0])
    assert formatters.HTMLFormatter()(results) == results._repr_html_()
