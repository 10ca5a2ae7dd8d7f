"""The `snapcore` command: arguments, progress, exit codes. All work is done by the engine."""
