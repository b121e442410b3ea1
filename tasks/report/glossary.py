"""Terms of the report in plain words; a report explains those it uses."""

import re

_TERMS = (
    ("Agreement", r"agreement", "Share of test images on which engine and torch predict the same class."),
    (
        "Bound",
        r"bound",
        """With 99 % confidence the percentile is not above this. It is one of the n measured latencies, that
        with the rank named when they are sorted; nothing is assumed of their distribution.""",
    ),
    ("Champion", r"champion", "The release in use now; a new one has to hold its ground against it."),
    (
        "Confidence interval",
        r"95 %|interval",
        """The test set is a sample. In 95 of 100 such samples the interval holds the accuracy on all images
        of that kind (Clopper and Pearson, exact). All variants see the same images, so a difference between
        two is surer than their intervals look; its own interval, paired, is Newcombe's (1998, method 10).""",
    ),
    ("Evidence hash", r"evidence", "One SHA-256 over all files the verdict rests on and over the verdict."),
    ("Flag", r"flags", "A mark that makes a latency invalid, such as a busy host."),
    ("fp32, fp16", r"fp32|fp16", "Weights stored in 32 or 16 bits, float arithmetic."),
    ("Gate", r"gate", "The checks a build has to pass before it can be registered as a release."),
    ("i8", r"i8\b|int8", "Weights and activations in 8-bit integers, integer arithmetic."),
    (
        "Inconclusive",
        r"inconclusive",
        "Measured, but the measurement proves neither pass nor fail; it does not count as passed.",
    ),
    ("MACs", r"MACs", "Multiply-accumulates for one image: the arithmetic a model asks for."),
    ("Not measured", r"not measured", "Nothing was measured; it does not count as passed."),
    ("P50, P95, P99", r"P50|P95|P99", "Half, 95 and 99 of 100 inferences take at most this long."),
    (
        "Parity",
        r"parity",
        "Largest difference between outputs of the engine and of torch, as a share of their range.",
    ),
    ("Peak memory", r"memory", "Most memory the process took while the model ran, the model included."),
    ("pp", r"\bpp\b", "Percentage points: from 95 % to 94 % is 1 pp."),
    ("SNR", r"SNR", "Signal over error in decibels: 10 dB more is a tenth of the error's power."),
    ("Top-1", r"top-1", "Share of test images whose most likely class is the true one, in the engine."),
    ("w8", r"w8", "Weights in 8-bit integers, float arithmetic."),
    ("Waived", r"waived", "Did not pass, and a named person let it through for a reason given."),
)


def used_terms(page: str) -> tuple[tuple[str, str], ...]:
    """The terms that occur in the page's text, with their meaning."""
    text = re.sub(r"<[^>]*>", " ", page)
    return tuple(
        (term, " ".join(meaning.split()))
        for term, sign, meaning in _TERMS
        if re.search(sign, text, re.IGNORECASE)
    )
