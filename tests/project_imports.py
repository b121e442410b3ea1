"""Which project modules a module reads at run time: its imports, by ast, and the children it starts."""

import ast
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("fleet", "tasks", "flows")

# They frame a stage and cannot change what it computes (docs/architecture.md).
EXCLUDED = frozenset(
    {
        "fleet/device/errors.py",
        "tasks/progress.py",
        "tasks/stage.py",
        "tasks/tracking.py",
        "tasks/tracking_writer.py",
        "tasks/workspace.py",
    }
)


def module_file(name: str) -> Path | None:
    """The file of a dotted module name inside the project, or None; packages themselves hold no code."""
    path = ROOT.joinpath(*name.split(".")).with_suffix(".py")
    return path if name.startswith(tuple(f"{p}." for p in PACKAGES)) and path.is_file() else None


def imported_names(tree: ast.AST) -> set[str]:
    """Every dotted name an import statement anywhere in the module may stand for."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def _started_children(tree: ast.AST, beside: Path) -> set[Path]:
    """Modules named by a string: `-m tasks.x` of a child process, or a script that lies beside the module."""
    found: set[Path] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            text = node.value
            candidate = module_file(text) if "." in text and "/" not in text else None
            if text.endswith(".py") and "/" not in text and (beside.parent / text).is_file():
                candidate = beside.parent / text
            if candidate and candidate != beside:
                found.add(candidate)
    return found


@cache
def direct_reads(path: Path) -> frozenset[Path]:
    """Project modules that `path` imports or starts itself."""
    tree = ast.parse(path.read_text(encoding="utf-8"), str(path))
    imported = {file for name in imported_names(tree) if (file := module_file(name))}
    return frozenset(imported | _started_children(tree, path))


def reads(module: str) -> set[str]:
    """`module`'s file and all it reads transitively but the exclusions, as paths relative to the root."""
    start = module_file(module)
    assert start is not None, f"no module {module}"
    seen: set[Path] = set()
    todo = [start]
    while todo:
        path = todo.pop()
        relative = str(path.relative_to(ROOT))
        if path in seen or relative in EXCLUDED:
            continue
        seen.add(path)
        todo += direct_reads(path)
    return {str(path.relative_to(ROOT)) for path in seen}
