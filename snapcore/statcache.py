"""The stat cache: what lets the next capture of the same sandbox skip files that it need not read.

For each manifest page of a root: a digest of what the scan said of its entries, and (ctime, inode) of each. An entry whose
times are too fresh for the next change to be sure to show, or that has no ctime, is marked untrusted, and its page gets no
digest. The cache of a root is kept by its sandbox's id and `stat_root`; of a sandbox without an id there is none.
"""

import zlib
from collections.abc import Sequence
from typing import Final

import msgspec
from blake3 import blake3

from .model import FileStat, Kind, PolicyRecord, StatPage
from .protocols import Workspace

__all__ = ["UNTRUSTED", "digest_salt", "make_stat_page", "page_digest", "read_stat_page", "stat_root"]

UNTRUSTED: Final = -1
NO_DIGEST: Final = b""
MAX_ROWS_BYTES: Final = 64 << 10  # the fullest page's rows take less than 8 KiB

_encoder: Final = msgspec.msgpack.Encoder()
_decoder: Final = msgspec.msgpack.Decoder(list[tuple[int, int]])


def stat_root(workspace: Workspace) -> str:
    """What the cache of a root is kept by, beside its sandbox's id: its path, so that another folder is never taken for it."""
    return workspace.root


def digest_salt(policy: PolicyRecord) -> bytes:
    """What a page's digest depends on besides its stats: under another policy every page is looked at again, since a hard-link
    group may have another first member."""
    return _encoder.encode(policy)


def page_digest(stats: Sequence[FileStat], salt: bytes) -> bytes:
    """A digest of all that a scan said of the entries of one page; none when a time is beyond what can be kept."""
    try:
        return blake3(salt + _encoder.encode(stats)).digest()
    except OverflowError:
        return NO_DIGEST


def make_stat_page(page_id: bytes, stats: Sequence[FileStat], salt: bytes, trusted_before_ns: int) -> StatPage:
    """The cache of one page. Files changed at `trusted_before_ns` or later are not trusted next time, nor are those without a
    ctime: size and mtime alone do not tell that a file is the same."""
    rows = []
    trusted = True
    for s in stats:
        fresh = s.mtime_ns >= trusted_before_ns or s.ctime_ns >= trusted_before_ns
        if s.kind == Kind.FILE and (fresh or not s.ctime_ns):
            rows.append((UNTRUSTED, s.inode))
            trusted = False
        else:
            rows.append((s.ctime_ns, s.inode))
    digest = page_digest(stats, salt) if trusted else NO_DIGEST
    return StatPage(page_id, digest, zlib.compress(_encoder.encode(rows), 1))


def read_stat_page(page: StatPage) -> list[tuple[int, int]]:
    """(ctime_ns, inode) of each entry, in the page's order; empty when the row is damaged, which costs a read and no more."""
    try:
        unpacker = zlib.decompressobj()
        rows = unpacker.decompress(page.data, MAX_ROWS_BYTES)
        return _decoder.decode(rows) if unpacker.eof else []
    except (zlib.error, msgspec.MsgspecError, RecursionError):
        return []
