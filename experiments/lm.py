"""Trains, evaluates and samples a sharded language model.

    python -m experiments.lm                                  # tiny, on this machine's devices: about a minute
    python -m experiments.lm preset=gpt2_124m data.path=corpus.txt mesh.fsdp=4
    python -m experiments.lm mode=sample run=runs/lm/tiny-1a2b3c4d prompt="def " sampling.temperature=0.7
    python -m experiments.lm mode=eval run=runs/lm/tiny-1a2b3c4d
    python -m experiments.lm mode=eval run=runs/lm/tiny-1a2b3c4d eval.kind=choices eval.path=questions.jsonl
    python -m experiments.lm mode=export run=runs/lm/tiny-1a2b3c4d out=tiny_hf
    python -m experiments.lm init=hf:llama-folder adapter=lora adapter.rank=16 adapter.base=nf4 data.path=mine.jsonl

The same command resumes a run that was ended, on any mesh.
"""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxpar.decode import Decoding, Prompts
from jaxpar.fields import AtLeast, check_fields, field, replace_nested
from jaxpar.io import Checkpoints, ProgressLabels, plot_loss
from jaxpar.lm import (
    AdapterConfig,
    LMConfig,
    ObjectiveConfig,
    OptimizerConfig,
    Sampling,
    Trainer,
    TuningConfig,
    axes,
    flops_per_token,
    load_model,
    merge_adapters,
    mixers_of,
    num_adapted,
    num_params,
)
from jaxpar.lm.text import (
    Corpora,
    Corpus,
    DataConfig,
    Tokenizer,
    batches_of,
    load_tokenizer,
    open_corpora,
    open_with_layout,
    training_batches,
)
from jaxpar.loop import Fit, FitResult
from jaxpar.mesh import MeshSpec, named_shardings, partition, rules_from
from jaxpar.nn.mixers import Recurrent
from jaxpar.types import PyTree, UsageError

from .app import harness, runner, saved_runs
from .app.harness import Run
from .app.lm import benchmark, default_mesh, expert_loads, export_files, initial_model
from .app.lm.pipeline_flags import PipelineConfig, make_schedule
from .app.lm.text_codec import decode, draw, encode
from .app.lm.validation import (
    check_length,
    judged_weights,
    make_evaluate,
    place,
    row_length,
    select_adapters,
)
from .app.mesh_flags import LM_AXES, check_split, refuse_idle, shares
from .app.run_folder import owning
from .app.runner import say
from .app.solver_flags import method_to_keep


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """Length of a run and what happens on the way.

    Attributes:
      steps: Optimizer steps.
      accumulate: Parts that a batch is cut into.
      eval_every: Steps between validations; 0 means at the end alone.
      eval_batches: Batches of validation, random windows that are the same each time; 0 means the whole split.
      save_every: Steps between checkpoints; 0 means at the end alone.
      keep: Newest checkpoints to keep; the best is kept as well.
      keep_every_s: Seconds from one checkpoint to the next that is kept for good; 0 keeps none for good.
      max_skipped: Non-finite steps in a row that stop the run.
      profile: "first:last", steps to write a profile of.
      needs_init: Whether a new run without init= is refused, as preset=finetune has it.
    """

    steps: int = field(1000, AtLeast(1))
    accumulate: int = field(1, AtLeast(1))
    eval_every: int = field(100, AtLeast(0))
    eval_batches: int = field(20, AtLeast(0))
    save_every: int = field(100, AtLeast(0))
    keep: int = field(2, AtLeast(1))
    keep_every_s: float = field(0, AtLeast(0))
    max_skipped: int = field(10, AtLeast(1))
    profile: str = ""
    needs_init: bool = False

    def __post_init__(self):
        """Refuses counts that no run can have."""
        check_fields(self, "train.")


