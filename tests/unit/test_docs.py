"""The documentation is true: its code runs, its links exist, every public name is in it; and the package keeps its shape."""

import inspect
import os
import pkgutil
import re
import subprocess
import sys
from pathlib import Path

import pytest

import unidist

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCKS = [
    pytest.param(framework, code, id=f"{page.stem}-{number}")
    for page in PAGES
    for number, (framework, code) in enumerate(re.findall(r"<!-- runs: (\w+) -->\n```python\n(.*?)```", page.read_text(), re.S))
]


def test_there_are_blocks_that_run():
    assert len(BLOCKS) >= 3


@pytest.mark.parametrize("framework, code", BLOCKS)
def test_code_in_the_documentation_runs(framework, code):
    environ = {**os.environ, "KERAS_BACKEND": framework, "UNIDIST_TRAIN_QUIET": "1", "TF_CPP_MIN_LOG_LEVEL": "3"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environ, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_every_public_name_is_documented():
    text = "\n".join(page.read_text() for page in PAGES)
    missing = [name for name in unidist.__all__ if not re.search(rf"\b{re.escape(name)}\b", text) and not name.endswith("Error")]
    assert not missing, missing


def test_public_functions_say_what_they_do():
    for name in unidist.__all__:
        value = getattr(unidist, name)
        if callable(value):
            assert inspect.getdoc(value), name
            assert value.__module__.startswith("unidist"), name


def test_no_module_carries_the_name_of_a_public_name():
    modules = {module.name for module in pkgutil.iter_modules(unidist.__path__)}
    assert not modules & set(unidist.__all__)


def test_types_see_the_same_names_as_users():
    source = Path(unidist.__file__).read_text()
    declared = {new for _, new in re.findall(r"(\w+) as (\w+)", source)}
    assert declared == set(unidist.__all__)


HEAVY = ("torch", "tensorflow", "keras", "numpy", "typer", "rich", "horovod")


@pytest.mark.parametrize("code", ["import unidist", "from unidist import *", "import unidist.testing, unidist.registry, unidist.control"])
def test_importing_loads_the_standard_library_only(code):
    check = f"import sys\n{code}\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_one_framework_a_process():
    """unidist brings in one framework, and torch never after TensorFlow."""
    code = "import sys, unidist\nunidist.init(backend='local', framework='{}')\nprint([n for n in ('torch', 'tensorflow') if n in sys.modules])"
    for framework in ("torch", "tensorflow"):
        environ = {k: v for k, v in os.environ.items() if k != "KERAS_BACKEND"} | {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": framework}
        done = subprocess.run([sys.executable, "-c", code.format(framework)], capture_output=True, text=True, timeout=60, env=environ)
        assert done.stdout.strip() == f"['{framework}']", done.stdout + done.stderr
