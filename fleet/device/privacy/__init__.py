"""Consent, what leaves with it, and ids that say nothing to anybody else."""
