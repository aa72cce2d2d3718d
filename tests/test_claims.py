"""Each claim of the README and of its pages beside the fast tests that would go red if it were false."""

import ast
import contextlib
import functools
import re
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest

from experiments import lm, verify
from experiments.app.lm import judged_trainings
from jaxpar.lm.text.tokenizer import Bytes
from jaxpar.mesh import MeshSpec, make_mesh, named_shardings, rules_from, use_mesh
from jaxpar.types import UsageError

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()

# Words of the README -> the tests of them. Times and speeds are no tests' matter: bench/ measures them, and
# docs/benchmarks.md says how.
CLAIMS = {
    # the first page
    "agree in value and in gradient": "scan/test_affine.py::derivatives_are_those_of_the_loop "
    "solve/test_gradients.py::gradients_to_everything_are_those_of_the_loop "
    "distributed/test_layouts.py::layout_equals_one_device_float32 "
    "rollout/test_trajectory.py::gradient_of_the_return_equals_the_plain_loops "
    "nn/test_recurrent.py::every_method_gives_the_loops_values_and_gradients "
    "nn/test_recurrent.py::values_gradients_and_resets_equal_those_of_the_loop",
    "Python 3.11 to 3.13": "test_packaging.py::the_versions_of_python_are_the_same_everywhere",
    "the run simulates eight CPU devices": "test_mesh.py::simulated_devices",
    "the same command goes on from where it was": "experiments/test_kill.py::two_kills_change_no_bit "
    "experiments/test_kill.py::ctrl_c_says_how_to_go_on_and_any_mesh_does",
    # what is there
    "GPT-2 and Llama 3 as one config": "lm/test_params.py::published_sizes nn/test_block.py::layer_equals_loop",
    "vocabulary-parallel chunked loss": "lm/test_loss.py::split_vocabulary_equals_naive_float64 "
    "lm/test_loss.py::logits_of_a_chunk_only_in_the_model",
    "AdamW, Muon": "lm/test_optim.py::eps_reaches_every_adam lm/test_optim.py::muon_equals_one_matrix_at_a_time",
    "KV-cache sampling": "lm/test_sample.py::cache_equals_the_whole_forward",
    "Hugging Face folders both ways": "lm/test_exchange.py::written_tensors_compute_the_same_logits_in_numpy "
    "lm/test_exchange.py::read_tensors_compute_the_same_logits_as_numpy",
    "axes derived from its program and shown first": "own/test_own_layout.py"
    "::a_transformer_is_split_as_megatron_splits_it "
    "own/test_own_layout.py::a_block_costs_one_sum_forward_and_one_backward "
    "experiments/test_own_command.py::it_shows_trains_and_resumes_bit_for_bit",
    "a run from three functions, equal to one device": "own/test_own_run.py"
    "::every_example_is_the_same_on_any_layout "
    "own/test_own_run.py::statistics_and_dropout_are_the_same_on_any_mesh",
    "affine scans": "scan/test_affine.py::equals_the_loop",
    "a drop-in for `lax.scan`": "solve/test_parallel_scan.py::every_method_gives_the_states_of_the_loop "
    "solve/test_parallel_scan.py::whatever_a_loop_takes",
    "one fused kernel": "solve/test_kernels_cells.py::sequential_kernel_equals_scan "
    "solve/test_kernels_cells.py::statements_compute_the_cell_and_its_jacobian",
    "gradients exact whatever the method": "solve/test_gradients.py::gradients_to_everything_are_those_of_the_loop "
    "solve/test_elk.py::values_and_gradients_are_those_of_the_loop",
    "failures reported and finished": "solve/test_parallel_scan.py"
    "::what_does_not_converge_is_run_sequentially_or_nan_or_an_error solve/test_robustness.py::no_error_is_silent",
    "mixtures of experts equal to the dense mixture on any mesh": "nn/test_experts.py::it_is_the_dense_mixture "
    "nn/test_experts.py::no_mesh_changes_anything experts/test_transports.py::it_is_the_dense_mixture",
    "chunks of tokens equal steps": "nn/test_linear_attention.py::chunks_equal_steps_in_value_and_gradient "
    "nn/test_linear_attention.py::over_eight_devices_it_is_what_it_is_on_one",
    "mixers trained for equal seconds": "experiments/test_compare.py"
    "::rows_get_what_their_speed_makes_of_the_budget_and_are_trained_once "
    "experiments/test_compare.py::a_speed_is_the_median_of_rounds_in_which_all_take_turns",
    "by what a route says of their class": "experiments/papers/test_information_gain_trellis.py"
    "::it_learns_to_tell_classes_apart",
    "experts that fail or answer with old weights": "nn/test_experts.py::experts_that_fail_are_masked "
    "experiments/papers/test_volunteer_experts.py::training_is_that_of_a_loop_that_keeps_all_old_weights",
    "the best of a grid of them": "experiments/papers/test_volunteer_experts.py::a_beam_finds_the_best_of_all_sums",
    "samples that share their prompt": "decode/test_generate.py::samples_share_their_prompt_and_differ",
    "speculative decoding that gives the plain loop's tokens": "decode/test_generate.py"
    "::any_draft_gives_the_tokens_of_the_slow_oracle",
    "a conformal quantile holds their share": "experiments/papers/test_step_speculation.py"
    "::conformal_shares_are_those_that_are_asked_for "
    "experimental/test_conformal.py::of_exchangeable_scores_the_share_is_alpha_from_the_first_on",
    "a schedule changes no token": "experiments/papers/test_pipelined_speculation.py"
    "::tokens_are_those_of_the_greedy_loop_and_each_is_verified_once",
    "beams, automata": "decode/test_beam.py::beams_equal_the_plain_search "
    "decode/test_generate.py::an_automaton_says_what_may_come_after_what",
    "GRU, LSTM, minGRU": "nn/test_cells.py::a_cell_is_its_papers_equations "
    "nn/test_aaren.py::it_equals_masked_softmax_attention",
    "streams with constant memory": "nn/test_recurrent.py::chunks_and_single_steps_equal_the_whole "
    "nn/test_aaren.py::its_state_does_not_grow",
    "one optimizer configuration": "optim/test_update.py::values_are_those_of_optax_in_double_precision",
    "would not be finite changes nothing and is counted": "optim/test_update.py"
    "::what_is_not_finite_changes_no_bit_and_is_counted",
    "attention over split sequences": "context/test_context.py"
    "::every_move_equals_dense_attention_in_value_and_gradient "
    "lm/test_split_sequence.py::loss_and_gradients_equal_one_device",
    "the cheapest collectives between two placements": "aot/test_placements.py::every_pair_over_one_axis "
    "aot/test_placements.py::a_way_round_is_never_cheaper",
    "one controller of several meshes": "experimental/test_controller.py::random_graphs_equal_numpy_and_never_deadlock",
    "gymnax's, JaxMARL's and others' in": "env/test_adapt.py::gymnax_steps_as_gymnax_does "
    "env/test_adapt.py::gymnax_keeps_the_last_observation_and_both_ends "
    "env/test_adapt.py::dictionaries_are_stacked_padded_and_masked",
    "gymnax and Gymnasium out": "env/test_facade.py::it_runs_in_gymnax_own_tools "
    "env/test_facade.py::six_values_with_the_reset_in_the_same_step "
    "env/test_gymnasium.py::check_env_passes",
    "a policy in thousands of environments": "rollout/test_trajectory.py::equals_a_plain_loop",
    "only finished environments begin anew": "rollout/test_resets.py"
    "::every_finished_environment_is_reset_once_and_nothing_without_one "
    "rollout/test_resets.py::chunks_give_each_finished_environment_its_own_start_and_leave_the_others",
    "one table from logical axes to mesh axes": "test_docs.py::rules_of_the_sharding_page_are_those_of_the_table "
    "test_mesh.py::shard_places_by_the_rules",
    "ZeRO-1 to 3, hybrid": "test_mesh.py::layouts_are_changes_of_the_table "
    "test_docs.py::verify_of_ones_own_model_holds",
    "each layout against one device": "experiments/test_verify_command.py::rows_table_plot_and_exit_code",
    "for your own model by one function": "verify/test_verify.py::a_right_model_holds_in_both_dtypes "
    "verify/test_verify.py::a_wrong_gradient_is_named",
    "chips that you do not have": "experiments/test_estimate.py::gpus_are_estimated_without_one "
    "aot/test_memory_estimate.py::the_account_is_near_the_compiled_program "
    "aot/test_roofline.py::prediction_is_near_the_h100",
    "any environment, ours or gymnax's": "experiments/test_env.py::it_counts_what_happened",
    "beliefs, exact oracles": "pomdp/test_belief.py::particles_follow_the_exact_belief_of_tiger "
    "pomdp/test_exact.py::published_values_between_the_bounds",
    "tree planners whose simulations run together": "pomdp/test_tree.py::equals_a_plain_tree_node_for_node "
    "pomdp/test_pft.py::equals_a_plain_tree_node_for_node pomdp/test_despot.py::equals_a_plain_tree_node_for_node",
    "the same bits every time": "contracts/test_planners.py"
    "::plans_a_legal_action_and_reports_it_by_one_trace_to_the_bit",
    "innovations numbered inside `jit`": "neat/test_neat_operators.py::equal_requests_get_equal_numbers",
    "a generation as one program, bit-equal on 1 to 8 devices": "neat/test_neat_species.py::devices_give_the_same_bits",
    "neat-python's JSON": "neat/test_neat_exchange.py::there_and_back "
    "neat/test_neat_exchange.py::neat_python_gives_the_same_outputs",
    "its energy is kept to the unit": "life/test_world.py::the_book_of_energy_balances_to_the_unit",
    "the right parents have the children": "life/test_world.py::who_eats_inherits_the_world",
    "PPO, A2C, PQN, DQN, TD3, SAC": "rl/test_ppo.py::losses_and_their_gradients_by_hand "
    "rl/test_joint.py::updates_equal_those_by_hand rl/test_joint.py::what_is_replayed_equals_what_happened_by_hand "
    "rl/test_pqn.py::an_update_equals_its_equations rl/test_dqn.py::an_update_equals_its_equations "
    "rl/test_twin_critics.py::td3_by_hand_in_value_and_gradient "
    "rl/test_twin_critics.py::sac_by_hand_in_value_and_gradient "
    "contracts/test_algorithms.py::types_of_the_state_never_change",
    "IPPO, MAPPO, VDN and QMIX": "rl/test_agent.py::a_central_critic_sees_all_and_an_actor_itself_alone "
    "rl/test_value_decomposition.py::a_mixer_equals_its_equations",
    "memories trained over whole rollouts at once": "rl/test_rl_memory.py::a_whole_unroll_equals_its_steps",
    "checkpoints without a topology": "io/test_checkpoint.py::state_returns_bit_for_bit_on_another_mesh",
    "one changed element is always noticed": "io/test_digest.py::every_flip_of_one_bit_shows "
    "io/test_digest.py::device_is_numpy_on_every_dtype_and_layout",
    "the newest whole one used": "io/test_checkpoint.py"
    "::a_damaged_newest_is_named_and_set_aside_and_the_one_before_it_used",
    "one killed process ends all": "experiments/test_launch.py::ctrl_c_saves_a_kill_ends_all_and_both_resume",
    "the only loops": "loop/test_loop.py::fit_in_any_chunks_is_run_bit_for_bit",
    "equals the unbroken one bit for bit": "loop/test_loop.py::a_crashed_run_resumes_with_the_same_bits",
    # flags
    "python -m experiments.lm train.steps=500 seed=3": "test_docs.py::flags_exist",
    "python -m experiments.generate": "test_docs.py::flags_of_other_experiments_exist "
    "experiments/test_generate_command.py::lines_are_those_of_the_slow_loop_whatever_company_draft_and_mesh",
    "python -m experiments.rnn": "test_docs.py::flags_of_other_experiments_exist "
    "experiments/test_rnn.py::it_trains_resumes_and_streams",
    "python -m experiments.neat": "test_docs.py::flags_of_other_experiments_exist "
    "experiments/test_neat.py::it_solves_and_tells",
    "python -m experiments.rl": "test_docs.py::flags_of_other_experiments_exist "
    "experiments/test_rl.py::it_learns_and_goes_on_where_it_was",
    "python -m experiments.pomdp": "pomdp/test_pomdp_page.py::flags_exist",
    "`--help` lists all": "experiments/test_launch.py::help_has_examples",
    "the nearest legal choice is data=8": "experiments/test_errors.py::bad_flags",
    # as a library
    "`data=2, fsdp=2, tensor=2` prints the same number": "test_docs.py::readme_snippet_learns_the_same_on_both_meshes",
    "the pillars `lm`, `pomdp`, `neat`, `rl`, `life`": "test_claims.py::the_rooms_named_are_those_of_the_library",
    "environments in families, one a file": "env/test_page.py::every_environment_is_named_once",
    "01: A language model trained on a mesh": "test_notebooks.py::runs_small",
    "[Quick start](docs/quickstart.md)": "test_docs.py::links_resolve",
}

