"""`python -m flows` is `edgeloop`."""

from flows.cli import main

if __name__ == "__main__":
    main()
