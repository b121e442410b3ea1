"""Servers of other projects that edgeloop starts: on the loopback only, and gone with their users."""
