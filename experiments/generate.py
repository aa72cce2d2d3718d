"""Continues prompts by a saved language model: one on the command line, or a file of them into a file of texts.

    python -m experiments.generate run=runs/lm/tiny-90ecd57b prompt="def " num_samples=3
    python -m experiments.generate run=runs/lm/tiny-90ecd57b prompts=prompts.jsonl out=texts.jsonl draft=copy
    python -m experiments.generate run=runs/lm/tiny-90ecd57b prompt="import " sampling.temperature=0.5 seed=3
    python -m experiments.generate run=runs/lm/tiny-90ecd57b prompt="def " beams=4
    python -m experiments.generate hf=llama-folder prompts=prompts.txt out=texts.jsonl preset=greedy
    python -m experiments.generate hf=llama-folder prompt="Once " mesh.data=1 mesh.context=4 rules.slots=context

A line of `out` is what follows one prompt: prompt, text, finish_reason, tokens, log_probs, passes, seed, sample, id.
With beams= it has the text's log_prob and score instead of log_probs, and sample 0 is the best.
Lines come as batches end; the same command adds those that are missing, and only those.
"""

import dataclasses
import pathlib
import time
from typing import Any

import jax

from jaxpar.decode import (
    Beams,
    CopyDraft,
    Draft,
    JacobiDraft,
    LookaheadDraft,
    ModelDraft,
    NoDraft,
    Sampling,
)
from jaxpar.fields import Between, Finite, OneOf, check_value, field
from jaxpar.io import ProgressLabels, open_progress
from jaxpar.lm import Decoder, Imported, adapter_axes, axes, from_peft, with_adapters
from jaxpar.lm.text import Template, chat_ml, load_chat, open_template
from jaxpar.mesh import MeshSpec, named_shardings
from jaxpar.types import PyTree, UsageError

from . import lm
from .app import runner
from .app.lm.completions import flags_of, open_completions
from .app.lm.initial_model import folder_named, imported_of, with_template
from .app.lm.prompt_batches import Job, Saved, Task, beyond_training, continued, make_tasks
from .app.lm.requests import DEFAULT_SEEDS, Request, read_requests
from .app.lm.text_codec import fingerprint
from .app.mesh_flags import check_split, refuse_idle
from .app.runner import say

DRAFTS = ("none", "copy", "jacobi", "lookahead", "model")
OLDER = {"default_seed": "zero", "special_tokens": True}
"""Values of fields in files of texts that were begun before these fields existed."""
MOST_NEW = 2**20
"""New tokens of a text at most; more would be a slip of the finger, and end in a lack of memory."""


