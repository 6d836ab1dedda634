"""CUDA_VISIBLE_DEVICES is read as CUDA reads it, compared with torch.cuda's reading, which has to agree with CUDA to count devices."""

import json
import random
import subprocess
import sys

import pytest

from unidist.hardware.records import Device, MigInstance
from unidist.hardware.visible import order_note, read_entries, visible_places
from unidist.launchers.gpus import num_visible_gpus

UUIDS = [
    "GPU-0a1b2c3d-0000-0000-0000-000000000000",
    "GPU-0a1bffff-0000-0000-0000-000000000001",
    "GPU-77777777-0000-0000-0000-000000000002",
]
PLAIN = [Device(index, name="A", uuid=uuid, mig_enabled=False) for index, uuid in enumerate(UUIDS)]


def split(index, *parts):
    """A GPU in MIG mode, its parts as (gpu instance, uuid)."""
    mig = tuple(MigInstance(gpu_instance=number, compute_instance=0, uuid=uuid) for number, uuid in parts)
    return Device(index, name="A", uuid=UUIDS[index], mig_enabled=True, mig=mig)


MIXED = [PLAIN[0], split(1, (1, "MIG-aaaa0000"), (2, "MIG-aaaa1111")), split(2)]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        (None, [0, 1, 2]), ("", []), (" ", []), ("0,1,2", [0, 1, 2]), ("2,0", [2, 0]), (" 1 , 2", [1, 2]), ("1,\t0", [1, 0]),
        ("-1", []), ("0,2,-1,1", [0, 2]), ("0,3,1", [0]), ("3", []), ("0,,1", [0]), ("0,", [0]), (",0", []), ("0,x,1", [0]),
        ("0,0", []), ("1,0,1", []), ("1,-1,-1", [1]), ("NoDevFiles", []), ("none", []), ("all", []),
        ("1st,+0", [1, 0]), ("01", [1]), ("-0", [0]),
        ("0x1", [0]), ("1.5", [1]), ("99999999999999999999", []),
        (UUIDS[1], [1]), (f"{UUIDS[2]},{UUIDS[0]}", [2, 0]), ("GPU-7", [2]), ("GPU-0a1bf,GPU-0a1b2", [1, 0]),
        ("GPU-0a1b", []), ("GPU-", []), ("GPU-7,GPU-0a1b,GPU-0a1bf", [2]), ("GPU-7,GPU-9,GPU-0a1bf", [2]), ("GPU-7,GPU-77", []),
        ("GPU-7,GPU-7", []), ("GPU-7,0", [2]), ("0,GPU-7", [0]), ("gpu-7", []), (" GPU-7", []), ("GPU-7, GPU-0a1bf", [2]), ("MIG-a", []),
    ],
)  # fmt: skip
def test_whole_gpus(variable, expected):
    assert visible_places(variable, PLAIN) == [(position, None) for position in expected]


@pytest.mark.parametrize(
    ("variable", "expected"),
    [
        pytest.param(None, [(1, 0)], id="one instance, and no whole GPU beside it"),
        pytest.param("0", [(0, None)], id="the GPU that is not split"),
        pytest.param("1", [(1, 0)], id="its first instance"),
        pytest.param("0,1", [(1, 0)], id="instance instead of GPU"),
        pytest.param("2", [], id="split, but no instance"),
        pytest.param("2,0", [(0, None)], id="nothing of the first"),
        pytest.param(UUIDS[1], [(1, 0)], id="by the GPU's UUID"),
        pytest.param("MIG-aaaa1111", [(1, 1)], id="by UUID"),
        pytest.param("MIG-aaaa1", [(1, 1)], id="cut short"),
        pytest.param("MIG-aaaa", [], id="cut too short"),
        pytest.param("MIG-aaaa1111,MIG-aaaa0000", [(1, 1)], id="the first of several"),
        pytest.param("MIG-aaaa1111,MIG-aaaa1111", [], id="twice"),
        pytest.param(f"MIG-{UUIDS[1]}/2/0", [(1, 1)], id="by numbers"),
        pytest.param(f"MIG-{UUIDS[1]}/9/0", [], id="a number that is not there"),
        pytest.param(f"MIG-{UUIDS[0]}/1/0", [], id="a GPU that is not split"),
        pytest.param(f"MIG-{UUIDS[1]}/2/0,MIG-aaaa1111", [], id="twice under two names"),
        pytest.param("MIG-bbbb,MIG-aaaa1111", [], id="invalid first"),
        pytest.param("0,MIG-aaaa1111", [(0, None)], id="a number first"),
    ],
)
def test_gpus_that_are_split(variable, expected):
    assert visible_places(variable, MIXED) == expected


EIGHT = [Device(i, uuid=f"GPU-{start}", mig_enabled=False) for i, start in enumerate(
    ("5a88edbe-90c4", "7d1a2244-bfa3", "121d0000-0001", "0c519389-096c", "44440000-0001", "55550000-0001", "66660000-0001", "77770000-0001")
)]  # fmt: skip


