"""Drift on real pixels, and what a simulated device makes of it."""

import numpy as np
import pytest

from fleet.device.errors import UserError
from fleet.simulator.drift import KINDS, Drift, camera_blur, colour_cast, low_light, new_domain

STRENGTHS = (0.0, 0.1, 0.3, 0.6, 1.0)


@pytest.fixture(scope="module")
def images():
    """[6, 32, 48, 3]: noise over a gradient, so that every function has something to change."""
    rng = np.random.default_rng(3)
    gradient = np.linspace(20, 220, 48)[None, None, :, None]
    return np.clip(gradient + rng.normal(0, 25, (6, 32, 48, 3)), 0, 255).astype(np.uint8)


def ladder(function, images):
    made = [function(images, strength) for strength in STRENGTHS]
    assert all(one.dtype == np.uint8 and one.shape == images.shape for one in made)
    np.testing.assert_array_equal(made[0], images)
    return made


def roughness(images):
    """Mean absolute difference between neighbours."""
    return np.abs(np.diff(images.astype(float), axis=2)).mean()


def test_blur_takes_detail_and_keeps_light(images):
    """Ever smoother, as bright as before within half a level, and the input is left alone."""
    before = images.copy()
    made = ladder(camera_blur, images)
    rough = [roughness(one) for one in made]
    assert rough == sorted(rough, reverse=True)
    assert rough[-1] < rough[0] / 5
    assert made[-1].mean() == pytest.approx(images.mean(), abs=0.5)
    np.testing.assert_array_equal(images, before)


def test_low_light_is_an_exposure(images):
    """3 % of the light is a level of 0.03 ** (1 / 2.2) = 20.3 % of what it was."""
    made = ladder(low_light, images)
    means = [one.mean() for one in made]
    assert means == sorted(means, reverse=True)
    white = np.full((1, 2, 2, 3), 255, np.uint8)
    assert set(low_light(white, 1.0).ravel()) == {52}
    assert set(low_light(white, 0.5).ravel()) == {round(255 * 0.515 ** (1 / 2.2))}


def test_a_colour_cast_is_warm(images):
    """Red stays; at full strength green keeps 65 % and blue 30 %."""
    made = ladder(colour_cast, images)
    for one in made:
        np.testing.assert_array_equal(one[..., 0], images[..., 0])
    blue = [one[..., 2].mean() for one in made]
    assert blue == sorted(blue, reverse=True)
    grey = np.full((1, 1, 1, 3), 200, np.uint8)
    assert colour_cast(grey, 1.0).ravel().tolist() == [200, 130, 60]


def test_a_new_domain_replaces_a_share(images):
    """None at 0, half at 0.5, all at 1; what was replaced stays replaced; the same seed chooses the same."""
    other = np.zeros((2, 32, 48, 3), np.uint8)

    def replaced(strength, seed=5):
        made = new_domain(images, other, strength, seed=seed)
        assert made.dtype == np.uint8
        return {at for at in range(len(made)) if not made[at].any()}

    assert [len(replaced(strength)) for strength in (0.0, 0.5, 1.0)] == [0, 3, 6]
    assert replaced(0.2) < replaced(0.5) < replaced(1.0)
    assert replaced(0.5) == replaced(0.5)
    assert any(replaced(0.5, seed) != replaced(0.5) for seed in range(6, 12))


@pytest.mark.parametrize("strength", [-0.1, 1.1, float("nan")])
def test_a_strength_that_is_none(images, strength):
    """One error for each function."""
    for function in (camera_blur, low_light, colour_cast):
        with pytest.raises(UserError, match="strength"):
            function(images, strength)
    with pytest.raises(UserError, match="strength"):
        new_domain(images, images, strength, seed=0)


def test_images_that_are_none(images):
    """Floats, one image without its batch, another size, an empty set."""
    for wrong in (images.astype(np.float32), images[0], images[..., :1]):
        with pytest.raises(UserError, match="uint8"):
            low_light(wrong, 0.5)
    for other in (images[:, :16], images[:0]):
        with pytest.raises(UserError, match="height and width"):
            new_domain(images, other, 0.5, seed=0)


@pytest.mark.parametrize("kind", KINDS)
def test_drift_costs_confidence(kind):
    """Ever less on average; Beta(12, 1) has a mean of 12 / 13, Beta(2, 3) of 2 / 5."""
    means = [
        Drift(kind=kind, strength=s).confidences(np.random.default_rng(1), 50_000).mean() for s in STRENGTHS
    ]
    assert means == sorted(means, reverse=True)
    assert means[0] == pytest.approx(12 / 13, abs=0.005)
    assert means[-1] == pytest.approx(2 / 5, abs=0.005)


def test_what_a_device_tells_of_its_images():
    """Low light is dark and flat, blur flat, warm light darker; a new domain looks like few classes."""
    rng = np.random.default_rng(2)
    told = {kind: Drift(kind=kind, strength=1.0).pixels(rng, 20_000) for kind in ("none", *KINDS)}
    mean, spread = told["none"][0].mean(), told["none"][1].mean()
    assert told["low_light"][0].mean() == pytest.approx(0.2 * mean, rel=0.02)
    assert told["colour_cast"][0].mean() == pytest.approx(0.65 * mean, rel=0.02)
    assert told["blur"][1].mean() == pytest.approx(0.7 * spread, rel=0.02)
    even = np.bincount(Drift(kind="blur", strength=1.0).labels(rng, 50_000, 10), minlength=10)
    assert even.min() > 4_500
    lean = np.bincount(Drift(kind="new_domain", strength=1.0).labels(rng, 50_000, 10), minlength=10)
    assert lean[0] > 40_000
