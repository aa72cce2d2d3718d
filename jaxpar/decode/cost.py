"""What generation costs: operations, and the bytes that it must read, which usually are the limit."""

import dataclasses
from typing import NamedTuple

from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.types import UsageError

__all__ = ["DecodingCost", "ModelSizes", "decoding_cost", "tokens_read"]


class DecodingCost(NamedTuple):
    """Of all continuations of one prompt, the prompt itself not counted.

    Attributes:
      flops: Products with weights, and attention.
      weight_bytes: Weights, read once for each token that the continuations draw together.
      cache_bytes: Keys and values.
    """

    flops: float
    weight_bytes: float
    cache_bytes: float

    def seconds(self, flops_per_s: float, bytes_per_s: float) -> float:
        """Returns the least time on a machine of these ceilings, were operations and reads to overlap."""
        return max(self.flops / flops_per_s, (self.weight_bytes + self.cache_bytes) / bytes_per_s)

    def equivalent_flops(self, flops_per_byte: float) -> float:
        """Returns operations plus the cache's bytes in their price: eFLOPs of Kinetics (arXiv:2506.05333, section 2).

        Weights are left out: a server shares them among many requests.

        Args:
          flops_per_byte: Of the machine, peak operations over bandwidth; 562.5 in the paper.
        """
        return self.flops + self.cache_bytes * flops_per_byte


def tokens_read(prompt: int, new: int, budget: int | None = None) -> int:
    """Returns how many cached tokens `new` tokens read in all: the sum of min(budget, prompt + t) over t < new.

    The published closed form for a budget has the sign of its square wrong; this one is the sum.
    """
    for name, value in {"prompt": prompt, "new": new, "budget": budget}.items():
        if value is not None and value < 0:
            raise UsageError(f"{name}={value} tokens must be at least 0.")
    if budget is None:
        return new * prompt + new * (new - 1) // 2
    short = min(max(budget - prompt, 0), new)  # tokens that read less than the budget
    return short * prompt + short * (short - 1) // 2 + (new - short) * budget


@dataclasses.dataclass(frozen=True)
class ModelSizes:
    """Sizes of a model that decide on what decoding costs.

    Attributes:
      num_params: Parameters, all of which each token meets.
      num_layers: L.
      num_heads: H.
      num_kv_heads: G.
      head_dim: K.
      itemsize: Bytes of a weight and of a number in the cache.
    """

    num_params: int = field(legal=AtLeast(1))
    num_layers: int = field(legal=AtLeast(1))
    num_heads: int = field(legal=AtLeast(1))
    num_kv_heads: int = field(legal=AtLeast(1))
    head_dim: int = field(legal=AtLeast(1))
    itemsize: int = field(2, AtLeast(1))

    __post_init__ = check_fields


def decoding_cost(
    model: ModelSizes,
    prompt: int,
    new: int,
    *,
    samples: int = 1,
    shared: bool = True,
    budget: int | None = None,
    block: int = 0,
) -> DecodingCost:
    """Returns what it costs to draw `new` tokens after a prompt, `samples` times.

    Args:
      model: Sizes of the model.
      prompt: Tokens of the prompt.
      new: Tokens of each continuation.
      samples: Continuations.
      shared: Whether the prompt's keys and values are read once for all of them, as a `Forest` does;
        with a budget each continuation reads its own choice.
      budget: Most cached tokens that a token attends to; None for all.
      block: Slots of a block where a budget is spent on blocks that are chosen by their mean keys,
        which are read for it (`BlockTopK`); 0 for none.
    """
    own = tokens_read(prompt, new, budget)
    means = 0.0
    if block and budget is not None:
        means = tokens_read(prompt, new) / block
    read = samples * own
    if shared and budget is None:
        read -= (samples - 1) * new * prompt

    heads = model.num_layers * model.num_heads * model.head_dim
    token_bytes = 2 * model.num_layers * model.num_kv_heads * model.head_dim * model.itemsize
    flops = samples * (2.0 * model.num_params * new + heads * (4.0 * own + 2.0 * means))
    weight_bytes = float(model.num_params * model.itemsize * new)
    return DecodingCost(flops, weight_bytes, token_bytes * (read + samples * means / 2))
