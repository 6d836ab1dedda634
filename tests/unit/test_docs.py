"""The documentation is true: its code runs, its links exist, every public name is in it; and the package keeps its shape.

A block of Python that is complete follows a comment `<!-- runs: FRAMEWORK -->`, or `<!-- runs: FRAMEWORK BACKEND N -->` where it is to
run under `unidist run`; each runs in a process (a job) and a folder of its own, two at a time.
"""

import ast
import inspect
import os
import pkgutil
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

import unidist
from unidist import registry
from unidist.metrics import Mean
from unidist.testing import run
from unidist.testing.listing import replaced
from unidist.testing.table import POINTS

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {page: page.read_text() for page in PAGES}
FOREIGN = ("UNIDIST_", "KERAS_BACKEND", "RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMI", "SLURM_", "HOROVOD_")

# What the README's blocks leave out: the user's own objects.
TORCH_README = """
import torch
Net, loss_fn, epochs = lambda: torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, 1
dataset = torch.utils.data.TensorDataset(torch.ones(130, 3), torch.ones(130, 1))
"""
KERAS_README = """
import keras, numpy
build = lambda: keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
x, y = numpy.ones((130, 3)), numpy.ones((130, 1))
"""


@dataclass(frozen=True)
class Block:
    """Code that is to run: under `unidist run` with a backend, else as a plain script."""

    name: str
    code: str
    framework: str
    backend: str = ""
    devices: str = "1"


def marked(page):
    """The blocks of a page that are marked as complete."""
    for number, (marker, code) in enumerate(re.findall(r"<!-- runs: (.*?) -->\n```python\n(.*?)```", TEXTS[page], re.S)):
        yield Block(f"{page.stem}-{number}", code, *marker.split())


def of_the_readme():
    """The README's two blocks, each with what it leaves out."""
    native, keras = re.findall(r"```python\n(.*?)```", TEXTS[PAGES[0]], re.S)
    yield Block("README-torch", TORCH_README + native, "torch", "ddp", "2")
    yield Block("README-keras", KERAS_README + keras, "tensorflow", "mirrored", "2")


BLOCKS = [*of_the_readme(), *(block for page in PAGES for block in marked(page))]


def clean(**extra):
    kept = {name: value for name, value in os.environ.items() if not name.startswith(FOREIGN)}
    return kept | {"TF_CPP_MIN_LOG_LEVEL": "3", "PYTHONWARNINGS": "ignore"} | extra


def execute(block, folder):
    script = folder / "block.py"
    script.write_text(block.code)
    start = [sys.executable]
    if block.backend:
        start += ["-m", "unidist", "run", "-n", block.devices, "--backend", block.backend, "--framework", block.framework]
    environ = clean(KERAS_BACKEND=block.framework)
    return subprocess.run([*start, str(script)], capture_output=True, text=True, env=environ, cwd=folder, timeout=120)


@pytest.fixture(scope="module")
def running(request, tmp_path_factory):
    """The jobs of all blocks that this session tests, by name."""
    parameters = [item.callspec.params for item in request.session.items if hasattr(item, "callspec")]
    wanted = [found["block"] for found in parameters if isinstance(found.get("block"), Block)]
    with ThreadPoolExecutor(2) as pool:
        yield {block.name: pool.submit(execute, block, tmp_path_factory.mktemp(block.name)) for block in BLOCKS if block in wanted}


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.name)
def test_code_in_the_documentation_runs(running, block):
    done = running[block.name].result()
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.startswith("unidist ") and " | " in line]
    assert len(lines) == 1, f"the line at the start, once: {lines}"


