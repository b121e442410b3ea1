"""The peer of the gateway's benchmark: what one writes first with FastAPI and SQLite. A row a window.

No identity, no checks of content, no protection from repeats; durable before it answers, as the gateway.
"""

import gzip
import json
import sqlite3
import sys
import time

import uvicorn
from fastapi import FastAPI, Request


def create_app(path: str) -> FastAPI:
    """One endpoint that stores each window as a row of JSON."""
    app = FastAPI()
    connection = sqlite3.connect(path, check_same_thread=False)
    connection.execute("PRAGMA journal_mode=WAL")
    connection.execute("PRAGMA synchronous=FULL")
    connection.execute("CREATE TABLE windows(device TEXT, sequence INTEGER, received REAL, window TEXT)")

    @app.post("/v1/windows")
    async def windows(request: Request) -> dict[str, int]:
        body = json.loads(gzip.decompress(await request.body()))
        device = request.headers["edgeloop-device"]
        with connection:
            for window in body["windows"]:
                connection.execute(
                    "INSERT INTO windows VALUES(?, ?, ?, ?)",
                    (device, window["sequence"], time.time(), json.dumps(window)),
                )
        return {"accepted": len(body["windows"])}

    return app


if __name__ == "__main__":
    server = uvicorn.Server(
        uvicorn.Config(create_app(sys.argv[1]), port=int(sys.argv[2]), log_level="warning", access_log=False)
    )
    server.run()
