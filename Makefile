PYTHON ?= python3
VENV ?= .venv
# The build of TensorFlow; on a machine with NVIDIA GPUs: make demo TENSORFLOW='tensorflow[and-cuda]'
TENSORFLOW ?= tensorflow-cpu
BIN = $(VENV)/bin

.PHONY: demo test test-keras-next lint fuzz bench clean

demo: $(VENV)/.installed
	$(BIN)/unidist demo

test: $(VENV)/.installed-test
	$(BIN)/unidist install horovod
	UNIDIST_TRAIN_REQUIRE=all $(BIN)/python -m pytest

# Keras' development version, whose failures are news, not faults: run it beside `make test`, not in it.
KERAS_CHECKS = $(foreach name,1-fit-even-keras 1-fit-uneven-sample-weights-keras 1-masked-fit-keras \
	4-clip-norm-keras 6-synchronised-uneven-keras 11-evaluate-and-predict-keras 11-merged-keras 7-keras-config-keras,--only $(name))
test-keras-next: $(VENV)/.installed-test
	$(BIN)/unidist install horovod
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --upgrade --target build/keras-next keras-nightly
	PYTHONPATH=$(CURDIR)/build/keras-next $(BIN)/python -c "import keras; print('Keras', keras.__version__)"
	for job in torch/ddp torch/horovod tensorflow/mirrored tensorflow/horovod; do \
		PYTHONPATH=$(CURDIR)/build/keras-next $(BIN)/unidist test $$job -n 2 $(KERAS_CHECKS) || failed=1; \
	done; test -z "$$failed"

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
