"""The random state of this process: Python's and NumPy's generators, and those that the framework's Store knows."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from unidist.checkpoint.parts import Store


def random_state(store: Store, models: Mapping[str, Any]) -> dict[str, Any]:
    """JSON of all generators."""
    import numpy

    kind, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = numpy.random.get_state(legacy=True)
    return {
        "python": [kind, list(internal), gauss],
        "numpy": [name, [int(key) for key in keys], position, has_gauss, cached],
        "framework": store.random_state(models),
    }


def set_random_state(store: Store, states: Sequence[Mapping[str, Any]], rank: int, models: Mapping[str, Any]) -> None:
    """Each rank gets its own back; one that the saved job did not have, streams derived from rank 0's and its number."""
    import numpy

    if rank >= len(states):
        seed = int.from_bytes(hashlib.sha256(json.dumps([states[0], rank]).encode()).digest()[:7], "big")
        random.seed(seed)
        numpy.random.seed(seed % 2**32)
        store.set_random_state(states[0]["framework"], seed, models)
        return
    kind, internal, gauss = states[rank]["python"]
    random.setstate((kind, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = states[rank]["numpy"]
    numpy.random.set_state((name, numpy.array(keys, numpy.uint32), position, has_gauss, cached))
    store.set_random_state(states[rank]["framework"], None, models)
