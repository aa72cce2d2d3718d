"""Every environment keeps its promises; the large families have a file of their own."""

from environment_rows import ALL, LARGE, assert_promises, each_row


@each_row([family for family in ALL if family not in LARGE])
def test_promises_hold(name):
    assert_promises(name)
