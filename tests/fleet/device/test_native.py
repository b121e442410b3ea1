"""Importing the engine: what MNN's native code prints never reaches stdout."""

import os
import subprocess
import sys


def test_what_native_code_prints_comes_before_the_results_and_on_stderr():
    """MNN greets through C's buffer, which a pipe fills and the exit would empty after our JSON."""
    code = "import fleet.device.engine; print('{}')"
    env = {k: v for k, v in os.environ.items() if k != "PYTHONUNBUFFERED"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout == "{}\n"
    assert "The device supports" in done.stderr
