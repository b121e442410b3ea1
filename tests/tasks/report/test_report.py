"""The release report: what it says, what it survives, and what it refuses."""

import html.parser
import os
import re
import resource
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from report_workspace import HOSTILE, VARIANTS, Spec, make_workspace

from fleet.device.errors import UserError
from tasks.judge.evidence import evidence_sha256
from tasks.report import write_report
from tasks.report.evidence import read_evidence
from tasks.report.pairing import class_rows, most_confused, pair
from tasks.report.rows import binomial_interval, headline, rows
from tasks.stage import write_json

ROOT = Path(__file__).resolve().parents[3]
ENVIRONMENT = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONHASHSEED": "7"}


class Document(html.parser.HTMLParser):
    """Tags with their attributes, and the text between them."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.pieces: list[str] = []
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.pieces.append(data)

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.pieces).split())

    def ids(self) -> list[str]:
        return [attributes["id"] for tag, attributes in self.tags if tag == "section"]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A build with a champion, one waiver and a full benchmark; do not change it, copy it."""
    return make_workspace(tmp_path_factory.mktemp("report"), Spec(champion=True, waived=True))


@pytest.fixture
def copy(workspace, tmp_path):
    """A copy of it to change."""
    return Path(shutil.copytree(workspace, tmp_path / "copy"))


def test_the_verdict_comes_first_and_the_checks_near_the_end(workspace):
    """A reviewer reads verdict and reasons, then who it is, then the evidence, then every check."""
    document = Document(write_report(workspace))
    assert document.ids() == [
        "verdict", "identity", "changed", "variants", "front", "pruning", "quantisation", "classes",
        "latency", "layers", "images", "checks", "glossary",
    ]  # fmt: skip
    assert document.text.index("Passed the gate") < document.text.index("accept 2 inconclusive checks")
    assert "ship without 2 checks that were not measured, stand by 1 waived check." in document.text
    assert "waived by R. Manager, up to 0.89: the low tier may be half a point below" in document.text
    assert not [piece for piece in document.pieces if "Not there" in piece]


def test_a_refused_build_is_reported_with_its_reason(tmp_path):
    """The reason a build was refused for stands before everything else, with value and limit."""
    document = Document(write_report(make_workspace(tmp_path, Spec(refused=True))))
    first = document.text[document.text.index("Refused by the gate") :]
    assert "Nothing to approve" in first
    assert f"{VARIANTS[2]}: 0.8701 share of the test set" not in first  # the check has no unit
    assert first.index(f"{VARIANTS[2]}: 0.8701, at least 0.95") < first.index("latency invalid: noisy")


FIVE = [f"mbv3s-{kind}-r48" for kind in ("p0-fp32", "p30-fp16", "p30-fp32", "p30-i8", "p30-w8")]
FEW = "fewer than 2000 images in common, the floors decide"


def _judged(name: str, verdict: str, measured: float, threshold: float, **rest: object) -> dict:
    return {
        "name": name, "verdict": verdict, "measured": measured, "threshold": threshold, "unit": "pp",
        "n": 359, "bound": "at most", "evidence": "parity.json", "note": "", "required": True,
    } | rest  # fmt: skip


def _first_screen(folder: Path, *checks: dict) -> str:
    verdict = "fail" if any(check["verdict"] == "fail" for check in checks) else "pass"
    gate = {"verdict": verdict, "checks": checks, "evidence": {}, "comparison": {}}
    write_json(folder / "reports/gate.json", gate | {"evidence_sha256": evidence_sha256(gate)})
    text = Document(write_report(folder)).text
    return text[: text.index("Variants")]


