"""Conformance suites and tools for those who write a store, a provider or a handle of their own.

The suites are pytest classes (async tests: `asyncio_mode = "auto"` of pytest-asyncio). Subclass one in a test module,
override its fixtures, and register it before it is imported so that its assertions are explained:
`pytest.register_assert_rewrite("snapcore.testing")`.

Everything is imported when it is first asked for: the suites need pytest, the clock and the faults do not.
"""

import importlib
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from .blob_suite import BlobStoreTests
    from .checkpoint_suite import CheckpointStoreTests
    from .clock import ManualClock
    from .faults import Crash, Faults, with_faults
    from .lease_suite import WriterLeaseTests
    from .ledger_suite import LedgerTests
    from .maintenance_suite import MaintenanceTests
    from .provider_suite import ProviderTests
    from .record_suite import RecordTests
    from .run_suite import RunTests
    from .s3_faults import S3Faults
    from .s3_server import StrictS3Server

__all__ = [
    "BlobStoreTests",
    "CheckpointStoreTests",
    "Crash",
    "Faults",
    "LedgerTests",
    "MaintenanceTests",
    "ManualClock",
    "ProviderTests",
    "RecordTests",
    "RunTests",
    "S3Faults",
    "StrictS3Server",
    "WriterLeaseTests",
    "with_faults",
]

_MODULES: Final = {
    "BlobStoreTests": "blob_suite",
    "CheckpointStoreTests": "checkpoint_suite",
    "Crash": "faults",
    "Faults": "faults",
    "LedgerTests": "ledger_suite",
    "MaintenanceTests": "maintenance_suite",
    "ManualClock": "clock",
    "ProviderTests": "provider_suite",
    "RecordTests": "record_suite",
    "RunTests": "run_suite",
    "S3Faults": "s3_faults",
    "StrictS3Server": "s3_server",
    "WriterLeaseTests": "lease_suite",
    "with_faults": "faults",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_MODULES[name]}", __name__), name)
