"""The gate: each kind of bad build is refused, for its own reason and no other."""

import json
import re
import shutil

import numpy as np
import pandas as pd
import pytest
from gate_workspace import CLASSES, FP32, INT8, PREPROCESS, PRUNED, GateWorkspace, by_verdict, digest

from fleet.device.errors import UserError
from fleet.device.preprocess import Preprocess
from fleet.lab.flags import WARNINGS
from tasks.gate import GateParams, require_judged
from tasks.judge.evidence import evidence_sha256
from tasks.paired import Paired
from tasks.stage import load_params

IDENTITY, PROVEN = "evidence is about this file", "preprocessing is the proven one"
FOLDER = "a folder"
BGR = Preprocess(size_px=32, color_order="BGR")


@pytest.fixture
def built(tmp_path):
    """A good build beside a champion that answered the same."""
    return GateWorkspace(path=tmp_path)


def test_a_good_build_passes_and_says_what_it_could_not_measure(built):
    """All floors kept and nothing lost: pass; an old engine and a long run are named as not measured."""
    report = built.write().judge()
    assert report["verdict"] == "pass"
    assert set(by_verdict(report, "not measured")) == {"oldest engine in the field", "stability run"}
    assert not by_verdict(report, "fail")
    assert not by_verdict(report, "inconclusive")
    assert set(report["comparison"]) == {FP32, PRUNED, INT8}
    assert report["comparison"][INT8]["n"] == 2500
    assert report["comparison"][INT8]["drop_pp"] == 0


def test_the_first_release_has_no_champion(tmp_path):
    """Said, not failed: nothing to compare with is no regression."""
    report = GateWorkspace(path=tmp_path, champion=False).write().judge()
    assert report["verdict"] == "pass"
    said = by_verdict(report, "not measured")["champion comparison"]
    assert "nothing has been released yet" in said["evidence"]
    assert report["comparison"] == {}
    assert not [check for check in report["checks"] if check["name"].endswith("against the champion")]


def worse(built):
    """15 of 2,500 images lost: 0.6 pp."""
    for label in range(5):
        built.lose(INT8, label, 3)


def worse_a_little(built):
    """12 of 2,500 images lost: 0.48 pp."""
    built.lose(INT8, 0, 12)


def class_collapsed(built):
    """A quarter of one class's images lost, as many gained elsewhere: no drop at all."""
    built.lose(INT8, 3, 60)
    for label in (0, 1, 2, 4, 5):
        built.gain(INT8, label, 12)


def swapped(built):
    """Another file under the variant's name, as long as the right one."""
    built.models[INT8] = b"x" * len(INT8)


def longer(built):
    """A file of another length than was converted, in all else consistent."""
    built.models[INT8] += b"\0"
    sha256 = digest(built.models[INT8])
    built.cards[INT8]["mnn_sha256"] = sha256
    built.parity[f"{INT8}/mnn_sha256"] = built.bench[f"{INT8}/mnn_sha256"] = sha256


def stale_parity(built):
    """A parity report of an older file."""
    built.parity[f"{INT8}/mnn_sha256"] = digest(b"older")


def stale_bench(built):
    """A benchmark of an older file."""
    built.bench[f"{INT8}/mnn_sha256"] = digest(b"older")


def stale_card(built):
    """A card of an older file."""
    built.cards[INT8]["mnn_sha256"] = digest(b"older")


def card_with_equal_first_digits(built):
    """A card of another file whose SHA-256 looks the same at first sight."""
    own = digest(built.models[INT8])
    built.cards[INT8]["mnn_sha256"] = own[:-1] + ("0" if own[-1] != "0" else "1")


def other_engine(built):
    """The device ran another engine than the models were proven in."""
    built.probe = {"engine_version": "3.5.0"}


def bgr_in_the_record(built):
    """Someone edits the colour order in the card: what the device would do is not what was proven."""
    built.cards[INT8]["preprocess"] = BGR.to_dict()


def bgr_in_record_and_digest(built):
    """A consistent card of another preprocessing than parity ran."""
    built.cards[INT8] |= {"preprocess": BGR.to_dict(), "preprocess_sha256": BGR.digest()}