@dataclasses.dataclass(frozen=True)
class Config(runner.RunConfig):
    """What is continued, by which model, and how.

    Attributes:
      run: A run folder of `experiments.lm`, or a Hugging Face folder.
      hf: A Hugging Face folder or a GGUF file, in place of `run`.
      adapter: A folder of adapters in PEFT's files, for the model of `run` or `hf`.
      checkpoint: "best" or "newest", of a run.
      use_ema: Whether to take the running average of a run with tuning.ema.
      strict: Whether config.json of a Hugging Face folder may hold no unknown key; false names such
        keys in a warning.
      dtype: Of computation; "auto" is the run's own, and bfloat16 for a Hugging Face folder.
      prompt: One to continue.
      prompts: A file of them instead, one a line: plain text, or JSON objects {"prompt", "seed", "id"}; chats have
        {"messages"} in place of a prompt, and the folder's template writes them. A seed decides on noise together
        with the flag `seed`.
      default_seed: Seed of prompts of a file that give none. "prompt" is a hash of prompt, id and
        number of earlier repeats, so that each has noise of its own; "zero" is 0.
      special_tokens: Whether special tokens that a prompt spells, such as <|im_end|>, are read as
        such; else they stay text. In chats they always are.
      out: A file of JSON objects, one a text; without it texts are printed.
      sampling: How tokens are drawn, and how many at most.
      num_samples: Texts of each prompt, which is read and stored once for them.
      stop: Strings that end a text, which is cut before them.
      draft: What guesses tokens that one pass of the model then looks at together.
      draft_length: Tokens that it guesses at a time; 0 for its own default.
      draft_run: The folder of a smaller model of the same tokens, for draft=model.
      rule: "coupled" keeps the tokens that there would be without a draft, "rejection" their distribution alone.
      beams: Width of a beam search for the most likely texts, which are printed or written the best
        first, in place of num_samples drawn ones; 0 draws.
      length_penalty: A search's texts are ranked by log-probability over (new tokens)^this.
      batch_size: Prompts of a batch.
    """

    name: str = "generate"
    run: str = ""
    hf: str = ""
    adapter: str = ""
    checkpoint: str = field("best", OneOf(("best", "newest")))
    use_ema: bool = False
    strict: bool = True
    dtype: str = field("auto", OneOf(("auto", "bfloat16", "float16", "float32")))
    prompt: str = ""
    prompts: str = ""
    default_seed: str = field("prompt", OneOf(DEFAULT_SEEDS))
    special_tokens: bool = False
    out: str = ""
    sampling: Sampling = Sampling(max_new_tokens=200, temperature=0.8)
    num_samples: int = field(1, Between(1, 1024))
    stop: list[str] = dataclasses.field(default_factory=list)
    draft: str = field("none", OneOf(DRAFTS))
    draft_length: int = field(0, Between(0, 64))
    draft_run: str = ""
    rule: str = field("coupled", OneOf(("coupled", "rejection")))
    beams: int = field(0, Between(0, 1024))
    length_penalty: float = field(1.0, Finite())
    batch_size: int = field(8, Between(1, 4096))

    def __post_init__(self):
        """Refuses what cannot go together."""
        super().__post_init__()
        check_value(
            "sampling.max_new_tokens", self.sampling.max_new_tokens, Between(1, MOST_NEW), int
        )
        if bool(self.run) and bool(self.hf):
            raise UsageError("run= and hf= name a model each; give one of them.")
        if self.prompt and self.prompts:
            raise UsageError("prompt= and prompts= are both given; give one of them.")
        if "" in self.stop:
            raise UsageError("stop= has an empty string; give strings of at least one character.")
        if (self.draft == "model") != bool(self.draft_run):
            raise UsageError(
                f"draft={self.draft} with draft_run={self.draft_run!r}; draft=model needs draft_run=, others have none."
            )
        if self.draft == "none" and self.draft_length:
            raise UsageError(
                f"draft_length={self.draft_length} belongs to no draft; give draft= as well."
            )
        if self.rule == "rejection" and self.draft not in ("none", "model"):
            raise UsageError(
                f"rule=rejection needs the distribution of the guesses, and draft={self.draft} has none; "
                "expected draft=model or rule=coupled."
            )
        if self.beams:
            self._check_beams()
        if self.metrics:
            raise UsageError("metrics= has nothing to write here; leave it out.")

    def _check_beams(self) -> None:
        """Rejects flags of drawing with a search, which draws nothing."""
        usual = dataclasses.replace(
            Sampling(),
            max_new_tokens=self.sampling.max_new_tokens,
            temperature=self.sampling.temperature,
            stop_token=self.sampling.stop_token,
        )
        drawing = {
            "num_samples": self.num_samples != 1,
            "draft": self.draft != "none",
            "stop": bool(self.stop),
            "sampling": self.sampling != usual,
        }
        for name, is_changed in drawing.items():
            if is_changed:
                raise UsageError(
                    f"beams={self.beams} search for the most likely texts and draw none; "
                    f"leave {name}= out."
                )


def compose(*flags: str) -> Config:
    """Returns the configuration that these flags give on the command line."""
    return runner.compose("generate", Config, list(flags))


