"""What are drafts worth that a model makes in its own pass: prompt tokens, hidden transfer, heads?

    python -m experiments.lm preset=tiny train.steps=1000 hydra.run.dir=runs/lm/drafted
    python bench/trained_drafts.py runs/lm/drafted                      # two CPU cores, a quarter of an hour
    python bench/trained_drafts.py FOLDER --layers 8 --embed 512 --train-s 120 --steps 1500     # one H200, 6 minutes

The model is that of a run of `experiments.lm`, with its texts; or a byte model in Hugging Face's form, which is trained
first where there is no such folder, with the texts of `bench/decode.py`. Each draft is distilled on the training text,
then measured on prompts that are held out, prompt tokens beside untrained ones. The tree of `--nodes` candidates is the
best one of the rates that are measured on other prompts. Tokens a pass count the one that each pass finds itself; all
passes but the one over the prompt count, the first of each row, before which nothing is guessed, among them. Tokens are
compared with plain decoding's, which in float32 may differ where rounding decides. Prints as it goes, writes JSON.
"""

import argparse
import dataclasses
import json
import pathlib
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import decode_pair  # noqa: E402
import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from lm_models import generate, lm_config  # noqa: E402

from jaxpar.decode import NoDraft, best_tree, chain  # noqa: E402
from jaxpar.experimental.pseudo_tokens import Heads, HiddenTransfer, PromptTokens  # noqa: E402
from jaxpar.experimental.trained_drafts import DraftTrainer, accept_rates  # noqa: E402
from jaxpar.lm import OptimizerConfig, Sampling, from_hf, num_params, to_hf  # noqa: E402
from jaxpar.loop import Fit, Hooks, fit  # noqa: E402

KEY = jax.random.key(3)


def of_run(folder: pathlib.Path, args: argparse.Namespace) -> tuple:
    """Returns configuration, parameters, batches of training text and prompts of a run's best checkpoint."""
    from experiments import lm
    from experiments.app import runner
    from jaxpar.io import Checkpoints
    from jaxpar.lm.text.data import Windows, open_corpus

    saved = runner.load(folder, lm.Config)
    checkpoints = Checkpoints(lm.checkpoint_folder(saved, folder), read_only=True)
    step = checkpoints.best()
    assert step is not None, f"{folder} has no checkpoint; train it first"
    shapes = jax.eval_shape(lm.make_trainer(saved).init, jax.random.key(0))
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=here), shapes)
    params = checkpoints.restore(step, abstract).params
    corpus = open_corpus(saved.data, folder / "data")
    windows = Windows(corpus.train, saved.data.seq_len, saved.data.batch_size, saved.seed + 7)
    prompts = Windows(corpus.validation, args.prompt, 2 * args.prompts, 1)(0)["tokens"]
    return saved.model, params, lambda step: windows(step)["tokens"], prompts


def of_bytes(folder: pathlib.Path, args: argparse.Namespace) -> tuple:
    """Returns the same of a byte model, trained first where there is none."""
    text = np.frombuffer(decode_pair.texts()[0], np.uint8)
    if not folder.exists():
        size = dict(
            num_layers=args.layers,
            embed_dim=args.embed,
            num_heads=args.embed // 64,
            mlp_dim=3 * args.embed,
        )
        shape = lm_config(vocab_size=256, dtype="float32", **size)
        params, said = decode_pair.train(
            shape, decode_pair.texts()[0], args.train_s, args.seq, args.rows
        )
        print("model", said, flush=True)
        to_hf(params, shape, folder)
    config, params = from_hf(folder, dtype="float32")

    def batch(step: int) -> np.ndarray:
        starts = np.random.default_rng(step).integers(len(text) - args.seq, size=args.rows)
        return text[starts[:, None] + np.arange(args.seq)].astype(np.int32)

    return (
        config,
        params,
        batch,
        np.array(decode_pair.prompts_of(2 * args.prompts, args.prompt), np.int32),
    )


class Run:
    """A trained model with its texts, and what it says to prompts."""

    def __init__(self, args: argparse.Namespace):
        """Reads or trains the model."""
        made = of_run if (args.run / "config.yaml").exists() else of_bytes
        self.config, self.params, self.batch, self.prompts = made(args.run, args)
        self.sampling = Sampling(args.new, temperature=args.temperature)
        self.decode = jax.jit(generate, static_argnums=(3, 4), static_argnames=("draft",))

    def says(self, prompts: np.ndarray, draft=NoDraft(), params=None) -> tuple:
        """Returns the texts, new tokens a pass, and seconds; of a second call, so that compiling does not count."""
        for _ in range(2):
            begin = time.perf_counter()
            out = self.decode(
                KEY,
                self.params,
                prompts,
                self.config,
                self.sampling,
                draft=draft,
                draft_params=params,
            )
            jax.block_until_ready(out)
        rate = len(prompts) * (self.sampling.max_new_tokens - 1) / float(out.passes.sum())
        return np.asarray(out.tokens), rate, time.perf_counter() - begin


