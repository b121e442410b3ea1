"""The default build: what `make loop` promises on the embedded digits (n = 359: an image is 0.28 pp)."""


def _by_name(build):
    return {
        variant["name"].removeprefix("mbv3s-").removesuffix("-r48"): variant for variant in build["variants"]
    }


def test_digits_pass_the_gate_and_are_registered(digits_build):
    """The first result of a new user is a model that was let through."""
    refused = [check["name"] for check in digits_build["gate"]["checks"] if check["verdict"] == "fail"]
    assert refused == []
    assert digits_build["gate"]["verdict"] == "pass"
    assert digits_build["registered"] == {"name": "edgeloop-digits", "version": 1}


def test_digits_become_seven_times_smaller_and_stay_right(digits_build):
    """Pruned int8 within 1 pp of the trained float model, at a seventh of its size and half of its MACs."""
    found = _by_name(digits_build)
    trained, int8 = found["p0-fp32"], found["p30-i8"]
    assert trained["top1"] > 0.97
    assert int8["top1"] > trained["top1"] - 0.01
    assert trained["size_bytes"] / int8["size_bytes"] > 7
    assert trained["macs"] / int8["macs"] > 1.9


def test_the_engine_computes_what_was_trained(digits_build):
    """Float32 within 1e-4 of the output's range; all predict as the reference does on 99 % of the images."""
    for name, variant in _by_name(digits_build).items():
        assert variant["agreement"] >= 0.99, name
        if name.endswith("fp32"):
            assert variant["parity_max_rel_error"] < 1e-4, name
