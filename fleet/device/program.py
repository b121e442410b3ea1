"""How the lab runs something on a device: a program gets one JSON, and answers with one JSON on stdout.

    python -m fleet.device.bench '{"model": "model.mnn", ...}'

The answer is {"result": ...}, or {"user_error": ...} / {"engine_error": ...} with the error's parts. A
program that crashed answers nothing.
"""

import json
import sys
from collections.abc import Callable
from typing import Any

from fleet.device.errors import EdgeloopError, EngineError, UserError
from fleet.device.native import quiet_stdout

Program = Callable[[dict[str, Any]], Any]


def answer(program: Program) -> None:
    """Run `program` on the JSON in the first argument and print its answer."""
    try:
        with quiet_stdout():  # what native code prints is no answer
            reply = {"result": program(json.loads(sys.argv[1]))}
    except UserError as error:
        reply = {"user_error": {"got": error.got, "allowed": error.allowed, "next_step": error.next_step}}
    except EngineError as error:
        reply = {"engine_error": {"reason": error.reason, "engine_said": error.engine_said}}
    print(json.dumps(reply, allow_nan=False))


def read_answer(text: str) -> Any:
    """The result in what a program printed.

    Raises:
        UserError: the program could not use what it was given.
        EngineError: the engine failed in it.
        ValueError: the text is no answer.
    """
    reply = json.loads(text)
    if not isinstance(reply, dict):
        raise ValueError(f"a {type(reply).__name__} is no answer")  # noqa: TRY004 - one error for all of these
    error: EdgeloopError
    if "user_error" in reply:
        error = UserError(**reply["user_error"])
        raise error
    if "engine_error" in reply:
        error = EngineError(**reply["engine_error"])
        raise error
    return reply["result"]
