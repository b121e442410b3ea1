"""Results of the benchmarks as docs/results/NAME.{json,md}: the page is written from the JSON.

python tests/bench/report.py    # write every page again from its JSON
"""

import argparse
import json
import os
import platform
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "results"


def parser(doc: str | None) -> argparse.ArgumentParser:
    """Of a benchmark: `--help` is what its module says."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def conditions(**more: Any) -> dict[str, Any]:
    """What a timing depends on: the machine, its load now, the versions and what the caller adds."""
    return {
        "machine": f"{_cpu_model()}, {os.cpu_count()} cores",
        "system": platform.platform(),
        "load_average_1min": round(os.getloadavg()[0], 1),
        "python": platform.python_version(),
        "torch": torch.__version__.partition("+")[0],
        **more,
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "?")


def write(path: Path, record: dict[str, Any]) -> None:
    """Write one result and its page.

    Args:
        path: The JSON; the page lies beside it.
        record: `title`, `command` (that measures it again), `text` (what was done), `conditions`, `rows` (a
            table: one flat object a row, the same keys in each), and whatever raw numbers belong to it.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    path.with_suffix(".md").write_text(page(path.name, record), encoding="utf-8")
    print(page(path.name, record))


def page(name: str, record: dict[str, Any]) -> str:
    """The Markdown page of a result."""
    rows = record["rows"]
    said = "; ".join(f"{key.replace('_', ' ')}: {value}" for key, value in record["conditions"].items())
    lines = [
        f"# {record['title']}",
        "",
        f"Written from `{name}` by `{record['command']}`; edit neither.",
        "",
        record["text"],
        "",
        f"| {' | '.join(rows[0])} |",
        "|---" * len(rows[0]) + "|",
        *(f"| {' | '.join(map(_cell, row.values()))} |" for row in rows),
        "",
        f"Conditions: {said}.",
    ]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def results() -> list[Path]:
    """The JSON files that this module writes pages from."""
    return sorted(
        path for path in FOLDER.glob("*.json") if "rows" in json.loads(path.read_text(encoding="utf-8"))
    )


if __name__ == "__main__":
    for result in results():
        write(result, json.loads(result.read_text(encoding="utf-8")))
