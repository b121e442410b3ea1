"""`python -m tasks.report` in a workspace writes reports/release.html."""

from pathlib import Path

from tasks.report.write import write_report
from tasks.tool import tool


def main() -> None:
    """Write the report of the working directory and say where it is."""
    with tool("report"):
        print(write_report(Path()))


if __name__ == "__main__":
    main()
