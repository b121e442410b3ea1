"""The gateway's SQLite file: durable before it answers, one writer at a time, readers beside it."""

import sqlite3
from pathlib import Path

FILE = "gateway.sqlite"
_VERSION = 1
_BUSY_S = 10.0

_SCHEMA = """
CREATE TABLE devices(
  number INTEGER PRIMARY KEY, device TEXT NOT NULL UNIQUE, public_key BLOB NOT NULL, model TEXT NOT NULL,
  enrolled_ms INTEGER NOT NULL, revoked_ms INTEGER);
CREATE TABLE tokens(hash BLOB PRIMARY KEY, expires_ms INTEGER NOT NULL, device TEXT) WITHOUT ROWID;
-- By time first: new ones go to the end, old ones are one range.
CREATE TABLE nonces(
  time_ms INTEGER NOT NULL, device INTEGER NOT NULL, nonce BLOB NOT NULL,
  PRIMARY KEY(time_ms, device, nonce)) WITHOUT ROWID;
-- AUTOINCREMENT: an id is never used twice, so `compacted_through` says for good what lies in Parquet.
CREATE TABLE batches(
  id INTEGER PRIMARY KEY AUTOINCREMENT, device INTEGER NOT NULL, received_ms INTEGER NOT NULL,
  taken BLOB NOT NULL, body BLOB NOT NULL);
CREATE TABLE state(
  device INTEGER PRIMARY KEY, newest INTEGER NOT NULL, bits BLOB NOT NULL, last_ms INTEGER NOT NULL,
  windows INTEGER NOT NULL, release INTEGER NOT NULL, model_version TEXT NOT NULL, app TEXT NOT NULL,
  tier TEXT NOT NULL, variant TEXT NOT NULL, backend TEXT NOT NULL);
CREATE TABLE quarantine(
  digest BLOB PRIMARY KEY, device INTEGER NOT NULL, received_ms INTEGER NOT NULL, reason TEXT NOT NULL,
  raw BLOB) WITHOUT ROWID;
CREATE TABLE quarantined(device INTEGER PRIMARY KEY, windows INTEGER NOT NULL, bytes INTEGER NOT NULL);
CREATE TABLE parts(
  path TEXT PRIMARY KEY, kind TEXT NOT NULL, date TEXT NOT NULL, tier TEXT NOT NULL, rows INTEGER NOT NULL,
  retired_ms INTEGER);
CREATE TABLE progress(name TEXT PRIMARY KEY, value INTEGER NOT NULL) WITHOUT ROWID;
INSERT INTO progress VALUES('compacted_through', 0);
CREATE TABLE samples(
  device INTEGER NOT NULL, sha256 TEXT NOT NULL, path TEXT NOT NULL, received_ms INTEGER NOT NULL,
  bytes INTEGER NOT NULL, PRIMARY KEY(device, sha256)) WITHOUT ROWID;
CREATE TABLE deletions(device INTEGER NOT NULL, at_ms INTEGER NOT NULL, samples INTEGER NOT NULL);
"""


def opened(folder: Path) -> sqlite3.Connection:
    """A connection to the file in the state folder, made when there is none; statements commit themselves.

    Raises:
        sqlite3.Error: it cannot be opened, or another version of the gateway made it.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    path = folder / FILE
    path.touch(mode=0o600)
    connection = sqlite3.connect(path, timeout=_BUSY_S, isolation_level=None, check_same_thread=False)
    # FULL: the write-ahead log is synced before a commit returns.
    for pragma in ("journal_mode=WAL", "synchronous=FULL", "secure_delete=OFF", "foreign_keys=OFF"):
        connection.execute(f"PRAGMA {pragma}")
    _migrate(connection)
    return connection


def reader(folder: Path) -> sqlite3.Connection:
    """A connection that can only read."""
    connection = sqlite3.connect(
        f"{(folder / FILE).as_uri()}?mode=ro",
        uri=True,
        timeout=_BUSY_S,
        isolation_level=None,
        check_same_thread=False,
    )
    connection.execute("PRAGMA query_only=ON")
    return connection


def _migrate(connection: sqlite3.Connection) -> None:
    connection.execute("BEGIN IMMEDIATE")
    (version,) = connection.execute("PRAGMA user_version").fetchone()
    if version == 0:
        for statement in _SCHEMA.split(";\n"):
            if statement.strip():
                connection.execute(statement)
        connection.execute(f"PRAGMA user_version={_VERSION}")
    connection.execute("COMMIT")
    if version not in (0, _VERSION):
        raise sqlite3.DatabaseError(f"state of version {version}, this gateway reads {_VERSION}")