def no_such_preprocess(built):
    """A record that is none."""
    built.cards[INT8]["preprocess"] = PREPROCESS.to_dict() | {"color_order": "GRB"}


def int8_is_float(built):
    """Perfect parity, because nothing was quantised."""
    built.parity[f"{INT8}/int8_ops_count"] = 0


def parity_failed(built):
    """What the stage parity found."""
    built.parity |= {f"{INT8}/parity_ok": 0, f"{INT8}/reason": "error 0.4 of the range, allowed 0.25"}


def class_gone(built):
    """The data set lost a folder: the build does not know a class of the champion at all."""
    gone = CLASSES - 1
    for name in built.now:
        built.cards[name]["labels"] = built.labels[:gone]
        built.now[name] = np.where(built.now[name] == gone, 0, built.now[name])
    built.label = np.where(built.label == gone, -1, built.label)


ACCURACY_LOST = f"{INT8}: accuracy lost against the champion"
CLASS_LOST = f"{INT8}: class lost against the champion"


@pytest.mark.parametrize(
    ("fault", "refused", "reason"),
    [
        (worse, ACCURACY_LOST, "edgeloop-x version 3, .*: 95 % interval 0.28 to 0.96 pp$"),
        (class_collapsed, CLASS_LOST, r"class 3: right on 177 of 250, was 237 \(p = 8.7e-19\)$"),
        (class_gone, "classes of the champion that are gone", "does not know class 9"),
        (swapped, f"{INT8}: {IDENTITY}", "card.json is about .*parity.json is about .*local.json is about"),
        (longer, f"{INT8}: {IDENTITY}", "^convert.json is about 16 bytes, not 17 bytes$"),
        (stale_card, f"{INT8}: {IDENTITY}", "^card.json is about [0-9a-f]{12}, not [0-9a-f]{12}$"),
        (stale_parity, f"{INT8}: {IDENTITY}", "^parity.json is about [0-9a-f]{12}, not [0-9a-f]{12}$"),
        (stale_bench, f"{INT8}: {IDENTITY}", "^benchmark/local.json is about [0-9a-f]{12}, not "),
        (card_with_equal_first_digits, f"{INT8}: {IDENTITY}", "^card.json is about "),
        (other_engine, "engine on local", f"^probe/local.json: 3.5.0; {FP32} was proven in 3.6.1; "),
        (bgr_in_the_record, f"{INT8}: {PROVEN}", "^card.json names .*; parity.json names "),
        (
            bgr_in_record_and_digest,
            f"{INT8}: {PROVEN}",
            f"^parity.json names {PREPROCESS.digest()[:12]}, the",
        ),
        (no_such_preprocess, f"{INT8}: {PROVEN}", "^card.json: preprocess.color_order = 'GRB'"),
        (int8_is_float, f"{INT8}: parity with torch and ONNX Runtime", "no operator ran in int8"),
        (parity_failed, f"{INT8}: parity with torch and ONNX Runtime", "error 0.4 of the range, allowed"),
    ],
)
def test_one_fault_is_refused_for_its_own_reason(built, fault, refused, reason):
    """One fault, one failed check, whose evidence says what is wrong; and the page begins with it."""
    fault(built)
    report = built.write().judge()
    assert report["verdict"] == "fail"
    assert list(by_verdict(report, "fail")) == [refused]
    assert re.search(reason, by_verdict(report, "fail")[refused]["evidence"])
    page = (built.path / "reports" / "gate.md").read_text(encoding="utf-8").splitlines()
    assert page[0].startswith("**Gate: fail** (1 fail")
    assert page[6].startswith(f"| {refused} |")


