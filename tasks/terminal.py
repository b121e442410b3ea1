"""Text that others wrote (a tag in MLflow, a class's name), made fit for a terminal."""

from tasks.foreign_text import is_hidden


def plain(text: str) -> str:
    """On one line, and without what would steer a terminal."""
    return "".join(letter if letter.isprintable() and not is_hidden(letter) else " " for letter in text)


def plain_lines(text: str) -> str:
    """Lines as they are, each `plain`."""
    return "\n".join(plain(line) for line in text.split("\n"))
