"""Cache the source's scores for later comparisons, so that a large source is loaded only once.

The cache holds the nats and the first-ranked token of every scored token, and the source's sizes, but not its logits.
So a comparison from the cache has perplexities, their paired change and the share of same top tokens, but no KL and no
speed relative to the source.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...console import info, warn
from ...working_folder import writing_whole
from .batches import split_by_document
from .paired import SourceScores
from .perplexity import Scores
from .windows import ScoredDocument


@dataclass(frozen=True)
class CachedSource:
    """Scores of the source, and the measurements that need no other model (JSON values)."""

    scores: SourceScores
    alone: dict[str, Any]


class SourceCache:
    """Holds one entry per source, text and protocol.

    Args:
        folder: holds the entries, and is made when the first one is stored.
        identity: all that the source's scores depend on.
    """

    def __init__(self, folder: Path, identity: dict[str, Any]) -> None:
        # sorted keys, so that the order of the settings has no effect on the name
        key = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:24]
        self._file = folder / f"source-{key}.npz"

    def find(self, documents: Sequence[ScoredDocument]) -> CachedSource | None:
        """Read the entry for these documents (None where there is none, or none that can be read)."""
        if not self._file.is_file():
            return None
        try:
            with np.load(self._file) as found:
                rows = [split_by_document(found[name], documents) for name in ("nats", "top")]
                alone: dict[str, Any] = json.loads(str(found["alone"]))
        except (OSError, ValueError, KeyError, zipfile.BadZipFile) as problem:
            warn(f"{self._file} cannot be read ({problem}), so the source is measured again.")
            return None
        # numpy splits an array that is too short without a word
        if sum(map(len, rows[0])) != sum(document.scored for document in documents):
            warn(f"{self._file} is cut short, so the source is measured again.")
            return None
        info(f"The source's scores come from {self._file}; the source itself is not run.")
        return CachedSource(SourceScores(Scores(documents, rows[0]), rows[1]), alone)

    def store(self, source: SourceScores, alone: dict[str, Any]) -> None:
        """Store an entry, whole or not at all."""
        self._file.parent.mkdir(parents=True, exist_ok=True)
        nats, top = np.concatenate(list(source.scores.nll_N)), np.concatenate(list(source.top_N))
        with writing_whole(self._file) as temporary:
            np.savez(temporary, nats=nats, top=top, alone=np.array(json.dumps(alone)))
