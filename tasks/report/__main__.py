"""`python -m tasks.report` in a workspace writes reports/release.html."""

import sys
from pathlib import Path

from fleet.device.errors import EdgeloopError
from tasks.report.write import write_report
from tasks.workspace import disk_full


def main() -> None:
    """Write the report of the working directory and say where it is."""
    try:
        print(write_report(Path()))
    except EdgeloopError as error:
        print(f"report: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from error
    except OSError as error:
        full = disk_full(error, Path())
        if full is None:
            raise
        print(f"report: {full}", file=sys.stderr)
        raise SystemExit(full.exit_code) from error


if __name__ == "__main__":
    main()
