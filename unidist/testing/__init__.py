"""What shows that a backend keeps the contract: the truth in NumPy, the checks, their launches; and `run` for own tests."""

from unidist.testing.running import run

__all__ = ["run"]
