"""jaxpar: loops as single parallel JAX programs, each shown to equal its loop."""

from jaxpar._renamed import find_renamed

__version__ = "0.1.0"

find_renamed()
