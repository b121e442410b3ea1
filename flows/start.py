"""`edgeloop` itself: the command line, or what to do where a package of its environment is missing."""

import sys


def main() -> None:
    """Run the command line."""
    try:
        from flows.cli import main as run
    except ImportError as error:
        print(
            f"edgeloop: its environment is not whole: {error}\n"
            "  allowed: what requirements.lock pins\n"
            f"  next:    `{sys.executable} -m flows.doctor` says what is missing, `make clean setup` mends",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
    run()
