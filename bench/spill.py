"""What does lending tokens even out, and what does it move? Plans of many skews; nothing is multiplied.

    python bench/spill.py

`skew`: the share of all tokens that the hot experts get, all of them on one device. "plain" and "lent": the largest
load over the mean one. "weights": of how many experts weights travel, to how many slots of one device at most.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))


def main() -> None:
    """Prints a table, a line a skew and number of slots."""
    import jax
    import numpy as np

    from jaxpar.nn.experts.sharded import least_loaded

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--tokens", type=int, default=1 << 20, help="choices of all devices")
    parser.add_argument("--min-chunk", type=int, default=1024)
    options = parser.parse_args()
    plan_of = jax.jit(least_loaded, static_argnames=("shares", "min_chunk", "slots"))
    local = options.experts // options.devices
    print(f"{options.experts} experts on {options.devices} devices, {options.tokens:,} choices")
    print(
        f"{'skew':>5} {'hot':>4} {'slots':>6} {'plain':>6} {'lent':>6} {'weights':>8} {'a device':>8}"
    )
    for skew, hot in ((0.0, 4), (0.3, 4), (0.5, 4), (0.8, 4), (0.95, 4), (0.95, 1), (0.95, local)):
        noise = np.random.default_rng(0).dirichlet(np.full(options.experts, 20.0))
        share = (1 - skew) * noise + skew * (np.arange(options.experts) < hot) / hot
        counts = np.floor(share * options.tokens).astype(np.int32)
        for slots in (1, 2, None):
            plan = np.asarray(
                plan_of(counts, shares=options.devices, min_chunk=options.min_chunk, slots=slots)
            )
            mean = counts.sum() / options.devices
            plain, most = (
                counts.reshape(options.devices, local).sum(1).max() / mean,
                plan.sum(0).max() / mean,
            )
            home = np.arange(options.experts)[:, None] // local == np.arange(options.devices)
            lent = ((plan > 0) & ~home).sum(0)
            name = "any" if slots is None else slots
            print(
                f"{skew:5} {hot:4} {name:>6} {plain:6.2f} {most:6.2f} {lent.sum():8} {lent.max():8}"
            )


if __name__ == "__main__":
    main()
