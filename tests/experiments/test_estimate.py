"""`python -m experiments.estimate`: published parameter counts, reports, sentences and exit codes."""

import dataclasses
import functools
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys

import jax
import pytest
from fast import OPTIONS
from jax.experimental.compilation_cache import compilation_cache

from experiments import estimate
from experiments.app import runner
from experiments.app.estimate.pipelines import MARGIN, Held
from experiments.app.estimate.report import context_seconds, size_text
from jaxpar import aot
from jaxpar.lm import config_from_hf, num_params
from jaxpar.nn.attention.context import Sizes, move_for
from jaxpar.pipeline import PIPELINES, bitpipe, one_f_one_b, zb_v

ROOT = pathlib.Path(__file__).parents[2]

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
}
ROPE = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192}  # fmt: skip
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "activation_function": "gelu_new",
        "vocab_size": 50257, "n_positions": 1024, "resid_pdrop": 0.1, "embd_pdrop": 0.1, "attn_pdrop": 0.1,
        "layer_norm_epsilon": 1e-5, "initializer_range": 0.02}  # fmt: skip


def llama(vocab, width, mlp, layers, heads, kv_heads, **more):
    sizes = {"vocab_size": vocab, "hidden_size": width, "intermediate_size": mlp, "num_hidden_layers": layers,
             "num_attention_heads": heads, "num_key_value_heads": kv_heads, "rope_theta": 5e5}  # fmt: skip
    return LLAMA | sizes | more


