"""What a device tells of its inferences, and at what cost: see docs/telemetry.md."""
