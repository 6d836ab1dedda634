PYTHON ?= python3
VENV ?= .venv
# The build of TensorFlow; on a machine with NVIDIA GPUs: make demo TENSORFLOW='tensorflow[and-cuda]'
TENSORFLOW ?= tensorflow-cpu
BIN = $(VENV)/bin

.PHONY: demo test lint fuzz bench clean

demo: $(VENV)/.installed
	$(BIN)/unidist demo

test: $(VENV)/.installed-test
	$(BIN)/unidist install horovod
	UNIDIST_TRAIN_REQUIRE=all $(BIN)/python -m pytest

lint: $(VENV)/.installed-test
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy

fuzz: $(VENV)/.installed-test
	$(BIN)/unidist install horovod
	UNIDIST_FUZZ_DRAWS=$${UNIDIST_FUZZ_DRAWS:-200} $(BIN)/python -m pytest tests/fuzz -v

bench: $(VENV)/.installed-test
	$(BIN)/python benchmarks/start.py && $(BIN)/python benchmarks/step.py

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/.installed: $(VENV)/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(TENSORFLOW) -e '.[torch,keras,cli,demo]'
	touch $@

$(VENV)/.installed-test: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[test,devices,horovod,dev]'
	touch $@

clean:
	rm -rf $(VENV) build *.egg-info
