"""Fixtures of several files."""

from namespaces import two_hosts

__all__ = ["two_hosts"]