def execute(config: Config, folder: pathlib.Path) -> None:
    """Continues every prompt, under the mesh of the flags."""
    if (
        config.out
        and config.prompts
        and pathlib.Path(config.out).resolve() == pathlib.Path(config.prompts).resolve()
    ):
        raise UsageError(f"out={config.out} is the file of prompts; name another.")
    config = as_begun(config)
    config = dataclasses.replace(
        config,
        run=folder_named(config.run),
        hf=folder_named(config.hf),
        draft_run=folder_named(config.draft_run),
    )
    if config.prompts:
        path = pathlib.Path(config.prompts)
        requests = read_requests(path, config.default_seed, lambda: template_of(config))
    else:
        requests = [Request(config.prompt)]
    with runner.open_devices(config, MeshSpec()), runner.ending_together():
        target = adapted(
            load(config.hf or config.run, config, "hf" if config.hf else "run"),
            config.adapter,
            imported_of(pathlib.Path(config.hf or config.run), config.strict),
        )
        refuse_idle("sampling", (axes(target.model), "batch", "slots"))
        check_split("batch_size", config.batch_size, "batch")
        draft, draft_params = make_draft(config, target)
        job = Job(
            target=target,
            key=jax.random.key(config.seed),
            sampling=config.sampling,
            num_samples=config.num_samples,
            stop=tuple(config.stop),
            draft=draft,
            draft_params=draft_params,
            rule=config.rule,
            batch_size=config.batch_size,
            special_tokens=config.special_tokens,
        )
        if config.beams:
            if config.beams > target.model.vocab_size:
                raise UsageError(
                    f"beams={config.beams} is over the model's {target.model.vocab_size} symbols; "
                    "a prompt has no more first tokens."
                )
            beams = Beams(
                width=config.beams,
                max_new_tokens=config.sampling.max_new_tokens,
                length_penalty=config.length_penalty,
            )
            job = job._replace(num_samples=config.beams, beams=beams)
        (write if config.out else show)(config, job, requests)


def as_begun(config: Config) -> Config:
    """Returns the configuration with older values of fields that `config.out` was begun without."""
    if not config.out:
        return config
    before = flags_of(pathlib.Path(config.out))
    if before is None:
        return config
    missing = {
        name: value
        for name, value in OLDER.items()
        if name not in before and getattr(config, name) != value
    }
    if not missing:
        return config
    flags = " ".join(f"{name}={str(value).lower()}" for name, value in missing.items())
    say(f"out        {config.out} was begun without these flags, and continues by {flags}")
    return dataclasses.replace(config, **missing)


def template_of(config: Config) -> Template:
    """Returns the chat template of the folder: a Hugging Face folder's own, or a run's of its training."""
    folder = pathlib.Path(config.hf or config.run)
    if (folder / "config.json").is_file():
        template = load_chat(folder)
        if template is None:
            raise UsageError(
                f"{folder} has no chat template, by which messages would be written; expected lines with "
                "a prompt, or a folder with chat_template.jinja."
            )
        return template
    path = with_template(runner.load(folder, lm.Config).data, folder).template
    if not path:
        return chat_ml
    return open_template(path)


def load(name: str, config: Config, flag: str) -> Saved:
    """Returns the model in a folder that a flag names."""
    folder = pathlib.Path(name)
    if not name or not folder.is_dir():
        raise UsageError(f"{flag}= must name an existing folder, not {name!r}.")
    if flag == "hf" and not (folder / "config.json").is_file():
        raise UsageError(f"hf={name} is no Hugging Face folder: it has no config.json.")
    found, params, tokenizer = lm.load(
        folder,
        lm.Config(checkpoint=config.checkpoint, use_ema=config.use_ema, strict=config.strict),
        "bfloat16" if config.dtype == "auto" else config.dtype,
    )
    dtype = found.model.dtype if config.dtype == "auto" else config.dtype
    trained_length = found.model.max_seq_len
    if not (folder / "config.json").is_file():
        if found.init:  # the model that it began with may have been trained on longer texts
            trained_length = max(found.data.seq_len, trained_length)
        else:
            trained_length = found.data.seq_len
    return Saved(
        model=dataclasses.replace(found.model, dtype=dtype),
        params=params,
        tokenizer=tokenizer,
        trained_length=trained_length,
    )


def adapted(saved: Saved, folder: str, imported: Imported | None = None) -> Saved:
    """Returns the model with the adapters of a folder, if one is named.

    `imported` is the record of the folder that the model came from: adapters name its tensors.
    """
    if not folder:
        return saved
    adapter, tree = from_peft(folder, saved.model, imported=imported)
    place = named_shardings(tree, adapter_axes(saved.model, tree))
    return saved._replace(
        params=with_adapters(saved.params, jax.device_put(tree, place), adapter.scale)
    )


