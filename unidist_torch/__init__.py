"""The PyTorch side of unidist: one file per backend, what they share in base, tensors, exchange, step and data."""
