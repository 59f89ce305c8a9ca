"""Python's own standard library as documents, packed into rows without padding."""

from __future__ import annotations

import random
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

VOCABULARY = 256  # tokens are bytes
_SKIPPED_FOLDERS = frozenset(
    {"site-packages", "dist-packages", "test", "tests", "idlelib", "encodings", "pydoc_data"}
)
_MIN_BYTES, _MAX_BYTES = 200, 60_000


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows of packed documents.

    tokens, targets: [B, S] int64; targets are the tokens one position on.
    documents: [B, S] int64; which document of its row a token belongs to, ascending from 0.
    counted: [B, S] bool; False where the target is the first byte of another document.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    documents: torch.Tensor
    counted: torch.Tensor


def read_documents(limit_bytes: int = 8_000_000) -> list[bytes]:
    """Source files of the running interpreter's standard library, sorted by path.

    Args:
        limit_bytes: stop after this many bytes in all.
    Raises:
        FileNotFoundError: this Python carries no .py files (a zipped or frozen library).
    """
    root = Path(sysconfig.get_path("stdlib"))
    documents: list[bytes] = []
    total = 0
    for path in sorted(root.rglob("*.py")):
        if _SKIPPED_FOLDERS.intersection(path.relative_to(root).parts):
            continue
        data = path.read_bytes()
        if not _MIN_BYTES <= len(data) <= _MAX_BYTES:
            continue
        documents.append(data)
        total += len(data)
        if total >= limit_bytes:
            break
    if not documents:
        raise FileNotFoundError(
            f"the standard library at {root} holds no .py files to train on; "
            "run the demo with a Python that carries its library as source"
        )
    return documents


def pack_batches(documents: list[bytes], rows: int, length: int, seed: int) -> Iterator[Batch]:
    """Endless batches: documents in a new random order each pass, laid end to end, cut into rows.

    A document that crosses the end of a row goes on in the next row as a document of its own.
    """
    stream = _stream_pieces(documents, random.Random(seed))
    piece, used = next(stream), 0
    while True:
        tokens = np.empty((rows, length + 1), dtype=np.int64)
        owners = np.empty((rows, length + 1), dtype=np.int64)
        for row in range(rows):
            filled = owner = 0
            while filled < length + 1:
                taken = min(len(piece) - used, length + 1 - filled)
                tokens[row, filled : filled + taken] = piece[used : used + taken]
                owners[row, filled : filled + taken] = owner
                filled, used, owner = filled + taken, used + taken, owner + 1
                if used == len(piece):
                    piece, used = next(stream), 0
        yield Batch(
            tokens=torch.from_numpy(tokens[:, :-1].copy()),
            targets=torch.from_numpy(tokens[:, 1:].copy()),
            documents=torch.from_numpy(owners[:, :-1].copy()),
            counted=torch.from_numpy(owners[:, 1:] == owners[:, :-1]),
        )


def _stream_pieces(documents: list[bytes], order: random.Random) -> Iterator[np.ndarray]:
    while True:
        for index in order.sample(range(len(documents)), len(documents)):
            yield np.frombuffer(documents[index], dtype=np.uint8)
