"""jaxpar: loops as single parallel JAX programs, each shown to equal its loop."""

__version__ = "0.1.0"
