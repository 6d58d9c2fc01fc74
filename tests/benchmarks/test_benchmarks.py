"""Each benchmark runs at its smallest size, and its arithmetic is right."""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pathlib
import subprocess
import sys
import types

import jax
import pytest

from tune_jax._records import KernelTime

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
SCRIPTS = sorted(path.name for path in BENCHMARKS.glob("[a-z]*.py"))


@pytest.fixture
def load(monkeypatch):
    """Imports a script as a module; scripts find each other in their own folder."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module


@pytest.fixture
def run_main(load, monkeypatch, capsys, tmp_path):
    """Runs a script's main in this process; returns what it printed and its report."""

    def run(name, *arguments):
        report = tmp_path / "report.json"
        monkeypatch.setattr(sys, "argv", [name, *arguments, "--out", str(report)])
        load(name).main()
        return capsys.readouterr().out, json.loads(report.read_text())

    return run


@pytest.fixture
def fake_peer(tmp_path):
    """A folder with another package of our name, which tunes nothing and takes the first choices."""
    package = tmp_path / "peer" / "tune_jax"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(
        "def tune(function, hyperparams):\n"
        "    first = {name: choices[0] for name, choices in hyperparams.items()}\n"
        "    def tuned(*args): return function(*args, **first)\n"
        "    tuned.optimal_hyperparams, tuned.timing_results = first, {0: None}\n"
        "    return tuned\n"
    )
    return package.parent


def test_there_is_a_line_for_every_script():
    text = (BENCHMARKS / "README.md").read_text()
    assert [name for name in SCRIPTS if name not in text] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_docstring_shows_how_to_run_it(name, load):
    assert f"python benchmarks/{name}" in load(name.removesuffix(".py")).__doc__


# Tuning time


def test_tuning_time_of_both_sides(run_main, fake_peer):
    printed, report = run_main("tuning_time", "--case", "tiny", "--peer", str(fake_peer), "--repeats", "1")
    assert "tiny: ours/peer " in printed
    ours, peer = report["runs"]
    assert (ours["side"], ours["candidates"], ours["programs"], ours["failed"]) == ("ours", 4, 4, 0)
    assert (peer["side"], peer["timed"]) == ("peer", 1)
    assert ours["missing_hooks"] == []
    parts = dict(ours["seconds"])
    for part in ("of timing, reading traces", "compiling, all threads"):
        assert parts.pop(part) > 0
    assert sum(parts.values()) == pytest.approx(ours["wall_s"])
    assert all(seconds >= 0 for seconds in parts.values())
    assert parts["the rest"] < 0.2 * ours["wall_s"]


def test_another_package_than_the_one_meant_is_refused(load, fake_peer):
    tuning_time = load("tuning_time")
    with pytest.raises(SystemExit, match="meant to import peer"):
        tuning_time._import_tuner("peer", str(fake_peer))
    assert tuning_time._import_tuner("ours", str(fake_peer)) is sys.modules["tune_jax"]


def test_our_checkout_is_not_on_the_peers_path(load, monkeypatch):
    tuning_time = load("tuning_time")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(BENCHMARKS.parent), "/peer", "/other"]))
    assert list(tuning_time._import_path("peer", "/peer")) == ["/peer", "/peer", "/other"]
    assert list(tuning_time._import_path("ours", "/peer")) == [str(BENCHMARKS.parent), "/other"]


def test_breakdown_tells_first_runs_from_timed_launches(load):
    tuning_time = load("tuning_time")
    calls = [
        tuning_time.Span(*call)
        for call in [
            ("inputs", 1.0, 1.5),
            ("lowering", 2.0, 3.0),
            ("compiling", 2.5, 6.0),
            ("compiling", 3.0, 6.0),
            ("attempt", 6.0, 6.5),
            ("build", 2.0, 7.0),
            ("attempt", 7.2, 7.4),
            ("reading", 7.5, 7.6),
            ("timing", 7.0, 8.0),
            ("session", 1.0, 8.5),
        ]
    ]
    assert tuning_time.Spans(calls).break_down(0.0, 10.0) == pytest.approx(
        {
            "before": 1.0,
            "inputs": 0.5,
            "lowering": 1.0,
            "waiting for compiles": 3.5,
            "first runs": 0.5,
            "timing": 1.0,
            "winner": 1.5,
            "the rest": 1.0,
            "of timing, reading traces": 0.1,
            "compiling, all threads": 6.5,
        }
    )


