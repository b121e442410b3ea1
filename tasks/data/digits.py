"""The embedded default: scikit-learn's 1,797 handwritten digits, 8 x 8 px, as files in memory.

Source: UCI Optical Recognition of Handwritten Digits (E. Alpaydin, C. Kaynak, 1998), CC BY 4.0.
"""

from functools import partial

import numpy as np

from tasks.data.listing import Entry, Listing

_WHITE = 16.0  # the set counts dark pixels in 4 x 4 blocks


def list_digits() -> Listing:
    """All digits as portable greymaps, white on black, without splits of their own."""
    from sklearn.datasets import load_digits

    bunch = load_digits()
    images = np.rint(bunch.images * (255 / _WHITE)).astype(np.uint8)
    entries = [
        Entry(
            name=f"digits/{label}/{index:04d}.pgm",
            label=str(label),
            read=partial(_greymap, image.tobytes(), image.shape[1], image.shape[0]),
        )
        for index, (image, label) in enumerate(zip(images, bunch.target, strict=True))
    ]
    return Listing(entries, [], tuple(str(digit) for digit in range(10)))


def _greymap(pixels: bytes, width: int, height: int) -> bytes:
    return b"P5 %d %d 255\n" % (width, height) + pixels
