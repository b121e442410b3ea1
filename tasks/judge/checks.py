"""All checks of a build, waivers not yet applied.

A report about another file says nothing about the one that lies there: the check of identity fails, and what
the report measured is not measured.
"""

from collections.abc import Mapping
from typing import Any

from tasks.champion import Comparison
from tasks.judge import floors
from tasks.judge.check import About, Check, not_measured
from tasks.judge.identity import Said, bytes_check, engine_check, preprocess_check
from tasks.judge.material import Material, Model
from tasks.judge.params import GateParams
from tasks.judge.regression import champion_checks, classes_check, no_champion, nothing_comparable
from tasks.variants import Variant

_NO_MODEL = Model(sha256="", size_bytes=0)


def evaluate(material: Material, params: GateParams) -> list[Check]:
    """Every check: of the devices, variant by variant, then of the whole build."""
    identity = {name: _identity(name, material) for name in material.variants}
    proven = [name for name in material.variants if _is_proven(name, material, identity[name][1])]
    parity = {key: value for key, value in material.parity.items() if key.split("/")[0] in proven}
    checks = [engine_check(name, probed, material.cards) for name, probed in sorted(material.probes.items())]
    for name in material.variants:
        checks += identity[name]
        checks += _floors(name, material, parity, params)
        if material.champion is not None:
            compared = _compared(name, material, name in proven)
            digest = material.models.get(name, _NO_MODEL).sha256
            checks += champion_checks(name, digest, material.champion, compared, params)
    if material.champion is None:
        checks.append(no_champion())
    else:
        checks.append(classes_check(material.champion, material.labels))
        if not any(material.champion.counterpart(name) for name in material.variants):
            checks.append(nothing_comparable(material.champion))
    checks.append(not_measured("oldest engine in the field", "no older engine is run by a build"))
    checks.append(not_measured("stability run", "no continuous run belongs to a build"))
    return checks


def _identity(name: str, material: Material) -> list[Check]:
    """What card and reports say about the file, and whether its preprocessing is the one that was proven."""
    model, card = material.models.get(name, _NO_MODEL), material.cards.get(name, {})
    parity = About(file="parity.json", variant=name, values=material.parity)
    converted = About(file="convert.json", variant=name, values=material.convert).count("size_bytes")
    statements = [
        Said.digest("card.json", card.get("mnn_sha256"), model.sha256),
        Said.bytes("convert.json", converted, model.size_bytes),
        Said.digest("parity.json", parity.text("mnn_sha256"), model.sha256),
    ]
    top1, n = parity.number("top1"), parity.count("n")
    if n is not None:
        statements.append(Said.images("predictions.parquet", material.predicted_count, n))
    if top1 is not None:
        statements.append(Said.top1("predictions.parquet", material.predicted_top1.get(name), top1))
    for device in sorted(material.benchmarks):
        bench = _bench(name, device, material.benchmarks[device])
        statements.append(Said.digest(bench.file, bench.text("mnn_sha256"), model.sha256))
    return [bytes_check(name, statements, exists=name in material.models), preprocess_check(card, parity)]


def _is_proven(name: str, material: Material, preprocess: Check) -> bool:
    """Whether parity.json is about this file, fed as its card says."""
    digest = material.models.get(name, _NO_MODEL).sha256
    return material.parity.get(f"{name}/mnn_sha256") == digest and preprocess.verdict != "fail"


def _bench(name: str, device: str, values: Mapping[str, Any]) -> About:
    return About(file=f"benchmark/{device}.json", variant=name, values=values)


def _floors(name: str, material: Material, parity: Mapping[str, Any], params: GateParams) -> list[Check]:
    model = material.models.get(name, _NO_MODEL)
    proven = About(file="parity.json", variant=name, values=parity)
    convert = About(file="convert.json", variant=name, values=material.convert)
    if convert.count("size_bytes") != model.size_bytes:
        convert = About(file=convert.file, variant=name, values={})
    checks = [
        *floors.accuracy_checks(proven, material.parent_pairs.get(name), params),
        *floors.parity_checks(proven, params),
        floors.size_check(convert, params),
    ]
    for device, values in sorted(material.benchmarks.items()):
        same = values.get(f"{name}/mnn_sha256") == model.sha256
        checks += floors.device_checks(device, _bench(name, device, values if same else {}), params)
    return checks


def _compared(name: str, material: Material, proven: bool) -> Comparison | str:
    """The comparison with the champion, or why there is none."""
    comparison = material.comparisons.get(name)
    top1, predicted = material.parity.get(f"{name}/top1"), material.predicted_top1.get(name)
    if not proven or top1 is None or predicted is None or abs(top1 - predicted) > Said.TOP1_ROUNDING:
        return "no predictions of this file on images with truth"
    if comparison is None:
        return f"{material.champion} has no variant of precision {Variant.parse(name).precision}"
    return comparison
