"""Where rank 0 listens when an engine's own rendezvous is served by it."""

import os
import socket
from collections.abc import Mapping

from unidist.world import World


def serving_host(world: World, environ: Mapping[str, str] = os.environ) -> str:
    """A name for rank 0's machine that all ranks reach: the loopback address in a job of one host, else MASTER_ADDR or its name."""
    if world.local_size == world.size:
        return "127.0.0.1"
    return environ.get("MASTER_ADDR") or socket.gethostname()


def interface_of(host: str) -> str | None:
    """The network interface that holds the route to an address; None where it can't be told (not Linux, or no such route)."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, 9))
            own = probe.getsockname()[0]
        except OSError:
            return None
    for _, name in socket.if_nameindex():
        if _address(name) == own:
            return name
    return None


def _address(interface: str) -> str | None:
    """An interface's IPv4 address, as the SIOCGIFADDR request gives it."""
    import fcntl
    import struct

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        try:
            reply = fcntl.ioctl(asked.fileno(), 0x8915, struct.pack("256s", interface.encode()[:15]))
        except OSError:
            return None
    return socket.inet_ntoa(reply[20:24])
