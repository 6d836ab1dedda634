"""Devices through the real pynvml and a stand-in for the driver's library (stand_in/nvml.c); CPUs and memory from a made-up /proc.

Cases 67 (names that are bytes or no UTF-8), 68 (no driver, no device), 69 (no distutils): nothing raises, and every reason is there.
"""

import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from unidist.cli.app import app
from unidist.cli.device_tables import cuda_number
from unidist.hardware import cpus, kernel_files
from unidist.hardware.cluster import gather_devices, merge_views
from unidist.hardware.records import Device, Devices, Host, MigInstance, text
from unidist.world import World

HERE = Path(__file__).parent / "stand_in"
ROOT = Path(__file__).resolve().parents[2]
SOURCE = (HERE / "nvml.c").read_text()
GIB = 2**30
DOCUMENTED = "\n".join(re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "devices.md").read_text(), re.S))

# Every function of the stand-in, refused in every way; all starts and ends are counted elsewhere.
FUNCTIONS = sorted(set(re.findall(r"^int (nvml\w+)\(", SOURCE, re.M)) - {"nvmlInitWithFlags"})
CODES = {"not supported": 3, "no permission": 4, "function not found": 13, "lost": 15, "no UTF-8 in its description": 77, "unknown": 999}
FIELDS = {
    "nvmlDeviceGetName": "name",
    "nvmlDeviceGetUUID": "uuid",
    "nvmlDeviceGetPciInfo_v3": "pci_bus_id",
    "nvmlDeviceGetMigMode": "mig_enabled",
    "nvmlDeviceGetComputeRunningProcesses_v3": "processes",
    "nvmlDeviceGetNvLinkState": "links",
    "nvmlDeviceGetTopologyCommonAncestor": "links",
    "nvmlDeviceGetEnforcedPowerLimit": "power_limit",
}
STARTS = {
    "library not found": (12, "no NVIDIA driver here: libnvidia-ml.so.1 was not found"),
    "driver not loaded": (9, "its kernel module is not loaded"),
    "uninitialized": (1, "Uninitialized"),
    "versions differ": (18, "different versions, as after an update"),
    "no permission": (4, "may not ask"),
    "a code of tomorrow": (555, "an error of the stand-in"),
}
EVERYTHING = {"STAND_IN_GPUS": "3", "STAND_IN_MIG": "1:2", "STAND_IN_NVLINK": "switch"}
REFUSALS = {f"{function} {what}": (function, code) for function in FUNCTIONS for what, code in CODES.items()}


def another_pynvml(source):
    """Code after which a module of that name and source is imported."""
    return (
        "import importlib, pathlib, sys\n"
        "folder = pathlib.Path(sys.argv[1]).parent\n"
        f"(folder / 'pynvml.py').write_text({source!r})\n"
        "sys.dont_write_bytecode, sys.path[:0] = True, [str(folder)]\n"
        "sys.modules.pop('pynvml', None)\n"
        "importlib.invalidate_caches()\n"
    )