# The shapes of the published configurations, and the parameters of the published files.
PUBLISHED = {
    "Llama-2-7B": (llama(32000, 4096, 11008, 32, 32, 32), 6_738_415_616),
    "Llama-3-8B": (llama(128256, 4096, 14336, 32, 32, 8), 8_030_261_248),
    "Llama-3.2-1B": (
        llama(
            128256,
            2048,
            8192,
            16,
            32,
            8,
            head_dim=64,
            tie_word_embeddings=True,
            rope_scaling=ROPE | {"factor": 32},
        ),
        1_235_814_400,
    ),
    "Llama-3.1-70B": (llama(128256, 8192, 28672, 80, 64, 8, rope_scaling=ROPE), 70_553_706_496),
    "Llama-3.1-405B": (
        llama(128256, 16384, 53248, 126, 128, 8, rope_scaling=ROPE),
        405_853_388_800,
    ),
    "gpt2": (GPT2 | {"n_embd": 768, "n_layer": 12, "n_head": 12}, 124_439_808),
    "gpt2-medium": (GPT2 | {"n_embd": 1024, "n_layer": 24, "n_head": 16}, 354_823_168),
    "gpt2-large": (GPT2 | {"n_embd": 1280, "n_layer": 36, "n_head": 20}, 774_030_080),
    "gpt2-xl": (GPT2 | {"n_embd": 1600, "n_layer": 48, "n_head": 25}, 1_557_611_200),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_the_published_ones(name, tmp_path):
    values, count = PUBLISHED[name]
    (tmp_path / "config.json").write_text(json.dumps(values))
    assert (
        num_params(config_from_hf(tmp_path / "config.json"))
        == num_params(config_from_hf(tmp_path))
        == count
    )


def told(err):
    """What is said on standard error but for what takes long."""
    # The time is alone on its line where others printed between.
    slow = r"^((compiling|running)\b.* \d+ s|starting: .*| *\d+ s)\n"
    return re.sub(slow, "", err, flags=re.MULTILINE)


@pytest.fixture
def main(monkeypatch, capfd, tmp_path):
    """`main(*flags)` is the command in this process, in `tmp_path`: exit code, stdout, stderr."""
    monkeypatch.setattr(runner, "_quieten", lambda: None)
    monkeypatch.setenv("HYDRA_FULL_ERROR", "1")
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    before = jax.config.jax_compilation_cache_dir

    def call(*flags):
        monkeypatch.setattr(sys, "argv", ["estimate", "hydra.run.dir=run", *flags])
        try:
            runner.launch("estimate", estimate.Config, estimate.execute)
            code = 0
        except SystemExit as exit_:
            code = exit_.code
        out, err = capfd.readouterr()
        return code, out, told(err)

    yield call
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


def report_of(tmp_path):
    (path,) = (tmp_path / "run").glob("*/report.json")
    assert (path.parent / "memory.png").read_bytes().startswith(b"\x89PNG")
    return json.loads(path.read_text())


def test_gpus_are_estimated_without_one(main, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Llama-3-8B"][0]))
    flags = (
        "topology=h100:8 hf=config.json data.seq_len=4096 data.batch_size=16 "
        "model.execution.remat=full show=true"
    ).split()
    code, out, err = main(*flags, "json=copy.json")
    assert (code, err) == (0, "")
    assert (
        "8,030,261,248 parameters" in out
        and "fsdp=8 on 8 h100 devices" in out
        and "fits with 10 % margin: " in out
    )
    assert "analytic model" in out and "model, not measurement" in out
    assert "layers.wq" in out and "embed -> inner+fsdp" in out  # of show
    report = report_of(tmp_path)
    assert report == json.loads((tmp_path / "copy.json").read_text())
    assert report["parameters"] == pytest.approx(4 * 8_030_261_248 / 8, rel=1e-3)
    assert 6 < report["flops"]["total"] / (8.03e9 * 16 * 4096) < 12 and not report["compiled"]


def test_a_slice_without_its_compiler_is_estimated_by_the_model_alone(main, tmp_path, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "libtpu" else find(name)
    )
    code, out, err = main("preset=tiny", "topology=v5e:2x4", "effort=none")
    assert (code, err) == (0, "") and "analytic model" in out and "15.75 GiB" in out
    code, _, err = main("preset=tiny", "topology=v5e:2x4")
    assert code == 2 and "needs libtpu; install it" in err


def test_what_does_not_fit_ends_in_one(main, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["Llama-3.1-405B"][0]))
    code, out, _ = main(
        "topology=h100:8", "hf=config.json", "data.seq_len=128", "data.batch_size=8"
    )
    assert code == 1 and "DOES NOT FIT" in out and "too much" in out
    assert report_of(tmp_path)["excess"] > 3 * 405e9 * 4 / 8 - 80e9


@pytest.mark.slow
def test_a_search_over_gpus(main, tmp_path):
    code, out, _ = main("preset=tiny", "topology=h200:8", "data.batch_size=64", "search=true")
    assert code == 0 and "best" in out and "60 candidates" in out
    rows = report_of(tmp_path)["search"]
    assert rows[0]["verdict"] == "best" and len(rows) == 60
    assert {"data", "fsdp", "tensor", "expert", "remat", "accumulate"} == rows[0][
        "candidate"
    ].keys()


@pytest.mark.parametrize(("num_experts", "sizes"), [(0, {1}), (4, {1, 2, 4}), (6, {1, 2})])
def test_a_search_splits_experts_over_as_many_devices_as_divide_them(num_experts, sizes):
    config = estimate.compose(f"model.experts.num_experts={num_experts}", "search=true")
    tried = estimate.candidates(config, 8)
    assert {each.expert for each in tried} == sizes
    assert all(each.data * each.fsdp * each.tensor * each.expert == 8 for each in tried)
    legal = [
        each for each in tried if each.remat != "blockwise"
    ]  # of experts a row of its own says why not
    assert [estimate.with_candidate(config, each).mesh.expert for each in legal] == [
        each.expert for each in legal
    ]
    assert sizes == {1} or any("expert=2" in str(each) for each in tried)


@pytest.mark.parametrize(
    "preset", sorted(path.stem for path in ROOT.glob("experiments/conf/lm/preset/*.yaml"))
)
def test_a_preset_s_own_mesh_hinders_no_search(preset, monkeypatch, tmp_path):
    class Reached(Exception):
        pass

    def reach(config):
        raise Reached

    monkeypatch.setattr(estimate, "with_model", reach)
    with pytest.raises(Reached):
        estimate.execute(
            estimate.compose(f"preset={preset}", "topology=v5e:4x4", "search=true"), tmp_path
        )


def test_what_another_layout_would_send(main, tmp_path):
    flags = (
        "topology=h100:8 preset=tiny data.batch_size=8 mesh.fsdp=4 mesh.tensor=2 source=fsdp8/zero2"
    )
    code, out, _ = main(*flags.split())
    report = report_of(tmp_path)
    held = report["parameters"] + report["optimizer"]
    assert code == 0 and "from       fsdp8 zero2: each device sends" in out
    assert 0 < sum(report["moves"].values()) <= held and "all-to-all" in report["moves"]


def test_what_attention_over_a_split_sequence_sends(main, tmp_path):
    sizes = (
        "num_layers=3 embed_dim=16 attention.num_heads=8 attention.num_kv_heads=4 "
        "attention.head_dim=8 mlp.dim=16 execution.remat=full execution.context=two_way"
    )
    flags = [f"model.{size}" for size in sizes.split()] + "mesh.data=2 mesh.context=4".split()
    flags += "data.batch_size=4 data.seq_len=64 train.accumulate=2 topology=h100:8".split()
    code, out, err = main(*flags)
    assert (code, err) == (0, "") and "attention over a split sequence" in out
    width = 4 if report_of(tmp_path)["config"]["model"]["dtype"] == "float32" else 2
    sizes = Sizes(
        2, 16, 8, 4, 8, width, places=1
    )  # of packed rows in a promised order the number of the document
    passes = [move_for("two_way", 4).bytes(sizes, backward) for backward in (False, True)]
    want = {way: 3 * (2 * passes[0][way] + passes[1][way]) for way in passes[0]}
    assert report_of(tmp_path)["context"] == want and want["up"] == want["down"] > 0 == want["all"]


def test_a_torus_sends_both_ways_at_once_and_a_switch_does_not():
    sent = {"up": 3e9, "down": 2e9, "all": 4e9}
    torus, switch = aot.CHIPS["v5p"], aot.CHIPS["h100"]
    assert context_seconds(sent, torus) == pytest.approx(5e9 / (0.8 * torus.link_bandwidth))
    assert context_seconds(sent, switch) == pytest.approx(9e9 / (0.8 * switch.link_bandwidth))


def test_decoding(main, tmp_path):
    flags = "preset=llama_1b decode=true topology=h100:8 mesh.fsdp=1 mesh.tensor=8 data.seq_len=8192 data.batch_size=64"
    code, out, _ = main(*flags.split())
    assert code == 0 and "one token for 64 rows" in out
    report = report_of(tmp_path)
    cache = (
        2 * 16 * 64 * 8192 * 8 * 64 * 2 / 8
    )  # keys and values, layers, rows, slots, heads, width, bytes
    assert report["other"] == pytest.approx(cache, rel=1e-3) and report["optimizer"] == 0
    assert report["activations"] is None and report["roofline"]["bound"] == "memory"


def test_the_machine_at_hand_is_compiled_for(main, tmp_path):
    code, out, err = main(
        "model.num_layers=1", "model.embed_dim=32", "model.mlp.dim=64", "data.seq_len=16"
    )
    assert (code, err) == (0, "")
    assert "data=2 fsdp=2 tensor=2 on 8 cpu devices" in out and "no prediction of time" in out
    report = report_of(tmp_path)
    assert report["compiled"] and report["fits"] is None and report["roofline"] is None
    assert {row["kind"] for row in report["crossings"]} == {"all-gather", "all-reduce"}


def test_the_layout_is_heeded():
    def weights(layout):
        job = estimate.make_job(
            estimate.compose("mesh.data=2", "mesh.fsdp=4", "mesh.inner=2", f"layout={layout}"),
            jax.devices(),
        )
        return {
            row.path.split(".")[-1]: row.spec
            for row in aot.placements(job)
            if row.group == "parameters"
        }

    assert weights("zero3")["w_up"] == (None, ("inner", "fsdp"), None)
    assert weights("nested")["w_up"] == (None, ("inner", "fsdp", "data"), None)


def test_a_number_of_devices_that_divides_nothing_gets_a_mesh_that_fits():
    config = estimate.compose("preset=llama_8b", "topology=v5p:4x4x5")
    sentence = " v5p:4x4x5 has 80 devices, over which mesh.data=5 mesh.fsdp=16 data.batch_size=160 divides."
    assert estimate._other_mesh(config, 80) == sentence and estimate._other_mesh(config, 64) == ""


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        ("topology=v5p", "topology='v5p' is unknown; legal are .* v5p:4x4x4"),
        (
            "topology=h100:8 effort=full",
            "effort=full needs a compiler, and there is none for h100:8 here",
        ),
        ("topology=h100:16", "start a new one"),
        ("topology=h100:8 mesh.fsdp=3", "mesh .* needs 3 devices|mesh .*fsdp=3"),
        (
            "topology=h100:8 data.batch_size=12",
            "data.batch_size=12 does not divide over mesh.fsdp=8",
        ),
        ("topology=h100:8 source=fsdp4", "mesh fsdp=4 needs 4 devices but 8 are here"),
        ("topology=h100:8 source=fsdp", "layout 'fsdp' is unknown; legal are sizes"),
        ("hf=nowhere.json", "there is no nowhere.json"),
        ("topologie=v5p:4x4x4", "unknown flag 'topologie'; did you mean topology"),
        ("search=true", "search=true ranks by a chip's peaks"),
    ],
)
def test_mistakes_end_in_a_sentence(main, flags, sentence):
    code, out, err = main(*flags.split())
    assert code == 2 and "Traceback" not in out + err
    (line,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert re.search(sentence, line), line


def commands():
    pages = (ROOT / "docs" / "estimates.md", ROOT / "experiments" / "estimate.py")
    found = [
        re.findall(r"python -m experiments\.estimate\b([^\n`]*)", page.read_text())
        for page in pages
    ]
    return [flags.split("#")[0].split() for page in found for flags in page]


def test_commands_of_the_pages_parse():
    assert len(commands()) >= 8
    for flags in commands():
        estimate.compose(*flags)


def test_the_snippet_of_the_page_runs(capsys):
    (snippet,) = re.findall(
        r"^```python\n(.*?)^```$", (ROOT / "docs/estimates.md").read_text(), re.M | re.S
    )
    exec(compile(snippet, "snippet", "exec"), {})
    out = capsys.readouterr().out
    assert "MiB" in out and "embed -> inner+fsdp; mlp -> tensor" in out


def test_sizes_are_read_easily():
    assert [size_text(n) for n in (3, 2048, 3 * 2**20, 1.5 * 2**30)] == [
        "3 B",
        "2.00 KiB",
        "3.00 MiB",
        "1.50 GiB",
    ]


def on_tpu(tmp_path, *flags):
    env = {
        k: v for k, v in os.environ.items() if not k.startswith(("XLA", "TPU_", "ALLOW_", "JAX_"))
    }
    line = [sys.executable, "-m", "experiments.estimate", "hydra.run.dir=run", *flags]
    env |= {"PYTHONPATH": str(ROOT)}
    return subprocess.run(line, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)


needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed"
)


