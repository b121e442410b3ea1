"""`python -m flows.doctor [--json]`: `edgeloop doctor` where not even the command line can be imported."""

import sys

from flows.doctor.report import run
from tasks.workspace import find_workspace

if __name__ == "__main__":
    raise SystemExit(run(find_workspace(None), as_json="--json" in sys.argv[1:]))
