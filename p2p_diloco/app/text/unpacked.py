"""The bytes of files, decompressed, and what their first bytes say of them."""

from __future__ import annotations

import bz2
import lzma
import re
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from p2p_diloco.app.extra import import_extra
from p2p_diloco.errors import ConfigError
from p2p_diloco.wording import first_line

HEAD_BYTES = 512
BLOCK_BYTES = 1 << 16
PACKED_SUFFIXES = frozenset({".gz", ".bz2", ".xz", ".lzma", ".zst", ".zstd"})
_LARGEST_WINDOW_LOG = 31
"""zstd with long windows, as archives of forums are published."""
_NO_TEXT = (
    (re.compile(rb"PK\x03\x04|7z\xbc\xaf\x27|Rar!\x1a\x07"), "is an archive", "unpack it and name the files in it"),
    (
        re.compile(rb"\x04\x22\x4d\x18|\x1f\x9d|\xff\x06\0\0sNaPpY"),
        "is compressed in no form that is read",
        "unpack it",
    ),
    (re.compile(rb"version https://git-lfs"), "is a pointer of Git LFS", "fetch the file itself with git lfs pull"),
    (re.compile(rb"WARC/\d"), "is a web archive", "extract its texts first, for example with trafilatura"),
    (re.compile(rb"\{\\rtf\d"), "is RTF", "save it as plain text first"),
    (re.compile(rb".{257}ustar[\0 ]", re.DOTALL), "is an archive", "unpack it and name the files in it"),
    (re.compile(rb"%PDF-\d\.\d"), "is a PDF", "extract its text first, for example with pdftotext"),
    (re.compile(rb"ARROW1\0|\xff\xff\xff\xff..\0\0", re.DOTALL), "is an Arrow table", "name its folder, after hf:"),
)


def why_no_text(head: bytes) -> tuple[str, str] | None:
    """Return what a file with these first bytes is instead of a text, and what to do; None if they may be text."""
    return next(((what, remedy) for pattern, what, remedy in _NO_TEXT if pattern.match(head)), None)


def is_packed(head: bytes) -> bool:
    """Return whether a file with these first bytes holds its text in another form: compressed, a table, or UTF-16."""
    forms = rb"\x1f\x8b|BZh[1-9]1AY&SY|\xfd7zXZ\0|\x28\xb5\x2f\xfd|PAR1|\xff\xfe|\xfe\xff"
    return re.match(forms, head) is not None


def unpacked(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in blocks, decompressed if its first bytes are those of a compressed file.

    No block is longer than `BLOCK_BYTES`, however small a file is that holds gigabytes.

    Raises:
        ConfigError: its name promises a compressed file and it is none, or reading it needs a package.
        OSError: it cannot be read.
        EOFError, ValueError: its compressed data end too early, or are damaged.
    """
    with path.open("rb") as raw:
        block = raw.read(BLOCK_BYTES)
        make = _decompressor_of(block, path.suffix.lower())
        if make is None and path.suffix.lower() in PACKED_SUFFIXES and block and why_no_text(block) is None:
            raise ConfigError(f"{path} is not compressed, against its name; rename it without {path.suffix}")
        if make is None:
            while block:
                yield block
                block = raw.read(BLOCK_BYTES)
            return
        unpack = make()
        while True:
            try:
                content = unpack.decompress(block, BLOCK_BYTES)
            except (zlib.error, lzma.LZMAError, OSError, _zstd_error()) as error:
                raise ValueError(first_line(error)) from None
            if content:  # bzip2 gives nothing before a whole block of it, and the first bytes say what a file is
                yield content
            if unpack.eof:  # another stream may follow, or zeros that fill up the file
                block, unpack = unpack.unused_data.lstrip(b"\0"), make()
                while not block and (more := raw.read(BLOCK_BYTES)):
                    block = more.lstrip(b"\0")
                if not block:
                    return
                continue
            block = raw.read(BLOCK_BYTES) if unpack.needs_input else b""
            if unpack.needs_input and not block and not content:
                raise EOFError("it ends within its compressed data")


class _Gzip:
    """Decompresses gzip with the interface of the other decompressors."""

    def __init__(self) -> None:
        self._stream = zlib.decompressobj(31)

    def decompress(self, block: bytes, max_length: int) -> bytes:
        return self._stream.decompress(self._stream.unconsumed_tail + block, max_length)

    @property
    def needs_input(self) -> bool:
        return not self._stream.unconsumed_tail

    @property
    def eof(self) -> bool:
        return self._stream.eof

    @property
    def unused_data(self) -> bytes:
        return self._stream.unused_data


def _decompressor_of(head: bytes, suffix: str) -> Callable[[], Any] | None:
    if head.startswith(b"\x1f\x8b"):
        return _Gzip
    if re.match(rb"BZh[1-9](1AY&SY|\x17rE8P)", head):
        return bz2.BZ2Decompressor
    if head.startswith(b"\xfd7zXZ\0") or (suffix == ".lzma" and head.startswith(b"]\0\0")):
        return partial(lzma.LZMADecompressor, memlimit=1 << _LARGEST_WINDOW_LOG)
    if re.match(rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18", head):
        zstd = _zstd()
        options = {zstd.DecompressionParameter.window_log_max: _LARGEST_WINDOW_LOG}
        return lambda: zstd.ZstdDecompressor(options=options)
    return None


def _zstd_error() -> type[Exception]:
    try:
        error: type[Exception] = _zstd().ZstdError
    except ConfigError:
        return zlib.error
    return error


def _zstd() -> Any:
    try:
        from compression import zstd  # from Python 3.14 on
    except ImportError:
        zstd = import_extra("backports.zstd", "reading a zstd file")
    return zstd