def test_quickstart_is_read_without_a_tuner(load):
    before = sys.modules.get("tune_jax")
    case = load("_cases").load_case("quickstart")
    assert sys.modules.get("tune_jax") is before
    assert case.size >= 16
    assert len(case.settings()) == case.size
    assert set(case.settings()[0]) == set(case.hyperparams)


def test_a_wrong_result_is_an_error(load):
    case = load("_cases").load_case("tiny")
    right = case.function(*case.inputs, parts=2)
    assert case.check(right) <= case.tolerance
    with pytest.raises(ValueError, match="the result is wrong by"):
        case.check(right + 1)
    with pytest.raises(ValueError, match="the result is wrong by nan"):
        case.check(right * float("nan"))


# Winner quality


def test_winner_quality(run_main):
    printed, report = run_main("winner_quality", "--case", "tiny", "--tunings", "2", "--launches", "5")
    assert "tiny: worst winner/fastest of 2 tunings " in printed
    assert len(report["ratios"]) == len(report["tunings"]) == 2
    assert min(report["ratios"]) >= 1
    assert set(report["medians_ns"]) == {"0", "1", "2", "3"}


# Trace agreement


def test_our_side_of_the_trace_agreement(run_main):
    printed, report = run_main(
        "trace_agreement", "--only", "ours", "--programs", "graph", "--launches", "3", "--repeats", "1"
    )
    (row,) = report["programs"]
    assert row["ratio"] is None
    assert len(row["runs"][0]["sums_ns"]) == 3
    assert row["runs"][0]["kernels"] >= 8
    assert "kernels" in printed


def _fake_run(side, median_ns, result=1.0):
    extra = {"graph_share": 1.0} if side == "ours" else {"mode": "back to back"}
    return {"side": side, "median_ns": median_ns, "kernels": 7, "result": result, **extra}


def test_agreement_is_the_ratio_of_medians(load, capsys):
    ours = [_fake_run("ours", ns) for ns in (101.0, 103.0, 900.0)]
    cupti = [_fake_run("cupti", ns) for ns in (99.0, 100.0, 7.0)]
    row = load("trace_agreement")._compare("graph", [*ours, *cupti, {"side": "cupti", "error": "died"}])
    assert row["ratio"] == pytest.approx(103 / 99)
    assert row["faults"] == 1
    assert "MISSED" in capsys.readouterr().out


def test_different_results_are_not_compared(load):
    with pytest.raises(SystemExit, match="different results"):
        load("trace_agreement")._compare("graph", [_fake_run("ours", 1.0), _fake_run("cupti", 1.0, result=2.0)])


@pytest.mark.gpu
def test_cupti_and_the_trace_agree_on_a_chain_of_kernels(tmp_path):
    # A process of its own: this one may have started the other profiler already.
    report = tmp_path / "report.json"
    command = [sys.executable, str(BENCHMARKS / "trace_agreement.py"), "--programs", "graph", "--repeats", "1"]
    # This process holds most of the device's memory, so the others must take only what they need.
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    subprocess.run([*command, "--out", str(report)], check=True, timeout=150, env=environment)
    (row,) = json.loads(report.read_text())["programs"]
    assert row["ratio"] == pytest.approx(1, abs=0.05)


# Two GPUs


@pytest.mark.gpu
def test_two_gpus_are_timed_by_their_slowest_and_tune_together(tmp_path):
    if len(jax.devices()) < 2:
        pytest.skip("needs two GPUs")
    report = tmp_path / "report.json"
    command = [sys.executable, str(BENCHMARKS / "two_gpus.py"), "--out", str(report)]
    environment = os.environ | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    subprocess.run(command, check=True, timeout=170, env=environment)
    cases = {case.pop("case"): case for case in json.loads(report.read_text())["cases"]}
    assert [case["within"] for name, case in cases.items() if name.startswith("sharded")] == [True] * 3
    assert all(case.get("right", True) for case in cases.values())
    assert cases["two processes"]["same results"]
    assert cases["inputs on the second device"]["allocations on the first"] == 0