def distilled(run: Run, draft, args: argparse.Namespace) -> tuple:
    """Returns a draft's parameters and the last losses by place, in nats."""
    rate = {"prompts": 3e-2}.get(args.name, 3e-3)
    optimizer = OptimizerConfig(learning_rate=rate, weight_decay=0.0)
    trainer = DraftTrainer(run.config, draft, optimizer, args.steps, num_anchors=args.anchors)
    losses = []
    hooks = Hooks(check=lambda step, metrics: losses.append(dict(metrics)))
    begin = time.perf_counter()
    result = fit(
        trainer,
        KEY,
        lambda step: {"tokens": run.batch(step), "model": run.params},
        Fit(args.steps),
        hooks,
    )
    names = [f"train/kl_{place + 1}" for place in range(draft.length)]
    last = [float(np.mean([each[name] for each in losses[-20:]])) for name in names]
    return result.state.params, {"kl": last, "train_s": time.perf_counter() - begin}


def measure(run: Run, name: str, args: argparse.Namespace) -> dict:
    """Trains one draft and measures it, as a chain and as a tree, beside itself untrained."""
    args.name = name
    layer = run.config.num_layers // 2 if args.layer is None else args.layer
    draft = {
        "prompts": PromptTokens(args.length),
        "hidden": HiddenTransfer(layer, args.length),
        "heads": Heads(args.length),
    }[name]
    tuned, held = np.split(run.prompts, 2)
    params, said = distilled(run, draft, args)
    kinds = {"trained": params}
    if (
        name == "prompts"
    ):  # the others start as the identity: their control is the model's own next token, again
        kinds["control"] = DraftTrainer(run.config, draft).init(jax.random.key(1)).params
    said["parameters"] = sum(leaf.size for leaf in jax.tree.leaves(params))
    texts, _, _ = run.says(tuned)
    plain, _, plain_s = run.says(held)
    for kind, own in kinds.items():
        rates = accept_rates(
            run.params, own, jnp.asarray(texts), run.config, draft, args.ranks, start=args.prompt
        )
        said[kind] = {"rates": rates.round(3).tolist()}
        for shape, candidates in {
            "chain": chain(args.length),
            "tree": best_tree(rates, args.nodes),
        }.items():
            shaped = dataclasses.replace(draft, candidates=candidates)
            tokens, rate, seconds = run.says(held, shaped, own)
            said[kind][shape] = {
                "tokens_a_pass": rate, "differing": int((tokens != plain).any(1).sum()), "nodes": candidates.parents,
                "window": shaped.tree.size, "speed": plain_s / seconds,
            }  # fmt: skip
            print(name, kind, shape, said[kind][shape], flush=True)
    return said


def main() -> None:
    """Measures the drafts that are asked for."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "run", type=pathlib.Path, help="a run folder of experiments.lm, or one of a byte model"
    )
    parser.add_argument("--drafts", default="prompts,hidden,heads")
    parser.add_argument(
        "--layer", type=int, help="where hidden transfer enters; by default in the middle"
    )
    parser.add_argument("--length", type=int, default=3, help="places that are guessed")
    parser.add_argument(
        "--nodes", type=int, default=12, help="candidates of the tree, the root one of them"
    )
    parser.add_argument(
        "--ranks", type=int, default=6, help="guesses of a place that are considered"
    )
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--prompt", type=int, default=64, help="tokens of a prompt")
    parser.add_argument("--new", type=int, default=128)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument(
        "--anchors", type=int, default=32, help="places of a row behind which a step guesses"
    )
    parser.add_argument(
        "--layers", type=int, default=4, help="of a byte model that is trained, and so the next"
    )
    parser.add_argument("--embed", type=int, default=128)
    parser.add_argument("--train-s", type=float, default=240)
    parser.add_argument("--seq", type=int, default=256, help="tokens of its rows")
    parser.add_argument("--rows", type=int, default=32, help="of a step")
    parser.add_argument("--out", type=pathlib.Path)
    args = parser.parse_args()
    run = Run(args)
    table: dict = {"device": jax.devices()[0].device_kind, "parameters": num_params(run.config)}
    for name in args.drafts.split(","):
        table[name] = measure(run, name, args)
        print(json.dumps({name: table[name]}, default=str), flush=True)
        if args.out:
            args.out.write_text(json.dumps(table, indent=2, default=str) + "\n")


if __name__ == "__main__":
    main()