def test_the_one_loss_over_its_limit_comes_first(tmp_path):
    """Of five variants int8 alone lost more than allowed: it is the first line, with limit and reason."""
    lost = dict(zip(FIVE, (0.0, 0.0, -0.2786, 0.5571, 0.0), strict=True))
    checks = [
        _judged(
            f"{name}: accuracy lost against the champion", "inconclusive", pp, 0.5, note=FEW, required=False,
            evidence=f"edgeloop-digits version 1, {name}, paired: 95 % interval {pp - 1:.2f} to 2.09 pp",
        )
        for name, pp in lost.items()
    ]  # fmt: skip
    text = _first_screen(tmp_path, *checks)
    heading = "Accuracy lost against the champion inconclusive "
    first = f"{FIVE[3]}: 0.5571 pp, at most 0.5 "
    assert f"{heading}{first}{FIVE[0]}: 0 pp, at most 0.5 and 3 more {FEW}" in text


def test_losses_to_the_champion_and_to_the_parent_are_told_apart(tmp_path):
    """Each has its own limit and its own heading; the names of the parents do not part the second."""
    text = _first_screen(
        tmp_path,
        _judged(f"{FIVE[3]}: accuracy lost against the champion", "fail", 0.9, 0.5),
        _judged(f"{FIVE[3]}: accuracy lost against {FIVE[2]}", "fail", 1.2, 1.0),
        _judged(f"{FIVE[2]}: accuracy lost against {FIVE[0]}", "fail", 1.6, 1.0),
    )
    assert f"Accuracy lost against the champion fail {FIVE[3]}: 0.9 pp, at most 0.5" in text
    assert f"Accuracy lost against its parent fail {FIVE[2]}: 1.6 pp, at most 1 {FIVE[3]}: 1.2 pp" in text


def test_the_lowest_below_a_floor_is_the_worst(tmp_path):
    """A floor is missed from below: what lies above it is no excess."""
    floors = [
        _judged(f"{name}: accuracy floor", "inconclusive", top1, 0.9, unit="", bound="at least", note=FEW)
        for name, top1 in zip(FIVE, (0.99, 0.895, 0.98, 0.85, 0.97), strict=True)
    ]
    text = _first_screen(tmp_path, *floors)
    assert f"{FIVE[3]}: 0.85, at least 0.9 {FIVE[1]}: 0.895, at least 0.9 and 3 more" in text


def test_the_same_evidence_gives_the_same_bytes(workspace, copy):
    """Nothing of a run, a place or a time is in the report."""
    ours = write_report(workspace).read_bytes()
    assert write_report(workspace).read_bytes() == ours
    code = "import sys; from pathlib import Path; from tasks.report import write_report; write_report(Path())"
    subprocess.run([sys.executable, "-c", code], cwd=copy, env=ENVIRONMENT, check=True)
    assert (copy / "reports/release.html").read_bytes() == ours


MISSING = {
    "reports/gate.json": "Not judged",
    "reports/convert.json": "Accuracy over latency",
    "reports/parity.json": "No front",
    "reports/train.json": "Passed",
    "reports/prune_ladder.csv": "No pruning ladder: reports/prune_ladder.csv is not there",
    "reports/quantize_layers.csv": "No quantisation error: reports/quantize_layers.csv is not there",
    "reports/benchmark": "No benchmark is there",
    "reports/benchmark/local_samples.parquet": "No distribution: the benchmark kept no samples",
    "reports/benchmark/local_layers.csv": "No layers: the benchmark kept no profile",
    "models/parity": "No confusion and no classes",
    "models/mnn": "not known: no model card",
    "champion": "there is no champion yet",
    "champion/predictions.parquet": "the champion has no predictions of these images",
    "data/prepared": "No pictures: data/prepared is not there",
}


@pytest.mark.parametrize("name", MISSING)
def test_what_is_missing_is_said_in_place(copy, name):
    """Any piece of evidence may be absent: the report is written and says what is not there."""
    path = copy / name
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert MISSING[name] in Document(write_report(copy)).text


def test_an_empty_folder_is_not_judged(tmp_path):
    """No evidence at all is a report that says so, no crash."""
    text = Document(write_report(tmp_path)).text
    assert "nothing was judged, nothing can be approved" in text
    assert "No variants: reports/convert.json and reports/parity.json are not there." in text


