"""Short names of recipes: what must be equal for a run to go on with the same data."""

import hashlib
import json
from typing import Any

import numpy as np

from megablocks_core.data.split import Split


def fingerprint(**facts: Any) -> str:
    """Return 16 hexadecimal digits that change with any of the facts, plain ones or NumPy's."""
    text = json.dumps(facts, sort_keys=True, default=lambda number: number.item())
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def facts_of_split(split: Split) -> list[Any]:
    """Return what tells the documents of a split from others; its name does not matter."""
    documents = split.documents
    if isinstance(documents, range):
        return [documents.start, documents.stop]
    content = np.ascontiguousarray(documents).data
    return [len(documents), hashlib.sha256(content).hexdigest()[:16]]