@pytest.mark.parametrize(
    ("variable", "count"),
    [
        ("0,1,2,3,4,5,6,7", 8),
        ("0,1,2,3,-1,5,6,7", 4),
        ("0,1,2,3,-1,0,6,7", 4),
        ("GPU-5a88edbe-90c4", 1),
        ("GPU-5a88edbe", 1),
        ("GPU-5a88edbe,GPU-7d1a2244-,GPU-121d,GPU-0c519389-096c", 4),
    ],
)
def test_what_was_measured_with_cuda_on_eight_gpus(variable, count):
    """The counts of the CUDA runtime in https://github.com/pytorch/pytorch/pull/92315 (2023-01-18)."""
    assert len(visible_places(variable, EIGHT)) == count


@pytest.mark.parametrize("variable", [None, "0", "MIG-89c850dc,MIG-f2b5fbbd"])
def test_what_was_measured_with_cuda_on_a_split_gpu(variable):
    """One instance in any case (the same source)."""
    gpu = split(0, (1, "MIG-89c850dc-38e3"), (2, "MIG-f2b5fbbd-850e"))
    assert visible_places(variable, [gpu]) == [(0, 0)]


def test_names_of_old_drivers_and_instances_ten_and_one():
    """Drivers before R470 give the name with numbers as the UUID; instance 1/0 is not taken for 1/01, nor 1 for 11."""
    name = f"MIG-{UUIDS[1]}"
    gpus = [PLAIN[0], split(1, (1, f"{name}/1/0"), (11, f"{name}/11/0"))]
    assert visible_places(f"{name}/1/0", gpus) == [(1, 0)]
    assert visible_places(f"{name}/11/0", gpus) == [(1, 1)]
    assert visible_places(f"{name}/1", gpus) == []


def test_a_gpu_that_could_not_be_asked_keeps_its_number():
    gpus = [Device(0), PLAIN[1]]
    assert visible_places("1,0", gpus) == [(1, None), (0, None)]
    assert visible_places("GPU-", gpus) == [(1, None)]


TORCH = """
import json, os, sys
import torch.cuda as cuda
variables, uuids = json.load(sys.stdin)
found = []
for variable in variables:
    os.environ["CUDA_VISIBLE_DEVICES"] = variable
    entries = cuda._parse_visible_devices()
    if entries and isinstance(entries[0], str):
        entries = [entries, cuda._transform_uuid_to_ordinals(entries, uuids)]
    found.append(entries)
print(json.dumps(found))
"""


def drawn_variables(count):
    draw = random.Random(67)
    pieces = [
        "0",
        "1",
        "2",
        "3",
        "7",
        "-1",
        "",
        " ",
        " 1",
        "2 ",
        "x",
        "1gpu2",
        "2ampere",
        "+1",
        *UUIDS,
        "GPU-7",
        "GPU-0a1b",
        "GPU-0a1bf",
        "GPU-9",
    ]
    for _ in range(count):
        pool = draw.choice([pieces, pieces[:14], pieces[14:]])
        yield ",".join(draw.choice(pool) for _ in range(draw.randint(1, 5)))


def test_torch_reads_the_same():
    """What torch.cuda.device_count makes of 500 lists, for numbers before it compares them with the number of GPUs."""
    variables = list(drawn_variables(500))
    done = subprocess.run([sys.executable, "-c", TORCH], input=json.dumps([variables, UUIDS]), capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    both_kinds = 0
    for variable, theirs in zip(variables, json.loads(done.stdout), strict=True):
        entries, positions = theirs if theirs and isinstance(theirs[0], list) else (theirs, theirs)
        assert read_entries(variable) == entries, variable
        within = next((place for place, number in enumerate(positions) if number >= len(UUIDS)), len(positions))
        assert visible_places(variable, PLAIN) == [(position, None) for position in positions[:within]], variable
        both_kinds += bool(positions)
    assert both_kinds > 100


@pytest.mark.parametrize(
    ("variable", "files", "expected"),
    [
        (None, 3, 3), (None, 0, 0), ("0,1,2", 3, 3), ("0,1,2", 2, 2), ("1,5,0", 2, 1), ("0,0", 2, 0), ("", 2, 0), ("-1", 2, 0),
        ("0,1", 0, 2), ("GPU-a,GPU-b", 2, 2), ("GPU-a,GPU-a", 2, 0), ("MIG-a,MIG-b", 1, 1), ("NoDevFiles", 0, 0),
    ],
)  # fmt: skip
def test_the_launcher_counts_the_same_way_from_device_files(tmp_path, variable, files, expected):
    (tmp_path / "dev").mkdir()
    for name in ("nvidiactl", "nvidia-uvm", "nvidia-caps", *(f"nvidia{number}" for number in range(files))):
        (tmp_path / "dev" / name).touch()
    assert num_visible_gpus({} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}, tmp_path) == expected


def test_what_is_assumed_about_the_order_is_said():
    """CUDA's own order, fastest first, is not known; with equal GPUs, UUIDs or the order of the bus nothing is assumed."""
    different = [PLAIN[0], Device(1, name="B", uuid=UUIDS[1])]
    assert "CUDA_DEVICE_ORDER=PCI_BUS_ID" in order_note({}, different)
    assert order_note({"CUDA_DEVICE_ORDER": "FASTEST_FIRST", "CUDA_VISIBLE_DEVICES": "1"}, different)
    assert order_note({"CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, different) is None
    assert order_note({"CUDA_VISIBLE_DEVICES": UUIDS[1]}, different) is None
    assert order_note({}, PLAIN) is None and order_note({}, []) is None
    assert order_note({}, [PLAIN[0], Device(1)]) is None
