"""Stage `validate`: Great Expectations judges the manifest and the shards before anything is trained on them.

A failed critical expectation stops the build; a failed warning is reported and the build goes on.
"""

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fleet.device.errors import EngineError, UserError
from tasks.data.dataset import PREPARED, Dataset
from tasks.data.facts import Facts, examine
from tasks.data.pages import NO_TIME, settle
from tasks.data.rules import Rule, ValidateParams, rules
from tasks.stage import REPORTS, stage

_EXAMPLES = 5  # offending rows named in a message
_SITE = "prepared"
_ROW_NAME = {"images": "source", "classes": "class_name", "splits": "split"}


@dataclass(frozen=True, kw_only=True)
class Failure:
    """An expectation that was not met."""

    rule: Rule
    count: int
    """Offending rows."""
    examples: tuple[str, ...]

    def __str__(self) -> str:
        named = f": {', '.join(self.examples)}" if self.examples else ""
        more = ", ..." if self.count > len(self.examples) > 0 else ""
        return f"{self.rule.name}: {self.count} {self.rule.table} {self.rule.meaning}{named}{more}"


@dataclass(frozen=True)
class Verdict:
    """What the validation found."""

    rules: tuple[Rule, ...]
    failures: tuple[Failure, ...]
    images_count: int

    def report(self) -> dict[str, Any]:
        """Flat counts for reports/validate.json, and the warnings in words."""
        counts = {rule.name: 0 for rule in self.rules} | {f.rule.name: f.count for f in self.failures}
        critical = [f for f in self.failures if f.rule.severity == "critical"]
        warnings = [str(f) for f in self.failures if f.rule.severity == "warning"]
        return {f"{name}_count": count for name, count in counts.items()} | {
            "images_count": self.images_count,
            "expectations_count": len(self.rules),
            "critical_failures_count": len(critical),
            "warnings_count": len(warnings),
            "critical": [str(f) for f in critical],
            "warnings": warnings,
        }

    def require(self) -> None:
        """Stop on a critical failure.

        Raises:
            UserError: names every failed critical expectation and the first offending rows.
        """
        critical = [str(f) for f in self.failures if f.rule.severity == "critical"]
        if critical:
            raise UserError(
                "the dataset is not fit to train on: " + "; ".join(critical),
                allowed="no critical expectation failed (reports/data_docs/index.html lists them)",
                next_step="mend the source or params.yaml, then run `dvc repro prepare`",
            )


def validate(params: ValidateParams, *, prepared: Path = PREPARED, reports: Path = REPORTS) -> Verdict:
    """Measure the dataset, judge it, and write the Data Docs to `reports`/data_docs.

    Raises:
        UserError: there is no dataset to judge.
    """
    dataset = Dataset.open(prepared)
    expected = rules(params, len(dataset.label_names))
    failures = judge(examine(dataset), expected, docs=reports / "data_docs")
    return Verdict(expected, tuple(failures), len(dataset.manifest))


def judge(facts: Facts, expected: Sequence[Rule], *, docs: Path) -> list[Failure]:
    """Let Great Expectations check every rule; `docs` is replaced by its pages.

    Raises:
        EngineError: an expectation could not be evaluated.
    """
    os.environ["GX_ANALYTICS_ENABLED"] = "false"  # read at import: it would report to its maker
    import great_expectations as gx
    from great_expectations.core.run_identifier import RunIdentifier

    context = gx.get_context(mode="ephemeral")
    context.variables.progress_bars = {"globally": False}
    shutil.rmtree(docs, ignore_errors=True)
    context.add_data_docs_site(_SITE, _site(docs))
    source = context.data_sources.add_pandas("prepared")
    failures: list[Failure] = []
    for table, row_name in _ROW_NAME.items():
        chosen = [rule for rule in expected if rule.table == table]
        suite = context.suites.add(gx.ExpectationSuite(table, expectations=[_expectation(r) for r in chosen]))
        batch = source.add_dataframe_asset(table).add_batch_definition_whole_dataframe("all")
        definition = gx.ValidationDefinition(name=table, data=batch, suite=suite)
        frame: pd.DataFrame = getattr(facts, table)
        outcome = context.validation_definitions.add(definition).run(
            batch_parameters={"dataframe": frame},
            result_format={"result_format": "SUMMARY", "unexpected_index_column_names": [row_name]},
            run_id=RunIdentifier(_SITE, NO_TIME),
        )
        failures += _failures(outcome.results, {rule.name: rule for rule in chosen}, row_name)
    context.build_data_docs(site_names=[_SITE])
    settle(docs)
    order = [rule.name for rule in expected]
    return sorted(failures, key=lambda failure: order.index(failure.rule.name))


def _site(docs: Path) -> dict[str, Any]:
    return {
        "class_name": "SiteBuilder",
        "show_how_to_buttons": False,
        "store_backend": {"class_name": "TupleFilesystemStoreBackend", "base_directory": str(docs.resolve())},
        "site_index_builder": {"class_name": "DefaultSiteIndexBuilder"},
    }


def _expectation(rule: Rule) -> Any:
    from great_expectations import expectations as gxe
    from great_expectations.expectations.row_conditions import Column

    common: dict[str, Any] = {"column": rule.column, "severity": rule.severity, "meta": {"rule": rule.name}}
    if rule.where:
        column, value = rule.where
        common |= {"row_condition": Column(column) == value}
    match rule.expect:
        case "between":
            return gxe.ExpectColumnValuesToBeBetween(**common, min_value=rule.low, max_value=rule.high)
        case "in_set":
            return gxe.ExpectColumnValuesToBeInSet(**common, value_set=list(rule.allowed))
        case "not_null":
            return gxe.ExpectColumnValuesToNotBeNull(**common)
        case "unique":
            return gxe.ExpectColumnValuesToBeUnique(**common)


def _failures(results: Sequence[Any], named: dict[str, Rule], row_name: str) -> list[Failure]:
    failures = []
    for outcome in results:
        rule = named[outcome.expectation_config.meta["rule"]]
        if outcome.success:
            continue
        if "unexpected_count" not in outcome.result:
            said = str(outcome.exception_info)
            raise EngineError(f"Great Expectations could not check {rule.name}", engine_said=said[-500:])
        rows = outcome.result.get("partial_unexpected_index_list") or []
        examples = tuple(str(row[row_name]) for row in rows[:_EXAMPLES])
        failures.append(Failure(rule=rule, count=int(outcome.result["unexpected_count"]), examples=examples))
    return failures


def main() -> None:
    """Run the stage in the current workspace."""
    with stage("validate", ValidateParams) as run:
        verdict = validate(run.params)
        run.report(verdict.report())
        verdict.require()


if __name__ == "__main__":
    main()
