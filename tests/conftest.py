"""Session fixtures: clones of this working tree, and the preset `tiny` built once through the whole graph."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from clones import TinyBuild, clone_repository, edgeloop


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
