"""Models built once; a repository and its server for each test."""

import pytest
from release_rig import Rig, make_model, serving, write_golden

from tasks.release_repository import ReleaseRepository


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """Three models with their golden inputs."""
    folder = tmp_path_factory.mktemp("models")
    models = [make_model(folder, seed) for seed in range(3)]
    return models, [write_golden(model, model.with_suffix(".npz")) for model in models]


@pytest.fixture
def rig(tmp_path, built):
    """An empty repository, served."""
    ReleaseRepository.create(tmp_path / "repository", tmp_path / "keys", demo=True)
    with serving(tmp_path / "repository") as server:
        yield Rig(tmp_path, *built, server)


@pytest.fixture(scope="session")
def trap(tmp_path_factory):
    """A model that answers the golden images, and not-a-number where an image is dark; with its golden."""
    folder = tmp_path_factory.mktemp("trap")
    model = make_model(folder, 9, trap=True)
    return model, write_golden(model, folder / "trap.npz")