@pytest.mark.parametrize(
    ("report", "key", "value", "refused"),
    [
        ("parity", f"{FP32}/agreement", 0.9895, f"{FP32}: predictions that differ from torch"),
        ("convert", None, None, f"{FP32}: model size"),
        ("bench", f"{FP32}/p95_bound_ms", 50.1, f"{FP32} on local: P95 latency, 99 % bound"),
        ("bench", f"{FP32}/p99_bound_ms", 100.1, f"{FP32} on local: P99 latency, 99 % bound"),
        ("bench", f"{FP32}/peak_memory_mb", 120.5, f"{FP32} on local: peak memory"),
    ],
)
def test_just_past_a_threshold_is_refused(built, report, key, value, refused):
    """Each floor by itself, a little beyond its value."""
    if key:
        getattr(built, report)[key] = value
    params = {} if key else {"max_size_mb": (len(FP32) - 0.5) / 1e6}
    if not key:
        for name in (PRUNED, INT8):
            built.models[name] = built.models[name][:5]
        built = GateWorkspace(path=built.path, models=built.models)
    found = built.write().judge(**params)
    assert list(by_verdict(found, "fail")) == [refused]


@pytest.mark.parametrize(
    ("floor", "losses", "refused"),
    [
        (0.95, {FP32: 1, PRUNED: 1, INT8: 1}, [f"{name}: accuracy floor" for name in (FP32, PRUNED, INT8)]),
        (0.9, {PRUNED: 26, INT8: 26}, [f"{PRUNED}: accuracy lost against {FP32}"]),
        (0.9, {INT8: 26}, [f"{INT8}: accuracy lost against {PRUNED}"]),
        (0.9, {INT8: 25}, []),  # 1 pp of 2,500 images: on the threshold
    ],
)
def test_accuracy_is_held_against_floor_and_parent(tmp_path, floor, losses, refused):
    """One image too many for the floor, for pruning, for quantising: refused; on the threshold: not."""
    built = GateWorkspace(path=tmp_path, champion=False)
    for name, count in losses.items():
        built.lose(name, 0, count)
    assert list(by_verdict(built.write().judge(min_top1=floor), "fail")) == refused


def test_few_images_cannot_tell_a_loss_to_the_parent(tmp_path):
    """One image of 44 is 2.3 pp and within noise; eight of them are not."""
    lost = f"{INT8}: accuracy lost against {PRUNED}"
    few = GateWorkspace(path=tmp_path / "few", n=44, wrong_then=2, champion=False)
    few.lose(INT8, 0, 1)
    report = few.write().judge()
    assert report["verdict"] == "pass"
    check = by_verdict(report, "inconclusive")[lost]
    assert check["measured"] == 2.2727
    paired = Paired(both=41, lost=1, gained=0, neither=2)
    assert f"95 % interval {paired.low_pp:.2f} to {paired.high_pp:.2f} pp" in check["evidence"]
    many = GateWorkspace(path=tmp_path / "many", n=44, wrong_then=2, champion=False)
    for label in range(8):
        many.lose(INT8, label, 1)
    assert lost in by_verdict(many.write().judge(min_top1=0.5), "fail")


def test_a_small_drop_passes_with_its_interval(built):
    """0.48 pp of 2,500 images is within the limit, and how uncertain that is stands beside it."""
    worse_a_little(built)
    report = built.write().judge()
    assert report["verdict"] == "pass"
    comparison = report["comparison"][INT8]
    assert comparison["drop_pp"] == 0.48
    low, high = comparison["interval_pp"]
    assert low < 0.48 < high
    page = (built.path / "reports" / "gate.md").read_text(encoding="utf-8")
    row = f"| {INT8} | the same | 2500 | 0.48 ≤ 0.5 | {low:.2f} to {high:.2f} | pass | none |"
    assert row in page.splitlines()


def test_few_images_cannot_tell_and_the_floors_decide(tmp_path):
    """1,999 images with the same drop of 0.6 pp: inconclusive, and the build passes on its floors."""
    built = GateWorkspace(path=tmp_path, n=1999, wrong_then=100)
    built.lose(INT8, 0, 12)
    report = built.write().judge()
    assert report["verdict"] == "pass"
    check = by_verdict(report, "inconclusive")[ACCURACY_LOST]
    assert (check["measured"], check["n"]) == (0.6003, 1999)
    assert "fewer than 2000 images" in check["note"]


