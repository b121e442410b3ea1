"""Ask what may never answer: a FIFO in place of a file, a fuel gauge that hangs, a dead file system.

Questions have names and are answered on a thread of their own. One that hangs costs its own answer, and a
deadline once: it is not asked again before it has come back.
"""

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

DEADLINE_S = 0.5


class Patience:
    """Asks questions within a deadline. One caller at a time."""

    def __init__(self, deadline_s: float = DEADLINE_S) -> None:
        """`deadline_s`: for all questions of one `ask` together."""
        self._deadline_s = deadline_s
        self._hanging: dict[str, threading.Thread] = {}

    @property
    def hanging(self) -> tuple[str, ...]:
        """Names of the questions that have not come back yet."""
        self._hanging = {name: thread for name, thread in self._hanging.items() if thread.is_alive()}
        return tuple(sorted(self._hanging))

    def ask(self, questions: Mapping[str, Callable[[], Any]]) -> dict[str, Any]:
        """Answers by name; one that hangs, or raises OSError or ValueError, has none.

        A thread answers one question after the other. When it does not come back it is left behind with the
        question it hangs at, and another goes on with the rest.
        """
        until = time.monotonic() + self._deadline_s
        left = {name: question for name, question in questions.items() if name not in self.hanging}
        answers: dict[str, Any] = {}
        while left:
            # What is late even for the last question gets a tenth: one that hangs must not cost the others.
            within_s = max(until - time.monotonic(), self._deadline_s / 10)
            run = _Run(left)
            run.wait(within_s)
            answers |= run.answers
            if run.at is None:
                return answers
            self._hanging[run.at] = run.thread
            left = {name: question for name, question in run.rest.items() if name != run.at}
        return answers


class _Run:
    """One thread through some questions."""

    def __init__(self, questions: Mapping[str, Callable[[], Any]]) -> None:
        self._lock, self._done = threading.Lock(), threading.Event()
        self._found: dict[str, Any] = {}
        self._left_behind = threading.Event()
        self.at: str | None = None
        """The question it hangs at, after `wait`."""
        self.answers: dict[str, Any] = {}
        self.rest = dict(questions)
        self.thread = threading.Thread(target=self._answer, args=(dict(questions),), daemon=True)

    def wait(self, seconds: float) -> None:
        self.thread.start()
        self._done.wait(seconds)
        with self._lock:
            self._left_behind.set()
            self.answers = dict(self._found)
            if self._done.is_set():
                self.at, self.rest = None, {}

    def _answer(self, questions: dict[str, Callable[[], Any]]) -> None:
        for name, question in questions.items():
            with self._lock:
                if self._left_behind.is_set():
                    return
                self.at = name
            try:
                answer = question()
            except (OSError, ValueError, IndexError, OverflowError):  # what a file said was no number
                answer = None
            with self._lock:
                if self._left_behind.is_set():
                    return
                self._found[name] = answer
                del self.rest[name]
        self._done.set()
