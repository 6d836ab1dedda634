"""Every built-in backend keeps the contract: one launch each, every check a test."""

from unidist.testing.plugin import conformance

test_torch_local = conformance("torch/local", n=1)
test_torch_ddp = conformance("torch/ddp", n=2)
test_torch_ddp_on_three = conformance("torch/ddp", n=3, only=("few",))
test_torch_dataparallel = conformance("torch/dataparallel", n=1, only=("few",))
test_torch_horovod = conformance("torch/horovod", n=2)
test_tensorflow_local = conformance("tensorflow/local", n=1)
test_tensorflow_mirrored = conformance("tensorflow/mirrored", n=2)
test_tensorflow_mirrored_on_three = conformance("tensorflow/mirrored", n=3, only=("few",))
test_tensorflow_mirrored_in_two_processes = conformance("tensorflow/mirrored", n=4, processes=2, only=("few",))
test_tensorflow_horovod = conformance("tensorflow/horovod", n=2)