@dataclasses.dataclass(frozen=True)
class Config(PipelineConfig):
    """The language-model experiment.

    Attributes:
      model: The transformer; its vocabulary grows to the tokenizer's if that is larger. model=tiny is preset=tiny.
      data: Corpus, tokenizer, split, window and batch.
      optimizer: Update rule and schedule.
      train: Length and events.
      adapter: Adapters to train of a frozen model, instead of the model.
      objective: What training makes smaller.
      teacher: hf:folder or run:folder, a frozen model of the same tokens, for a share of the training as
        objective.distil says; read again when a run is resumed.
      tuning: What of the model is frozen, rates by depth, and a running average.
      sampling: How the sample is drawn.
      mode: "train", "sample", "eval" or "export".
      eval: What mode=eval measures, and on which file.
      init: hf:folder or run:folder to train on from a Hugging Face folder or a run: its model, parameters and
        tokenizer; hf:model.gguf is a GGUF file. Flags of `model` for the computation count then,
        and dtype.
      run: A run folder, or for all but train also a Hugging Face folder or a GGUF file.
      checkpoint: "best" or "newest", for all but train.
      use_ema: Whether validation, samples and exports take the running average of a run with tuning.ema.
      checkpoints: Where checkpoints live instead of in the run's folder, such as gs://bucket/folder; each run has a
        folder of its own name there.
      prompt: Where the sample begins; by default with the validation text.
      strict: Whether a Hugging Face folder's config.json may hold no unknown key; false names
        such keys in a warning.
      export: Options of mode=export.
      out: What export writes: a Hugging Face folder, or a file that ends in .safetensors or .npz. With eval.kind a
        file of JSONL, of what was found of each record.
    """

    model: LMConfig = LMConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    adapter: AdapterConfig = AdapterConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    teacher: str = runner.identifying(
        "", before=lambda teacher: {"teacher": teacher} if teacher else {}
    )
    tuning: TuningConfig = TuningConfig()
    sampling: Sampling = Sampling(max_new_tokens=200, temperature=0.8)
    mode: str = "train"
    eval: benchmark.EvalConfig = benchmark.EvalConfig()
    init: str = runner.identifying("", before=lambda init: {"init": init} if init else {})
    run: str = ""
    checkpoint: str = "best"
    use_ema: bool = False
    checkpoints: str = ""
    prompt: str = ""
    strict: bool = True
    export: export_files.ExportConfig = export_files.ExportConfig()
    out: str = ""

    def __post_init__(self):
        """Has a run of preferences read pairs, and no other."""
        super().__post_init__()
        if self.data.pairs and self.objective.kind != "dpo":
            raise UsageError("data.pairs=true is of objective.kind=dpo; give that alone.")
        if self.objective.kind == "dpo":
            object.__setattr__(self, "data", dataclasses.replace(self.data, pairs=True))


def compose(*flags: str) -> Config:
    """Returns the configuration that these flags give on the command line."""
    return runner.compose("lm", Config, list(flags))


def execute(config: Config, folder: pathlib.Path) -> Any:
    """Does what `config.mode` says."""
    config = dataclasses.replace(config, run=initial_model.folder_named(config.run))
    modes = {"train": train, "sample": sample, "eval": evaluate, "export": export}
    if config.mode not in modes:
        raise UsageError(f"mode={config.mode!r} is unknown; legal are {', '.join(modes)}.")
    if config.checkpoint not in ("best", "newest"):
        raise UsageError(f"checkpoint={config.checkpoint!r} is unknown; legal are best, newest.")
    with runner.open_devices(config, usual_mesh(config, folder)) as mesh:
        say("mesh       " + _mesh_text(mesh))
        return modes[config.mode](config, folder)


def usual_mesh(config: Config, folder: pathlib.Path) -> MeshSpec:
    """Returns the mesh where none is asked for, of eight simulated devices; the model allows it."""
    if config.mesh != MeshSpec(data=-1):
        return runner.SHOWN
    model = config.model
    data = config.data
    start = initial_model.source(config.init)
    if config.mode != "train":
        start = None
        if config.run:
            start = pathlib.Path(config.run)
    elif start is not None and config.init.startswith("hf:"):
        start = initial_model.kept(folder) or start
    if start is not None and (start / "config.json").is_file():
        model = initial_model.with_model(model, start, config.strict)
    elif start is not None and (start / "config.yaml").is_file():
        saved = runner.load(start, Config)
        model = saved.model
        if config.mode != "train":
            data = saved.data
    rules = rules_from(config.rules, config.layout)
    return default_mesh.fitting_mesh(runner.SHOWN, model, rules, data.batch_size)


