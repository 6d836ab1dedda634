"""The checks of the contract, one module per point or group."""

MODULES = """
    gradients own_loops keras_loops same_start accumulation clipping parameters batchnorm native_objects collectives
    exchanges groups waits data loaders metrics refusals randomness
""".split()
