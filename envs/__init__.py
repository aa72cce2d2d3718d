"""Environments, one a file, used from a checkout; they come with `jaxpar.env`."""

from .registry import make, names

__all__ = ["make", "names"]
