"""The contract's checks of torch/relay, each a test."""

from unidist.testing.plugin import conformance

test_relay = conformance("torch/relay", n=2)
