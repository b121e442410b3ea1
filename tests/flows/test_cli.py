"""The command line: what it offers, how it refuses."""

import json
import os
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from clones import edgeloop

from flows.build import Built
from flows.built_text import print_built
from flows.cli import main

LONG = "/tmp/" + "a" * 300
"""A path that the system takes nowhere."""


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (["--help"], 0),
        (["--version"], 0),
        (["bild"], 2),
        (["build", "--preset"], 2),
        (["build", "--no-such-option"], 2),
        (["convert", "model.onnx"], 2),
        (["init", "Bad Name", "."], 2),
        (["init", "new", "/no/such/folder"], 2),
        (["bench"], 2),
        (["bench", "/no/such.mnn"], 2),
        (["bench", "m.mnn", "--threads", "0"], 2),
        (["bench", "m.mnn", "--queries", "many"], 2),
        (["bench", LONG], 2),
        (["init", "new", LONG], 2),
        (["convert", LONG, "--out", "m.mnn"], 2),
        (["doctor", "--preprocess", LONG], 2),
    ],
    ids=str,
)
def test_exit_codes(arguments, code, capsys):
    """0 for an answer, 2 for input that cannot be used; never Python's 1, which means refused by the gate."""
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == code
    assert "Traceback" not in capsys.readouterr().err


def _built(*flags: str) -> Built:
    latency = {"p50": 0.1, "p95": 0.2, "p99": 0.3}
    quiet = {"name": "quiet", "top1": 1.0, "size_bytes": 1, "macs": 1, "latency_ms": latency, "flags": []}
    quiet |= {"parity_max_rel_error": 0.0, "agreement": 1.0}
    rows = [quiet, quiet | {"name": "marked", "flags": list(flags)}]
    gate = {"verdict": "pass", "checks": []}
    return Built(
        preset="p", seconds=1.0, variants=rows, gate=gate, registered=None, ran=[], champion={}, comparison={}
    )


def test_a_noisy_latency_is_marked_and_the_mark_explained(capsys):
    """A number from a busy host does not look like one from a quiet host; --json carries the flags."""
    print_built(_built("noisy"), "reports/release.html")
    quiet, marked, legend = capsys.readouterr().out.splitlines()[1:4]
    assert "*" not in quiet
    assert marked.count(" ms*") == 3
    assert "* latency" in legend
    assert "busy" in legend
    assert json.loads(_built("noisy").to_json())["variants"][1]["flags"] == ["noisy"]


def test_a_latency_of_too_few_queries_says_so(capsys):
    """The other mark the benchmark sets."""
    print_built(_built("too_few_queries"), "reports/release.html")
    assert "with care: too few queries to bound its P99\n" in capsys.readouterr().out


def test_without_flags_there_is_no_legend(capsys):
    """Nothing to explain, nothing explained."""
    print_built(_built(), "reports/release.html")
    assert "*" not in capsys.readouterr().out


def _lost(drop_pp: float, low_pp: float, high_pp: float) -> dict:
    interval = [low_pp, high_pp]
    return {"same_file": False, "against": "x", "n": 359, "drop_pp": drop_pp, "interval_pp": interval}


def test_the_worst_against_the_champion_is_said_whatever_the_verdict(capsys):
    """One line: which variant lost most, how sure that is, on how many images; not in the JSON."""
    compared = {"p30-fp32": _lost(-0.2786, -1.1, 0.5), "p30-i8": _lost(0.5571, -0.6812, 2.0911)}
    champion = {"name": "edgeloop-digits", "version": 1}
    built = replace(_built(), champion=champion, comparison=compared)
    line = "champion: edgeloop-digits version 1; most lost by p30-i8: +0.56 pp (-0.68 to +2.09), 359 images\n"
    for verdict in ("pass", "fail"):
        print_built(replace(built, gate={"verdict": verdict, "checks": []}), "reports/release.html")
        assert line in capsys.readouterr().out
    assert not {"champion", "comparison", "ran"} & set(json.loads(built.to_json()))
    print_built(replace(built, comparison={}), "reports/release.html")
    assert "champion" not in capsys.readouterr().out


def test_files_that_are_the_champions_own_lost_nothing(capsys):
    """Most is lost by a file that is another one; where none is, no number pretends to be a comparison."""
    own = _lost(0.0, -1.16, 1.16) | {"same_file": True}
    champion = {"name": "edgeloop-digits", "version": 1}
    built = replace(_built(), champion=champion, comparison={"p0": own, "p30-i8": _lost(-0.3, -1.1, 0.5)})
    print_built(built, "reports/release.html")
    line = "edgeloop-digits version 1; 1 of 2 variants are its own files; most lost by p30-i8: -0.30 pp"
    assert line in capsys.readouterr().out
    print_built(replace(built, comparison={"p0": own}), "reports/release.html")
    line = "champion: edgeloop-digits version 1; 1 of 1 variants are its own files\n"
    assert line in capsys.readouterr().out