# Attention


@pytest.fixture
def tiny_shape(load):
    return load("_attention").Shape(1, 24, 24, 2, 1, 16, True, dtype="float32")


@pytest.mark.usefixtures("quick_tuning")
def test_attention_times_and_checks_a_row(run_main, load, monkeypatch):
    # Put back what the script sets for its process.
    monkeypatch.setattr(sys.modules["tune_jax"].CONFIG, "max_measure_s", 1.0)
    monkeypatch.setattr(load("attention"), "ROUNDS", 1)
    printed, report = run_main("attention", "--quick", "--rows", "training")
    (row,) = report["rows"]
    assert set(row["rates"]) == {"default", "xla", "jax_xla"}
    assert row["ratios"] == {"best / default": 1.0}  # one program: the default is xla
    assert max(row["errors"].values()) < 1e-5
    assert "best / default: worst of 1 rows 1.000 (at least 0.97: met)" in printed


def test_attention_work_is_counted_by_the_convention_of_the_targets(load):
    shapes = load("_attention")
    attention = load("attention")
    full = shapes.Shape(2, 8, 8, 4, 2, 16)
    assert full.forward_flops == 4 * 2 * 4 * 8 * 8 * 16
    assert shapes.Shape(2, 8, 8, 4, 2, 16, True).forward_flops * 2 == full.forward_flops
    assert shapes.Shape(1, 4, 4, 1, 1, 1, True, window=2).forward_flops == 4 * (1 + 2 + 2 + 2)
    assert attention.Row("training", full).rate(1e-12) == 3.5 * full.forward_flops
    assert attention.Row("decoding", full).rate(1e-9) == pytest.approx(2 * 2 * 8 * 2 * 16 * 2)


def test_a_wrong_attention_is_marked(load, tiny_shape):
    attention = load("attention")
    row = attention.Row("forward", tiny_shape)
    programs = {"xla": lambda q, k, v, dout: v.repeat(2, 2), "default": lambda q, k, v, dout: q * float("nan")}
    errors = attention._check(row, programs, tiny_shape.draw())
    assert attention._wrong(row, {"errors": errors}) == ["xla", "default"]


def test_ours_and_jaxs_kernel_get_the_same_settings(load, tiny_shape, monkeypatch):
    attention = load("attention")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    heads = dataclasses.replace(tiny_shape, kv_heads=2)
    for kind, count in (("forward", 36), ("training", 18)):
        labels = list(attention._programs(attention.Row(kind, heads), {}))
        ours, theirs = (
            [x.partition(" ")[2] for x in labels if x.startswith(f"{n} ")] for n in ("triton", "jax_triton")
        )
        assert len(ours) == count
        assert ours == theirs
    grouped = attention._programs(attention.Row("forward", tiny_shape), {})
    assert not any(label.startswith("jax_triton") for label in grouped)


@pytest.mark.usefixtures("quick_tuning")
def test_attention_table_is_made_and_completed(run_main, load, monkeypatch, tiny_shape):
    script = load("tune_attention")
    keys = [script.Key(walk, tiny_shape) for walk in ("forward", "backward")]
    monkeypatch.setattr(script, "KEYS", keys)
    printed, first = run_main("tune_attention", "--only", "^forward")
    assert "1/1 forward B1 T24 H2/1 D16 causal: xla" in printed
    printed, table = run_main("tune_attention")
    assert "1/2 forward B1 T24 H2/1 D16 causal: there already" in printed
    assert table["entries"][:1] == first["entries"]
    entries = script.tables.parse_table(table)
    assert [(entry.walk, entry.situation) for entry in entries] == [(key.walk, key.situation) for key in keys]
    assert [entry["fastest"] for entry in table["entries"]] == ["xla", "xla"]


