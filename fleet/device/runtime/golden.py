"""Golden inputs: images and the logits that a variant answered where it was proven.

A device runs them before it trusts a model: another driver or kernel, or a wrong preprocessing, shows here.
"""

import io
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from fleet.device.errors import UserError
from fleet.device.runtime.refusal import UpdateRefusedError

_MOST_BYTES, _MOST_IMAGES = 64 << 20, 256
_NAMES = ("images", "labels", "logits")


@dataclass(frozen=True, kw_only=True, eq=False)
class Golden:
    """N images and what they came to."""

    images: npt.NDArray[np.uint8]
    """[N, H, W, 3], RGB."""
    logits: npt.NDArray[np.float32]
    """[N, classes]."""
    labels: tuple[str, ...]
    """Names in the order of the logits."""

    def to_bytes(self) -> bytes:
        """The .npz; the same content, the same bytes.

        Raises:
            UserError: arrays of other shapes, types or lengths than a device takes.
        """
        if wrong := _wrong(self):
            raise UserError(wrong, allowed=_ALLOWED, next_step="make the golden inputs anew")
        out = io.BytesIO()
        np.savez(out, images=self.images, logits=self.logits, labels=np.array(self.labels))
        return out.getvalue()

    @classmethod
    def read(cls, path: Path) -> "Golden":
        """The golden inputs in a file; nothing in it is executed.

        Raises:
            UpdateRefusedError: reason `golden`, whatever is wrong with it.
        """
        try:
            with zipfile.ZipFile(path) as packed:
                size = sum(member.file_size for member in packed.infolist())
            if size > _MOST_BYTES:
                raise UpdateRefusedError("golden", f"{size} bytes unpacked, allowed {_MOST_BYTES}")
            with np.load(path, allow_pickle=False) as arrays:
                if sorted(arrays.files) != sorted(_NAMES):
                    raise UpdateRefusedError("golden", f"arrays {sorted(arrays.files)}, allowed {_ALLOWED}")
                images, logits, labels = arrays["images"], arrays["logits"], arrays["labels"]
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error, MemoryError) as error:
            raise UpdateRefusedError("golden", f"no .npz of plain arrays: {error}") from error
        if labels.dtype.kind != "U" or labels.ndim != 1:
            raise UpdateRefusedError("golden", f"labels of dtype {labels.dtype}, allowed {_ALLOWED}")
        golden = cls(images=images, logits=logits, labels=tuple(map(str, labels)))
        if wrong := _wrong(golden):
            raise UpdateRefusedError("golden", f"{wrong}, allowed {_ALLOWED}")
        return golden

    def difference(self, logits_NC: npt.NDArray[np.float32]) -> float:
        """Largest |difference| of a logit, as a share of the range of the golden logits; infinite for NaN."""
        range_of = float(self.logits.max() - self.logits.min()) or 1.0
        largest = float(np.abs(logits_NC - self.logits).max())
        return largest / range_of if np.isfinite(largest) else float("inf")


_ALLOWED = (
    f"images uint8 [1 to {_MOST_IMAGES}, H, W, 3], finite logits float32 [N, classes], labels [classes],"
    f" {_MOST_BYTES >> 20} MiB in all"
)


def _wrong(golden: Golden) -> str:
    """What is wrong with the arrays; empty if nothing."""
    images, logits = golden.images, golden.logits
    fits = (
        images.dtype == np.uint8
        and images.ndim == 4
        and images.shape[3] == 3
        and 1 <= len(images) <= _MOST_IMAGES
        and 0 not in images.shape
        and images.nbytes <= _MOST_BYTES // 2
        and logits.dtype == np.float32
        and logits.shape == (len(images), len(golden.labels))
        and logits.size > 0
        and bool(np.isfinite(logits).all())
    )
    if fits:
        return ""
    return (
        f"images {images.dtype} {images.shape}, logits {logits.dtype} {logits.shape}"
        f" ({int((~np.isfinite(logits)).sum()) if logits.dtype.kind == 'f' else '?'} not finite),"
        f" {len(golden.labels)} labels"
    )
