"""Lets the tests of each family import what stands here: `journey` and `playing`."""