@needs_libtpu
def test_a_slice_that_is_not_here(tmp_path):
    flags = (
        "topology=v5e:2x2 mesh.fsdp=2 mesh.tensor=2 model.num_layers=2 model.embed_dim=256 "
        "model.attention.head_dim=64"
    )
    done = on_tpu(
        tmp_path, *flags.split(), "data.seq_len=128", "data.batch_size=8", "model.dtype=bfloat16"
    )
    assert (done.returncode, told(done.stderr)) == (0, "")  # nothing of libtpu's start-up
    assert "fits with 8 % margin: " in done.stdout and "of 15.75 GiB" in done.stdout
    report = report_of(tmp_path)
    assert report["compiled"] and report["roofline"]["step_s"] > 0 and report["notes"] == []
    found = {(row["kind"], row["axes"]): row["count"] for row in report["crossings"]}
    # Seven weights a layer, gathered for the forward and, kept, not again; the embedding and the head.
    assert found["all-gather", "fsdp"] >= 2 * 7 + 2 and found["reduce-scatter", "fsdp"] >= 1
    assert found["all-reduce", "tensor"] >= 2 * 4


@needs_libtpu
def test_a_mesh_that_splits_axes_of_the_torus(tmp_path):
    """Eight by eight of 4x4x4: no axes of the torus multiply to eight."""
    flags = (
        "topology=v5p:4x4x4 mesh.fsdp=8 mesh.tensor=8 model.attention.num_heads=8 "
        "model.attention.num_kv_heads=8 model.num_layers=1"
    )
    done = on_tpu(tmp_path, *flags.split(), "data.batch_size=8", "data.seq_len=16", "effort=none")
    assert (done.returncode, told(done.stderr)) == (0, "")
    assert (
        "278,912 parameters" in done.stdout and "fsdp=8 tensor=8 on 64 v5p devices" in done.stdout
    )
    norms = 3 * 128  # whole on every device; of all else each has a 64th
    assert report_of(tmp_path)["parameters"] == 4 * (norms + (278_912 - norms) // 64)


@needs_libtpu
@pytest.mark.slow  # 10 s
def test_a_million_tokens_of_llama_8b_fit_on_64_chips(tmp_path):
    """By the analytic model; attention's bytes follow its table, the forward pass made twice."""
    flags = (
        "preset=llama_8b topology=v5p:4x4x4 mesh.context=64 rules.embed=context "
        "model.execution.context=two_way effort=none"
    )
    flags += " model.execution.context_order=zigzag model.execution.remat=full data.batch_size=1 data.seq_len=1048576"
    done = on_tpu(tmp_path, *flags.split())
    assert (done.returncode, told(done.stderr)) == (0, "") and "fits: " in done.stdout
    sizes = Sizes(
        1, 2**20 // 64, 32, 8, 128, 2, places=1
    )  # of a promised order the number of the document
    forward, backward = (move_for("two_way", 64).bytes(sizes, is_back) for is_back in (False, True))
    assert report_of(tmp_path)["context"] == {
        way: 32 * (2 * forward[way] + backward[way]) for way in forward
    }


@needs_libtpu
@pytest.mark.slow  # 40 CPU s
def test_experts_and_chips_that_grow_together_take_as_much_of_a_chip(tmp_path):
    """GShard's 600 billion weights on 1,024 chips beside 39 billion on 64, within 10 %, by the analytic model."""
    flags = (
        "effort=none mesh.data=1 mesh.fsdp=1 model.experts.experts_per_token=2 "
        "model.experts.capacity=1.0 model.num_layers=36 "
    )
    flags += (
        "model.embed_dim=1024 model.mlp.dim=8192 model.mlp.activation=gelu "
        "model.attention.num_heads=16 model.attention.num_kv_heads=16 "
    )
    flags += "model.vocab_size=32000 data.seq_len=1024 model.execution.remat=full"
    peaks, sent = [], []
    for chips, topology in ((64, "4x4x4"), (1024, "8x8x16")):
        folder = tmp_path / str(chips)
        folder.mkdir()
        of_size = (
            f"topology=v5p:{topology} mesh.expert={chips} model.experts.num_experts={chips} "
            f"data.batch_size={4 * chips}"
        )
        done = on_tpu(folder, *flags.split(), *of_size.split())
        assert (done.returncode, told(done.stderr)) == (0, ""), done.stderr
        report = report_of(folder)
        peaks.append(report["peak"])
        sent.append(report["experts"]["all_to_all"])
    assert peaks[0] < peaks[1] <= 1.1 * peaks[0] and sent[1] <= 1.1 * sent[0]


@needs_libtpu
@pytest.mark.slow
def test_a_slice_that_is_too_small(tmp_path):
    done = on_tpu(tmp_path, "preset=llama_1b", "topology=v5e:1x1", "data.batch_size=4", "data.seq_len=2048",
                  "train.accumulate=1")  # fmt: skip
    assert done.returncode == 1 and "DOES NOT FIT" in done.stdout and "of 15.75 GiB" in done.stdout
    assert report_of(tmp_path)["excess"] > 0


PIPED = ("mesh.stage=2", "mesh.fsdp=4", "data.batch_size=32", "data.seq_len=16", "microbatches=4", "model.num_layers=4",
         "model.embed_dim=16", "model.attention.num_heads=2", "model.attention.num_kv_heads=2",
         "model.mlp.dim=32")  # fmt: skip


@pytest.fixture(scope="module")
def ranked():
    """`ranked(capacity)`: all schedules, best first, for devices with that capacity in bytes."""
    config = estimate.compose("topology=h100:8", "pipeline=search", *PIPED)
    config, devices, _ = estimate.find_devices(config)
    job = estimate.pipeline_job(config, devices)
    return functools.cache(lambda capacity: estimate.estimate_pipeline(config, job, capacity))


def test_a_pipeline_is_told_by_its_bubble_and_what_its_stages_keep(ranked):
    rows = {row["schedule"]: row for row in ranked(None)}
    assert set(rows) == {*PIPELINES, "searched", "searched_v"}
    assert (
        rows["gpipe"]["bubble"] == rows["1f1b"]["bubble"] == pytest.approx(1 / 5)
    )  # (P-1)/(m+P-1)
    assert rows["gpipe"]["kept"] == 4 and rows["1f1b"]["kept"] == 2
    stash = {name: row["slots"]["stash"] for name, row in rows.items()}
    assert stash["gpipe"] == 2 * stash["1f1b"] > 0
    for row in rows.values():
        assert row["stage"] == sum(row["slots"].values()) and row["fits"] is None


@pytest.mark.slow  # 22 s on two busy cores
def test_a_search_of_schedules_keeps_to_the_memory_and_ranks_by_time(ranked):
    free = {row["schedule"]: row for row in ranked(None)}
    capacity = (free["searched"]["device"] + free["1f1b"]["device"]) / 2 / (1 - MARGIN)
    rows = ranked(capacity)
    assert all(row["fits"] == (row["device"] <= (1 - MARGIN) * capacity) for row in rows)
    assert [row["fits"] for row in rows] == sorted((row["fits"] for row in rows), reverse=True)
    fitting = [row["time"] for row in rows if row["fits"]]
    assert fitting == sorted(fitting)
    (found,) = [row for row in rows if row["schedule"] == "searched"]
    assert found["fits"] and found["cap"] < 4 and found["kept"] < free["searched"]["kept"]


def test_gathered_weights_and_what_waits_on_the_host_count_where_they_lie():
    """Weights are whole on a device of fsdp, in two slots; what is on the host is on no device."""

    def row(*flags):
        config, devices, _ = estimate.find_devices(
            estimate.compose("topology=h100:8", *flags, *PIPED)
        )
        (found,) = estimate.estimate_pipeline(config, estimate.pipeline_job(config, devices), None)
        return found

    plain, gathered = (
        row("pipeline=breadth_first", f"gather_chunks={on}") for on in ("false", "true")
    )
    layer = 16 * (3 * 32 + 4 * 16) + 2 * 16  # products and two norms
    assert plain["slots"]["weights"] == 0 < gathered["slots"]["weights"] <= 2 * layer * 4
    assert gathered["slots"]["weights"] >= 2 * layer * 2  # in bfloat16, of one layer a chunk
    assert gathered["own"] - plain["own"] == gathered["slots"]["weights"]
    plain, away = (row("pipeline=gpipe", f"offload={on}") for on in ("false", "true"))
    less = plain["slots"]["stash"] - away["slots"]["stash"]
    assert away["slots"]["host"] > 0 < less
    assert plain["own"] - away["own"] == less / 4  # rows lie over fsdp=4


PIPES = ("preset=tiny", "mesh.data=1", "microbatches=8", "data.batch_size=16", "data.seq_len=64", "model.num_layers=8",
         "model.embed_dim=64", "model.attention.num_heads=4", "model.mlp.dim=256", "model.vocab_size=512")  # fmt: skip


@pytest.mark.parametrize(
    "flags",
    [
        (
            "pipeline=1f1b",
            "mesh.stage=2",
            "model.execution.remat=full",
            "model.vocab_size=8192",
        ),  # a task's logits
        (
            "pipeline=bitpipe",
            "mesh.stage=4",
            "model.execution.remat=full",
            "model.embed_dim=192",
        ),  # copies of layers and sums
        (
            "pipeline=1f1b",
            "mesh.stage=2",
            "model.execution.remat=full",
            "model.embed_dim=192",
        ),  # the optimizer's new state
        ("pipeline=zb_v", "mesh.stage=2", "mesh.tensor=2"),  # slots, split by tensor
    ],
    ids=" ".join,
)
def test_what_a_pipeline_holds_is_near_what_is_compiled(flags):
    """Within a quarter, never under by more than the margin; docs/estimates.md has more."""
    config = estimate.compose(*PIPES, *flags)
    devices = jax.devices()[: config.mesh.stage * config.mesh.tensor]
    job = dataclasses.replace(estimate.pipeline_job(config, devices), options=OPTIONS)
    (row,) = estimate.estimate_pipeline(config, job, None)
    peak = aot.compile_job(job, "full").peak
    assert (1 - MARGIN) * peak <= row["device"] <= 1.25 * peak
    # The account of any step takes a pipelined one too.
    # It does not know which slots are written in place.
    assert aot.analyse(job)[0].peak >= row["device"]


def test_the_most_that_a_pipeline_holds_is_in_its_loop_or_after_it():
    held = Held(state=100.0, optimizer=60.0, parameters=30.0, layers=20.0, task=5.0, layout=None)
    at_rest = one_f_one_b(2, 4)
    moved = zb_v(2, 4)
    copies = bitpipe(2, 4)
    assert held.by(at_rest, 70.0) == 100 + 30 + 70 + 5
    # Layers sent to the stages of their chunks.
    assert held.by(moved, 70.0) == 100 + 30 + 20 + 70 + 5
    assert held.by(copies, 70.0) == 100 + (30 + 20) + 2 * 20 + 70 + 5  # and sums of a second copy
    # Gradients, and the optimizer's old and new state.
    assert held.by(at_rest, 1.0) == 100 + 30 + 60
    bare = held._replace(optimizer=0.0, task=0.0)
    assert bare.by(moved, 0.0) == 100 + 30 + 2 * 20  # sums on their way to where layers lie at rest


def test_a_pipeline_fits_only_where_its_margin_stays_free(ranked):
    device = {row["schedule"]: row["device"] for row in ranked(None)}["1f1b"]
    config = estimate.compose("topology=h100:8", "pipeline=1f1b", *PIPED)
    config, devices, _ = estimate.find_devices(config)
    job = estimate.pipeline_job(config, devices)
    for free, fits in ((1.01 * MARGIN, True), (0.99 * MARGIN, False)):
        (row,) = estimate.estimate_pipeline(config, job, device / (1 - free))
        assert (row["fits"], row["margin"]) == (fits, MARGIN)


def test_a_pipeline_is_printed_and_written(main, tmp_path):
    code, out, _ = main("topology=h100:8", "pipeline=1f1b", *PIPED)
    (report,) = tmp_path.glob("run/*/report.json")
    (row,) = json.loads(report.read_text())["pipeline"]
    assert (
        code == 0
        and row["fits"]
        and f"{row['bubble']:.1%}" in out
        and size_text(row["stage"]) in out
    )
    assert "fits       with 20 % margin; nothing compiled" in out
