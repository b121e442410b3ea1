"""What `edgeloop build` prints for people: variants, verdict with its reasons, champion, registration."""

import os
import shutil
import sys
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from fleet.lab.flags import FLAGS
from flows.build import Built
from tasks.refusal import refusing, what_was_found
from tasks.terminal import plain

_LOG_WIDTH = 140
_MARK = "*"


def print_built(built: Built, report: str) -> None:
    """Print a build's result on stdout.

    Args:
        built: The result.
        report: Path of the release report, as the reader would type it.
    """
    console = Console(file=sys.stdout, width=None if sys.stdout.isatty() else _LOG_WIDTH)
    console.print(_variants(built))
    if flags := sorted({FLAGS.get(flag, flag) for v in built.variants for flag in v["flags"]}):
        console.print(f"  {_MARK} latency to be taken with care: {'; '.join(flags)}")
    verdicts = Counter(check["verdict"] for check in built.gate["checks"])
    counts = ", ".join(f"{count} {verdict}" for verdict, count in verdicts.most_common())
    console.print(f"gate: [bold]{built.gate['verdict']}[/] ({counts})")
    for check in refusing(built.gate):
        _line(console, f"  {check['name']}: {what_was_found(check)}")
    if verdicts["inconclusive"]:
        console.print("  inconclusive: the report says what a quieter host or more test images would tell")
    for line in (_against_champion(built), _registered(built), f"report: {report}"):
        if line:
            _line(console, line)
    count = len(built.ran)
    what = f"{count} {'stage was' if count == 1 else 'stages were'} due" if count else "nothing to do"
    console.print(f"{what}, {built.seconds:.1f} s")


def _line(console: Console, text: str) -> None:
    """One line of foreign text: a class may be called `[b]`."""
    console.print(plain(text), soft_wrap=True, markup=False, highlight=False)


def _variants(built: Built) -> Table:
    table = Table("variant", "top-1", "size", "MACs", "P50", "P95", "P99", "parity", "agreement", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for v in built.variants:
        mark = _MARK if v["flags"] else ""
        latency = [f"{v['latency_ms'][p]:.2f} ms{mark}" for p in ("p50", "p95", "p99")]
        size, macs = f"{v['size_bytes'] / 1e6:.2f} MB", f"{v['macs'] / 1e6:.1f} M"
        parity, agreement = f"{v['parity_max_rel_error']:.1e}", f"{v['agreement']:.2%}"
        table.add_row(v["name"], f"{v['top1']:.2%}", size, macs, *latency, parity, agreement)
    return table


def _against_champion(built: Built) -> str:
    """Which variants are not the champion's, and what lost most of them; empty without comparison."""
    if not built.champion or not built.comparison:
        return ""
    changed = {name: c for name, c in built.comparison.items() if not c["same_file"]}
    own_count, all_count = len(built.comparison) - len(changed), len(built.comparison)
    line = f"champion: {built.champion['name']} version {built.champion['version']}"
    if own_count:
        line += f"; {own_count} of {all_count} variants are its own files"
    if not changed:
        return line
    worst = max(changed, key=lambda name: changed[name]["drop_pp"])
    lost = changed[worst]
    low_pp, high_pp = lost["interval_pp"]
    return (
        f"{line}; most lost by {worst}: {lost['drop_pp']:+.2f} pp ({low_pp:+.2f} to {high_pp:+.2f}), "
        f"{lost['n']} images"
    )


def _registered(built: Built) -> str:
    if not built.registered:
        return ""
    name, version = built.registered["name"], built.registered["version"]
    champion = (built.champion.get("name"), str(built.champion.get("version")))
    if (name, str(version)) == champion:
        return f"registered: {name} version {version}, the champion"
    return f"registered: {name} version {version}; `{_typed()} release list` says what waits for review"


def _typed() -> str:
    """`edgeloop` as it can be typed here: where no environment is active, by its path."""
    if shutil.which("edgeloop"):
        return "edgeloop"
    return os.path.relpath(Path(sys.executable).with_name("edgeloop"))
