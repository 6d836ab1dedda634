"""Plays scenes against the stand-in for the driver's library, all in one process: each has its variables, and asks again from scratch.

Reads {name: {"environ": {...}, "looks": n, "before": code}} and writes {name: [{"list": ..., "reason": ..., "calls": "is"}, ...]}.
"""

import contextlib
import json
import os
import sys

# Python 3.12 has no distutils, and this process no setuptools that would bring it.
sys.modules["distutils"] = sys.modules["setuptools"] = None

import unidist  # noqa: E402

assert "pynvml" not in sys.modules and "ctypes" not in sys.modules, "nothing of NVML at import"


def look(log):
    found = unidist.devices()
    calls = log.read_text() if log.exists() else ""
    log.unlink(missing_ok=True)
    return {"list": json.loads(json.dumps(found.to_dict())), "reason": found.reason, "calls": calls}


def play(scene, log):
    ours = {name: value for name, value in os.environ.items() if name.startswith(("STAND_IN_", "CUDA_"))}
    for name in ours:
        del os.environ[name]
    os.environ.update(scene.get("environ", {}), STAND_IN_LOG=str(log))
    if "before" in scene:
        with contextlib.redirect_stdout(sys.stderr):
            exec(scene["before"], {})
        log.unlink(missing_ok=True)
    return [look(log) for _ in range(scene.get("looks", 1))]


def main():
    from pathlib import Path

    log = Path(sys.argv[1])
    results = {name: play(scene, log) for name, scene in json.load(sys.stdin).items()}
    heavy = [name for name in ("torch", "tensorflow", "keras", "numpy", "rich", "typer", "horovod") if name in sys.modules]
    assert not heavy, heavy
    libraries = Path("/proc/self/maps").read_text()
    assert "libcuda" not in libraries, "a CUDA context needs libcuda"
    print(json.dumps(results))


if __name__ == "__main__":
    main()
