"""What is copied: the continuation of the longest match of the text's end, by a loop in Python."""

import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.decode import CopyDraft

SIZE = 14


def twin(draft, text, length, prompt):
    """Every place is tried, and every token compared."""
    end = min(prompt, length) if draft.source == "prompt" else length
    best, longest = None, 0
    for after in range(1, end):
        left, run = draft.gaps, 0
        for j in range(draft.match):
            is_inside = after - 1 - j >= 0 and length - 1 - j >= 0
            if is_inside and text[after - 1 - j] == text[length - 1 - j]:
                run += 1
            else:
                left -= 1
            if left < 0:
                break
        if run and run >= longest:
            best, longest = after, run
    if best is None:
        return [-1] * draft.length
    return [text[best + i % (end - best)] for i in range(draft.length)]


@pytest.mark.parametrize("source", ["text", "prompt"])
@pytest.mark.parametrize("gaps", [0, 1, 2])
def test_the_longest_match_is_copied(source, gaps):
    draft = CopyDraft(5, 4, source, gaps)
    propose = jit(
        lambda prompts, text, lengths: draft.propose(None, prompts, text, lengths, None)[0].tokens
    )

    @settings(max_examples=150, deadline=None)
    @given(
        st.lists(st.integers(0, 2), min_size=SIZE, max_size=SIZE),
        st.integers(1, SIZE),
        st.integers(1, SIZE),
    )
    def check(text, length, prompt):
        got = propose(jnp.array([prompt]), jnp.array([text]), jnp.array([length]))
        assert got[0].tolist() == twin(draft, text, length, prompt)

    check()


def test_a_copy_goes_on_behind_what_was_replaced():
    source = np.arange(10)
    text = jnp.array([[*source, 0, 1, 2, 9]])  # 3 was replaced by 9, which ends the prompt
    args = jnp.array([10]), text, jnp.array([14])
    assert CopyDraft(3, 4, "prompt", 1).propose(None, *args, None)[0].tokens.tolist() == [[4, 5, 6]]
    assert CopyDraft(3, 4, "prompt").propose(None, *args, None)[0].tokens.tolist() == [[-1] * 3]
