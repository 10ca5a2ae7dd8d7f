"""Blob stores and the SQL store of checkpoints: one backend a module, imported when its scheme is used."""
