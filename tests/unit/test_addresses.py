"""Addresses as they are shown: nothing in them can be a credential."""

import urllib.parse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from snapcore.addresses import shown_address

CANARY = "hunter2-canary"


@pytest.mark.parametrize(
    "address",
    [
        "./dir",
        "/srv/a@b:c?d=e",
        "~/dir",
        "file:///srv/a@b",
        "memory://",
        "s3://bucket/prefix?endpoint=https://minio.example.org:9000&region=auto",
        "s3://bucket/mail@example.org",
        "sqlite:////srv/snapcore.db",
        "postgresql://user@db.example.org:5432/snapcore?schema=one&sslmode=require",
        "postgresql+psycopg://user@db/snapcore",
        "postgresql://[::1]:5432/snapcore",
        "docker://box/workspace",
        "ssh://dev@host:2222/srv/project",
        "exec:true",
    ],
)
def test_what_holds_no_credential_is_shown_as_it_is(address: str) -> None:
    assert shown_address(address) == address


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        (f"postgresql://user:{CANARY}@db/x", "postgresql://user:***@db/x"),
        (f"postgresql://user:{CANARY}@{CANARY}/a@db/x?schema=s", "postgresql://user:***@db/x?schema=s"),
        (f"postgresql://user:{CANARY}", "postgresql://***"),
        (f"postgresql://user:a?{CANARY}@db/x", "postgresql://***"),
        (f"postgresql://user:a#{CANARY}@db/x", "postgresql://***"),
        (f"postgresql://user:a@db/x?password=a@{CANARY}", "postgresql://***"),
        (f"POSTGRESQL://:{CANARY}@db/x", "POSTGRESQL://:***@db/x"),
        (f"postgresql://user@db/x?password={CANARY}&schema=s", "postgresql://user@db/x?password=***&schema=s"),
        (f"postgresql://db/x?{CANARY}", "postgresql://db/x?***"),
        (f"s3://{CANARY}:{CANARY}@bucket/p", "s3://***:***@bucket/p"),
        (f"s3://bucket/p?endpoint=https://u:{CANARY}@host&key={CANARY}", "s3://***"),
        (f"thing://{CANARY}@host/x", "thing://***@host/x"),
        (f"exec:curl -H {CANARY} /w", "exec:curl ***"),
        (f"exec: curl\n{CANARY}", "exec:curl ***"),
    ],
)
def test_what_may_be_one_is_hidden(address: str, shown: str) -> None:
    told = shown_address(address)
    assert CANARY not in told
    assert told == shown


@given(st.text("aZ0@:/?#&=%[] é", min_size=1, max_size=12), st.sampled_from(["postgresql", "s3", "thing"]), st.booleans())
def test_no_password_is_shown_however_it_is_written(password: str, scheme: str, escaped: bool) -> None:
    written = urllib.parse.quote(password, safe="") if escaped else password
    shown = shown_address(f"{scheme}://u:<{written}>@host/x?password=<{written}>")
    assert "<" not in shown
    assert ">" not in shown
