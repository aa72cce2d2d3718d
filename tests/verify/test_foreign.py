"""Models that are none of the library's: each right one holds, and each wrong one has a breach."""

import jax
import pytest

from jaxpar.verify import VerifyOptions, verify
from tests.verify.foreign import BATCH_AXES, CORRECT, WRONG, batch


@pytest.fixture(autouse=True)
def others_rules():
    """Leaves models of others what JAX allows, and this library's tests do not."""
    with jax.numpy_rank_promotion("allow"):
        yield


def rows_of(foreign):
    return verify(
        foreign.model,
        batch,
        BATCH_AXES,
        foreign.layouts,
        allow=foreign.allow,
        options=VerifyOptions(dtypes=["float64"]),
    )


@pytest.mark.parametrize("make", CORRECT, ids=lambda make: make.__name__)
def test_a_right_model_holds(make):
    foreign = make()
    rows = rows_of(foreign)
    assert len(rows) == len(foreign.layouts)
    for row in rows:
        assert not row.refused, row.refused
        assert not row.breaches, "\n".join(row.breaches)


@pytest.mark.parametrize("make", WRONG, ids=lambda make: make.__name__)
def test_a_wrong_model_has_a_breach(make):
    for row in rows_of(make()):
        assert not row.refused, row.refused
        assert row.breaches, row
