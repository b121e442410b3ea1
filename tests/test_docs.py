"""Every command the documents show exists, with the options they show."""

import importlib.util
import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from cyclopts import CycloptsError
from PIL import Image
from sklearn.datasets import load_digits

from fleet.device.preprocess import Preprocess
from flows.cli import app, main
from tasks.mnn.calibration import read_preprocess
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


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(document):
    """Files and pictures that a page links to, or names with their path, are in the repository."""
    text = document.read_text(encoding="utf-8")
    assert [link for link in _links(text) if not (document.parent / link).exists()] == []
    assert [name for name in _named_pages(text) if not (ROOT / name).exists()] == []


def _links(text: str) -> list[str]:
    """Targets of links and pictures, those of HTML too, that are relative; without the place in the page."""
    found = re.findall(r"\]\(<?([^)\s>]+)", text) + re.findall(r"\b(?:href|src)=\"([^\"]+)\"", text)
    found += re.findall(r"^\[[^\]]+\]:\s*(\S+)", text, re.MULTILINE)
    return [link.partition("#")[0] for link in found if not re.match(r"[a-z]+:|#", link)]


def _named_pages(text: str) -> list[str]:
    return re.findall(r"`(docs/[\w/.-]+\.\w+)`", text)


def test_a_dead_link_would_be_found():
    """The check itself: each way to write a link, and none that leads to the web or within the page."""
    text = '[a](docs/a.md#b) ![p](<b.png>) <img src="c.png">, `docs/d.md`\n[e]: e.md\n'
    text += "[w](https://example.org/x) [h](#here)"
    assert _links(text) == ["docs/a.md", "b.png", "c.png", "e.md"]
    assert _named_pages(text) == ["docs/d.md"]


def test_a_wrong_command_would_be_found():
    """The check itself: a command that does not exist fails it."""
    text = "```sh\n$ edgeloop bild --preset digits\n```\nand `edgeloop build --presett x`"
    assert commands(text) == ["edgeloop bild --preset digits", "edgeloop build --presett x"]
    for command in commands(text):
        with pytest.raises(CycloptsError):
            _check(command)


def _blocks(document: str) -> dict[str, str]:
    """The fenced blocks of a page by their language; one of each."""
    text = (ROOT / "docs" / document).read_text(encoding="utf-8")
    blocks = re.findall(r"```(\w+)\n(.*?)```", text, re.DOTALL)
    assert len(dict(blocks)) == len(blocks)
    return dict(blocks)


def _without_numbers(text: str) -> str:
    return re.sub(r"\d+(\.\d+)?", "N", text)


def test_the_example_of_own_model_runs_as_it_stands(tmp_path, monkeypatch, capsys):
    """Export, record and command of the page make the int8 model, and print what the page shows."""
    blocks = _blocks("own-model.md")
    for number, digit in enumerate(load_digits().images[:110]):
        picture = Image.fromarray((digit * 255 / 16).astype(np.uint8)).resize((96, 96))
        (tmp_path / "images").mkdir(exist_ok=True)
        picture.convert("RGB").save(tmp_path / "images" / f"{number}.png")
    (tmp_path / "preprocess.json").write_text(blocks["json"], encoding="utf-8")
    (tmp_path / "export.py").write_text(blocks["python"], encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    subprocess.run([sys.executable, "export.py"], check=True, capture_output=True)
    with pytest.raises(SystemExit) as ended:
        main(shlex.split(blocks["sh"])[1:])
    printed = capsys.readouterr().out
    assert ended.value.code == 0, printed
    assert _without_numbers(printed) == _without_numbers(blocks["text"].replace("\\\n", ""))
    record = json.loads(blocks["json"])
    assert set(record) == set(Preprocess.__dataclass_fields__)  # all fields, as the page says
    assert Preprocess.from_dict(record) == read_preprocess(tmp_path / "preprocess.json")