@owning
def train(config: Config, folder: pathlib.Path) -> FitResult:
    """Trains under the ambient mesh, in `folder`; resumes what is there."""
    if config.use_ema and not config.tuning.ema:
        raise UsageError(
            "use_ema=true asks for an average that this run does not keep; give tuning.ema=0.999."
        )
    start = initial_model.source(config.init)
    if start is None:
        _check_start(config, folder)
    if start is not None and config.init.startswith("run:"):
        config, tokenizer = _on_from(config, start, folder)
    else:
        if start is not None:
            config = dataclasses.replace(
                config,
                model=initial_model.with_model(
                    config.model, initial_model.kept(folder) or start, config.strict
                ),
            )
        tokenizer = initial_model.kept_tokenizer(folder, start, config.data.template, config.strict)
    read = initial_model.with_template(config.data, folder if start is not None else None)
    mixed, layout = _open_data(config, read, folder, tokenizer)
    config = dataclasses.replace(config, data=dataclasses.replace(config.data, layout=layout))
    corpus = mixed.first
    config = with_vocabulary(config, corpus.tokenizer, is_given=start is not None)
    config = with_solver(config, folder)
    teacher, given = _teacher(config, corpus.tokenizer)
    trainer = make_trainer(config, teacher)
    data = config.data
    length = config.train
    windows = training_batches(mixed, data, config.seed)
    fit = Fit(
        num_steps=length.steps,
        chunk=1,
        eval_every=length.eval_every,
        save_every=length.save_every,
        profile=length.profile,
    )
    run = Run(
        config=config,
        folder=folder,
        fit=fit,
        progress=ProgressLabels(
            description="training", tokens_per_step=data.batch_size * data.seq_len
        ),
        tell_start=functools.partial(_tell_start, config, folder, corpus, trainer, windows),
        checkpoints=dict(
            where=checkpoint_folder(config, folder) if config.checkpoints else "",
            keep=length.keep,
            keep_every_s=length.keep_every_s,
        ),
        metadata={"corpus": mixed.hash, "tokenizer": corpus.tokenizer.identity},
        evaluate=make_evaluate(config, corpus),
        check=_make_check(config),
        extending="stretches its schedule",
        first=None if start is None else functools.partial(_first_state, config, trainer, start),
    )
    result = harness.train(
        trainer, lambda step: place(config, functools.partial(windows, step)) | given, run
    )
    _tell_end(config, folder, corpus, result)
    return result


def _open_data(
    config: Config, data: DataConfig, folder: pathlib.Path, tokenizer: Tokenizer
) -> tuple[Corpora, str]:
    """Opens the corpora that `data` names for the run in `folder`; returns them and their layout.

    A run that is resumed keeps the layout that it began with. Older runs have none, and so windows
    that lie whole in the stream.
    """
    cache = folder / "data"
    if config.data.layout or not (folder / "config.yaml").is_file():
        corpora, data = open_with_layout(data, cache, tokenizer, say)
        return corpora, data.layout
    data = dataclasses.replace(data, layout=runner.load(folder, Config).data.layout)
    return open_corpora(data, cache, tokenizer, say), data.layout


def with_solver(config: Config, folder: pathlib.Path) -> Config:
    """Returns the configuration with the method that `auto` takes in this folder and on this machine."""
    mixers = jax.tree.leaves(mixers_of(config.model))
    cells = [mixer.cell for mixer in mixers if isinstance(mixer, Recurrent)]
    if config.model.execution.solver != "auto" or not cells:
        return config
    name = method_to_keep(
        folder, Config, "model.execution.solver", cells, config.data.batch_size, config.data.seq_len
    )
    model = replace_nested(config.model, {"execution.solver": name})
    return dataclasses.replace(config, model=model)


