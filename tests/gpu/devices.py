"""On a machine with GPUs: `unidist.devices()` against torch.cuda, and its reading of CUDA_VISIBLE_DEVICES against CUDA's own.

    python tests/gpu/devices.py

Each list is tried in a process of its own, which asks CUDA (libcuda.so.1: count and UUIDs) after unidist. Exits with 1 on a difference.
"""

import json
import os
import subprocess
import sys

import unidist
from unidist.hardware.records import Device

CUDA = """
import ctypes, json, uuid
import unidist
found = unidist.devices()
ours = [entry.uuid for entry in found.visible]
cuda = ctypes.CDLL("libcuda.so.1")
count = ctypes.c_int(0)
if cuda.cuInit(0) == 0:
    cuda.cuDeviceGetCount(ctypes.byref(count))
theirs = []
for index in range(count.value):
    device, raw = ctypes.c_int(), (ctypes.c_char * 16)()
    cuda.cuDeviceGet(ctypes.byref(device), index)
    cuda.cuDeviceGetUuid_v2(ctypes.byref(raw), device)
    theirs.append(str(uuid.UUID(bytes=bytes(raw.raw))))
print(json.dumps([[(name or "").split("-", 1)[-1] for name in ours], theirs, list(found.host.notes)]))
"""

TORCH = """
import json
import torch
properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
print(json.dumps([[p.name, str(p.uuid), p.total_memory, [p.major, p.minor]] for p in properties]))
"""


def ask(code, variable):
    environ = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    environ |= {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=120)
    if done.returncode:
        raise SystemExit(f"CUDA_VISIBLE_DEVICES={variable!r}:\n{done.stderr}")
    return json.loads(done.stdout)


def variables(gpus):
    """What can be written of these GPUs, right and wrong."""
    last = len(gpus) - 1
    names = [gpu.uuid for gpu in gpus]
    numbers = [
        None,
        "",
        " ",
        "0",
        " 0",
        f"{last},0",
        "0,-1",
        "-1",
        "-1,0",
        "0,0",
        "0,,0",
        "0,x",
        "x,0",
        "0x0",
        "1.0",
        "0gpu",
        "+0",
        "00",
        "99",
        "0,99",
    ]
    parts = [part.uuid for gpu in gpus for part in gpu.mig]
    mig = [*parts, ",".join(parts), *(part[:20] for part in parts), "MIG-x"]
    uuids = [names[0], ",".join(reversed(names)), names[0][:12], "GPU-", f"{names[0]},{names[0]}", f"{names[0]},0", f"0,{names[0]}",
             f" {names[0]}", f"{names[0]}, {names[-1]}", f"{names[0]},GPU-x", names[0].lower(), names[0].upper()]  # fmt: skip
    return [*numbers, *uuids, *mig]


def tell(same, what):
    print(f"{'same   ' if same else 'DIFFERS'} {what}", flush=True)
    return same


def compare_with_cuda(gpus):
    """Every list, the same devices in the same order."""
    results = []
    for variable in dict.fromkeys(variables(gpus)):
        ours, theirs, notes = ask(CUDA, variable)
        results.append(tell(ours == theirs, f"CUDA_VISIBLE_DEVICES={variable!r}: unidist {ours}, CUDA {theirs} {' '.join(notes)}"))
    return all(results)


def compare_with_torch(seen):
    """Count, names, UUIDs, compute capability; torch's total memory leaves out what the driver keeps."""
    theirs = ask(TORCH, os.environ.get("CUDA_VISIBLE_DEVICES"))
    results = [tell(len(seen) == len(theirs), f"unidist shows {len(seen)} devices, torch.cuda {len(theirs)}")]
    for entry, (name, uuid, memory, capability) in zip(seen, theirs):
        same = (entry.uuid or "").partition("-")[2] == uuid and 0.9 * entry.memory_total <= memory <= entry.memory_total
        if isinstance(entry, Device):
            same = same and entry.name == name and list(entry.compute_capability) == capability
        results.append(
            tell(same, f"unidist {entry.name} {entry.uuid} {entry.memory_total}, torch.cuda {name} {uuid} {memory} {capability}")
        )
    return all(results)


def main():
    gpus = unidist.devices()
    if not gpus:
        raise SystemExit(f"no GPUs here: {gpus.reason}")
    results = [compare_with_cuda(gpus), compare_with_torch(gpus.visible)]
    raise SystemExit(0 if all(results) else 1)


if __name__ == "__main__":
    main()
