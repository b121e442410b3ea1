"""`python -m flows` is `edgeloop`."""

from flows.start import main

if __name__ == "__main__":
    main()
