"""Traces that cannot be read, and what reading does to the process."""

from __future__ import annotations

import gc
import subprocess
import sys
from pathlib import Path

import pytest
from jax.profiler import ProfileData

from tune_jax._errors import ProfileError
from tune_jax._measure.xplane import read_launches

RECORDED = Path(__file__).parents[1] / "data" / "traces" / "mosaic_two.xplane.pb"
SEEN = "jit_candidate_0, jit_candidate_1"
TPU_PLANE = """planes { name: "/device:TPU:0"
  event_metadata { key: 1 value { id: 1 name: "jit_b(123)" } }
  lines { name: "XLA Modules" events { metadata_id: 1 duration_ps: 5000 } } }"""


def read_text(text: str, order: list[str]) -> None:
    read_launches(ProfileData.text_proto_to_serialized_xspace(text), order)


def test_an_empty_trace_says_so() -> None:
    with pytest.raises(ProfileError, match=r"trace is empty \(0 bytes\)"):
        read_launches(b"", ["a"])


@pytest.mark.parametrize("size", [-1, -700, 1000, 100])
def test_a_truncated_trace_says_so(size: int) -> None:
    with pytest.raises(ProfileError, match=r"cannot be parsed; are its \d+ bytes all there"):
        read_launches(RECORDED.read_bytes()[:size], ["jit_candidate_0"])


def test_every_truncation_is_an_error_of_ours_or_a_shorter_reading() -> None:
    trace = RECORDED.read_bytes()
    for size in range(0, len(trace), 61):
        try:
            times = read_launches(trace[:size], ["jit_candidate_0", "jit_candidate_1"])
        except ProfileError:
            continue
        assert len(times) == 2


def test_bytes_that_are_no_trace_cannot_be_parsed() -> None:
    with pytest.raises(ProfileError, match="cannot be parsed"):
        read_launches(b"no trace" * 20, ["a"])


def test_a_trace_without_a_device_plane_names_the_planes_it_has() -> None:
    with pytest.raises(ProfileError, match=r"no device plane.*\['Task Environment'\].*host_tracer_level"):
        read_text('planes { name: "Task Environment" }', ["a"])


def test_a_trace_without_our_events_names_what_was_launched_and_what_was_seen() -> None:
    with pytest.raises(ProfileError, match=rf"no event of the launched programs \(a, b\), only of: {SEEN}\."):
        read_launches(RECORDED.read_bytes(), ["b", "a", "a"])


@pytest.mark.parametrize("plane", ["/device:GPU:0", "/device:TPU:0", "/host:CPU"])
def test_a_device_plane_without_events_is_one_without_ours(plane: str) -> None:
    with pytest.raises(ProfileError, match=r"no event of the launched programs \(a\), only of: none"):
        read_text(f'planes {{ name: "{plane}" }}', ["a"])


def test_a_tpu_trace_without_our_events_names_its_programs() -> None:
    with pytest.raises(ProfileError, match="only of: jit_b"):
        read_text(TPU_PLANE, ["jit_a"])


def test_an_error_lists_only_some_of_many_programs() -> None:
    with pytest.raises(ProfileError, match=r"\(p00, p01, p02, p03, p04 and 15 more\)"):
        read_text(TPU_PLANE, [f"p{index:02}" for index in range(20)])


def test_an_empty_order_has_no_launches() -> None:
    assert read_launches(b"", []) == []


def test_reading_survives_warnings_as_errors_from_the_first_read_on() -> None:
    code = (
        "import gc, pathlib, sys; from tune_jax._measure.xplane import read_launches\n"
        "trace = pathlib.Path(sys.argv[1]).read_bytes()\n"
        "for _ in range(3): print(len(read_launches(trace, ['jit_candidate_0'])), gc.collect() >= 0)"
    )
    command = [sys.executable, "-W", "error::DeprecationWarning", "-c", code, str(RECORDED)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, done.stdout) == (0, "1 True\n" * 3), done.stderr


def test_reading_again_after_a_collection_does_not_warn(recwarn: pytest.WarningsRecorder) -> None:
    for _ in range(3):
        read_launches(RECORDED.read_bytes(), ["jit_candidate_0"])
        gc.collect()
    assert len(recwarn) == 0
