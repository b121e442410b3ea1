"""What the gate is made of: checks, comparison with the champion, evidence, waivers, table. `tasks.gate` puts them together."""
