"""DuckDB, held to one folder: it reads and writes there and nowhere else, and loads nothing."""

from pathlib import Path
from typing import Any

import duckdb

_MEMORY = "512MB"


def confined(folder: Path, *, threads: int = 1) -> Any:
    """A connection of its own, in memory, that reaches the files below `folder` only."""
    connection = duckdb.connect(
        ":memory:",
        config={
            "threads": threads,
            "memory_limit": _MEMORY,
            "autoinstall_known_extensions": "false",
            "autoload_known_extensions": "false",
            "temp_directory": str(folder / "duckdb.tmp"),
        },
    )
    folder_sql = str(folder).replace("'", "''")
    connection.execute(f"SET allowed_directories = ['{folder_sql}/']")
    connection.execute("SET enable_external_access = false")
    connection.execute("SET lock_configuration = true")
    return connection
