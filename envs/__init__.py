"""Environments, one a file, used from a checkout; they come with `jaxpar.env`."""