# Page -> the same of what the README leaves to it.
PAGES = {
    "README.md": CLAIMS,
    "docs/quickstart.md": {
        "853,120 parameters in 4 layers": "test_claims.py::the_run_shown_is_that_of_the_default_flags",
        "runs/lm/tiny-90ecd57b": "test_docs.py::the_run_folder_shown_is_the_one_of_the_default_run",
        "loss plot": "experiments/test_kill.py::the_uninterrupted_run_leaves_its_files",
        "mode=sample": "experiments/test_kill.py::eval_and_sample_work_on_a_run",
        "mode=export": "experiments/test_export.py::a_hugging_face_folder_gives_the_same_logits "
        "lm/test_exchange.py::round_trip_is_exact",
        "four real [processes](pods.md)": "distributed/test_processes.py::two_processes_equal_one "
        "experiments/test_launch.py::help_has_examples",
    },
    "docs/experts.md": {
        "in value and in every gradient": "nn/test_experts.py::it_is_the_dense_mixture",
        "logits equal those of NumPy twins of the formulas": "lm/test_exchange.py"
        "::written_tensors_compute_the_same_logits_in_numpy",
        "says so in one sentence": "lm/test_folders.py::another_number_of_experts_is_told",
        "the load of each expert of each layer": "lm/test_mixtures.py"
        "::loads_for_the_picture_are_those_of_a_loop io/test_plots.py::experts_are_drawn_with_what_is_there",
        "every expert's attention of every token under a mask": (
            "experimental/test_attention_experts.py::it_is_the_dense_mixture"
        ),
        "Outputs and gradients are those of the dense": "experts/test_lend.py::it_is_the_dense_mixture",
        "dealt out first ones first": "experts/test_lend.py::choices_are_dealt_as_a_loop_deals_them",
        "Rows sorted by block give the numbers and gradients": "experiments/papers/test_information_gain_trellis.py"
        "::hard_routes_are_the_masked_dense_evaluation",
    },
    "docs/decoding.md": {
        "a draft changes how many passes there are, never a token": "decode/test_generate.py"
        "::any_draft_gives_the_tokens_of_the_slow_oracle test_docs.py::decoding_snippet_prints_what_it_says",
        "by enumerating every path, to 1e-12": "decode/test_accept.py::the_law_of_what_is_emitted_is_the_targets "
        "decode/test_generate.py::by_rejection_the_law_is_kept",
        "a fork copies nothing": "decode/test_reader.py::the_cache_is_not_copied "
        "decode/test_forest.py::any_steps_lead_to_what_lists_say",
        "Two rows of one prompt and one seed agree": "decode/test_generate.py::a_row_has_its_own_seed_and_no_place "
        "decode/test_company.py::tokens_depend_on_no_company_and_no_place",
        "the first difference is where the two best scores were that near": "decode/test_company.py"
        "::tokens_are_those_of_the_slow_oracle_but_for_near_ties",
        "the tokens are those of the target alone": "experiments/papers/test_step_speculation.py"
        "::where_all_is_rejected_tokens_are_those_of_the_target_alone",
        "from the first score on": "experimental/test_conformal.py"
        "::of_exchangeable_scores_the_share_is_alpha_from_the_first_on",
        "counted as a loop that keeps one cache would count them": "experiments/papers/test_step_speculation.py"
        "::texts_lines_and_counts_are_those_of_a_plain_loop",
        "that ends in an error if it is not": "experiments/papers/test_pipelined_speculation.py"
        "::a_wrong_text_is_noticed",
        "a plain count of the same events gives every tick": "experiments/papers/test_pipelined_speculation.py"
        "::tokens_are_those_of_the_greedy_loop_and_each_is_verified_once "
        "experiments/papers/test_pipelined_speculation.py::ticks_a_token_are_those_of_the_closed_form "
        "experiments/papers/test_pipelined_speculation.py::cancelling_saves_work_and_no_tick",
        "The same command goes on": "experiments/test_generate_command.py"
        "::what_is_there_is_neither_drawn_again_nor_touched "
        "experiments/test_generate_command.py::lines_of_others_are_left_alone",
    },
    "docs/stack.md": {
        "mixes in `jaxpar.lm`": "lm/test_mixer.py::streaming_equals_the_whole_sequence "
        "lm/test_mixer.py::generation_equals_asking_the_whole_model",
        "adapters and rounded weights in any product": "nn/test_linear.py::an_adapter_is_the_sum_of_both_weights "
        "nn/test_linear.py::eight_bits_are_off_by_half_a_scale_at_most",
        "it is written in place": "nn/test_stack.py::a_step_writes_the_cache_in_place_and_copies_none_of_it "
        "nn/test_stack.py::slots_can_be_split_over_devices",
    },
    "docs/matrix_state.md": {
        "plain loops in NumPy, to 1e-9 in float64": "nn/test_mixer_papers.py"
        "::a_layer_is_its_papers_equations_in_value_and_gradient",
        '"State" counts numbers a head': "nn/test_mixer_papers.py"
        "::states_are_as_large_as_the_page_says_whatever_came_before",
    },
    "docs/mixers.md": {
        "Streamed outputs equal whole ones to 1e-10 in float64, and gradients too": "nn/test_lmuformer.py"
        "::a_network_streams_with_the_values_and_gradients_of_the_whole",
        "however tokens fall (counted in the program)": "experiments/papers/test_scattered_attention.py"
        "::its_cost_is_that_of_its_tokens_alone",
        "values and gradients are equal": "experiments/papers/test_scattered_attention.py"
        "::it_is_its_sums_over_pairs_in_value_and_gradient",
    },
    "docs/benchmarks.md": {
        "torch's GRU and LSTM to 1e-13": "nn/test_cells.py::gru_equals_torch nn/test_cells.py::lstm_equals_torch "
        "nn/test_cells.py::a_cell_is_its_papers_equations",
        "86 of 86 rows hold": "test_claims.py::the_layouts_that_verify_judges_are_counted",
        "compiled for eight v5e chips": "distributed/test_tpu.py::tpu_program",
        "equal to backpropagation through time in float64": "rl/test_pqn.py"
        "::gradients_through_a_memory_equal_backpropagation_through_time",
    },
    "docs/rl.md": {
        "**inside the parallel solve** wherever an episode begins": "rl/test_rl_memory.py"
        "::the_past_before_a_start_is_forgotten",
    },
}


