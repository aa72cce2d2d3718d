"""Planted errors by somebody who has not read the checker."""

OUTSIDE = ()
