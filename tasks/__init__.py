"""What the loop does, one module a station: pure functions and a short main() run as `python -m tasks.X`."""
