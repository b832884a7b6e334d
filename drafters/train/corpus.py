"""Training documents: chats of the target's own making, read from ``.npz`` shards."""

from __future__ import annotations

import glob
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specdiff.errors import FormatError, InvalidInputError


@dataclass(frozen=True, eq=False)
class Document:
    """One chat.

    Attributes:
        ids: ``int64[T]`` token ids, prompt first.
        prompt_length: number of leading ids that belong to the prompt; anchors are taken from the response.
        source: where the prompt came from.
        temperature: temperature the response was sampled with (0 for greedy).
        key: stable name of the document (shard and index), used to split off held-out documents.
    """

    ids: np.ndarray
    prompt_length: int
    source: str = ""
    temperature: float = 0.0
    key: str = ""

    def __len__(self) -> int:
        return len(self.ids)


def read_shard(path: str | Path) -> list[Document]:
    """Documents of one ``.npz`` shard.

    The arrays: ``flat`` (ids of all documents, joined), ``lens`` and ``plen`` (length and prompt length of each), and
    optionally ``src`` and ``temp``.

    Raises:
        FormatError: arrays are missing or their lengths contradict each other.
    """
    path = Path(path)
    with np.load(path, allow_pickle=False) as data:
        missing = {"flat", "lens", "plen"} - set(data.files)
        if missing:
            raise FormatError(f"{path}: not a corpus shard, arrays {sorted(missing)} are missing")
        flat, lens, plen = data["flat"].astype(np.int64), data["lens"], data["plen"]
        sources = data["src"] if "src" in data.files else np.full(len(lens), "")
        temps = data["temp"] if "temp" in data.files else np.zeros(len(lens))
    if int(lens.sum()) != len(flat) or len(plen) != len(lens) or bool((plen > lens).any()):
        raise FormatError(f"{path}: lens and plen do not fit the {len(flat)} ids of flat")
    ends = np.cumsum(lens)
    return [
        Document(flat[end - n : end], int(p), str(s), float(t), f"{path.stem}/{i}")
        for i, (end, n, p, s, t) in enumerate(zip(ends, lens, plen, sources, temps, strict=True))
    ]


def write_shard(path: str | Path, documents: Sequence[Document]) -> None:
    """Write documents in the layout of :func:`read_shard`; the file appears whole or not at all."""
    path = Path(path)
    flat = np.concatenate([d.ids for d in documents]) if documents else np.zeros(0, np.int64)
    small = len(flat) == 0 or int(flat.max()) < 2**16
    scratch = path.with_name(path.name + ".tmp.npz")
    np.savez_compressed(
        scratch,
        flat=flat.astype(np.uint16 if small else np.int32),
        lens=np.array([len(d) for d in documents], np.int32),
        plen=np.array([d.prompt_length for d in documents], np.int32),
        src=np.array([d.source for d in documents], dtype=np.str_),
        temp=np.array([d.temperature for d in documents], np.float32),
    )
    scratch.replace(path)


def expand(patterns: Iterable[str]) -> list[Path]:
    """Shard files named by paths, folders (all their ``.npz``) or glob patterns, sorted, each once.

    Raises:
        InvalidInputError: a plain path does not exist.
    """
    found: dict[Path, None] = {}
    for pattern in patterns:
        path = Path(pattern)
        if path.is_dir():
            hits = sorted(path.glob("*.npz"))
        elif path.exists():
            hits = [path]
        elif any(c in pattern for c in "*?["):
            hits = [Path(p) for p in sorted(glob.glob(pattern))]
        else:
            raise InvalidInputError(f"no such corpus file or folder: {pattern}")
        found.update((p, None) for p in hits if not p.name.endswith(".tmp.npz"))
    return list(found)
