"""Names to backends: what a user may type, and what they read when it is wrong."""

import pytest

from unidist import context, frameworks, registry
from unidist.errors import FrameworkMismatchError, LaunchError, MissingDependencyError, UnknownBackendError


@pytest.mark.parametrize(
    "name, hint",
    [
        ("nccl", "transport"),
        ("gloo", "transport"),
        ("jax", "does not cover"),
        ("mirored", "mirrored"),
        ("horovd", "horovod"),
        ("xyz", "known are"),
    ],
)
def test_an_unknown_backend_gets_a_sentence_that_helps(name, hint):
    with pytest.raises(UnknownBackendError, match=hint):
        registry.candidates(name)


def test_a_backend_of_the_other_framework_names_what_there_is():
    with pytest.raises(FrameworkMismatchError, match="mirrored, horovod"):
        registry.find("tensorflow", "ddp")
    with pytest.raises(FrameworkMismatchError, match="ddp"):
        registry.find("torch", "mirrored")


def test_aliases_and_full_names():
    assert registry.find("torch", "dp").name == "dataparallel" and registry.find("torch", "torch/ddp").name == "ddp"
    assert registry.framework_name("PyTorch") == "torch" and registry.framework_name("tf") == "tensorflow"
    with pytest.raises(UnknownBackendError, match="does not cover"):
        registry.framework_name("jax")
    with pytest.raises(UnknownBackendError, match="tensorflow"):
        registry.framework_name("tensorflw")


def test_a_missing_package_names_the_line_that_installs_it():
    entry = registry.Entry("torch", "x", "nowhere:X", ("no_such_module",), "pip install no-such")
    with pytest.raises(MissingDependencyError, match="no_such_module.*pip install no-such"):
        entry.load()


def test_processes_of_a_job():
    assert registry.num_processes("mirrored", None, 4) == 1 and registry.num_processes("ddp", None, 4) == 4
    assert registry.num_processes("horovod", "tensorflow", 4) == 4 and registry.num_processes(None, "tensorflow", 4) == 1
    assert registry.num_processes("auto", "torch", 3) == 3 and registry.num_processes("dp", None, 3) == 1
    assert registry.num_processes("multiworkermirrored", None, 4, 2) == 2 and registry.num_processes(None, "tensorflow", 4, 4) == 4
    assert registry.num_processes("ddp", None, 4, 4) == 4 and registry.num_processes("local", "torch", 1, 1) == 1
    for backend, processes in (("ddp", 2), ("mirrored", 3), ("local", 2)):
        with pytest.raises(LaunchError, match=f"{processes} processes were asked for"):
            registry.num_processes(backend, "tensorflow" if backend == "local" else None, 4, processes)


CHOICES = [
    ("ddp", None, ("ddp", "torch")), ("mirrored", None, ("mirrored", "tensorflow")), ("horovod", "tf", ("horovod", "tensorflow")),
    ("auto", "torch", (None, "torch")),
]  # fmt: skip


@pytest.mark.parametrize("backend, framework, chosen", CHOICES)
def test_what_is_chosen(monkeypatch, backend, framework, chosen):
    monkeypatch.delenv("UNIDIST_TRAIN_BACKEND", raising=False)
    assert context._choose(backend, framework) == chosen


def test_the_launcher_wins_over_the_argument(monkeypatch, capsys):
    monkeypatch.setenv("UNIDIST_TRAIN_BACKEND", "mirrored")
    assert context._choose("ddp", None) == ("mirrored", "tensorflow")
    assert "'mirrored' from unidist run" in capsys.readouterr().err


def test_two_frameworks_and_no_sign_is_an_error_that_shows_the_choices(monkeypatch):
    monkeypatch.setattr(frameworks, "imported", list)
    monkeypatch.setattr(frameworks, "installed", lambda: ["torch", "tensorflow"])
    monkeypatch.setattr(frameworks, "keras_backend", lambda: None)
    with pytest.raises(UnknownBackendError, match="framework='torch' or framework='tensorflow'"):
        context._choose("horovod", None)
    monkeypatch.setattr(frameworks, "imported", lambda: ["tensorflow"])
    assert context._choose("horovod", None) == ("horovod", "tensorflow")
    monkeypatch.setattr(frameworks, "installed", list)
    monkeypatch.setattr(frameworks, "imported", list)
    with pytest.raises(MissingDependencyError, match="neither torch nor tensorflow"):
        context._choose(None, None)


def test_an_engines_keras_that_is_not_covered(monkeypatch):
    monkeypatch.setattr(frameworks, "keras_backend", lambda: "jax")
    with pytest.raises(UnknownBackendError, match="KERAS_BACKEND"):
        context._choose(None, None)
