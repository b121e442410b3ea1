"""Reaching devices to measure them."""
