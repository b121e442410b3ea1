"""What the gate is made of: checks, evidence, waivers, table. `tasks.gate` puts them together."""
