"""How long starting takes: `import unidist`, and `unidist run -n 2` of an empty script beside torchrun and horovodrun.

    python benchmarks/start.py [--rounds 7] [--horovodrun]

Arms are interleaved; the table gives medians with the smallest and largest of all rounds, and each arm's ratio to `unidist run`.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def seconds(command):
    began = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    return time.perf_counter() - began


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--horovodrun", action="store_true", help="measure it too; takes about 10 s a round")
    args = parser.parse_args()
    bin = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / "empty.py"
        empty.write_text("")
        arms = {
            "python -c pass": [sys.executable, "-c", "pass"],
            "import unidist": [sys.executable, "-c", "import unidist"],
            "unidist run -n 2": [sys.executable, "-m", "unidist", "run", "-n", "2", "--backend", "ddp", str(empty)],
            "unidist run -n 2 (again)": [sys.executable, "-m", "unidist", "run", "-n", "2", "--backend", "ddp", str(empty)],
            "unidist run, horovod": [sys.executable, "-m", "unidist", "run", "-n", "2", "--backend", "horovod", str(empty)],
            "torchrun, 2 workers": [str(bin / "torchrun"), "--nproc-per-node", "2", str(empty)],
        }
        if args.horovodrun:
            arms["horovodrun -np 2"] = [str(bin / "horovodrun"), "-np", "2", sys.executable, str(empty)]
        times = {name: [] for name in arms}
        for _ in range(args.rounds):
            for name, command in arms.items():
                times[name].append(seconds(command))
    base = statistics.median(times["unidist run -n 2"])
    bare = statistics.median(times["python -c pass"])
    for name, values in times.items():
        middle = statistics.median(values)
        print(f"{name:28s} {1000 * middle:8.0f} ms  [{1000 * min(values):.0f}, {1000 * max(values):.0f}]  {middle / base:5.2f}x")
    print(f"import unidist above bare Python: {1000 * (statistics.median(times['import unidist']) - bare):.1f} ms")


if __name__ == "__main__":
    main()
