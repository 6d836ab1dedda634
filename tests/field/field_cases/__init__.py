"""Situations from public bug reports, by their number; each holds on every backend that it concerns."""

MODULES = """
    gradients
    fit
""".split()