# What is not among the packages of `make test`.
FOREIGN = re.compile(
    r"triton_interpreter\.NEEDED|importorskip\(.(torch|transformers|pyarrow|zstandard|jaxmarl|jumanji|navix|pgx|xminigrid)"
)


@functools.cache
def fast_tests(name):
    """The tests of a file that `make test` runs, at least with some of their parameters."""
    path = ROOT / "tests" / name
    if not path.is_file():
        return set()
    functions = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.FunctionDef)
    ]
    slow = {
        node.name
        for node in functions
        if "pytest.mark.slow" in map(ast.unparse, node.decorator_list)
    }
    return {node.name for node in functions} - slow


@functools.cache
def skipping_tests(name):
    """The tests of a file that `make test` skips, since they ask for what its installation lacks."""
    body = ast.parse((ROOT / "tests" / name).read_text()).body
    functions = [node for node in body if isinstance(node, ast.FunctionDef)]
    return {node.name for node in functions if FOREIGN.search(ast.unparse(node))}


@pytest.mark.parametrize("page", PAGES)
def test_each_claim_has_fast_tests(page):
    """And one of them runs wherever `make test` does."""
    said = " ".join((ROOT / page).read_text().split())
    gone = [f"{page} does not say {words!r}" for words in PAGES[page] if words not in said]
    for words, tests in PAGES[page].items():
        named = [test.partition("::") for test in tests.split()]
        missing = [
            (file, test) for file, _, test in named if f"test_{test}" not in fast_tests(file)
        ]
        gone += [f"{words!r}: tests/{file} has no fast test_{test}" for file, test in missing]
        if not missing and all(f"test_{test}" in skipping_tests(file) for file, _, test in named):
            gone.append(f"{words!r}: make test skips each of its tests")
    assert not gone, "\n" + "\n".join(gone)


