"""On a machine with GPUs, in one call: devices against CUDA's and torch's, the contract on every backend, a step's cost above raw DDP.

    python tests/gpu/check.py

Needs an environment with the frameworks' GPU builds. It is not part of the suite, which runs on CPUs.
"""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
UNIDIST = [sys.executable, "-m", "unidist"]
COMMANDS = (
    [*UNIDIST, "env"],
    [*UNIDIST, "backends"],
    [*UNIDIST, "devices"],
    [sys.executable, str(ROOT / "tests" / "gpu" / "devices.py")],
    [*UNIDIST, "test"],  # every usable backend, on all visible GPUs
    [*UNIDIST, "demo", "--epochs", "3"],
    [sys.executable, str(ROOT / "benchmarks" / "step.py")],
)

codes = []
for command in COMMANDS:
    print(f"\n$ {' '.join(command[1:])}", flush=True)
    codes.append(subprocess.run(command, cwd=ROOT).returncode)
sys.exit(max(codes))
