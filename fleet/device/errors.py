"""The two error roots. Everything edgeloop raises on purpose is one of them."""


class EdgeloopError(Exception):
    """An error with an exit code; its text is complete: nothing else needs to be printed."""

    exit_code = 3


class UserError(EdgeloopError):
    """Input that cannot be used. Says what was got, what is allowed, and the next step."""

    exit_code = 2

    def __init__(self, got: str, *, allowed: str, next_step: str) -> None:
        """Keep the three parts apart so that JSON output can carry them.

        Args:
            got: What was found, with the file or parameter name and the value.
            allowed: What would have been accepted.
            next_step: The command or edit that mends it.
        """
        super().__init__(f"{got}\n  allowed: {allowed}\n  next:    {next_step}")
        self.got, self.allowed, self.next_step = got, allowed, next_step


class EngineError(EdgeloopError):
    """The engine or its converter failed, refused, or would have been silently wrong."""

    exit_code = 3

    def __init__(self, reason: str, *, engine_said: str = "") -> None:
        """Carry the reason in one sentence and, apart from it, the engine's own words.

        Args:
            reason: What failed, with the model and the operator or layer where known.
            engine_said: The relevant lines of the engine's output, if it said anything.
        """
        super().__init__(f"{reason}\n  engine said: {engine_said}" if engine_said else reason)
        self.reason, self.engine_said = reason, engine_said


INTERRUPTED = 130
"""Exit code of a command that a signal ended: 128 + SIGINT, as shells have it."""