CORRUPT = {
    "reports/gate.json": b'{"verdict":"pass","checks":[{"name":"x","verdict":"so"}],"evidence":{},'
    b'"evidence_sha256":""}',
    "reports/convert.json": b"{",
    "reports/parity.json": b"[1]",
    "reports/benchmark/local.json": f'{{"{VARIANTS[0]}/p50_ms": "fast"}}'.encode(),
    "reports/benchmark/local_samples.parquet": b"PAR1 and then nothing",
    "reports/benchmark/local_layers.csv": b"variant,layer\nx,y\n",
    "reports/prune_ladder.csv": b"",
    "reports/quantize_layers.csv": b"precision,layer,snr_db,snr_in_place_db,cosine_in_place\ni,a,loud,1,1\n",
    "models/parity/predictions.parquet": b"",
    "champion/champion.json": b'{"name": "x"}',
    "champion/predictions.parquet": b"no parquet",
    f"models/mnn/{VARIANTS[2]}/card.json": b"\xff\xfe",
    "data/prepared/manifest.parquet": b"PAR1",
    "data/prepared/test-000.npy": b"",
    "dvc.lock": b"<<<<<<< HEAD\n",
}
NUMBERS = {
    f"{VARIANTS[0]}/top1": "NaN",
    f"{VARIANTS[1]}/top1": "1.5",
    f"{VARIANTS[2]}/agreement": "-0.1",
    f"{VARIANTS[2]}/n": "[240]",
}


@pytest.mark.parametrize("name", CORRUPT)
def test_corrupt_evidence_is_one_clear_error(copy, name):
    """A file that is not what its stage writes is named; the report that was there stays."""
    before = write_report(copy).read_bytes()
    (copy / name).write_bytes(CORRUPT[name])
    with pytest.raises(
        UserError, match=re.escape(Path(name).name if "prepared" not in name else "data/prepared")
    ):
        write_report(copy)
    assert (copy / "reports/release.html").read_bytes() == before
    assert not list((copy / "reports").glob(".release*"))


@pytest.mark.parametrize("key", NUMBERS)
def test_a_number_that_is_none_is_refused(copy, key):
    """Not finite, out of range or no number at all: the key is named, nothing is drawn from it."""
    path = copy / "reports/parity.json"
    text = re.sub(rf'("{key}": )[^,\n]+', rf"\g<1>{NUMBERS[key]}", path.read_text(encoding="utf-8"))
    path.write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=rf"parity\.json: {key} is"):
        write_report(copy)


def test_a_class_no_model_has_is_refused(copy):
    """A prediction outside the labels is an error, not a picture of another class."""
    path = copy / "models/parity/predictions.parquet"
    frame = pd.read_parquet(path)
    frame.loc[0, VARIANTS[2]] = 99
    frame.to_parquet(path, index=False)
    with pytest.raises(UserError, match=f"predictions of {VARIANTS[2]}: 0 to 99 in int16"):
        write_report(copy)


def test_a_verdict_on_other_files_is_stale(copy):
    """A model that changed after it was judged: the report warns first and does not say passed."""
    (copy / "models/mnn" / VARIANTS[0] / "model.mnn").write_bytes(b"other bytes")
    text = Document(write_report(copy)).text
    assert "The verdict is stale" in text
    assert f"{VARIANTS[0]}/model.mnn is not what the gate judged" in text
    assert "Passed the gate" not in text


def test_hostile_names_stay_text(tmp_path):
    """Class names with markup, template syntax, control characters or none of our letters change nothing."""
    path = write_report(make_workspace(tmp_path, Spec(labels=HOSTILE, n=400, champion=True)))
    document = Document(path)
    assert {tag for tag, _ in document.tags}.isdisjoint(
        {"script", "iframe", "object", "embed", "form", "base"}
    )
    assert not [name for _, attributes in document.tags for name in attributes if name.startswith("on")]
    addresses = [
        a[name] for tag, a in document.tags for name in ("src", "href") if a.get(name) and tag != "a"
    ]
    assert addresses
    assert all(address.startswith("data:") for address in addresses)
    assert "<script>alert(1)</script>" in document.text
    assert "{{ 7 * 7 }} {% raw %}" in document.text
    content = path.read_text(encoding="utf-8")
    assert "\u202e" not in content
    assert "\x1b" not in content
    assert "a" * 61 not in content