def test_the_released_files_themselves_pass_on_few_images(tmp_path):
    """As after an approval: few images and small classes leave no question about equal bytes."""
    report = GateWorkspace(path=tmp_path, n=300, wrong_then=15, released=True).write().judge()
    assert by_verdict(report, "inconclusive") == {}
    check = by_verdict(report, "pass")[f"{INT8}: accuracy lost against the champion"]
    assert (check["evidence"], check["note"]) == ("edgeloop-x version 3's own file", "")
    assert all(comparison["same_file"] for comparison in report["comparison"].values())


def test_equal_bytes_that_answer_otherwise_are_no_released_file(tmp_path):
    """Predictions that differ for the same file prove that one of them is of something else: no pass."""
    workspace = GateWorkspace(path=tmp_path, n=300, wrong_then=15, released=True)
    workspace.gain(INT8, 0, 1)
    assert f"{INT8}: accuracy lost against the champion" in by_verdict(
        workspace.write().judge(), "inconclusive"
    )


def test_a_drop_beyond_all_doubt_is_refused_on_few_images(tmp_path):
    """400 images and 8 pp lost over all classes: the whole interval lies beyond the limit."""
    built = GateWorkspace(path=tmp_path, n=400, wrong_then=20)
    for label in range(8):
        built.lose(INT8, label, 4)
    report = built.write().judge(min_top1=0.5, max_precision_drop_pp=100)
    assert list(by_verdict(report, "fail")) == [ACCURACY_LOST]
    note = by_verdict(report, "fail")[ACCURACY_LOST]["note"]
    assert note.startswith("the whole interval lies above 0.5 pp")
    assert report["comparison"][INT8]["interval_pp"][0] > 0.5


def test_a_lost_class_is_refused_on_few_images(tmp_path):
    """36 images a class, ten of one lost and ten won elsewhere: nothing lost in all, one class collapsed."""
    built = GateWorkspace(path=tmp_path, n=360, wrong_then=20)
    built.lose(INT8, 7, 10)
    for label in (0, 1, 2, 3, 4):
        built.gain(INT8, label, 2)
    report = built.write().judge()
    assert list(by_verdict(report, "fail")) == [CLASS_LOST]
    assert report["comparison"][INT8]["drop_pp"] == 0
    changed = {c["label"]: (c["champion"], c["candidate"]) for c in report["comparison"][INT8]["classes"]}
    assert changed["class 7"] == (round(34 / 36, 6), round(24 / 36, 6))


def test_a_small_class_may_fall_by_chance(tmp_path):
    """10 images a class, three lost: 30 pp that chance explains; the reviewer is told, the build passes."""
    built = GateWorkspace(path=tmp_path, n=100, wrong_then=0)
    built.lose(INT8, 7, 3)
    report = built.write().judge(max_precision_drop_pp=100)
    assert not by_verdict(report, "fail")
    check = by_verdict(report, "pass")[CLASS_LOST]
    assert check["note"] == "fell, perhaps by chance: class 7: right on 7 of 10, was 10 (p = 0.12)"


def test_classes_too_small_for_any_test_are_inconclusive(tmp_path):
    """5 images a class cannot show a collapse, so none was excluded."""
    report = GateWorkspace(path=tmp_path, n=50, wrong_then=0).write().judge()
    assert CLASS_LOST in by_verdict(report, "inconclusive")


