"""The noise of a token belongs to its request and position, so that decoding in any order draws the same tokens.

A token drawn from softmax(z) is argmax_v(z_v + g_v) for standard Gumbel noise g (Gumbel 1954). Where g is a function of
who asks and of the place in the sequence alone, so is the token: batches, drafts and schedules change the order in
which tokens are found, never which ones they are.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jaxpar.types import PRNGKey, UsageError

__all__ = ["NoiseIndex", "gumbel", "token_keys"]


class NoiseIndex(NamedTuple):
    """Numbers by which rows find their noise, as `token_keys` and `gumbel` take them.

    Attributes:
      seeds: Seed of each row's request, below 2**32; others are taken modulo that.
      positions: Position of the token that is drawn, counted from the start of the request.
      lineage: Number of the row among the readers of its request; 0 where there is one.
    """

    seeds: Int[Array, "*rows"]
    positions: Int[Array, "*rows"]
    lineage: Int[Array, "*rows"]


def token_keys(
    key: PRNGKey,
    seeds: Int[Array, "*rows"],
    positions: Int[Array, "*rows"],
    lineage: Int[Array, "*rows"],
) -> Key[Array, "*rows"]:
    """Returns one key a token: fold_in(fold_in(fold_in(key, seed), position), lineage).

    A row's place in the batch does not enter, nor does the number of rows: two rows of one prompt and one seed agree,
    wherever they stand, and a request that moves to another slot goes on as it would have. Readers that share a request
    and are to differ, such as children of one prompt, need lineages of their own. That holds for the default generator,
    threefry; "rbg" draws other bits under `vmap`.

    Args:
      key: Consumed.
      seeds: Seed of each row's request, below 2**32; others are taken modulo that.
      positions: Where the token that is drawn will stand, counted from the start of the request.
      lineage: Which reader of the request draws; 0 where there is one.

    Raises:
      UsageError: If the shapes differ.
    """
    arrays = [jnp.asarray(each) for each in (seeds, positions, lineage)]
    if len({each.shape for each in arrays}) > 1:
        shapes = ", ".join(str(list(each.shape)) for each in arrays)
        raise UsageError(f"seeds, positions and lineage must have one shape, not {shapes}.")

    def one(*numbers):
        last = key
        for number in numbers:
            last = jax.random.fold_in(last, number)
        return last

    return jax.vmap(one)(*(each.reshape(-1) for each in arrays)).reshape(arrays[0].shape)


def gumbel(
    key: PRNGKey,
    seeds: Int[Array, "*rows"],
    positions: Int[Array, "*rows"],
    lineage: Int[Array, "*rows"],
    vocab_size: int,
) -> Float[Array, "*rows V"]:
    """Returns the standard Gumbel noise of each token that is drawn, float32 whatever the model's dtype.

    It is drawn with twice the bits of a float32: with 23 bits the largest of V values is tied with another one in a
    share V / 2**23 of all draws (1.5 % for V = 128,256), and the lower token would win them all. Cost: 2 V random words
    a token.

    Args:
      key: Consumed; the same one for all tokens of all requests.
      seeds: As in `token_keys`, and so the next two.
      positions: Of the tokens that are drawn: the first new token of a prompt of n tokens has n.
      lineage: Of the readers.
      vocab_size: V; static.

    Raises:
      UsageError: If the shapes of seeds, positions and lineage differ.
    """
    keys = token_keys(key, seeds, positions, lineage)
    noise = jax.vmap(lambda each: jax.random.gumbel(each, (vocab_size,), jnp.float32, mode="high"))(
        keys.reshape(-1)
    )
    return noise.reshape(*keys.shape, vocab_size)