def test_colours_are_the_pages_own(workspace):
    """No figure brings a colour along: all follow light, dark and print."""
    drawn = [
        (tag, a)
        for tag, a in Document(write_report(workspace)).tags
        if tag in ("path", "text", "line", "rect")
    ]
    colours = {a[name] for _, a in drawn for name in ("fill", "stroke") if name in a}
    assert "var(--ink)" in colours
    assert all(re.fullmatch(r"var\(--[a-z0-9-]+\)|none|transparent", colour) for colour in colours)
    style = (ROOT / "tasks/report/templates/style.css").read_text(encoding="utf-8")
    for name in re.findall(r"var\((--[a-z0-9-]+)\)", " ".join(colours)):
        assert style.count(f"{name}:") == 3, name  # light, dark, print


def test_ten_thousand_images_of_many_classes_stay_small(tmp_path):
    """A big test set makes no big page: matrix, bars and pictures are bounded."""
    labels = tuple(f"class {number} of three hundred" for number in range(300))
    path = write_report(make_workspace(tmp_path, Spec(labels=labels, n=10_000, side_px=64)))
    assert path.stat().st_size < 2_000_000
    document = Document(path)
    assert len([tag for tag, _ in document.tags if tag == "img"]) == 24
    assert "Of 300 classes the 100 with most errors." in document.text


def test_images_are_counted_against_the_champion_by_class_name(workspace):
    """The champion's classes stand in another order and it misses one image: the counts are those by name."""
    evidence = read_evidence(workspace)
    pairing = pair(evidence, rows(evidence))
    now = pd.read_parquet(workspace / "models/parity/predictions.parquet").set_index("sha256")
    then = pd.read_parquet(workspace / "champion/predictions.parquet").set_index("sha256")
    both = now.join(5 - then[[VARIANTS[2]]].rename(columns={VARIANTS[2]: "then"}), how="inner")
    was, is_right = both["then"] == both["label"], both[VARIANTS[2]] == both["label"]
    assert (len(both), pairing.left_out) == (239, 1)
    assert len(pairing.right_to_wrong) == int((was & ~is_right).sum()) > 20
    assert len(pairing.wrong_to_right) == int((~was & is_right).sum())
    text = Document(write_report(workspace)).text
    assert f"{len(pairing.right_to_wrong)} went from right to wrong" in text


def test_without_a_champion_the_parent_is_compared(tmp_path):
    """The first release is held against its fp32 parent: class 1 is the one that int8 took for class 2."""
    evidence = read_evidence(make_workspace(tmp_path, Spec()))
    pairing = pair(evidence, rows(evidence))
    assert (pairing.candidate, pairing.before, pairing.champion) == (VARIANTS[2], VARIANTS[1], "")
    worst = class_rows(pairing)[0]
    assert (worst.label, worst.n) == ("class 1", 40)
    assert worst.delta_pp == pytest.approx(100 * (worst.after - worst.before))
    assert worst.delta_pp <= -45
    most = most_confused(pairing, 3)[0]
    assert (most.truth, most.predicted) == ("class 1", "class 2")
    assert most.after >= 20 > most.before


def test_a_new_class_is_no_gain_over_the_champion(copy):
    """Images of a class the champion does not know are left out, as in the gate's comparison."""
    path = copy / "champion/champion.json"
    path.write_text(path.read_text(encoding="utf-8").replace('"class 0"', '"class zero"'), encoding="utf-8")
    evidence = read_evidence(copy)
    pairing = pair(evidence, rows(evidence))
    assert 0 not in set(pairing.truth)
    assert pairing.left_out == 40


def test_the_interval_is_the_exact_one():
    """Known values of Clopper and Pearson's interval; none and all are one-sided."""
    five = binomial_interval(5, 10)
    assert (five.low, five.high) == pytest.approx((0.18709, 0.81291), abs=1e-5)
    none, everything = binomial_interval(0, 10), binomial_interval(10, 10)
    assert (none.low, none.high) == pytest.approx((0.0, 0.30850), abs=1e-5)
    assert (everything.low, everything.high) == pytest.approx((0.69150, 1.0), abs=1e-5)


