"""How many steps of tokens from layer to layer stay on a device, if experts are placed by a trained model's choices?

    python -m experiments.lm model.experts.num_experts=8 model.experts.experts_per_token=1 \
        model.mlp.dim=128 train.steps=150
    python bench/expert_placement.py --run runs/lm/...          # the folder that it printed

Choices are counted on one half of the windows of the validation text and told on the other, as shares of the
transitions from an expert of a layer to one of the next that go to another device: experts in their order, experts
placed at random, and placed by `place_experts`.
"""

import argparse
import pathlib
import sys

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))


def chosen(folder: pathlib.Path, windows: int):
    """Returns the experts of each layer [L, B, T, k] of a run, on windows of its validation text, and how many."""
    import jax
    import numpy as np

    from experiments import lm
    from jaxpar.fields import replace_nested
    from jaxpar.lm.model import embed_for_training
    from jaxpar.lm.text.data import Windows, open_corpus
    from jaxpar.nn.experts.sharded import chosen_experts

    config, params, _ = lm.load(folder, lm.compose())
    model = replace_nested(config.model, {"execution.remat": "none"})
    corpus, length = open_corpus(config.data, folder / "data"), config.data.seq_len
    batch = Windows(corpus.validation, length, windows, config.seed + 2, config.data.pack)(0)

    @jax.jit
    def choose(params, tokens):
        return chosen_experts(
            model.stack(), params, embed_for_training(params, tokens, None, model)
        )

    return np.asarray(choose(params, batch["tokens"])), model.experts.num_experts


def main() -> None:
    """Prints a table, a line a number of devices."""
    import numpy as np

    from jaxpar.mesh import MeshSpec, make_mesh, use_mesh
    from jaxpar.nn.experts.sharded import count_crossings, count_transitions, place_experts

    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--run", type=pathlib.Path, required=True, help="folder of a run of experiments.lm"
    )
    parser.add_argument("--windows", type=int, default=64)
    options = parser.parse_args()
    with use_mesh(make_mesh(MeshSpec())):
        expert, num_experts = chosen(options.run, options.windows)
    half = options.windows // 2
    counts, held = (
        count_transitions(part, num_experts) for part in (expert[:, :half], expert[:, half:])
    )
    loads = np.array([np.bincount(layer.reshape(-1), minlength=num_experts) for layer in expert])
    print(f"{len(expert)} layers of {num_experts} experts, {expert[0].size:,} choices a layer, largest load over the "
          f"mean {(loads.max(1) / loads.mean(1)).max():.2f}")  # fmt: skip
    print(f"{'devices':>7} {'in order':>9} {'random':>7} {'placed':>7} {'fewer than in order':>20}")
    for shares in [n for n in range(2, num_experts + 1) if num_experts % n == 0]:
        order = np.tile(np.repeat(np.arange(shares), num_experts // shares), (len(expert), 1))
        rng = np.random.default_rng(0)
        drawn = [np.array([rng.permutation(row) for row in order]) for _ in range(100)]
        random = np.mean([count_crossings(held, placement) for placement in drawn])
        plain, placed = (
            count_crossings(held, each) for each in (order, place_experts(counts, shares))
        )
        told = [part / held.sum() for part in (plain, random, placed)]
        print(f"{shares:7} {told[0]:9.3f} {told[1]:7.3f} {told[2]:7.3f} {1 - placed / plain:20.1%}")


if __name__ == "__main__":
    main()
