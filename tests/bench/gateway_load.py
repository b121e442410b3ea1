"""Load for the gateway: requests signed beforehand, sent over kept connections, every acknowledgement noted.

A process of its own, so that it can have a core of its own.
"""

import asyncio
import gzip
import json
import os
import secrets
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "fleet" / "gateway"))

import gateway_kit as kit

from fleet.device.credentials import DeviceKey

_PLACE = 8_000_000_000_000
"""Stands for a sequence number in a template; as many digits as the numbers that replace it."""
FIRST = _PLACE // 8
"""The lowest sequence number of `bodies`, which count on from it."""
_TEMPLATES = 8


def bodies(count: int, windows: int, *, first: int = 0) -> list[bytes]:
    """Compressed batches with their own sequence numbers, the same for every device."""
    rng = np.random.default_rng(7)
    templates = [
        kit.batch_of([kit.window(_PLACE + k, rng) for k in range(windows)])
        for _ in range(min(count, _TEMPLATES))
    ]
    made = []
    for number in range(count):
        body = templates[number % len(templates)]
        for k in range(windows):
            body = body.replace(
                str(_PLACE + k).encode(), str(FIRST + (first + number) * windows + k).encode()
            )
        made.append(gzip.compress(body, 6))
    return made


@dataclass
class Load:
    """What was sent and how it was answered."""

    acknowledged: list[tuple[int, int]] = field(default_factory=list)
    """Index of the device and of the body, for each 2xx."""
    latencies_s: list[float] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0


def signed(key: DeviceKey, body: bytes, path: str = "/v1/windows") -> bytes:
    """The bytes of a request on the wire."""
    headers = key.headers("POST", path, body, time_ms=kit.now_ms()) | {
        "Host": "127.0.0.1",
        "Content-Encoding": "gzip",
        "Content-Length": str(len(body)),
    }
    head = "".join(f"{name}: {value}\r\n" for name, value in headers.items())
    return f"POST {path} HTTP/1.1\r\n{head}\r\n".encode() + body


async def run(port: int, requests: list[tuple[int, int, bytes]], connections: int) -> Load:
    """Send all requests (device, body, bytes), each connection one after the other."""
    load, left = Load(), iter(requests)

    async def connection() -> None:
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for device, body, wire in left:
                started = time.perf_counter()
                writer.write(wire)
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                await reader.readexactly(length)
                if head[9:12] == b"200":
                    load.acknowledged.append((device, body))
                    load.latencies_s.append(time.perf_counter() - started)
                else:
                    status = head[9:12].decode()
                    load.refused[status] = load.refused.get(status, 0) + 1
            writer.close()
        except (OSError, asyncio.IncompleteReadError) as error:  # the server was killed
            name = type(error).__name__
            load.refused[name] = load.refused.get(name, 0) + 1

    started = time.perf_counter()
    await asyncio.gather(*(connection() for _ in range(connections)))
    load.seconds = time.perf_counter() - started
    return load


def main() -> None:
    """Reads what to do as a line of JSON (port, keys in hex, bodies, windows, connections, core).

    Signs, prints `ready`, waits for another line, sends, prints the result as one line of JSON.
    """
    given = json.loads(sys.stdin.readline())
    if given.get("core") is not None:
        os.sched_setaffinity(0, {given["core"]})
    keys = [DeviceKey(bytes.fromhex(key)) for key in given["keys"]]
    contents = bodies(given["bodies"], given["windows"])
    requests = [
        (d, b, signed(key, content)) for b, content in enumerate(contents) for d, key in enumerate(keys)
    ]
    print("ready", flush=True)
    sys.stdin.readline()
    load = asyncio.run(run(given["port"], requests, given["connections"]))
    print(json.dumps(load.__dict__ | {"body_bytes": len(contents[0])}), flush=True)


def new_key() -> str:
    return secrets.token_bytes(32).hex()


if __name__ == "__main__":
    main()
