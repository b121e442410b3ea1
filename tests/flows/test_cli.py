"""The command line: what it offers, how it refuses."""

import json

import pytest
from clones import edgeloop

from flows.build import Built
from flows.cli import _print_built, main


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
    return Built(preset="p", seconds=1.0, variants=rows, gate=gate, registered=None, ran=[])


def test_a_noisy_latency_is_marked_and_the_mark_explained(capsys):
    """A number from a busy host does not look like one from a quiet host; --json carries the flags."""
    _print_built(_built("noisy"), "reports/release.html")
    quiet, marked, legend = capsys.readouterr().out.splitlines()[1:4]
    assert "*" not in quiet
    assert marked.count(" ms*") == 3
    assert "* latency" in legend
    assert "busy" in legend
    assert json.loads(_built("noisy").to_json())["variants"][1]["flags"] == ["noisy"]


def test_a_latency_of_too_few_queries_says_so(capsys):
    """The other mark the benchmark sets."""
    _print_built(_built("too_few_queries"), "reports/release.html")
    assert "with care: too few queries to bound its P99\n" in capsys.readouterr().out


def test_without_flags_there_is_no_legend(capsys):
    """Nothing to explain, nothing explained."""
    _print_built(_built(), "reports/release.html")
    assert "*" not in capsys.readouterr().out


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
