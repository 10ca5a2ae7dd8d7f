"""Alembic environment of the SQL store; `snapcore.stores.sql_migrate` runs it."""
