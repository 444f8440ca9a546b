"""Bytes of a table as UTF-8, whatever it was compressed with or encoded in."""

import codecs
import zlib
from pathlib import Path

from abrun.errors import StoreError
from abrun.logs.log import printable, readable
from abrun.regular_files import read_regular

GZIP = b"\x1f\x8b"
LARGEST_UNPACKED = 2**30  # bytes
UTF_16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


def read_content(path: Path) -> tuple[bytes, bool]:
    """Return a file's bytes, unpacked and as UTF-8 without a byte order mark, and whether its end is torn.

    Raises StoreError, one line.
    """
    with readable(path):
        content = read_regular(path)
    torn = False
    if content.startswith(GZIP):
        content, torn = _unpacked(path, content)
    encoding = UTF_16.get(content[:2])
    if encoding:
        text, read = codecs.getincrementaldecoder(encoding)("replace").decode(content[2:]), len(content)
        return text.encode(errors="replace"), torn or read % 2 == 1
    return content.removeprefix(codecs.BOM_UTF8), torn


def _unpacked(path: Path, content: bytes) -> tuple[bytes, bool]:
    """Return what gzip's members hold, one behind the other, and whether the last has no end."""
    parts: list[bytes] = []
    size = 0
    while content.startswith(GZIP):
        member = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)
        try:
            parts.append(member.decompress(content, LARGEST_UNPACKED - size + 1))
        except zlib.error as error:
            raise StoreError(
                f"{printable(str(path))}: damaged gzip file ({error}); write the file again"
            ) from None
        size += len(parts[-1])
        if size > LARGEST_UNPACKED:
            raise StoreError(
                f"{printable(str(path))}: unpacks to more than {LARGEST_UNPACKED} bytes; log less often"
            )
        if not member.eof:
            return b"".join(parts), True
        content = member.unused_data
    return b"".join(parts), False
