"""The example in a room's docstring, which adds something new through the room's seam, does what it says."""

import importlib
import textwrap

import pytest

ROOMS = [
    "jaxpar.optim",
    "jaxpar.nn.linear",
    "jaxpar.nn.mixer",
    "jaxpar.nn.auxiliary",
    "jaxpar.nn.experts.grouped",
    "jaxpar.pipeline.accumulation",
    "jaxpar.decode.draft",
    "jaxpar.env.capabilities",
    "jaxpar.rollout.policies",
    "jaxpar.rl.learner",
    "jaxpar.pomdp",
    "jaxpar.pomdp.beliefs.belief",
]


def example_of(module):
    """The code below the line "Example:" of a module's docstring: the block that is indented further than that line."""
    lines = (module.__doc__ or "").expandtabs().splitlines()
    heads = [number for number, line in enumerate(lines) if line.strip() == "Example:"]
    assert len(heads) == 1, f"{module.__name__} has {len(heads)} lines 'Example:'"
    depth, block = len(lines[heads[0]]) - len(lines[heads[0]].lstrip()), []
    for line in lines[heads[0] + 1 :]:
        if line.strip() and len(line) - len(line.lstrip()) <= depth:
            break
        block.append(line)
    return textwrap.dedent("\n".join(block)).strip() + "\n"


@pytest.mark.parametrize("room", ROOMS)
def test_the_example_of_a_room_runs(room):
    code = example_of(importlib.import_module(room))
    assert code.rstrip().splitlines()[-1].startswith("assert "), "an example ends in what it claims"
    exec(compile(code, f"the example of {room}", "exec"), {"__name__": "example"})


def test_the_block_is_all_that_is_indented():
    module = type(importlib)("made_up")
    module.__doc__ = "One.\n\nExample:\n    a = 1\n    if a:\n\n        b = 2\n    assert a + b == 3\n\nMore.\n    c"
    assert example_of(module) == "a = 1\nif a:\n\n    b = 2\nassert a + b == 3\n"
    module.__doc__ = "One line."
    with pytest.raises(AssertionError, match="made_up has 0 lines"):
        example_of(module)
