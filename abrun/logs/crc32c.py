"""CRC-32C of many messages at once, as TFRecords mask it, in numpy: no package that is always there has it.

With a register that begins at 0, zeros before a message change nothing, and a register r behind which n bytes
follow turns into shift_n(r) xor the CRC of those: so messages are cut into chunks, whose CRCs are taken side
by side and then joined in pairs. To begin at 0 instead of all ones, the first 4 bytes are inverted.
"""

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

POLYNOMIAL = 0x82F63B78  # reflected
CHUNK = 64  # bytes
BATCH = 1 << 22  # bytes that are looked at together

Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]
Words = NDArray[np.uint32]


def masked_crc32c(content: bytes, spans: Sequence[tuple[int, int]]) -> Words:
    """The masked CRC-32C of each span of `content`: its first byte, and the byte after its last."""
    everything = np.frombuffer(content, np.uint8)
    starts, stops = np.array(spans, np.int64).reshape(-1, 2).T
    lengths = stops - starts
    crcs = np.zeros(len(spans), np.uint32)
    log_chunks = np.ceil(np.log2(np.maximum(1, -(-lengths // CHUNK)))).astype(int)
    for log in np.unique(log_chunks).tolist():
        indices = np.flatnonzero(log_chunks == log)
        indices = indices[np.argsort(lengths[indices], kind="stable")]
        most = max(1, BATCH // (CHUNK << log))
        for first in range(0, len(indices), most):
            some = indices[first : first + most]
            crcs[some] = _crcs(everything, starts[some], lengths[some], log)
    return ((crcs >> np.uint32(15)) | (crcs << np.uint32(17))) + np.uint32(0xA282EAD8)


def _crcs(content: Bytes, starts: Places, lengths: Places, log_chunks: int) -> Words:
    """Of spans with ascending lengths that fit into 2^log_chunks chunks."""
    width = CHUNK << log_chunks
    padded = np.zeros((len(starts), width), np.uint8)
    begins = [0, *(np.flatnonzero(np.diff(lengths)) + 1).tolist(), len(starts)]
    for first, end in pairwise(begins):  # those of one length together
        length = int(lengths[first])
        if end - first > 1:
            padded[first:end, width - length :] = content[starts[first:end, None] + np.arange(length)]
        else:
            padded[first, width - length :] = content[starts[first] : starts[first] + length]
        padded[first:end, width - length : width - length + 4] ^= 0xFF
    chunks = padded.reshape(-1, CHUNK)
    crcs = np.zeros(len(chunks), np.uint32)
    for offset in range(CHUNK):
        crcs = TABLE[(crcs ^ chunks[:, offset]) & 0xFF] ^ (crcs >> np.uint32(8))
    shift = SHIFT
    for _ in range(log_chunks):
        crcs = _shifted(crcs[0::2], shift) ^ crcs[1::2]
        shift = _shifted(shift, shift)
    for row in np.flatnonzero(lengths < 4).tolist():
        crc = 0xFFFFFFFF
        for byte in content[starts[row] : starts[row] + lengths[row]].tolist():
            crc = int(TABLE[(crc ^ byte) & 0xFF]) ^ (crc >> 8)
        crcs[row] = crc
    return ~crcs


def _shifted(registers: Words, shift: Words) -> Words:
    """What registers turn into behind the zeros that `shift` [4, 256] stands for, byte by byte of them."""
    parts = [shift[byte][(registers >> np.uint32(8 * byte)) & 0xFF] for byte in range(4)]
    return parts[0] ^ parts[1] ^ parts[2] ^ parts[3]


def _table() -> Words:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, (table >> np.uint32(1)) ^ np.uint32(POLYNOMIAL), table >> np.uint32(1))
    return table


def _shift_of_a_chunk() -> Words:
    registers = np.arange(256, dtype=np.uint32)[None] << np.array([[0], [8], [16], [24]], np.uint32)
    for _ in range(CHUNK):
        registers = TABLE[registers & 0xFF] ^ (registers >> np.uint32(8))
    return registers


TABLE = _table()
SHIFT = _shift_of_a_chunk()