@pytest.mark.parametrize(("kept", "verdict"), [(0, "not measured"), (1249, "inconclusive"), (1250, "pass")])
def test_a_champion_of_another_test_set_proves_nothing(built, kept, verdict):
    """No image in common: not measured; less than half: inconclusive, with the numbers; never a pass."""
    built.n = 5000 if kept else 2500
    built.__post_init__()
    built.write()
    path = built.path / "champion" / "predictions.parquet"
    table = pd.read_parquet(path)
    kept = kept * 2
    table.loc[kept:, "sha256"] = [digest(f"other {row}".encode()) for row in range(len(table) - kept)]
    table.to_parquet(path, index=False)
    record = json.loads((built.path / "champion" / "champion.json").read_text())
    record["predictions_sha256"] = digest(path.read_bytes())
    (built.path / "champion" / "champion.json").write_text(json.dumps(record))
    report = built.judge()
    assert report["verdict"] == "pass"
    assert {ACCURACY_LOST, CLASS_LOST} <= set(by_verdict(report, verdict))
    assert (INT8 in report["comparison"]) is (kept > 0)
    texts = [c["evidence"] + c["note"] for c in by_verdict(report, verdict).values() if INT8 in c["name"]]
    if verdict == "not measured":
        assert all(
            "none of the 2500 test images is one edgeloop-x version 3 was judged on" in t for t in texts
        )
    if verdict == "inconclusive":
        assert all("only 2498 of 5000 test images are the champion's" in t for t in texts)


def test_a_variant_without_counterpart_is_not_measured(built):
    """The champion has no int8 variant: said for that variant alone."""
    built.write()
    path = built.path / "champion" / "champion.json"
    record = json.loads(path.read_text())
    del record["variants"][INT8]
    path.write_text(json.dumps(record))
    report = built.judge()
    check = by_verdict(report, "not measured")[ACCURACY_LOST]
    assert check["evidence"] == "edgeloop-x version 3 has no variant of precision i8"
    assert set(report["comparison"]) == {FP32, PRUNED}
    assert report["verdict"] == "pass"


@pytest.mark.parametrize("left", [{}, {"mbv3s-p30-w8-r32": {"mnn_sha256": "ab" * 32, "size_bytes": 10}}])
def test_a_champion_that_no_variant_can_be_held_against_refuses(built, left):
    """A record without variants, or of another precision only, does not switch the comparison off."""
    built.write()
    path = built.path / "champion" / "champion.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"variants": left}))
    answers = pd.read_parquet(path.with_name("predictions.parquet"))
    answers.assign(**dict.fromkeys(left, answers[INT8])).to_parquet(path.with_name("predictions.parquet"))
    digest_now = digest(path.with_name("predictions.parquet").read_bytes())
    path.write_text(json.dumps(json.loads(path.read_text()) | {"predictions_sha256": digest_now}))
    report = built.judge()
    assert report["verdict"] == "fail"
    check = by_verdict(report, "not measured")["champion comparison"]
    assert check["required"]
    assert check["evidence"] == "edgeloop-x version 3 has no variant of a precision that this build has"


@pytest.mark.parametrize(
    ("report", "key"),
    [
        ("parity", "top1"),
        ("parity", "parity_ok"),
        ("parity", "agreement"),
        ("parity", "max_rel_error"),
        ("parity", "tolerance_rel"),
        ("parity", "int8_ops_count"),
        ("parity", "mnn_sha256"),
        ("parity", "preprocess_sha256"),
        ("bench", "p95_bound_ms"),
        ("bench", "flags"),
        ("bench", "n"),
        ("bench", "mnn_sha256"),
        ("convert", "size_bytes"),
    ],
)
def test_missing_evidence_is_not_measured_and_refuses(built, report, key):
    """A report without the value: not measured, and what is not measured is no pass."""
    built.write()
    del getattr(built, report)[f"{INT8}/{key}"]
    found = built.write(top1=False).judge()
    assert found["verdict"] == "fail"
    assert not by_verdict(found, "fail")
    assert any(check["required"] for check in by_verdict(found, "not measured").values())