def _on_from(config: Config, start: pathlib.Path, folder: pathlib.Path) -> tuple[Config, Tokenizer]:
    """Returns `config` with the model of the run in `start`, and its tokenizer; the new run keeps a copy."""
    saved = runner.load(start, Config)
    tokenizer = open_corpora(
        initial_model.with_template(saved.data, start),
        start / "data",
        initial_model.kept_tokenizer(start, None),
    ).first.tokenizer
    initial_model.keep_of_run(folder, start, tokenizer, config.data.template)
    return dataclasses.replace(
        config, model=initial_model.as_told(saved.model, config.model)
    ), tokenizer


def _check_start(config: Config, folder: pathlib.Path) -> None:
    """Rejects a new run of fine-tuning from random numbers."""
    if (folder / "config.yaml").is_file():
        return
    expected = "expected init=hf:folder or init=run:folder"
    if config.adapter.kind != "none":
        raise UsageError(
            f"adapter.kind={config.adapter.kind}: without init= it would adapt a frozen model of "
            f"random numbers; {expected}."
        )
    if config.train.needs_init:
        raise UsageError(
            f"init='': {config.name} trains a model that exists on, and none is given; {expected}, "
            "or train.needs_init=false to begin with random numbers."
        )


def _first_state(config: Config, trainer: Trainer, start: pathlib.Path) -> PyTree:
    """Returns the state that training begins with, of parameters in the folder `start`."""

    def read() -> PyTree:
        if config.init.startswith("hf:"):
            return initial_model.read_parameters(trainer, start, config.strict)
        return merge_adapters(load(start, dataclasses.replace(config, checkpoint="best"))[1])

    return initial_model.first_state(trainer, config.seed, read)


def _teacher(config: Config, tokenizer: Tokenizer) -> tuple[LMConfig | None, dict[str, PyTree]]:
    """Returns the model that `config.teacher` names, and its parameters as batches hold them, in `model.dtype`."""
    start = initial_model.source(config.teacher, "teacher")
    if start is None:
        return None, {}
    found, params, theirs = load(
        start, dataclasses.replace(config, checkpoint="best", use_ema=False)
    )
    if theirs.identity != tokenizer.identity:
        raise UsageError(
            f"teacher={config.teacher} has the tokenizer {theirs.identity[:16]}, and the model "
            f"{tokenizer.identity[:16]}; legal is a teacher of the same tokens."
        )
    dtype = config.model.dtype
    held = jax.tree.map(lambda x: x.astype(dtype), merge_adapters(params))
    return initial_model.as_told(found.model, config.model), {"teacher": held}


def sample(config: Config, folder: pathlib.Path) -> None:
    """Prints a sample of a saved run or a Hugging Face folder."""
    config, params, tokenizer = _load(config)
    refuse_idle("sampling", (axes(config.model), "batch"))
    say(
        draw_sample(config, params, tokenizer, config.prompt or ("" if tokenizer.bos_ids else "\n"))
    )


def evaluate(config: Config, folder: pathlib.Path) -> dict[str, float]:
    """Prints what `config.eval` asks of a saved run or a Hugging Face folder: by default the loss over a split."""
    template = config.data.template
    config, params, tokenizer = _load(config)
    refuse_idle("a language model", (axes(config.model), LM_AXES))
    if template:
        config = dataclasses.replace(
            config, data=dataclasses.replace(config.data, template=template)
        )
    if config.eval.kind != "split":
        return benchmark.evaluate(config, params, tokenizer)
    check_split("data.batch_size", config.data.batch_size, "batch")
    check_length(config)
    if config.data.pairs:
        raise UsageError("mode=eval of a run of preferences knows no start to compare with; give eval.kind, legal are "
                         "documents, choices, exact.")  # fmt: skip
    folder = pathlib.Path(config.run)
    if (folder / "config.json").is_file():  # no run, which would have the layout of its training
        corpora, data = open_with_layout(config.data, folder / "data", tokenizer)
        config = dataclasses.replace(config, data=data)
    else:
        corpora = open_corpora(config.data, folder / "data", tokenizer)
    corpus = corpora.first
    say(corpus.describe())
    whole = dataclasses.replace(config, train=dataclasses.replace(config.train, eval_batches=0))
    metrics = make_evaluate(whole, corpus)(params)
    say("  ".join(f"{name} {value:.4f}" for name, value in metrics.items()))
    return metrics


