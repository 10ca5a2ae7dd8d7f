"""The E2B service that the tests use: the test server, or the real one when it is asked for.

`SNAPCORE_TEST_E2B=1` with `E2B_API_KEY` set runs what can be run there against the real service. Without, the server needs root
and busybox: its sandboxes are chroots.
"""

import os
from typing import Any

import pytest

from snapcore.testing.e2b_server import E2BServer

REQUIRED = "SNAPCORE_REQUIRE_SERVICES"
REAL = os.environ.get("SNAPCORE_TEST_E2B") == "1" and bool(os.environ.get("E2B_API_KEY"))


def need_server() -> None:
    """Skip the test where there can be no server; fail where there has to be one."""
    if why := E2BServer.why_not():
        if os.environ.get(REQUIRED):
            pytest.fail(why)
        pytest.skip(why)


class Service:
    """Where sandboxes come from. `server` is None when that is the real service."""

    def __init__(self, server: E2BServer | None) -> None:
        self.server = server

    @property
    def options(self) -> dict[str, Any]:
        """Connection options."""
        return {} if self.server is None else dict(self.server.options)
