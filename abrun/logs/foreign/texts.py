"""Text files in blocks: decompressed, as UTF-8, in lines."""

import codecs
import io
import zlib
from collections.abc import Iterable, Iterator
from functools import partial
from itertools import chain
from pathlib import Path

from abrun.errors import StoreError
from abrun.logs.foreign.files import open_file
from abrun.runs.redaction import printable

GZIP = b"\x1f\x8b"
BLOCK_BYTES = 1 << 16
MAX_LINE = 1 << 24  # bytes or characters
MAX_LINES = 1 << 25
MAX_RATIO, FREE_BYTES = 100, 1 << 22  # of a compressed file, once it has unpacked FREE_BYTES
MAX_DOCUMENT_BYTES = 2**28  # of a file that is parsed as a whole
MAX_UNPACKED_BYTES = 2**30  # of a compressed file
UTF_16 = {codecs.BOM_UTF16_LE: "utf-16-le", codecs.BOM_UTF16_BE: "utf-16-be"}


class TextFile:
    """Content of a text file, plain or compressed; as UTF-8 without byte order mark. Raises StoreError.

    `torn` and `ended` (with a line end) describe the end of the file once it has been read.
    """

    def __init__(self, path: Path) -> None:
        self.place = printable(str(path))
        self.torn, self.ended = False, True
        self._path, self._num_lines = path, 0

    def blocks(self) -> Iterator[bytes]:
        """Yield the content in blocks of some size."""
        with open_file(self._path) as file:
            blocks = iter(partial(file.read, BLOCK_BYTES), b"")
            start, blocks = _peek(blocks)
            if start.startswith(GZIP):
                # Refuse a file that unpacks out of proportion before its lines are parsed, which costs more
                for _ in self._decompress(blocks):
                    pass
                file.seek(0)
                blocks = iter(partial(file.read, BLOCK_BYTES), b"")
                start, blocks = _peek(self._decompress(blocks))
            if encoding := UTF_16.get(start[:2]):
                blocks = self._transcode(blocks, encoding)
            for index, block in enumerate(blocks):
                self.ended = block.endswith((b"\n", b"\r"))
                yield block if index else block.removeprefix(codecs.BOM_UTF8)

    def content(self) -> bytes:
        """Return the whole content. Raises StoreError for more than MAX_DOCUMENT_BYTES."""
        content, size = [], 0
        for block in self.blocks():
            content.append(block)
            size += len(block)
            if size > MAX_DOCUMENT_BYTES:
                raise StoreError(f"{self.place}: larger than {MAX_DOCUMENT_BYTES} bytes; write JSON lines")
        return b"".join(content)

    def lines(self) -> Iterator[bytes]:
        """Yield the lines without their ends; the last one, after the last line end, may be empty."""
        pending, num_pending = [b""], 0  # of the line that has no end yet
        for block in self.blocks():
            pending.append(block)
            num_pending += len(block)
            if b"\n" in block:
                *lines, rest = b"".join(pending).split(b"\n")
                pending = [rest]
                self._count_lines(len(lines))
                yield from lines
                num_pending = len(rest)
            elif num_pending > MAX_LINE:
                raise self._long_line_error()
        yield b"".join(pending)

    def text_lines(self) -> Iterator[str]:
        r"""Yield the lines with their ends, which may be \n, \r\n or \r."""
        decoder, offset = codecs.getincrementaldecoder("utf-8")(), 0
        pending, num_pending = [""], 0
        for block in self.blocks():
            num_undecoded = len(decoder.getstate()[0])
            try:
                pending.append(decoder.decode(block))
            except UnicodeDecodeError as error:
                raise StoreError(
                    f"{self.place}: byte {offset - num_undecoded + error.start} is not UTF-8; expected a CSV "
                    "file: save it as UTF-8"
                ) from None
            offset += len(block)
            num_pending += len(block)
            if "\n" in pending[-1] or "\r" in pending[-1]:
                text = "".join(pending)
                end = max(text.rfind("\n"), text.rfind("\r", 0, -1)) + 1
                pending, num_pending = [text[end:]], len(text) - end
                self._count_lines(text.count("\n") + text.count("\r") - text.count("\r\n"))
                yield from io.StringIO(text[:end], newline="")
            elif num_pending > MAX_LINE:
                raise self._long_line_error()
        yield "".join(pending)

    def _count_lines(self, number: int) -> None:
        self._num_lines += number
        if self._num_lines > MAX_LINES:
            raise StoreError(f"{self.place}: more than {MAX_LINES:,} lines; log less often, or split it")

    def _long_line_error(self) -> StoreError:
        return StoreError(f"{self.place}: a line is longer than {MAX_LINE} bytes; write the file again")

    def _decompress(self, blocks: Iterable[bytes]) -> Iterator[bytes]:
        """Yield the content of all members of a gzip file; what follows the last one is ignored."""
        member, size, packed_size, rest = zlib.decompressobj(zlib.MAX_WBITS | 16), 0, 0, b""
        for block in blocks:
            rest += block
            packed_size += len(block)
            while True:
                if member.eof:
                    if len(rest) < len(GZIP):
                        break
                    if not rest.startswith(GZIP):
                        return
                    member = zlib.decompressobj(zlib.MAX_WBITS | 16)
                try:
                    content = member.decompress(rest, BLOCK_BYTES)
                except zlib.error as error:
                    raise StoreError(
                        f"{self.place}: damaged gzip file ({error}); write the file again"
                    ) from None
                size += len(content)
                if size > max(FREE_BYTES, MAX_RATIO * packed_size):
                    raise StoreError(
                        f"{self.place}: unpacks to more than {MAX_RATIO} times its size; unpack it"
                    )
                if size > MAX_UNPACKED_BYTES:
                    raise StoreError(
                        f"{self.place}: unpacks to more than {MAX_UNPACKED_BYTES} bytes; log less often"
                    )
                if content:
                    yield content
                rest = member.unused_data if member.eof else member.unconsumed_tail
                if not member.eof and len(content) < BLOCK_BYTES:
                    break
        self.torn = not member.eof

    def _transcode(self, blocks: Iterable[bytes], encoding: str) -> Iterator[bytes]:
        decoder, size = codecs.getincrementaldecoder(encoding)("replace"), 0
        for index, block in enumerate(blocks):
            size += len(block)
            yield decoder.decode(block if index else block[2:]).encode(errors="replace")
        self.torn = self.torn or size % 2 == 1


def _peek(blocks: Iterable[bytes]) -> tuple[bytes, Iterator[bytes]]:
    """Return the first block, and an iterator over all of them."""
    blocks = iter(blocks)
    first_block = next(blocks, b"")
    return first_block, chain([first_block] if first_block else [], blocks)
