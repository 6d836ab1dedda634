"""The checks of the contract, one module per point or group."""

MODULES = """
    gradients class_losses precision mixed_precision own_loops keras_loops same_start accumulation clipping parameters batchnorm
    native_objects collectives waits data loaders metrics refusals randomness checkpoint exchanges groups loss_scaling
""".split()
