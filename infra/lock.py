"""Write requirements.lock: install pyproject.toml with its extras into a fresh environment, freeze it."""

import subprocess
import sys
import tempfile
import venv
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# torch's CUDA libraries exist for Linux on x86-64 only.
_LINUX_X86_ONLY = ("nvidia-", "cuda-", "triton")
_MARKER = ' ; sys_platform == "linux" and platform_machine == "x86_64"'
_HEAD = "# Written by `make lock`; install with `make setup`. Versions only: no index, no path.\n"


def main() -> None:
    """Resolve, freeze, mark, write."""
    with tempfile.TemporaryDirectory() as folder:
        venv.create(folder, with_pip=True)
        pip = [str(Path(folder) / "bin" / "python"), "-m", "pip", "--disable-pip-version-check"]
        subprocess.run([*pip, "install", "setuptools>=80", f"{ROOT}[build,gateway,dev]"], check=True)
        frozen = subprocess.run([*pip, "freeze", "--all"], check=True, capture_output=True, text=True).stdout
    pins = []
    for line in frozen.splitlines():
        name = line.split("==")[0]
        if name in ("edgeloop", "pip") or name.startswith("edgeloop @"):
            continue
        if "==" not in line:
            sys.exit(f"{line}: not a pinned release; only released packages may be locked")
        pins.append(line.split("+")[0] + (_MARKER if name.startswith(_LINUX_X86_ONLY) else ""))
    (ROOT / "requirements.lock").write_text(_HEAD + "\n".join(pins) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