def test_each_row_and_each_experiment_of_the_readme_is_claimed():
    rows = re.findall(r"^\| (`jaxpar\.|`experiments\.)(.*)\|$", README, re.MULTILINE)
    unclaimed = [row for _, row in rows if not any(words in row for words in CLAIMS)]
    assert len(rows) >= 13 and not unclaimed
    files = {test.partition("::")[0] for tests in CLAIMS.values() for test in tests.split()}
    experiments = set(re.findall(r"python -m experiments\.(\w+)", README))
    tested = {re.sub(r"experiments/test_(\w+?)(_command)?\.py", r"\1", file) for file in files}
    assert experiments - tested <= {"lm", "pomdp"}, (
        "of which test_kill.py and pomdp/test_pomdp_page.py run"
    )


def test_the_readme_is_one_screen_and_one_table_of_short_cells():
    """What it is, whom it serves and what to type come first; measurements are docs/benchmarks.md's."""
    lines = README.splitlines()
    rows = [number for number, line in enumerate(lines) if line.startswith("|")]
    assert rows[0] <= 45 and rows == list(range(rows[0], rows[-1] + 1)), (
        "one table, after one screen"
    )
    assert lines[rows[0]] == "| room | what it does | page |"
    cells = [
        cell
        for number in rows
        for cell in re.sub(r"\]\([^)]*\)", "]", lines[number]).strip("| ").split("|")
    ]
    assert len(cells) == 3 * len(rows) and not [cell for cell in cells if len(cell.split()) > 25]


