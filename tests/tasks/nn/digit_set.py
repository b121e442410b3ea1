"""A prepared dataset of scikit-learn's digits, small enough to train on within a test."""

import hashlib
import json
from pathlib import Path

import cv2
import numpy as np
import pandas as pd
from sklearn.datasets import load_digits


def write_digits(root: Path, counts: dict[str, int], *, size_px: int = 16) -> Path:
    """Write `counts[split]` digits into each split as tasks.data.dataset reads them; train has two shards."""
    digits = load_digits()
    grey = (digits.images * 255 / 16).round().astype(np.uint8)
    pixels = np.stack([cv2.cvtColor(cv2.resize(i, (size_px, size_px)), cv2.COLOR_GRAY2RGB) for i in grey])
    rows, start = [], 0
    root.mkdir(parents=True)
    for split, count in counts.items():
        chosen = np.arange(start, start + count)
        start += count
        for number, part in enumerate(np.array_split(chosen, 2 if split == "train" else 1)):
            shard = f"{split}-{number:03d}.npy"
            np.save(root / shard, pixels[part])
            rows += [
                {
                    "sha256": hashlib.sha256(pixels[index].tobytes()).hexdigest(),
                    "label": int(digits.target[index]),
                    "split": split,
                    "source": f"digit {index}",
                    "width": 8,
                    "height": 8,
                    "group": "",
                    "origin": "base",
                    "added_in": "",
                    "shard": shard,
                    "row": row,
                }
                for row, index in enumerate(part)
            ]
    pd.DataFrame(rows).to_parquet(root / "manifest.parquet")
    (root / "labels.json").write_text(json.dumps([str(digit) for digit in range(10)]))
    return root
