"""Checkpoints on a schedule: many jobs in one process, or one run for a scheduler of the system."""
