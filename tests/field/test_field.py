"""The cases on every backend that they concern: one launch each, every case a test."""

from unidist.testing.plugin import conformance

CASES = "field_cases"

test_torch_local = conformance("torch/local", n=1, catalogue=CASES)
test_torch_ddp = conformance("torch/ddp", n=2, catalogue=CASES)
test_torch_horovod = conformance("torch/horovod", n=2, catalogue=CASES)
test_tensorflow_local = conformance("tensorflow/local", n=1, catalogue=CASES)
test_tensorflow_mirrored = conformance("tensorflow/mirrored", n=2, catalogue=CASES)
test_tensorflow_horovod = conformance("tensorflow/horovod", n=2, catalogue=CASES)