def test_the_headline_is_the_most_compressed_variant(workspace):
    """int8 before others; its numbers are those of the reports."""
    table = rows(read_evidence(workspace))
    assert [row.name for row in table] == list(VARIANTS)
    row = headline(table)
    assert row.name == VARIANTS[2]
    assert (row.size_mb, row.macs_m) == (pytest.approx(0.863092), pytest.approx(2.076496))
    assert row.latency.ranks == {"p95": 487, "p99": 500}


def _run(workspace: Path, limit_bytes: int | None = None) -> subprocess.CompletedProcess[str]:
    limit = (
        (lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes)))
        if limit_bytes
        else None
    )
    return subprocess.run(
        [sys.executable, "-m", "tasks.report"], cwd=workspace, env=ENVIRONMENT,
        capture_output=True, text=True, check=False, preexec_fn=limit,
    )  # fmt: skip


def test_the_command_writes_where_it_stands(copy):
    """`python -m tasks.report` in a workspace prints the file it wrote."""
    (copy / "params.yaml").write_text("root: .\n", encoding="utf-8")
    done = _run(copy)
    assert (done.returncode, done.stdout) == (0, "reports/release.html\n"), done.stderr
    (copy / "reports/gate.json").write_text("{", encoding="utf-8")
    done = _run(copy)
    assert done.returncode == 2
    assert done.stderr.startswith("report: reports/gate.json: ")
    assert "Traceback" not in done.stderr


def test_a_full_disk_costs_nothing(copy):
    """No room for the new report: one clear error, the old report stays, nothing else is left."""
    (copy / "params.yaml").write_text("root: .\n", encoding="utf-8")
    before = write_report(copy).read_bytes()
    done = _run(copy, limit_bytes=20_000)
    assert done.returncode == 2, done.stderr
    assert "no room to write" in done.stderr
    assert (copy / "reports/release.html").read_bytes() == before
    assert not list((copy / "reports").glob(".*"))


def test_a_report_needs_no_tracking_and_no_training():
    """Writing the report imports neither MLflow nor torch nor Prefect."""
    code = "import sys, tasks.report; print(sorted({'mlflow', 'torch', 'prefect', 'dvc'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_pictures_are_of_the_images_that_changed(workspace):
    """Each picture's file decodes to the stored pixels of an image the candidate lost."""
    import base64
    import io

    from PIL import Image

    evidence = read_evidence(workspace)
    pairing = pair(evidence, rows(evidence))
    test = evidence.dataset.split("test")
    lost = {test.images([test.sha256.index(pairing.sha256[i])]).tobytes() for i in pairing.right_to_wrong}
    document = Document(write_report(workspace))
    sources = [a["src"] for tag, a in document.tags if tag == "img"]
    assert len(sources) == 20
    for source in sources:
        image = Image.open(io.BytesIO(base64.b64decode(source.partition(",")[2])))
        assert np.asarray(image.convert("RGB")).tobytes() in lost


def test_what_changed_since_the_champion_is_said(tmp_path):
    """Parameters and files that differ, each with both values; not the way to the code."""
    page = Document(write_report(make_workspace(tmp_path, Spec(champion=True))))
    section = page.text[page.text.index("Changed since the champion what") :][:400]
    assert "quantize.epochs 5 2 quantize.seed – 1" in section  # noqa: RUF001  # as the page has it
    assert "skip" not in section
    assert "root" not in section
    assert f"{VARIANTS[2]} 0.90 MB 0.86 MB" in section
    assert "No model file is the champion's own." in section


def test_parameters_of_another_champion_are_not_compared(tmp_path):
    """The file beside the record is not the one it names."""
    folder = make_workspace(tmp_path, Spec(champion=True))
    (folder / "champion/params.yaml").write_text("quantize: {}\n", encoding="utf-8")
    assert "The champion's parameters were not kept" in Document(write_report(folder)).text
