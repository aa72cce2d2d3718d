"""Checkpoints that close themselves."""

import pytest

from jaxpar.io import Checkpoints


@pytest.fixture
def opened():
    """`opened(folder, ...)` is a `Checkpoints` that the test closes at its end."""
    all_opened = []

    def open_(folder, **options):
        all_opened.append(Checkpoints(folder, **options))
        return all_opened[-1]

    yield open_
    for checkpoints in all_opened:
        checkpoints.close()
