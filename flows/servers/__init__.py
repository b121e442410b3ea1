"""Servers of other projects that edgeloop starts: on the loopback only, and gone with their users."""

UI_LOCK = "ui.lock"
"""Held by `edgeloop ui` in the repository's `.edgeloop`."""