def make_draft(config: Config, target: Saved) -> tuple[Draft, PyTree]:
    """Returns what guesses, and its parameters if it is a model.

    Raises:
      UsageError: It is a model of other tokens.
    """
    length = config.draft_length
    if config.draft == "lookahead":
        return (LookaheadDraft(ngram=length + 1) if length else LookaheadDraft()), None
    options = {}
    if length:
        options["length"] = length
    if config.draft != "model":
        kinds = {"none": NoDraft, "copy": CopyDraft, "jacobi": JacobiDraft}
        return kinds[config.draft](**options), None
    small = load(config.draft_run, config, "draft_run")
    if (
        small.tokenizer.identity != target.tokenizer.identity
        or small.model.vocab_size != target.model.vocab_size
    ):
        raise UsageError(
            f"draft_run={config.draft_run} has {small.model.vocab_size} symbols of the tokenizer "
            f"{small.tokenizer.identity[:16]}, and the model {target.model.vocab_size} of "
            f"{target.tokenizer.identity[:16]}; give a draft of the same tokens."
        )
    return ModelDraft(model=Decoder(small.model), **options), small.params


def told(config: Config, job: Job) -> dict[str, Any]:
    """Returns all that decides on a text besides its request, by flag name where there is one."""
    flat = {
        f"sampling.{name}": value for name, value in dataclasses.asdict(config.sampling).items()
    }
    flat |= {
        "seed": config.seed,
        "stop": list(config.stop),
        "rule": config.rule,
        "default_seed": config.default_seed,
        "special_tokens": config.special_tokens,
        "dtype": job.target.model.dtype,
    }
    flat |= {"weights": fingerprint(job.target.params), "tokenizer": job.target.tokenizer.identity}
    if config.beams:
        flat |= {"beams": config.beams, "length_penalty": config.length_penalty}
    if config.rule == "rejection":  # by the other rule no draft changes a token
        flat |= {"draft": config.draft, "draft_length": config.draft_length}
        flat |= {"draft_run": fingerprint(job.draft_params) if job.draft_params is not None else ""}
    return flat


def say_beyond(job: Job, tasks: list[Task]) -> None:
    """Prints once that texts outgrow the trained length, if they may."""
    sentence = beyond_training(job, tasks)
    if sentence:
        say("length     " + sentence)


def show(config: Config, job: Job, requests: list[Request]) -> None:
    """Prints texts as they come."""
    tasks = make_tasks(job, requests, {})
    say_beyond(job, tasks)
    for batch in continued(job, tasks):
        for line in batch.lines:
            say(
                f"\nseed {line['seed']} sample {line['sample']}: {line['finish_reason']} after {len(line['tokens'])} "
                f"tokens in {line['passes']} passes\n{line['prompt']}{line['text']}"
            )


def write(config: Config, job: Job, requests: list[Request]) -> None:
    """Adds the lines that `config.out` lacks, and prints how many there were and how fast."""
    path = pathlib.Path(config.out)
    with open_completions(path, told(config, job), config.resume, OLDER) as out:
        there, tasks = out.done.total(), make_tasks(job, requests, out.done)
        total, tokens, passes, began = (
            sum(len(task.samples) for task in tasks),
            0,
            0,
            time.perf_counter(),
        )
        say(f"out        {config.out}: {total} lines to write, {there} were there")
        if not total:
            return
        say_beyond(job, tasks)
        labels = ProgressLabels(description="generating", unit="text", shown=("tokens_per_pass",))
        with open_progress(total, labels=labels) as progress:
            for batch in continued(job, tasks):
                out.write(batch.lines)
                tokens, passes = tokens + batch.tokens, passes + batch.passes
                progress.update(
                    out.done.total() - there, {"tokens_per_pass": tokens / max(passes, 1)}
                )
        seconds = time.perf_counter() - began
        say(f"written    {total} lines in {seconds:.1f} s, compiling included; {tokens / max(passes, 1):.2f} tokens a "
            f"pass with draft={config.draft}")  # fmt: skip


if __name__ == "__main__":
    runner.launch("generate", Config, execute)
