"""For all tests: the suites that snapcore ships explain their failures as the tests here do."""

import pytest

pytest.register_assert_rewrite("snapcore.testing")