@pytest.mark.parametrize(
    ("report", "key", "value", "named"),
    [
        ("bench", "p95_bound_ms", -1, "p95_bound_ms is -1"),
        ("bench", "p99_bound_ms", -5.0, "p99_bound_ms is -5.0"),
        ("bench", "peak_memory_mb", -9, "peak_memory_mb is -9"),
        ("bench", "p99_bound_rank", 499, "p99_bound_rank is 499\n.*rank 500 of 500 samples"),
        ("bench", "n", 3, "p95_bound_rank is 487\n.*none: 3 samples bound no such percentile"),
        ("bench", "n", 0, "n is 0"),
        ("parity", "agreement", 2, "agreement is 2"),
        ("parity", "agreement", -0.1, "agreement is -0.1"),
        ("parity", "top1", 1.01, "top1 is 1.01"),
        ("parity", "parity_ok", True, "parity_ok is True"),
        ("parity", "n", -80, "n is -80"),
        ("parity", "n", 0, "n is 0"),
        ("parity", "n", 2499.5, "n is 2499.5"),
        ("parity", "n", 10**9, "n is 1000000000"),
        ("parity", "tolerance_rel", 10**400, "tolerance_rel is 10000"),
    ],
)
def test_numbers_that_nothing_can_have_measured_are_refused(built, report, key, value, named):
    """Not judged, passed or failed, but named: no stage writes a negative latency or a share above one."""
    built.write()
    getattr(built, report)[f"{INT8}/{key}"] = value
    built.write(top1=False)
    with pytest.raises(UserError, match=f"{INT8}/{named}"):
        built.judge()


@pytest.mark.parametrize("n", [80, 2499, 10**6])
def test_predictions_of_another_number_of_images_are_refused(built, n):
    """parity.json speaks of as many images as there are predictions."""
    built.parity[f"{INT8}/n"] = n
    check = by_verdict(built.write().judge(), "fail")[f"{INT8}: {IDENTITY}"]
    assert check["evidence"] == f"predictions.parquet is about 2500 images, not {n} images"


def test_an_error_beyond_its_tolerance_is_no_parity_whatever_the_report_says(built):
    """The verdict follows from the numbers; the report's three digits are no difference."""
    built.parity |= {f"{INT8}/max_rel_error": 1.01e-4, f"{PRUNED}/max_rel_error": 1.004e-4}
    failed = by_verdict(built.write().judge(), "fail")
    assert list(failed) == [f"{INT8}: parity with torch and ONNX Runtime"]
    assert "the error is beyond the tolerance" in next(iter(failed.values()))["evidence"]


def test_what_a_stale_report_measured_is_not_measured(built):
    """Accuracy, parity and comparison of an older file are nothing of this one; latency still is."""
    stale_parity(built)
    report = built.write().judge()
    absent = set(by_verdict(report, "not measured"))
    assert {f"{INT8}: accuracy floor", f"{INT8}: predictions that differ from torch", ACCURACY_LOST} <= absent
    assert f"{INT8} on local: P99 latency, 99 % bound" in by_verdict(report, "pass")
    assert f"{PRUNED}: accuracy floor" in by_verdict(report, "pass")


def test_predictions_of_another_run_are_refused(built):
    """predictions.parquet comes to another accuracy than parity.json says: it is not of that run."""
    built.write()
    built.lose(INT8, 0, 1)
    report = built.write(top1=False).judge()
    assert list(by_verdict(report, "fail")) == [f"{INT8}: {IDENTITY}"]
    assert "predictions.parquet is about top-1 0.9496, not top-1 0.95" in str(by_verdict(report, "fail"))
    assert ACCURACY_LOST in by_verdict(report, "not measured")


def test_a_model_nobody_speaks_of_is_refused(built):
    """A file put beside the converted ones would be shipped: all evidence about it is missing."""
    extra = "mbv3s-p30-w8-r32"
    built.models[extra] = b"extra"
    built.cards[extra] = built.cards[INT8] | {"mnn_sha256": digest(b"extra")}
    report = built.write().judge()
    assert report["verdict"] == "fail"
    assert (
        "parity.json says nothing" in by_verdict(report, "not measured")[f"{extra}: {IDENTITY}"]["evidence"]
    )


def test_a_converted_model_that_is_gone_is_refused(built):
    """The convert report speaks of it, nothing lies there."""
    built.write()
    shutil.rmtree(built.path / "models" / "mnn" / INT8)
    report = built.judge()
    refused = by_verdict(report, "fail")[f"{INT8}: {IDENTITY}"]
    assert refused["evidence"] == f"there is no models/mnn/{INT8}/model.mnn"


