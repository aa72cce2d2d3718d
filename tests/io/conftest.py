"""Checkpoints that close themselves."""

import pytest

from jaxpar.io import Checkpoints, storage


@pytest.fixture
def opened():
    """`opened(folder, ...)` is a `Checkpoints`, closed when its folder reopens or the test ends."""
    all_opened = []

    def open_(folder, **options):
        for earlier in all_opened:
            if earlier.folder == storage.absolute(folder):
                earlier.close()
        all_opened.append(Checkpoints(folder, **options))
        return all_opened[-1]

    yield open_
    for checkpoints in all_opened:
        checkpoints.close()