def test_attention_table_of_another_device_is_not_completed(load, tmp_path):
    script = load("tune_attention")
    table = script._load(tmp_path / "table.json", "one")
    script._write(tmp_path / "table.json", table)
    assert script._load(tmp_path / "table.json", "one") == table
    with pytest.raises(SystemExit, match="for one; this is another"):
        script._load(tmp_path / "table.json", "another")
    assert [path.name for path in tmp_path.iterdir()] == ["table.json"]


def test_keys_of_the_attention_table_are_distinct_and_two_dozen(load):
    keys = load("tune_attention").KEYS
    assert len({(key.walk, key.situation) for key in keys}) == len(keys)
    assert 24 <= len(keys) <= 28


def _row(dkv, dq, keys_ns, queries_ns):
    kernels = [("x_backward_keys_1", keys_ns), ("x_backward_queries_1", queries_ns), ("fusion", 5.0)]
    found = tuple(KernelTime(name, "", 2, ns) for name, ns in kernels if ns is not None)
    tiles = {"block_q_dkv": dkv, "block_q_dq": dq}
    return types.SimpleNamespace(hyperparams={"implementation": "pallas_triton", **tiles}, kernels=found)


def test_each_walk_of_the_backward_pass_gets_the_tiles_of_its_fastest_kernel(load):
    rows = [_row(64, 32, 10.0, 9.0), _row(32, 64, 11.0, 7.0), _row(16, 16, 12.0, 12.0)]
    assert load("tune_attention")._join_walks(rows) == {"block_q_dkv": 64, "block_q_dq": 64}


def test_walks_whose_kernels_are_not_found_are_not_joined(load):
    assert load("tune_attention")._join_walks([_row(64, 32, 10.0, None)]) == {}


# Call overhead


def test_call_overhead(run_main, load):
    printed, report = run_main("call_overhead", "--bursts", "3", "--calls", "5")
    assert [row["kind"] for row in report["kinds"]] == list(load("call_overhead").KINDS)
    assert all(row["same_lowering"] for row in report["kinds"])
    assert all(row["ratio"] > 0 for row in report["kinds"])
    assert "DIFFERENT" not in printed


@pytest.mark.skipif(not os.path.exists("/proc/self/clear_refs"), reason="needs Linux")
def test_attention_on_a_cpu(run_main):
    small = ("--length", "24", "--memory-length", "600", "--heads", "1", "--head-dim", "8", "--repeats", "1")
    printed, report = run_main("attention_cpu", *small, "--passes", "forward")
    assert printed.count("ours/peer ") == 4
    assert [(row["pass"], row["causal"]) for row in report["times"]] == [("forward", False), ("forward", True)]
    assert report["memory"]["ours"]["temporary"] < report["memory"]["peer"]["temporary"]


def test_verdict_names_the_limit(load):
    verdict = load("_common").verdict
    assert verdict(0.4, 0.4) == "0.4000 (at most 0.4: met)"
    assert verdict(0.41, 0.4) == "0.4100 (at most 0.4: MISSED)"


def test_a_worker_that_fails_says_what_it_printed(load, tmp_path):
    script = tmp_path / "worker.py"
    script.write_text("print('about to fail'); raise SystemExit(3)")
    with pytest.raises(RuntimeError, match=r"ended with 3:\nabout to fail"):
        load("_common").run_worker(str(script), [], os.environ, timeout_s=30)


# Errors of attention


def test_attention_errors_of_every_result(run_main):
    printed, report = run_main("attention_errors", "--quick", "--seed", "0")
    assert " OK, " in printed
    for row in report["rows"]:
        assert list(row["errors"]) == ["out", "lse", "dq", "dk", "dv"]
        assert all(0 < error < 1e-5 for error in (*row["errors"].values(), *row["peer"].values()))
        assert row["is_good"] == all(ratio <= 1.2 for ratio in row["ratios"].values())


def test_an_error_is_relative_and_knows_no_nan(load):
    errors = load("attention_errors")
    want = jax.numpy.array([3.0, 4.0])
    assert errors.relative_error(jax.numpy.array([3.0, 4.5]), want) == pytest.approx(0.1)
    assert not errors.relative_error(jax.numpy.array([3.0, jax.numpy.nan]), want) <= errors.LIMIT
