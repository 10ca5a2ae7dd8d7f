"""The SQL store does what every checkpoint store does, in a file, in memory and on Postgres."""

from snapcore.testing import CheckpointStoreTests, MaintenanceTests, RecordTests, WriterLeaseTests

from .sql_stores import OnSql


class TestCheckpoints(OnSql, CheckpointStoreTests):
    pass


class TestLeases(OnSql, WriterLeaseTests):
    pass


class TestRecords(OnSql, RecordTests):
    pass


class TestMaintenance(OnSql, MaintenanceTests):
    pass
