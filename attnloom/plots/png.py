"""PNG files from arrays, for pages that must not need matplotlib."""

from __future__ import annotations

import struct
import zlib

import numpy as np

_SIGNATURE = b"\x89PNG\r\n\x1a\n"
_EIGHT_BIT_RGB = (8, 2, 0, 0, 0)


def png_bytes(image: np.ndarray) -> bytes:
    """A PNG file of [rows, columns, 3] colours in 0 .. 1."""
    rows, columns, _ = image.shape
    pixels = np.round(np.clip(image, 0, 1) * 255).astype(np.uint8).reshape(rows, -1)
    lines = np.concatenate([np.zeros((rows, 1), np.uint8), pixels], axis=1)  # filter 0 of each row
    return b"".join(
        (
            _SIGNATURE,
            _chunk(b"IHDR", struct.pack(">2I5B", columns, rows, *_EIGHT_BIT_RGB)),
            _chunk(b"IDAT", zlib.compress(lines.tobytes(), 9)),
            _chunk(b"IEND", b""),
        )
    )


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