SCENES = {
    "two": {"environ": {"STAND_IN_GPUS": "2", "CUDA_VISIBLE_DEVICES": "1,0"}},
    "hidden": {"environ": {"STAND_IN_GPUS": "2", "CUDA_VISIBLE_DEVICES": "GPU-abc00001"}},
    "none": {"environ": {"STAND_IN_GPUS": "0"}},
    "names": {"environ": {"STAND_IN_GPUS": "3", "STAND_IN_NAMES": os.fsdecode(b"\xf8A|T\xc3\xa9sla \x1b[31m|\xe2\x82")}},
    "mig": {"environ": {"STAND_IN_GPUS": "2", "STAND_IN_MIG": "0:2 1:0", "CUDA_VISIBLE_DEVICES": "MIG-abcd,MIG-def00000"}},
    "second instance": {
        "environ": {"STAND_IN_GPUS": "1", "STAND_IN_MIG": "0:2", "CUDA_VISIBLE_DEVICES": "MIG-GPU-abc00000-1111-2222-3333-444444444444/8/0"}
    },
    "pair": {"environ": {"STAND_IN_GPUS": "3", "STAND_IN_NVLINK": "pair"}},
    "switch": {"environ": {"STAND_IN_GPUS": "3", "STAND_IN_NVLINK": "switch"}},
    "one refuses": {"environ": {"STAND_IN_GPUS": "2", "STAND_IN_ERRORS": "nvmlDeviceGetTemperature@1=3 nvmlDeviceGetPowerUsage@1=3"}},
    "one is lost": {"environ": {"STAND_IN_GPUS": "2", "STAND_IN_ERRORS": "nvmlDeviceGetHandleByIndex_v2@0=15"}},
    "denied": {"environ": {"STAND_IN_GPUS": "4", "STAND_IN_ERRORS": "nvmlDeviceGetHandleByIndex_v2@1=4", "CUDA_VISIBLE_DEVICES": "1,2,3"}},
    "old memory": {"environ": {"STAND_IN_GPUS": "1", "STAND_IN_ERRORS": "nvmlDeviceGetMemoryInfo_v2=13"}},
    "no count": {"environ": {"STAND_IN_GPUS": "1", "STAND_IN_ERRORS": "nvmlDeviceGetCount_v2=999"}},
    "different": {"environ": {"STAND_IN_GPUS": "2", "STAND_IN_NAMES": "A|B"}},
    "variable": {"environ": {"STAND_IN_GPUS": "1", "CUDA_VISIBLE_DEVICES": os.fsdecode(b"0,\xff")}},
    "lost while watching": {"environ": {"STAND_IN_GPUS": "2", "STAND_IN_LOST": "1"}, "looks": 5, "before": "import ctypes; ctypes.CDLL('libnvidia-ml.so.1').forget_starts()"},  # noqa: E501
    **{f"start {name}": {"environ": {"STAND_IN_GPUS": "2", "STAND_IN_ERRORS": f"nvmlInitWithFlags={code}"}} for name, (code, _) in STARTS.items()},  # noqa: E501
    **{name: {"environ": EVERYTHING | {"STAND_IN_ERRORS": f"{function}={code}"}} for name, (function, code) in REFUSALS.items()},
    "documentation": {"environ": {"STAND_IN_GPUS": "3"}, "before": DOCUMENTED},
    # The last ones change pynvml.
    "bytes": {"environ": {"STAND_IN_GPUS": "1"}, "before": "import pynvml\npynvml.nvmlDeviceGetName = lambda handle: b'\\xf8A'"},
    "old pynvml": {"environ": {"STAND_IN_GPUS": "1"}, "before": "import pynvml\ndel pynvml.nvmlDeviceGetMigMode, pynvml.nvmlDeviceGetEnforcedPowerLimit"},  # noqa: E501
    "pynvml with distutils": {"before": another_pynvml("import distutils")},
    "pynvml of Python 2": {"before": another_pynvml("print 'hello'")},
    "another pynvml": {"before": another_pynvml("")},
    "no pynvml": {"before": "import sys\nsys.modules['pynvml'] = None"},
}  # fmt: skip


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """A folder with the stand-in; the loader finds it there by LD_LIBRARY_PATH."""
    folder = tmp_path_factory.mktemp("nvml")
    compiler = shutil.which("cc") or "gcc"
    options = ["-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-Wl,-soname,libnvidia-ml.so.1"]
    subprocess.run([compiler, *options, "-o", str(folder / "libnvidia-ml.so.1"), str(HERE / "nvml.c")], check=True, timeout=60)
    return folder


def environment(library, **more):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("CUDA_", "UNIDIST_", "COLUMNS"))}
    return kept | {"LD_LIBRARY_PATH": str(library), "PYTHONPATH": str(ROOT)} | more


@pytest.fixture(scope="module")
def played(library, tmp_path_factory):
    """What every scene gave."""
    log = tmp_path_factory.mktemp("log") / "calls"
    command = [sys.executable, str(HERE / "play.py"), str(log)]
    done = subprocess.run(command, input=json.dumps(SCENES), capture_output=True, text=True, timeout=120, env=environment(library))
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def of(played, name):
    (found,) = played[name]
    return Devices.from_dict(found["list"])