@pytest.mark.parametrize("bound_ms", [1.0, 500.0])
def test_latency_of_a_noisy_host_is_inconclusive(built, bound_ms):
    """Fast or slow, a flagged run is neither pass nor fail, and does not refuse."""
    built.bench |= {f"{FP32}/flags": "noisy", f"{FP32}/p95_bound_ms": bound_ms}
    report = built.write().judge()
    assert report["verdict"] == "pass"
    latency = by_verdict(report, "inconclusive")
    assert set(latency) == {f"{FP32} on local: {p} latency, 99 % bound" for p in ("P95", "P99")}
    assert all(check["evidence"] == "latency invalid: noisy" for check in latency.values())


def test_a_large_share_of_the_memory_is_warned_of(built):
    """The benchmark's own warning, and no refusal: the page says it of that variant alone."""
    built.bench |= {f"{FP32}/warnings": "fallback memory", f"{PRUNED}/warnings": "fallback"}
    report = built.write().judge()
    noted = {c["name"]: c["note"] for c in by_verdict(report, "pass").values() if "memory" in c["name"]}
    assert noted[f"{FP32} on local: peak memory"] == f"warning: {WARNINGS['memory']}"
    assert noted[f"{PRUNED} on local: peak memory"] == ""
    assert "**To be looked at**" in (built.path / "reports" / "gate.md").read_text(encoding="utf-8")


def test_allowed_disagreements_are_at_least_one(tmp_path):
    """50 images at 99 %: half an image rounds up to one, so one flip passes and two fail."""
    for agreement, failed in ((0.98, 0), (0.96, 1)):
        built = GateWorkspace(path=tmp_path, n=50, wrong_then=0, champion=False)
        built.parity[f"{INT8}/agreement"] = agreement
        assert len(by_verdict(built.write().judge(), "fail")) == failed


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("reports/benchmark/local.json", None, r"local\.json"),
        ("reports/parity.json", None, r"parity\.json"),
        ("reports/parity.json", f'{{"{INT8}/top1": NaN}}', "top1 is nan"),
        ("reports/benchmark/old-phone.json", "{}", "old-phone"),
        ("models/parity/predictions.parquet", None, "dvc repro parity"),
        (f"models/mnn/{INT8}/card.json", None, r"card\.json"),
        (f"models/mnn/{INT8}/card.json", '{"labels": ["cat"]}', "the same in every card"),
        ("reports/parity.json", "null", r"parity\.json holds null"),
        ("reports/parity.json", "[1]", r"parity\.json holds \[1\]"),
        ("reports/convert.json", "7", r"convert\.json holds 7"),
        ("reports/benchmark/local.json", "[]", r"local\.json holds \[\]"),
        ("reports/convert.json", "[" * 100_000, r"convert\.json: nested too deeply"),
        (f"models/mnn/{INT8}/card.json", "null", "the same in every card"),
        (f"models/mnn/{INT8}/card.json", "[" * 100_000, r"card\.json: nested too deeply"),
        (f"models/mnn/{INT8}/model.mnn", FOLDER, r"model\.mnn"),
        (f"models/mnn/{INT8}/card.json", FOLDER, r"card\.json"),
        ("models/parity/predictions.parquet", FOLDER, "dvc repro parity"),
        ("champion/champion.json", FOLDER, r"there is no .*champion\.json"),
        ("champion/champion.json", "null", r"champion\.json: "),
        ("champion/champion.json", "[1]", r"champion\.json: "),
        ("champion/champion.json", "[" * 100_000, r"champion\.json: nested too deeply"),
        ("champion/predictions.parquet", FOLDER, "predictions.parquet: no file"),
        ("champion/champion.json", None, r"there is no .*champion\.json"),
        ("champion/champion.json", '{"name": 1}', "version: Field required"),
        ("champion/predictions.parquet", "", "the predictions .* names"),
    ],
)
def test_what_cannot_be_read_is_one_clear_error(built, file, content, message):
    """A missing or corrupt file is no verdict: the error names it and the next step."""
    built.write()
    path = built.path / file
    if content in (None, FOLDER):
        path.unlink()
        if content:
            path.mkdir()
    else:
        path.write_text(content, encoding="utf-8")
    with pytest.raises(UserError, match=message):
        built.judge()


