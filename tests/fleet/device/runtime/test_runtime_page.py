"""docs/runtime.md does what it shows, and names every reason."""

import re
import subprocess
import sys
from pathlib import Path
from typing import get_args

import cv2
from release_rig import IMAGES, LABELS, Rig

from fleet.device.runtime.refusal import Reason

ROOT = Path(__file__).resolve().parents[4]
PAGE = (ROOT / "docs/runtime.md").read_text(encoding="utf-8")


def test_the_app_of_the_page_runs(rig: Rig):
    """The block as it stands, but for the server's port: an update, and an answer."""
    rig.publish(1)
    cv2.imwrite(str(rig.folder / "picture.png"), IMAGES[0])
    (rig.folder / "root.json").write_bytes(rig.repository.root)
    (code,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    assert "http://127.0.0.1:8480/repository/" in code
    code = code.replace("http://127.0.0.1:8480/repository/", rig.server.url)
    done = subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(ROOT)!r})\n{code}"],
        cwd=rig.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "installed release 1"
    label, confidence, variant, backend = second.split()
    assert label in LABELS
    assert (variant, backend) == ("v0", "CPU")
    assert 0.2 <= float(confidence) <= 1


def test_every_reason_is_on_the_page():
    """A program that meets a reason finds it there."""
    table = PAGE[PAGE.index("| reason |") :]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    named = set(re.findall(r"`(\w+)`", " ".join(row.split("|")[1] for row in rows)))
    in_actions = {"rollout", "tier"}
    assert named | in_actions == set(get_args(Reason))
