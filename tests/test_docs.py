"""Every command the documents show exists, with the options they show."""

import importlib.util
import json
import re
import shlex
from pathlib import Path

import pytest
from cyclopts import CycloptsError

from flows.cli import app
from tasks.results import table

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ("build", "init", "convert", "bench", "doctor", "ui")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


def commands(text: str) -> list[str]:
    """Command lines of a document: in blocks, and inline code that begins with a known program."""
    blocks = re.findall(r"```(?:sh|bash|shell|console)\n(.*?)```", text, re.DOTALL)
    lines = [line.strip().removeprefix("$ ") for block in blocks for line in block.splitlines()]
    lines += [line.removeprefix("$ ") for line in re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE)]
    lines += re.findall(r"`([^`\n]+)`", text)
    return [
        line.split(" #")[0].strip() for line in lines if re.match(r"(\S*/)?(edgeloop|make|python -m) ", line)
    ]


def _check(command: str) -> None:
    words = shlex.split(command)
    program, arguments = Path(words[0]).name, words[1:]
    if program == "make":
        targets = re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
        assert {word for word in arguments if "=" not in word} <= set(targets), command
    elif program == "python":
        module = arguments[1]
        if (
            module.split(".")[0] in ("tasks", "flows", "fleet")
            and "STAGE" not in module
            and "X" not in module
        ):
            assert importlib.util.find_spec(module), command
    elif len(arguments) == 1 and arguments[0] in COMMANDS:
        return  # the text speaks of the command
    else:
        app.parse_args([word for word in arguments if word != "..."], print_error=False, exit_on_error=False)


@pytest.mark.parametrize("result", sorted((ROOT / "docs/results").glob("*.json")), ids=lambda path: path.stem)
def test_result_pages_say_what_their_json_says(result):
    """A page under docs/results is what its writer makes of the JSON beside it."""
    spec = importlib.util.spec_from_file_location("bench_report", ROOT / "tests/bench/report.py")
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    record = json.loads(result.read_text(encoding="utf-8"))
    page = table(record) if result.stem == "builds" else report.page(result.name, record)
    assert result.with_suffix(".md").read_text(encoding="utf-8") == page


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_commands_exist(document):
    """edgeloop commands parse, make targets and modules are there."""
    for command in commands(document.read_text(encoding="utf-8")):
        try:
            _check(command)
        except CycloptsError as error:
            pytest.fail(f"{document.name}: `{command}`: {error}")


def test_a_wrong_command_would_be_found():
    """The check itself: a command that does not exist fails it."""
    text = "```sh\n$ edgeloop bild --preset digits\n```\nand `edgeloop build --presett x`"
    assert commands(text) == ["edgeloop bild --preset digits", "edgeloop build --presett x"]
    for command in commands(text):
        with pytest.raises(CycloptsError):
            _check(command)