FLOATS = [name for name, field in GateParams.model_fields.items() if field.annotation is float]


@pytest.mark.parametrize("value", [".inf", ".nan"])
@pytest.mark.parametrize("name", FLOATS)
def test_a_threshold_is_a_finite_number(tmp_path, name, value):
    """Every threshold: an infinite one would switch its check off and could be in no report."""
    (tmp_path / "params.yaml").write_text(f"gate:\n  {name}: {value}\n")
    with pytest.raises(UserError, match=f"gate.{name}: Input should be "):
        load_params("gate", GateParams, tmp_path)


def test_no_model_at_all_is_no_pass(built):
    """Nothing to judge is refused, not passed for want of a failed check."""
    built.write()
    shutil.rmtree(built.path / "models" / "mnn")
    with pytest.raises(UserError, match="holds no model"):
        built.judge()


def test_evidence_covers_all_that_was_judged(built):
    """Any file a verdict rests on, or a threshold, gives another evidence hash; the same gives the same."""
    for name in ("local_samples.parquet", "local_layers.csv"):
        (built.path / "reports" / "benchmark").mkdir(parents=True, exist_ok=True)
        (built.path / "reports" / "benchmark" / name).write_bytes(b"1")
    report = built.write().judge()
    assert set(report["evidence"]) == {
        "champion/champion.json",
        "champion/predictions.parquet",
        "models/parity/predictions.parquet",
        "reports/convert.json",
        "reports/parity.json",
        "reports/probe/local.json",
        *(f"reports/benchmark/local{end}" for end in (".json", "_samples.parquet", "_layers.csv")),
        *(f"models/mnn/{name}/{file}" for name in built.models for file in ("card.json", "model.mnn")),
    }
    hashes = [report["evidence_sha256"], built.judge(max_size_mb=9.0)["evidence_sha256"]]
    (built.path / "reports" / "benchmark" / "local_samples.parquet").write_bytes(b"2")
    hashes += [
        built.judge(max_size_mb=9.0)["evidence_sha256"],
        built.judge(max_size_mb=9.0)["evidence_sha256"],
    ]
    assert len(set(hashes)) == 3
    assert hashes[-1] == hashes[-2]


@pytest.mark.parametrize(
    "file",
    [
        f"models/mnn/{INT8}/model.mnn",
        f"models/mnn/{INT8}/card.json",
        "models/parity/predictions.parquet",
        "champion/champion.json",
        "reports/parity.json",
    ],
)
def test_files_changed_after_the_verdict_are_found(built, file):
    """Bit rot in any file, whatever its time stamp says, is not what was judged."""
    report = built.write().judge()
    require_judged(built.path, report)
    (built.path / file).write_bytes((built.path / file).read_bytes() + b" ")
    with pytest.raises(UserError, match="is not what the gate judged") as error:
        require_judged(built.path, report)
    # Of this workspace alone: others of the clone may never have been built.
    assert f"`dvc checkout --force {built.path / 'dvc.yaml'}`" in str(error.value)


def test_an_edited_verdict_is_found(built):
    """`pass` written over `fail`, with or without a new hash: the checks say otherwise."""
    stale_bench(built)
    report = built.write().judge() | {"verdict": "pass"}
    with pytest.raises(UserError, match=r"reports/gate\.json is not what the gate judged"):
        require_judged(built.path, report)
    with pytest.raises(UserError, match="its checks say otherwise"):
        require_judged(built.path, report | {"evidence_sha256": evidence_sha256(report)})
    with pytest.raises(UserError, match="is not what the gate judged"):
        require_judged(built.path, {})


def test_parity_on_unknown_many_images_is_not_measured(built):
    """And refuses: it is required."""
    del built.parity[f"{INT8}/elementwise_n"]
    report = built.write().judge()
    assert report["verdict"] == "fail"
    assert f"{INT8}: parity with torch and ONNX Runtime" in by_verdict(report, "not measured")