def test_the_run_shown_is_that_of_the_default_flags(monkeypatch, tmp_path):
    # The layout is that of a text, which the command finds when it opens the corpus.
    said, config = [], lm.with_vocabulary(lm.compose("data.layout=stream"), Bytes())
    monkeypatch.setattr(lm, "say", said.append)
    mesh, corpus = (
        make_mesh(MeshSpec(data=2, fsdp=2, tensor=2)),
        SimpleNamespace(describe=lambda: "corpus 806ee97a62d4", tokenizer=Bytes()),
    )
    said.append(f"mesh       {lm._mesh_text(mesh)}")
    with use_mesh(mesh):
        lm._tell_start(config, tmp_path, corpus, lm.make_trainer(config), None, 0)
    shown = (ROOT / "docs" / "quickstart.md").read_text()
    lines = [line for line in said if not line.startswith("run ")]
    assert len(lines) == 6 and not [line for line in lines if line not in shown]


def test_the_layouts_that_verify_judges_are_counted():
    """Two rows of each, float64 and compiled for a TPU, and float32 of some."""
    config = verify.Config()
    proof = judged_trainings.Proof(config)
    rows = 0
    legal = 0
    for number, layout in enumerate(verify.chosen_layouts(config, 8)):
        with contextlib.suppress(UsageError):
            trainer = proof.trainer(layout, proof.training(layout, number), "float32")
            shapes = jax.eval_shape(lambda trainer=trainer: trainer.init(jax.random.key(0)))
            with use_mesh(make_mesh(layout.mesh), rules_from(layout=layout.name)):
                named_shardings(shapes, trainer.axes())
            legal += 1
            rows += 2 + (number % config.float32_every == 0)
    for page in ("benchmarks.md", "sharding.md"):
        text = (ROOT / "docs" / page).read_text()
        layouts = re.search(r"(\d+) legal layouts", text)[1]
        judged = re.search(r"(\d+) of \1 rows hold", text)[1]
        assert (legal, rows) == (int(layouts), int(judged))


def test_the_rooms_named_are_those_of_the_library():
    named = re.search(r"the library: (.*?), and the pillars (.*?)\.\n", README, re.DOTALL)
    rooms = set(re.findall(r"`(\w+)`", named[1] + named[2]))
    found = {
        path.stem
        for path in (ROOT / "jaxpar").iterdir()
        if not path.stem.startswith("_") and path.suffix != ".typed"
    }
    aliases = {"envs", "commands"}  # folders beside the library, which the next rows name
    assert rooms == found - aliases and aliases < found
