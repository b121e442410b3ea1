"""Stage gate: every threshold beside its measured value, and one verdict for the whole build.

The stage itself succeeds whether or not the gate refuses: a refusal is a result, and its report must survive.
`edgeloop build` exits 1 on it, and a refused build is not registered.
"""

from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasks.judge.check import overall
from tasks.judge.evidence import evidence, evidence_sha256, require_judged
from tasks.judge.params import GateParams, Waiver
from tasks.judge.table import markdown
from tasks.judge.waivers import apply_waivers
from tasks.stage import REPORTS, stage, write_text

__all__ = ["GateParams", "Waiver", "gate", "main", "require_judged"]


def gate(workspace: Path, params: GateParams) -> dict[str, Any]:
    """Judge a workspace: writes reports/gate.md and returns what reports/gate.json holds.

    Raises:
        UserError: a report, card or record of the champion is missing or cannot be read, a report is of a
            device that is not judged, or a waiver cannot be.
    """
    # pandas and OpenCV: who imports this module for `require_judged` needs neither.
    from tasks.champion import records
    from tasks.judge.checks import evaluate
    from tasks.judge.material import read_material

    files = evidence(workspace, params.devices)
    material = read_material(workspace, params.devices)
    digests = {name: model.sha256 for name, model in material.models.items()}
    checks = apply_waivers(evaluate(material, params), params.waivers, digests)
    verdict, comparison = overall(checks), records(material.comparisons, material.of_champion())
    write_text(workspace / REPORTS / "gate.md", markdown(verdict, checks, comparison))
    report = {
        "verdict": verdict,
        "evidence": files,
        "checks": [asdict(check) for check in checks],
        "comparison": comparison,
    }
    return report | {"evidence_sha256": evidence_sha256(report)}


def main() -> None:
    """`python -m tasks.gate` writes reports/gate.json and reports/gate.md."""
    with stage("gate", GateParams) as run:
        run.report(gate(Path(), run.params))


if __name__ == "__main__":
    main()
