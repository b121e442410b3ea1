"""What the gate is made of: checks, evidence, champion, waivers, table. `tasks.gate` puts them together."""