@pytest.mark.parametrize(
    ("champion", "said"),
    [
        ({}, "; `edgeloop release list` says what waits for review"),
        (
            {"name": "edgeloop-digits", "version": 1},
            "; `edgeloop release list` says what waits for review",
        ),
        ({"name": "edgeloop-digits", "version": 2}, ", the champion"),
    ],
)
def test_an_approved_version_does_not_wait_for_review(champion, said, capsys, monkeypatch):
    """Only the very version that is the champion is called so."""
    monkeypatch.setattr(shutil, "which", lambda _name: "/somewhere/edgeloop")
    built = replace(_built(), registered={"name": "edgeloop-digits", "version": 2}, champion=champion)
    print_built(built, "reports/release.html")
    assert f"registered: edgeloop-digits version 2{said}\n" in capsys.readouterr().out


def test_advice_can_be_typed_where_no_environment_is_active(capsys, monkeypatch, tmp_path):
    """After `make loop` in a plain shell `edgeloop` is not on PATH: the advice names it by its path."""
    monkeypatch.setenv("PATH", str(tmp_path))
    print_built(
        replace(_built(), registered={"name": "edgeloop-digits", "version": 2}), "reports/release.html"
    )
    typed = os.path.relpath(Path(sys.executable).with_name("edgeloop"))
    assert f"; `{typed} release list` says what waits for review\n" in capsys.readouterr().out


def _failed(name: str, measured: float, threshold: float, unit: str) -> dict:
    values = {"measured": measured, "threshold": threshold, "unit": unit, "evidence": "parity.json"}
    return values | {"name": name, "verdict": "fail", "required": True}


def test_refusals_are_readable_and_those_of_one_kind_stand_together(capsys):
    """Shares as per cent, more digits where a missed limit needs them, kinds in the gate's order."""
    share = "share of the test set"
    checks = [
        _failed("a: accuracy floor", 0.9442896935933147, 0.95, share),
        _failed("a: accuracy lost against the champion", 0.557103, 0.5, "pp"),
        _failed("a: accuracy lost against c", 1.5, 1.0, "pp"),
        _failed("b: accuracy floor", 0.949999, 0.95, share),
        _failed("b: accuracy lost against d", 1.25, 1.0, "pp"),
        _failed("b: predictions that differ from torch", 12345, 4, "images"),
    ]
    print_built(replace(_built(), gate={"verdict": "fail", "checks": checks}), "reports/release.html")
    refused = [line.strip() for line in capsys.readouterr().out.splitlines() if "threshold" in line]
    assert refused == [
        "a: accuracy floor: 94.43 % of the test set, threshold 95 %; parity.json",
        "b: accuracy floor: 94.9999 % of the test set, threshold 95 %; parity.json",
        "a: accuracy lost against the champion: 0.5571 pp, threshold 0.5; parity.json",
        "a: accuracy lost against c: 1.5 pp, threshold 1; parity.json",
        "b: accuracy lost against d: 1.25 pp, threshold 1; parity.json",
        "b: predictions that differ from torch: 12345 images, threshold 4; parity.json",
    ]


def test_help_names_every_command(capsys):
    """The front page shows all there is, and where to start."""
    with pytest.raises(SystemExit):
        main(["--help"])
    page = capsys.readouterr().out
    for command in ("build", "init", "convert", "bench", "doctor", "ui"):
        assert command in page
    assert "Start with" in page


def test_a_bug_is_no_refusal(monkeypatch, capsys):
    """An unexpected exception exits 3 with its traceback: exit 1 is the gate's."""
    monkeypatch.setattr("flows.cli.find_workspace", lambda name: 1 / 0)
    with pytest.raises(SystemExit) as exit_:
        main(["build"])
    assert exit_.value.code == 3
    assert "ZeroDivisionError" in capsys.readouterr().err


def test_stdout_is_for_results(tiny_build):
    """What compiled libraries print does not get into the JSON."""
    done = edgeloop(tiny_build.clone, "build", "--preset", "tiny", "--json")
    assert done.stdout.startswith("{")
    assert done.stdout.rstrip().endswith("}")


@pytest.mark.parametrize(
    "arguments",
    [["build", "--no-such-option"], ["convert", "m.onnx"], ["bench", "no.mnn"], ["bild"]],
    ids=str,
)
def test_json_is_printed_for_usage_errors_too(arguments, capsys):
    """A program that asked for JSON gets one document whatever was wrong."""
    with pytest.raises(SystemExit):
        main([*arguments, "--json"])
    record = json.loads(capsys.readouterr().out)
    assert (record["ok"], record["exit_code"]) == (False, 2)
    assert record["error"]
