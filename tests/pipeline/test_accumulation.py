"""Microbatches: how a batch is cut where its rows and its sequence are split over devices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.mesh import MeshSpec, make_mesh, rules_from, use_mesh
from jaxpar.pipeline.accumulation import parts_of
from jaxpar.types import UsageError


def test_row_r_goes_to_microbatch_r_modulo_their_number():
    rows = jnp.arange(12).reshape(6, 2)
    parts = parts_of({"tokens": rows}, 3)["tokens"]
    for part in range(3):
        np.testing.assert_array_equal(parts[part], rows[part::3])
    with pytest.raises(
        UsageError, match="train.accumulate=4 does not divide the batch of 6 rows; nearest is 3"
    ):
        parts_of(rows, 4)


def test_microbatches_gather_no_sequence_that_is_split():
    mesh = make_mesh(MeshSpec(data=2, context=2), jax.devices()[:4])
    with use_mesh(mesh, rules_from()):
        sharding = jax.NamedSharding(mesh, jax.P("data", "context"))
        rows = jax.ShapeDtypeStruct((8, 16), jnp.int32, sharding=sharding)
        step = jax.jit(functools.partial(parts_of, count=2)).lower({"tokens": rows}).compile()
        text = step.as_text()
        parts = step.output_shardings["tokens"]
    assert parts.shard_shape((2, 4, 16)) == (2, 2, 8)
    for kind in ("all-gather", "all-to-all", "collective-permute", "all-reduce"):
        assert kind not in text
