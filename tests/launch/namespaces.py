"""Two hosts for tests: network namespaces joined by a cable, where this machine lets us make them."""

import os
import shutil
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ADDRESSES = ("10.77.8.1", "10.77.8.2")


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True)


def can_make_namespaces() -> bool:
    """Root may lack the right too, in a container."""
    if os.getuid() != 0 or shutil.which("ip") is None:
        return False
    probe = f"ud{os.getpid()}p"
    made = subprocess.run(["ip", "netns", "add", probe], capture_output=True).returncode == 0
    return subprocess.run(["ip", "netns", "del", probe], capture_output=True).returncode == 0 and made


@pytest.fixture
def two_hosts() -> Iterator[list[list[str]]]:
    """Two network namespaces, each of which knows its own name by its real address; the commands that run something inside each."""
    if not can_make_namespaces():
        pytest.skip("network namespaces need root and iproute2")
    names = [f"ud{os.getpid()}{end}" for end in "ab"]
    folders = [Path("/etc/netns") / name for name in names]
    try:
        for name in names:
            ip("netns", "add", name)
        ip("link", "add", names[0], "type", "veth", "peer", "name", names[1])
        for name, address, folder in zip(names, ADDRESSES, folders):
            ip("link", "set", name, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", name)
            ip("-n", name, "link", "set", name, "up")
            ip("-n", name, "link", "set", "lo", "up")
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{address} {socket.gethostname()}\n")
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name, folder in zip(names, folders):
            subprocess.run(["ip", "netns", "del", name], capture_output=True)
            shutil.rmtree(folder, ignore_errors=True)