def test_there_are_blocks_that_run():
    assert len(BLOCKS) >= 10 and {block.framework for block in BLOCKS} == {"torch", "tensorflow"}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_of_python_are_python(page):
    for code in re.findall(r"```python\n(.*?)```", TEXTS[page], re.S):
        ast.parse(code)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\(([^)#:]*)(#[^)]*)?\)", TEXTS[page]):
        path = page.parent / target if target else page
        assert path.exists(), f"{page.name} links to {target}"
        if anchor:
            assert anchor[1:] in anchors(path), f"{page.name} links to {target}{anchor}"


def anchors(page):
    """What a page's headings are called in links."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_page_is_in_the_index():
    index = TEXTS[ROOT / "docs" / "README.md"]
    for page in PAGES[1:]:
        assert page.name == "README.md" or f"({page.relative_to(ROOT / 'docs')})" in index, page


def test_every_public_name_is_documented():
    text = "\n".join(TEXTS.values())
    missing = [name for name in unidist.__all__ if not re.search(rf"\b{re.escape(name)}\b", text)]
    assert not missing, missing


def test_every_backend_has_a_page():
    """In the registry's words, aliases included."""
    for entry in registry.BUILTIN:
        page = TEXTS[ROOT / "docs" / "backends" / f"{entry.framework}-{entry.name}.md"]
        assert page.startswith(f"# {entry.key}"), entry.key
        assert all(f"`{alias}`" in page for alias in entry.aliases), entry.aliases


def test_the_contracts_points_are_those_of_the_suite():
    text = TEXTS[ROOT / "docs" / "contract.md"]
    for number, title in POINTS.items():
        assert re.search(rf"^{number}\. \*\*{re.escape(title)}\.?\*\*", text, re.M | re.I), f"point {number}: {title}"


def test_messages_that_the_documentation_quotes_are_in_the_source():
    """The first column of the table of errors, in pieces between what differs from case to case."""
    packages = ("unidist", "unidist_torch", "unidist_tf", "unidist_keras")
    source = "".join(path.read_text() for package in packages for path in (ROOT / package).rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # sentences that go over several lines
    _, _, table = TEXTS[ROOT / "docs" / "getting-started.md"].partition("## When something is wrong")
    cells = re.findall(r"^\| (`.*?) \|", table, re.M)
    quoted = [piece for cell in cells for text in re.findall(r"`(.*?)`", cell) for piece in text.split(" ... ")]
    assert len(quoted) > 20
    for piece in set(quoted) - {"Timed out waiting"}:  # gloo's own
        assert piece in source, piece


def test_public_functions_say_what_they_do():
    for name in unidist.__all__:
        value = getattr(unidist, name)
        if callable(value):
            assert (inspect.getdoc(value) or "").strip(), name
            assert value.__module__.startswith("unidist"), name


def test_public_methods_say_what_they_do():
    for owner in (unidist.Context, unidist.Data, unidist.Share, unidist.Step, Mean):
        for name, value in vars(owner).items():
            if inspect.isfunction(value) and not name.startswith("_"):
                assert inspect.getdoc(value), f"{owner.__name__}.{name}"


def test_no_module_carries_the_name_of_a_public_name():
    modules = {module.name for module in pkgutil.iter_modules(unidist.__path__)}
    assert not modules & set(unidist.__all__)


def test_types_see_the_same_names_as_users():
    source = Path(unidist.__file__).read_text()
    declared = {new for _, new in re.findall(r"(\w+) as (\w+)", source)}
    assert declared == set(unidist.__all__)


HEAVY = ("torch", "tensorflow", "keras", "numpy", "typer", "rich", "horovod", "click", "pytest")


@pytest.mark.parametrize(
    "code",
    ["import unidist", "from unidist import *", "import unidist; unidist.rank(); unidist.shutdown()",
     "import unidist.testing, unidist.registry, unidist.control"],
)  # fmt: skip
def test_importing_loads_the_standard_library_only(code):
    check = f"import sys\n{code}\nprint([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


@pytest.mark.parametrize("framework", ["torch", "tensorflow"])
def test_one_framework_a_process(framework):
    """unidist brings in one framework, and torch never after TensorFlow."""
    code = (
        f"import sys, unidist\nunidist.init(backend='local', framework={framework!r})\n"
        "print([n for n in ('torch', 'tensorflow') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, env=clean(KERAS_BACKEND=framework))
    assert done.stdout.strip() == f"['{framework}']", done.stdout + done.stderr


def mistakes():
    """In a job: what each mistake that would train the ranks apart raises, and a batch in which nothing counts."""
    import keras
    import torch

    unidist.init(framework="torch")
    x = torch.linspace(-1, 1, 8).reshape(8, 1)
    found = {}

    def attempt(name, function):
        try:
            function()
        except (unidist.UnidistError, TypeError) as error:
            found[name] = f"{type(error).__name__}: {error}"

    def bare_model():
        model = torch.nn.Linear(1, 1)
        optimizer = unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        model(x).sum().backward()
        optimizer.step()

    def own_parameter():
        model, scale = unidist.wrap_model(torch.nn.Linear(1, 1)), torch.nn.Parameter(torch.ones(()))
        optimizer = unidist.wrap_optimizer(torch.optim.SGD([*model.parameters(), scale], lr=0.1))
        (scale * model(x)).sum().backward()
        optimizer.step()

    def keras_model(wrap_model, wrap_optimizer):
        model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
        model = unidist.wrap_model(model) if wrap_model else model
        optimizer = keras.optimizers.SGD(0.1)
        model.compile(unidist.wrap_optimizer(optimizer) if wrap_optimizer else optimizer, loss="mse")
        model.fit(x.numpy(), x.numpy(), batch_size=4, verbose=0)

    def nothing_counts():
        model = unidist.wrap_model(torch.nn.Linear(1, 1))
        before = unidist.get_weights(model)
        optimizer = unidist.wrap_optimizer(torch.optim.SGD(model.parameters(), lr=0.1), model)
        step = unidist.make_train_step(model, optimizer, lambda outputs, targets: ((outputs * 0.0).sum(), (targets > 5).sum()))
        for batch in unidist.wrap_data((x, x), global_batch_size=4):
            step(batch)
        after = unidist.get_weights(model)
        found["nothing counts"] = all((before[name] == after[name]).all() for name in before)

    def summed():
        model = unidist.wrap_model(torch.nn.Linear(1, 1))
        unidist.make_train_step(model, torch.optim.SGD(model.parameters(), lr=0.1), torch.nn.MSELoss(reduction="sum"))

    attempt("bare model", bare_model)
    attempt("own parameter", own_parameter)
    attempt("bare Keras model", lambda: keras_model(False, True))
    attempt("bare Keras optimizer", lambda: keras_model(True, False))
    attempt("sum", summed)
    nothing_counts()
    unidist.shutdown()
    attempt("option", lambda: unidist.init(framework="torch", no_such_option=1))
    return found


def test_what_would_train_the_ranks_apart_is_refused():
    for found in run(mistakes, 2, backend="ddp", environ={"KERAS_BACKEND": "torch"}):
        for name in ("bare model", "own parameter", "bare Keras model"):
            assert "would train its own; call wrap_model" in found[name], found
        assert "wrap_optimizer" in found["bare Keras optimizer"] and "reduction='sum'" in found["sum"], found
        assert "no_such_option" in found["option"] and found["nothing counts"] is True, found


def test_the_contract_lists_every_rule_with_its_test(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "tests" / "field")
    text = (ROOT / "docs" / "contract.md").read_text(encoding="utf-8")
    assert replaced(text) == text, "bring it up to date: python -m unidist.testing.listing docs/contract.md"
