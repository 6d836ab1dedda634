"""Situations from public bug reports, by their number; each holds on every backend that it concerns."""

MODULES = """
    gradients parameters batchnorm optimizers habits data checkpoints collectives keras_training fit
""".split()
