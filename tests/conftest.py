"""Session fixtures: a browser, clones of this tree, and the presets `tiny` and `digits` built once."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import open_browser
from clones import TinyBuild, clone_repository, edgeloop, environment
from playwright.sync_api import Browser

_DIGITS = pytest.StashKey[tuple[subprocess.Popen[str], Path]]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of the digits build come last: it takes minutes and runs beside all others."""
    items.sort(key=lambda item: "digits_build" in getattr(item, "fixturenames", ()))


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    """One Chromium for all tests of pages; a test opens a page of its own and closes it."""
    with open_browser() as opened:
        yield opened


@pytest.fixture(scope="session")
def make_clone(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], Path]:
    """Makes fresh clones with DVC caches of their own."""
    return lambda: clone_repository(tmp_path_factory.mktemp("repository") / "edgeloop")


@pytest.fixture(scope="session")
def tiny_build(make_clone: Callable[[], Path]) -> TinyBuild:
    """`edgeloop build --preset tiny --json` in a fresh clone."""
    clone = make_clone()
    done = edgeloop(clone, "build", "--preset", "tiny", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    return TinyBuild(clone, json.loads(done.stdout), done.stderr)


@pytest.fixture(scope="session", autouse=True)
def _digits_in_the_background(
    request: pytest.FixtureRequest, make_clone: Callable[[], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[None]:
    """Start `edgeloop build --json` with the first test of a session that has tests of it."""
    wanted = any("digits_build" in getattr(item, "fixturenames", ()) for item in request.session.items)
    if not wanted:
        yield
        return
    clone, log = make_clone(), tmp_path_factory.mktemp("digits") / "log"
    with log.open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "flows", "build", "--json"],
            cwd=clone,
            env=environment(clone),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
    request.config.stash[_DIGITS] = process, log
    yield
    if process.poll() is None:
        process.terminate()
        process.wait(60)


@pytest.fixture(scope="session")
def digits_build(request: pytest.FixtureRequest) -> dict[str, Any]:
    """What `edgeloop build --json` printed in a fresh clone: the default, on the embedded digits."""
    process, log = request.config.stash[_DIGITS]
    printed, _ = process.communicate()
    assert process.returncode in (0, 1), printed + log.read_text(encoding="utf-8")
    return dict(json.loads(printed))
