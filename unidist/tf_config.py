"""TF_CONFIG, which Kubernetes' TFJob and others set for TensorFlow: the workers' addresses and which of them this process is."""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unidist.errors import LaunchError

VARIABLE = "TF_CONFIG"
_TRAINING = ("chief", "master", "worker")  # the chief is rank 0


@dataclass(frozen=True)
class Cluster:
    """addresses: "host:port" of every rank; rank: this process's."""

    addresses: tuple[str, ...]
    rank: int

    @property
    def hosts(self) -> list[str]:
        """The host of every rank."""
        return [address.rpartition(":")[0] for address in self.addresses]

    @property
    def name(self) -> str:
        """The same on all ranks, and another one for other addresses."""
        return f"{zlib.crc32(','.join(self.addresses).encode()):08x}"


def read(environ: Mapping[str, str]) -> Cluster | None:
    """The cluster of TF_CONFIG; None where it is unset or describes no cluster.

    Raises LaunchError for text that is no TF_CONFIG, and for a task that does not train (ps, evaluator).
    """
    text = environ.get(VARIABLE, "").strip()
    if not text:
        return None
    try:
        config: Any = json.loads(text)
        cluster: Any = config.get("cluster") or {}
        if not cluster:
            return None
        kind, index = str(config["task"]["type"]), int(config["task"]["index"])
        tasks = [(job, number) for job in _TRAINING for number in range(len(cluster.get(job, [])))]
        addresses = tuple(str(cluster[job][number]) for job, number in tasks)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise LaunchError(
            f"TF_CONFIG is {text!r}, which can't be read ({type(error).__name__}: {error}); it looks like "
            '{"cluster": {"worker": ["host:port", ...]}, "task": {"type": "worker", "index": 0}}'
        ) from error
    if (kind, index) not in tasks:
        raise LaunchError(f"TF_CONFIG says that this process is {kind} {index}, which is not one of its workers {list(addresses)}")
    return Cluster(addresses, tasks.index((kind, index)))