def test_what_a_card_tells(played):
    found = of(played, "two")
    first, second = found
    assert (first.index, first.name, first.uuid) == (0, "Stand-in A100", "GPU-abc00000-1111-2222-3333-444444444444")
    assert first.pci_bus_id == "00000000:1A:00.0" and second.pci_bus_id == "00000000:1B:00.0"
    assert (first.memory_total, first.memory_used, first.memory_free) == (40 * GIB, GIB, 40 * GIB - GIB - GIB // 2)
    assert (second.utilization, second.temperature, second.power_draw, second.power_limit) == (11, 41, 61.5, 400.0)
    assert first.compute_capability == (8, 0) and first.mig_enabled is False and first.mig == ()
    assert (found.host.driver_version, found.host.cuda_version, found.reason) == ("580.65.06", "13.1", None)
    assert not first.unknown and not second.unknown and "devices" not in found.host.unknown


def test_numbers_are_cudas(played):
    found = of(played, "two")
    assert [gpu.visible_index for gpu in found] == [1, 0] and [gpu.index for gpu in found.visible] == [1, 0]
    assert found.host.cuda_visible_devices == "1,0"
    assert [gpu.visible_index for gpu in of(played, "hidden")] == [None, 0]


def test_processes(played):
    """One that computes and draws is one; a memory that NVML does not tell and a name that it does not find are None."""
    first, second = of(played, "two")
    assert [(p.pid, p.name, p.memory, p.kind) for p in first.processes] == [
        (4242, "/opt/tr\ufffdger/python [bold]", 300 * 2**20, "compute"),
        (4343, None, None, "compute+graphics"),
    ]
    assert [p.pid for p in second.processes] == [4242] and second.processes[0].gpu_instance is None


def test_instances(played):
    """MIG: the parts with their own memory; CUDA shows one part, so the list's first that is there, or none."""
    first, second = of(played, "mig")
    assert first.mig_enabled and second.mig_enabled and second.mig == ()
    assert [(p.gpu_instance, p.compute_instance, p.memory_total) for p in first.mig] == [(7, 0, 10 * GIB), (8, 0, 10 * GIB)]
    assert first.mig[1].uuid == "MIG-def00000-5555-6666-7777-888888888881" and first.mig[0].name == "Stand-in MIG 1g.10gb"
    assert first.utilization is None and first.unknown == {"utilization": "Not Supported"}
    assert [p.visible_index for p in first.mig] == [None, None], "MIG-abcd is not there, and ends the list"
    assert {p.gpu_instance for p in first.processes if p.pid == 4242} == {7, 8}
    chosen = of(played, "second instance")
    assert [p.visible_index for p in chosen[0].mig] == [None, 0] and chosen[0].visible_index is None
    assert chosen.visible == [chosen[0].mig[1]]


def test_links(played):
    """Straight NVLinks lead to one GPU, those to switches to all; the PCI bus is there in any case."""
    pair, switch, bare = of(played, "pair"), of(played, "switch"), of(played, "two")
    assert [(link.index, link.num_nvlinks, link.topology) for link in pair[0].links] == [(1, 2, "PIX"), (2, 0, "SYS")]
    assert [(link.index, link.num_nvlinks) for link in switch[2].links] == [(0, 4), (1, 4)]
    assert [(link.index, link.num_nvlinks, link.topology) for link in bare[1].links] == [(0, 0, "PIX")]


def test_case_67_names(played):
    """Always str, printable and for JSON, whatever the driver and the binding make of them."""
    assert [gpu.name for gpu in of(played, "names")] == ["\ufffdA", "T\u00e9sla \ufffd[31m", "\ufffd"]
    assert of(played, "bytes")[0].name == "\ufffdA"
    assert of(played, "variable").host.cuda_visible_devices == "0,\ufffd" and of(played, "variable")[0].visible_index == 0
    assert text(b"\xf8A") == text("\udcf8A") == "\ufffdA" and text("A100") == "A100"


@pytest.mark.parametrize("name", STARTS)
def test_case_68_a_driver_that_does_not_start(played, name):
    (found,) = played[f"start {name}"]
    assert found["list"]["devices"] == [] and found["calls"] == "", found
    assert STARTS[name][1] in found["reason"], found["reason"]
    assert {"devices", "cuda_version"} <= set(found["list"]["host"]["unknown"]) and found["list"]["host"]["num_cores"] >= 1


def test_case_68_a_driver_without_devices(played):
    assert of(played, "none") == [] and "shows no GPU" in of(played, "none").reason
    assert of(played, "none").host.driver_version == "580.65.06"
    assert of(played, "no count") == [] and "Unknown Error" in of(played, "no count").reason


def test_case_68_no_pynvml(played):
    assert "pip install 'unidist-train[devices]'" in of(played, "no pynvml").reason
    assert "distutils" in of(played, "pynvml with distutils").reason
    assert "pynvml can't be imported" in of(played, "pynvml of Python 2").reason
    assert "is not nvidia-ml-py's" in of(played, "another pynvml").reason
    old = of(played, "old pynvml")[0]
    assert old.mig_enabled is None and old.power_limit is None and old.power_draw == 61.5
    assert "pip install -U nvidia-ml-py" in old.unknown["power_limit"] and "nvmlDeviceGetMigMode" in old.unknown["mig_enabled"]


def test_case_69_no_distutils():
    """play.py hides distutils and setuptools before it imports unidist, and nothing of unidist imports them."""
    for path in ROOT.glob("unidist*/**/*.py"):
        assert not re.search(r"^\s*(import|from) distutils", path.read_text(), re.M), path


def test_the_documentation(played):
    """Its code runs, to the end: no GPU of the stand-in is idle, so none is grabbed. Every field is in it."""
    assert of(played, "documentation").host.cuda_visible_devices == ""
    page = (ROOT / "docs" / "devices.md").read_text()
    names = {field.name for record in (Device, Host) for field in fields(record)} - {"name", "ranks", "cpu_name"}
    assert not [name for name in names if f"`{name}`" not in page]


def test_a_card_that_refuses_a_question(played):
    first, second = of(played, "one refuses")
    assert (first.temperature, first.power_draw) == (40, 61.5) and not first.unknown
    assert (second.temperature, second.power_draw, second.power_limit) == (None, None, 400.0)
    assert second.unknown == {"temperature": "Not Supported", "power_draw": "Not Supported"}


def test_a_card_that_is_lost(played):
    first, second = of(played, "one is lost")
    assert first.uuid is None and first.memory_total is None and set(first.unknown.values()) == {"GPU is lost"}
    assert second.uuid is not None and second.links[0].num_nvlinks is None and not second.unknown


def test_a_card_that_this_process_may_not_use(played):
    """The driver counts it, CUDA doesn't: the others' numbers go on without it."""
    found = of(played, "denied")
    assert [gpu.index for gpu in found] == [0, 1, 2, 3] and [gpu.visible_index for gpu in found] == [None, None, 0, 1]
    assert found[1].unknown["name"] == "Insufficient Permissions"


def test_memory_of_older_drivers(played):
    """Without the newer question what the driver keeps counts as used."""
    gpu = of(played, "old memory")[0]
    assert "too old" in of(played, "nvmlDeviceGetPowerUsage function not found")[0].unknown["power_draw"]
    assert (gpu.memory_total, gpu.memory_used, gpu.memory_free) == (40 * GIB, GIB + GIB // 2, 40 * GIB - GIB - GIB // 2)


def test_what_is_assumed_is_noted(played):
    assert "CUDA_DEVICE_ORDER" in of(played, "different").host.notes[0] and of(played, "two").host.notes == ()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_whatever_is_refused_the_rest_is_there(played, function):
    """One value is missing, with a reason; NVML is shut down as often as it was started."""
    for what in CODES:
        (found,) = played[f"{function} {what}"]
        assert found["calls"] == "is", (what, found["calls"])
        devices = Devices.from_dict(found["list"])
        if function == "nvmlDeviceGetCount_v2":
            assert devices == [] and devices.reason
            continue
        assert len(devices) == 3 and devices[0].index == 0
        if function in FIELDS and what not in ("not supported", "function not found"):
            assert FIELDS[function] in devices[0].unknown, what
        for gpu in devices:
            for field in ("name", "uuid", "pci_bus_id", "memory_total", "power_draw", "compute_capability", "mig_enabled"):
                assert getattr(gpu, field) is not None or gpu.unknown.get(field), (what, field)


def test_nvml_lost_while_watching(played):
    """First all is well, then the GPUs are lost, then NVML does not start any more; every look gives a list and a reason."""
    looks = played["lost while watching"]
    lists = [Devices.from_dict(look["list"]) for look in looks]
    assert [len(found) for found in lists] == [2, 2, 0, 0, 0]
    assert lists[0][0].temperature == 40 and lists[1][0].unknown["temperature"] == "GPU is lost"
    assert "does not answer: Uninitialized" in lists[2].reason
    assert [look["calls"] for look in looks] == ["is", "is", "", "", ""]


def unidist(library, *arguments, **environ):
    command = [sys.executable, "-m", "unidist", "devices", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(library, **environ))


def test_the_table(library):
    """Also where the terminal can't show a name, and with names that look like markup."""
    done = unidist(
        library, STAND_IN_GPUS="4", STAND_IN_MIG="1:1", STAND_IN_NVLINK="pair", STAND_IN_NAMES=os.fsdecode(b"[red]\xf8|A|A|A"),
        STAND_IN_ERRORS="nvmlDeviceGetTemperature@2=3 nvmlDeviceGetHandleByIndex_v2@3=15", CUDA_VISIBLE_DEVICES="2,0",
        PYTHONIOENCODING="ascii",
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr
    for expected in (
        "driver 580.65.06 | CUDA 13.1 | CUDA_VISIBLE_DEVICES='2,0'", "[red]?", "GPU-abc00002-1111-2222-3333-444444444444", "1.0 of 40.0",
        "MIG-def00001", "NV2", "SYS", "4343", "[bold]", "Not Supported: GPU 1 utilization; GPU 2 temperature", "GPU is lost: GPU 3",
        "CUDA_DEVICE_ORDER=PCI_BUS_ID",
    ):  # fmt: skip
        assert expected in done.stdout, (expected, done.stdout)
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines() if "of 40.0" in line]
    assert [(row[0], row[1], row[3], row[4], row[5]) for row in rows] == [
        ("0", "1", "1.0 of 40.0", "10 %", "40 C"), ("1", "-", "2.0 of 40.0", "?", "41 C"), ("2", "0", "3.0 of 40.0", "12 %", "?"),
    ]  # fmt: skip


def test_json_on_the_command_line():
    """Of this machine, whatever it has."""
    done = CliRunner().invoke(app, ["devices", "--json"])
    assert done.exit_code == 0 and set(json.loads(done.stdout)) == {"host", "devices"}, done.output


def test_watching_on_a_terminal_goes_on_when_nvml_is_lost(library):
    """In place, until Ctrl-C, which is no error; the last look stays."""
    environ = environment(library, STAND_IN_GPUS="1", STAND_IN_LOST="3", TERM="xterm")
    shown, code = on_a_terminal(["--watch", "0.1"], environ, "Uninitialized")
    assert code == 0 and "Traceback" not in shown, shown
    assert "Stand-in A100" in shown and "GPU is lost" in shown and "\x1b[?1049h" in shown
    assert "Uninitialized" in shown.partition("\x1b[?1049l")[2]


def on_a_terminal(arguments, environ, until):
    """(all output, exit code) of `unidist devices`, ended by Ctrl-C as soon as `until` was shown."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "unidist", "devices", *arguments]
    process = subprocess.Popen(command, stdin=theirs, stdout=theirs, stderr=theirs, env=environ, start_new_session=True)
    os.close(theirs)
    shown, deadline, asked = b"", time.monotonic() + 60, False
    try:
        while time.monotonic() < deadline:
            try:
                data = os.read(ours, 65536)
            except OSError:  # the end of a terminal, on Linux
                break
            shown += data
            if until.encode() in shown and not asked:
                asked = True
                process.send_signal(signal.SIGINT)
        return shown.decode(errors="replace"), process.wait(timeout=10)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
        os.close(ours)


def test_seconds_without_watch_are_refused():
    done = CliRunner().invoke(app, ["devices", "3"])
    assert done.exit_code == 2 and "goes with --watch" in done.output


def seen(*numbers, uuids=("GPU-a", "GPU-b"), parts=()):
    mig = tuple(MigInstance(1, 0, uuid=uuid, visible_index=number) for uuid, number in parts)
    gpus = [Device(index, uuid=uuid, visible_index=number, mig=mig) for index, (uuid, number) in enumerate(zip(uuids, numbers))]
    return Devices(gpus, Host("node"))


def test_a_host_is_put_together_from_its_ranks():
    """Each rank's numbers; what only one rank sees, in a container of its own, is there as well, parts included."""
    same = merge_views([(2, seen(0, None)), (3, seen(None, 0))])
    assert same.host.ranks == (2, 3) and [gpu.visible_to for gpu in same] == [((2, 0),), ((3, 0),)]
    apart = merge_views([(0, seen(0, uuids=("GPU-a",))), (1, seen(0, uuids=("GPU-b",)))])
    assert [(gpu.uuid, gpu.visible_to) for gpu in apart] == [("GPU-a", ((0, 0),)), ("GPU-b", ((1, 0),))]
    parts = merge_views([(0, seen(None, uuids=("GPU-a",), parts=[("M1", 0)])), (1, seen(None, uuids=("GPU-a",), parts=[("M2", 0)]))])
    assert [(part.uuid, part.visible_to) for part in parts[0].mig] == [("M1", ((0, 0),)), ("M2", ((1, 0),))]
    assert Devices.from_dict(json.loads(json.dumps(parts.to_dict()))) == parts


RANK_ON_ITS_OWN_GPU = """
import os, sys
os.environ["CUDA_VISIBLE_DEVICES"] = os.environ["RANK"]
sys.argv = ["unidist", "devices", "--cluster", *sys.argv[1:]]
from unidist.cli.main import main
main()
"""


def test_all_hosts_of_a_job(library, tmp_path):
    """`unidist devices --cluster` on two ranks, each with a GPU of its own: rank 0 prints, and no framework is imported."""
    script = tmp_path / "script.py"
    script.write_text(RANK_ON_ITS_OWN_GPU)
    command = [sys.executable, "-m", "unidist", "run", "-n", "2", str(script), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, env=environment(library, STAND_IN_GPUS="3"))
    assert done.returncode == 0, done.stdout + done.stderr
    (row,) = json.loads(done.stdout)
    host = Devices.from_dict(row)
    assert host.host.ranks == (0, 1) and [gpu.visible_to for gpu in host] == [((0, 0),), ((1, 0),), ()]


def test_hosts_are_told_apart_whatever_way_ranks_are_dealt_out():
    """Ranks 0 and 2 on one host, 1 on another of the same node number: by host name too."""

    def view(node, name, number):
        found = seen(number, uuids=(f"GPU-{name}",))
        return json.dumps({"node": node, **Devices(found, replace(found.host, name=name)).to_dict()})

    rows = [view(0, "a", 0), view(0, "b", 0), view(0, "a", 0)]
    control = SimpleNamespace(hosts=["a", "b", "a"], gather=lambda name, payload: rows)
    hosts = gather_devices(control, World(1, 3, 0, 1))
    assert [(found.host.name, found.host.ranks, found[0].visible_to) for found in hosts] == [
        ("a", (0, 2), ((0, 0), (2, 0))),
        ("b", (1,), ((1, 0),)),
    ]


def test_numbers_in_a_job_are_shown_in_short():
    host = Host("node", ranks=(0, 1, 2, 3))
    views = (((0, 0), (1, 0), (2, 0), (3, 0)), ((0, 0), (2, 1), (3, 1)), ())
    assert [cuda_number(Device(0, visible_to=pairs), host) for pairs in views] == ["0", "0: 0\n2-3: 1", "-"]


def files(root, **contents):
    for name, content in contents.items():
        path = root / name.replace("__", "/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return root


INFORMATION = b"Model: \t\t NVIDIA A100 \xf8\nIRQ:   \t\t 11\nGPU UUID: \t GPU-12\nBus Location: \t 0000:%s:00.0\nDevice Minor: \t 0\n"


def test_without_nvml_the_kernel_modules_files_are_read(tmp_path):
    gpus = tmp_path / "proc/driver/nvidia/gpus"
    for bus, information in (("c1", b""), ("07", INFORMATION), ("1b", INFORMATION.replace(b"GPU-12", b"GPU-????-??"))):
        (gpus / f"0000:{bus}:00.0").mkdir(parents=True)
        (gpus / f"0000:{bus}:00.0" / "information").write_bytes(information)
    (tmp_path / "proc/driver/nvidia/version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  560.35.03  Release Build  (dvs-builder@x)\nGCC version: gcc 12.2.0\n"
    )
    found = kernel_files.list_gpus(tmp_path)
    assert [(gpu.index, gpu.name, gpu.uuid, gpu.pci_bus_id) for gpu in found] == [
        (0, "NVIDIA A100 \ufffd", "GPU-12", "00000000:07:00.0"), (1, "NVIDIA A100 \ufffd", None, "00000000:1B:00.0"),
        (2, None, None, "00000000:C1:00.0"),
    ]  # fmt: skip
    assert kernel_files.driver_version(tmp_path) == "560.35.03"
    assert kernel_files.list_gpus(tmp_path / "empty") == [] and kernel_files.driver_version(tmp_path / "empty") is None


@pytest.mark.parametrize(
    "words", ["x86_64 Kernel Module", "aarch64 Kernel Module", "Open Kernel Module for aarch64", "Open Kernel Module for x86_64"]
)
def test_the_kernel_modules_version(tmp_path, words):
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text(f"NVRM version: NVIDIA UNIX {words}  535.129.03  Thu Oct 19 18:56:32 UTC 2023")
    assert kernel_files.driver_version(tmp_path) == "535.129.03"


MEMINFO = "MemTotal:       1000 kB\nMemFree:  100 kB\nMemAvailable:   800 kB\n"


def test_memory_of_the_machine_and_of_the_container(tmp_path):
    machine = files(tmp_path / "machine", proc__meminfo=MEMINFO)
    assert cpus.memory(machine) == cpus.Memory(1000 * 1024, 800 * 1024)
    nested = files(tmp_path / "v2", proc__meminfo=MEMINFO, proc__self__cgroup="0::/job/step\n")
    group = nested / "sys/fs/cgroup/job"
    files(group, **{"memory.max": "512000", "memory.current": "300000", "memory.stat": "anon 1\ninactive_file 100000\n"})
    files(group / "step", **{"memory.max": "max", "memory.current": "5"})
    assert cpus.memory(nested) == cpus.Memory(512000, 312000)
    old = files(tmp_path / "v1", proc__meminfo=MEMINFO, proc__self__cgroup="5:cpu,cpuacct:/docker/x\n4:memory:/docker/x\n")
    files(old / "sys/fs/cgroup/memory", **{"memory.limit_in_bytes": "400000", "memory.usage_in_bytes": "390000"})
    assert cpus.memory(old) == cpus.Memory(400000, 10000), "the path is the host's, the files are the container's"
    files(old / "sys/fs/cgroup/memory", **{"memory.limit_in_bytes": str(2**63 - 4096)})
    assert cpus.memory(old) == cpus.Memory(1000 * 1024, 800 * 1024)


def test_cores_of_the_affinity_and_the_quota(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    bare = files(tmp_path / "bare", proc__self__cgroup="0::/\n")
    assert cpus.num_cores(bare) == 8
    nested = files(tmp_path / "v2", proc__self__cgroup="0::/job/step\n")
    files(nested / "sys/fs/cgroup/job", **{"cpu.max": "350000 100000\n"})
    files(nested / "sys/fs/cgroup/job/step", **{"cpu.max": "max 100000\n"})
    assert cpus.num_cores(nested) == 4
    files(nested / "sys/fs/cgroup/job/step", **{"cpu.max": "20000 100000\n"})
    assert cpus.num_cores(nested) == 1
    old = files(tmp_path / "v1", proc__self__cgroup="5:cpu,cpuacct:/\n")
    files(old / "sys/fs/cgroup/cpu,cpuacct", **{"cpu.cfs_quota_us": "200000\n", "cpu.cfs_period_us": "100000\n"})
    assert cpus.num_cores(old) == 2
    files(old / "sys/fs/cgroup/cpu,cpuacct", **{"cpu.cfs_quota_us": "-1\n"})
    assert cpus.num_cores(old) == 8


def test_the_name_of_the_processor(tmp_path):
    found = files(tmp_path, proc__cpuinfo="processor : 0\nmodel name\t: A Processor 9000\n\nprocessor : 1\nmodel name\t: B\n")
    assert cpus.cpu_name(found) == "A Processor 9000"
    assert isinstance(cpus.cpu_name(tmp_path / "empty"), str | None)
