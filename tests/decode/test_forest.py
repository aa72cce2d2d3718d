"""The tables of a forest say what plain lists of tokens say, whatever is done to them."""

import pytest
from forest_twin import Twin, steps
from hypothesis import given, settings


@pytest.mark.parametrize("masked", [False, True], ids=["places", "slots"])
@settings(max_examples=60, deadline=None)
@given(steps)
def test_any_steps_lead_to_what_lists_say(masked, steps):
    Twin(masked).run(steps)
