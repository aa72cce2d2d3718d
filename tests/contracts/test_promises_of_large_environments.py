"""Environments of the large families keep their promises."""

from environment_rows import LARGE, assert_promises, each_row


@each_row(LARGE)
def test_promises_hold(name):
    assert_promises(name)