def export(config: Config, folder: pathlib.Path) -> None:
    """Writes the parameters of a saved run to `config.out`."""
    out = export_files.checked(config.out, config.export.dtype)
    template = config.data.template
    run = _source(config)
    adapters = None
    if (run / "config.json").is_file():
        config, params, tokenizer = load(run, config, config.export.dtype)
    else:
        config, state, tokenizer = load_state(run, config)
        params = judged_weights(config, state)
        adapters = select_adapters(config, state)
    export_files.write(out, config, params, tokenizer, template, adapters=adapters)


def checkpoint_folder(config: Config, folder: pathlib.Path) -> str:
    """Returns where the checkpoints of the run in `folder` live."""
    if not config.checkpoints:
        return str(folder / "checkpoints")
    return f"{config.checkpoints.rstrip('/')}/{folder.absolute().name}"


def with_vocabulary(config: Config, tokenizer: Tokenizer, is_given: bool = False) -> Config:
    """Returns `config` with a vocabulary of at least the tokenizer's size, in multiples of 64; as it is, if given."""
    size = config.model.vocab_size
    if is_given and tokenizer.vocab_size > size:
        raise UsageError(
            f"the tokenizer of init={config.init} has {tokenizer.vocab_size} symbols of {size}."
        )
    if not is_given:
        size = max(size, -(-tokenizer.vocab_size // 64) * 64)
        if config.model.vocab_size not in (size, LMConfig().vocab_size):
            say(f"note       model.vocab_size={config.model.vocab_size} is raised to {size}: the tokenizer has "
                f"{tokenizer.vocab_size} symbols")  # fmt: skip
    config = dataclasses.replace(config, model=dataclasses.replace(config.model, vocab_size=size))
    if config.model.positions == "learned" and config.data.seq_len > config.model.max_seq_len:
        raise UsageError(
            f"data.seq_len={config.data.seq_len} is over model.max_seq_len={config.model.max_seq_len}, "
            "which bounds learned positions."
        )
    return config


def make_trainer(config: Config, teacher: LMConfig | None = None) -> Trainer:
    """Returns the algorithm, after checking that its state and batch can be laid out on the ambient mesh."""
    schedule, parts, flag = make_schedule(config, config.model, config.train.accumulate)
    trainer = Trainer(
        model=config.model,
        optimizer=config.optimizer,
        num_steps=config.train.steps,
        accumulate=parts,
        max_skipped=config.train.max_skipped,
        schedule=schedule,
        tuning=config.tuning,
        objective=config.objective,
        teacher=teacher,
        adapter=config.adapter,
    )
    refuse_idle("a language model", (trainer.axes(), LM_AXES))
    default_mesh.check_divides(config.model)
    named_shardings(jax.eval_shape(lambda: trainer.init(jax.random.key(0))), trainer.axes())
    rows = config.data.batch_size
    if rows % parts:
        raise UsageError(f"{flag}={parts} does not divide data.batch_size={rows}.")
    check_split("data.batch_size", rows, "batch", flag, parts)
    check_length(config)
    partition(
        ("batch", "seq"), (rows // parts, row_length(config)), "the batch"
    )  # two rules may clash
    return trainer


def draw_sample(config: Config, params: PyTree, tokenizer: Tokenizer, prompt: str) -> str:
    """Returns the prompt and its continuation, which begins and ends as the tokenizer's texts do."""
    ids, added = encode(tokenizer, prompt, config.model.vocab_size)
    rows = np.broadcast_to(ids, (shares("batch"), len(ids)))
    key, ends = jax.random.key(config.seed), tokenizer.eos_ids
    decoding = Decoding(stop_tokens=ends)
    drawn = draw(key, params, Prompts(rows), config.model, config.sampling, decoding)
    text = np.asarray(drawn.tokens)[0, added : int(drawn.lengths[0])]
    return decode(tokenizer, text[: -1 if text[-1] in ends else None])


def _load(config: Config) -> tuple[Config, PyTree, Tokenizer]:
    """Reads the parameters and tokenizer of `config.run`; flags of this call keep their sampling and data."""
    return load(_source(config), config, config.model.dtype)


def _source(config: Config) -> pathlib.Path:
    """Returns the folder that `config.run` names."""
    folder = pathlib.Path(config.run)
    if not config.run or not folder.is_dir():
        raise UsageError(
            f"mode={config.mode} needs run= to name an existing folder, not {config.run!r}."
        )
    return folder


def load(
    folder: pathlib.Path, config: Config, dtype: str | None = None
) -> tuple[Config, PyTree, Tokenizer]:
    """Returns what a run folder or a Hugging Face folder holds: `config` with its model, parameters, tokenizer.

    Of a run only the parameters are read, not the state of its optimizer.

    Args:
      folder: The run or the folder.
      config: Configuration of which the checkpoint that it asks for counts, and `data.template` and
        `strict` for a Hugging Face folder.
      dtype: Type of the parameters of a Hugging Face folder; empty for its own, and by default
        `config.model.dtype`.
    """
    if (folder / "config.json").is_file():
        if config.use_ema:
            raise UsageError(
                f"use_ema=true asks for an average, and the Hugging Face folder {folder} has none."
            )
        model = initial_model.with_model(config.model, folder, config.strict)
        default_mesh.check_divides(model)
        name = dtype
        if dtype is None:
            name = config.model.dtype
        model, params = load_model(folder, name, strict=config.strict)
        data = initial_model.with_template(config.data, folder)
        return dataclasses.replace(config, model=model, data=data), params, load_tokenizer(folder)
    config, state, tokenizer = load_state(folder, config)
    return config, judged_weights(config, state), tokenizer


def load_state(folder: pathlib.Path, config: Config) -> tuple[Config, PyTree, Tokenizer]:
    """Returns what a run folder holds: `config` with its model, the state, the tokenizer.

    The state has no moments of the optimizer, and an average only where `config.use_ema` takes it.
    """
    saved = runner.load(folder, Config)
    data = initial_model.with_template(saved.data, folder)
    corpus = open_corpora(data, folder / "data", initial_model.kept_tokenizer(folder, None)).first
    config = dataclasses.replace(
        config, model=saved.model, data=data, optimizer=saved.optimizer, train=saved.train, seed=saved.seed,
        tuning=saved.tuning, objective=saved.objective, teacher=saved.teacher,
        adapter=dataclasses.replace(saved.adapter, merge=config.adapter.merge), init=saved.init,
    )  # fmt: skip
    trainer = make_trainer(config)
    shapes = jax.eval_shape(trainer.init, jax.random.key(0))
    shardings = named_shardings(shapes, trainer.axes())
    abstract = jax.tree.map(
        lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings
    )
    ignored = ["opt_state", "reference"]
    if not config.use_ema:
        ignored.append("average")
    unread = {name: None for name in ignored if hasattr(abstract, name)}
    checkpoints = Checkpoints(checkpoint_folder(saved, folder), read_only=True)
    _, state = saved_runs.restored(
        checkpoints,
        config.checkpoint,
        abstract.replace(**unread),
        folder,
        trainer.later_leaves,
        ignored,
    )
    return config, state, corpus.tokenizer


def _make_check(config: Config):
    def check(step: int, metrics: Mapping[str, float]) -> None:
        if metrics["train/skipped_in_a_row"] >= config.train.max_skipped:
            raise UsageError(
                f"the loss, its gradient or the new parameters were not finite for {config.train.max_skipped} steps "
                f"up to step {step}; lower optimizer.learning_rate, or resume from the last checkpoint with another "
                "setting."
            )

    return check


def _mesh_text(mesh: Any) -> str:
    sizes = (
        " ".join(f"{axis}={size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    )
    kind = mesh.devices.flat[0].device_kind
    return f"{sizes} on {mesh.devices.size} {kind} device{'s' * (mesh.devices.size > 1)}"


def _tell_start(
    config: Config,
    folder: pathlib.Path,
    corpus: Corpus,
    trainer: Trainer,
    batches: Any,  # a layout, a mixture or pairs
    start: int,
) -> None:
    data, model = config.data, config.model
    shapes = jax.eval_shape(trainer.init, jax.random.key(0))
    shardings = jax.tree.leaves(named_shardings(shapes, trainer.axes()))
    a_device = sum(
        math.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, sharding in zip(jax.tree.leaves(shapes), shardings, strict=True)
    )
    tokens = data.batch_size * data.seq_len
    flops = tokens * flops_per_token(model, data.seq_len)
    say(f"run        {runner.short(folder)}" + (f" (resuming at step {start})" if start else ""))
    say(
        f"model      {num_params(model):,} parameters in {model.num_layers} layers of width {model.embed_dim}"
    )
    if config.adapter.kind != "none":
        say(f"adapter    {num_adapted(model, config.adapter):,} of them in {config.adapter.kind} are trained beside "
            f"a base in {config.adapter.base}")  # fmt: skip
    say(f"state      {a_device / 2**20:,.1f} MiB a device (parameters and optimizer)")
    say(corpus.describe().replace("corpus ", "corpus     ", 1))
    if data.layout:
        say(f"layout     {data.layout}")
    for rows in getattr(batches, "sources", (batches,)):
        if note := getattr(rows, "note", ""):
            say(f"note       {note}")
    if (enough := -(-corpus.tokenizer.vocab_size // 64) * 64) < model.vocab_size:
        say(f"note       the tokenizer has {corpus.tokenizer.vocab_size:,} of {model.vocab_size:,} symbols; "
            f"model.vocab_size={enough} leaves the others out")  # fmt: skip
    length = row_length(config)
    pads = f", padded to rows of {length} over mesh.context" if length != data.seq_len else ""
    say(
        f"step       {data.batch_size} x {data.seq_len} = {tokens:,} tokens{pads}, {flops / 1e9:,.1f} GFLOP"
    )


def _tell_end(config: Config, folder: pathlib.Path, corpus: Corpus, result: FitResult) -> None:
    if result.interrupted:
        return
    plot = folder / "plots" / "loss.png"
    if jax.process_index() == 0:
        plot.parent.mkdir(exist_ok=True)
        plot_loss(folder / "metrics.jsonl", plot, title=folder.name)
    plots = {"loss plot": plot}
    if config.model.experts.num_experts:
        plots["experts"] = plot.with_name("experts.png")
        data = config.data
        rows = batches_of(corpus.validation, data.layout.split("+")[0], data, config.seed + 1)
        batch = place(config, functools.partial(rows, 0))
        expert_loads.draw(
            config.model,
            judged_weights(config, result.state),
            batch,
            folder / "metrics.jsonl",
            plots["experts"],
        )
    prompt = config.prompt or corpus.tokenizer.decode(
        corpus.validation.read(0, min(32, len(corpus.validation)))
    )
    text = draw_sample(config, judged_weights(config, result.state), corpus.tokenizer, prompt)
    say(f"\nsample     {'-' * 60}\n{text}\n{'-' * 71}")
    say(
        f"validation loss {result.metrics['validation/loss']:.4f} nats a token after {result.step} steps"
    )
    for what, path in (plots | {"metrics": folder / "metrics.jsonl"}).items():
        say(f"{what:10} {runner.short(path)}")
    where = checkpoint_folder(config, folder)
    say(f"checkpoint {where if config.checkpoints else runner.short(pathlib.Path(where))}")


if __name__ == "__main__":
    runner.launch("lm", Config, execute)
