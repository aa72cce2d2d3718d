"""What a GPU runs in kernels, here interpreted: the same as the slots and sweeps that every platform has."""

import contextlib
import functools
import math

import gymnax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from jax.sharding import AbstractDevice, AbstractMesh
from plain_neat import ACTIVATIONS, Network, random_genomes

import envs
from jaxpar.env import adapt
from jaxpar.mesh import AXES
from jaxpar.neat import Episodes, Neat, NeatConfig, apply, express, io_sizes
from jaxpar.neat._kernels import feedforward_kernel, use_kernels
from jaxpar.neat._scalars import NotScalar, scalarize
from jaxpar.neat.distance import centres_of, slot_ids
from jaxpar.neat.episodes import PlayOptions, _Player
from jaxpar.neat.genome import first
from jaxpar.neat.graph import has_cycle, reachable, singleton

# Op by op they are dozens of programs each.
expressed = jit(express, static_argnames=("config", "width", "form"))
kernel = jit(functools.partial(feedforward_kernel, interpret=True))
applied = jit(lambda networks, x: apply(networks, (), x)[0])


def made(name):
    if name.startswith("Double"):
        return envs.make(name)
    env, params = gymnax.make(name)
    return adapt(env, params), params


def game_of(name, kind, nodes=14, episodes=2, max_steps=30, sub_steps=1):
    env, params = made(name)
    sizes = io_sizes(env, params, True)
    config = NeatConfig(*sizes, 6, nodes, 3 * nodes, 4, "fast", kind=kind, sub_steps=sub_steps)
    genomes = random_genomes(np.random.default_rng(8), config, config.population)
    networks = expressed(config, genomes)
    return _Player(
        key=jax.random.key(3),
        networks=networks,
        env=env,
        params=params,
        episodes=episodes,
        max_steps=max_steps,
        options=PlayOptions(compacts=False),
    )


@pytest.mark.parametrize(
    "name, kind, sub_steps",
    [("CartPole-v1", "feedforward", 1), ("DoublePole", "recurrent", 3), ("Pendulum-v1", "feedforward", 1)],
)  # fmt: skip
def test_a_kernel_plays_what_slots_play(name, kind, sub_steps):
    game = game_of(name, kind, sub_steps=sub_steps)
    whole, slots = (
        jax.jit(game.by_kernel(interpret=True))(),
        jax.jit(lambda: game.play_in_slots(12))(),
    )
    np.testing.assert_array_equal(whole.lengths, slots.lengths)
    # Rounding of other sums of weights, which a swing-up carries on: float32, 30 steps.
    np.testing.assert_allclose(whole.returns, slots.returns, rtol=1e-5, atol=1e-4)
    assert whole.env_steps == whole.lengths.sum() <= slots.env_steps
    assert len(np.unique(whole.returns)) > 2


@pytest.mark.parametrize("nodes, form, activations", [
    (14, "matrix", ("sigmoid",)), (30, "edges", ("tanh", "gauss", "relu")), (18, "matrix", ("identity", "sin"))
])  # fmt: skip
def test_networks_settle_to_what_sweeps_give(nodes, form, activations):
    config = NeatConfig(
        3,
        2,
        8,
        nodes,
        3 * nodes,
        4,
        "fast",
        activations=activations,
        output_activation=activations[0],
    )
    genomes = random_genomes(np.random.default_rng(5), config, 8)
    networks = expressed(config, genomes, form=form)
    x = jax.random.normal(jax.random.key(1), (8, 3, 3))
    found, swept = kernel(networks, x), applied(networks, x)
    plain = [[Network(config, genomes.rows(p))(row) for row in x[p]] for p in range(8)]
    # Sums of weights in another order, float32, carried over as many levels as there are.
    np.testing.assert_allclose(found, swept, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found, plain, rtol=1e-4, atol=1e-4)
    assert int(networks.sweeps) > 2 and np.std(found) > 1e-3


@pytest.mark.parametrize("name", ["Acrobot-v1", "Breakout-MinAtar"])
def test_what_draws_or_indexes_is_left_to_slots(name):
    game = game_of(name, "feedforward", nodes=500 if "MinAtar" in name else 14)
    with pytest.raises(NotScalar, match="it (draws|uses)|makes more than"):
        game.scalar_step()
    assert game.by_kernel(interpret=True) is None


def test_a_function_of_arrays_is_one_of_numbers():
    def f(x, n):
        ends = jnp.concatenate([x[::-1], jnp.stack([x.max(), x.min()])])
        square = jax.checkpoint(lambda x: jnp.outer(x, x))(x)[1:].T.reshape(2, 3)
        picked = jax.lax.cond(n > 2, lambda: x * 2.0, lambda: -x)
        return [ends, square.sum(0), jnp.argmax(x), jnp.any(x > 1), jnp.clip(x, -1, 1) ** 3, picked, jnp.arange(3) * n,
                jnp.where(n > 2, x, 0.0), jnp.prod(x), jnp.argmin(ends)]  # fmt: skip

    plain, scalar = jit(f), jit(scalarize(f, jnp.zeros(3), jnp.int32(0)))
    for x in ([0.5, 3.0, -2.0], [1.0, 1.0, 0.0]):
        for n in (1, 5):
            expected = np.concatenate(
                [np.ravel(leaf) for leaf in plain(np.float32(x), np.int32(n))]
            )
            found = scalar(*map(np.float32, x), np.int32(n))
            np.testing.assert_allclose(
                np.array([float(number) for number in found]), expected, rtol=1e-6
            )


def test_only_what_counts_is_looked_at():
    def f(x):
        noise = jax.random.normal(jax.random.key(0))
        return [x + 1, x * noise]

    with pytest.raises(NotScalar, match="it uses a key"):
        scalarize(f, jnp.float32(1))
    with pytest.raises(NotScalar, match="more than 256"):
        scalarize(lambda x: [x[0]], jnp.zeros(257))
    assert float(scalarize(lambda x: f(x)[:1], jnp.float32(1))(jnp.float32(1))[0]) == 2


def test_as_many_numbers_as_256_may_be_made_on_the_way():
    def product(x):
        return [jnp.outer(x, x)[-1, -1]]

    assert float(scalarize(product, jnp.zeros(16))(*jnp.arange(16.0))[0]) == 15 * 15
    with pytest.raises(NotScalar, match="makes more than 256"):
        scalarize(product, jnp.zeros(17))


def test_the_ways_of_a_gpu_give_the_same(monkeypatch):
    """Reductions, searches and looks at loops are done otherwise where JAX's first platform is a GPU."""
    config = NeatConfig(3, 2, 40, 40, 90, 5, "fast", kind="recurrent")
    genomes = jax.tree.map(jnp.asarray, random_genomes(np.random.default_rng(2), config, 40))
    ends = genomes.source, genomes.target, genomes.on

    def ways(genomes):
        centres = centres_of(genomes.rows(slice(0, 5)))
        begin = singleton(jnp.arange(40, dtype=jnp.int32) % 7, 40)
        return (first(~genomes.on), first(genomes.on.T, 0), slot_ids(centres, genomes.innovation), has_cycle(*ends, 40),
                reachable(begin, *ends, 40))  # fmt: skip

    plain = jax.jit(lambda genomes: ways(genomes))(genomes)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    jax.tree.map(
        np.testing.assert_array_equal, jax.jit(lambda genomes: ways(genomes))(genomes), plain
    )
    assert 0 < plain[3].sum() < 40


def for_cuda(f, *args):
    """What `f` is lowered to for a CUDA GPU, here."""
    card = AbstractDevice(device_kind="NVIDIA H100", num_cores=None, platform="cuda")
    mesh = jax.sharding.use_abstract_mesh(
        AbstractMesh((1,) * len(AXES), AXES, abstract_device=card)
    )
    with (
        mesh if jax.__version_info__ >= (0, 11) else contextlib.nullcontext()
    ):  # 0.11 asks what card it is
        return jax.jit(f).trace(*args).lower(lowering_platforms=("cuda",)).as_text()


SLOPE = jnp.float32(0.001)


@pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)  # by jax 0.11
@pytest.mark.parametrize("function, plain, inlines", [
    (lambda z: jnp.where(z > 0, z, 0.001 * z), lambda z: z if z > 0 else 0.001 * z, True),
    (jax.nn.silu, lambda z: z / (1 + math.exp(-z)), True),
    (jax.lax.erf, math.erf, False),  # what Triton may lack
    (lambda z: jnp.where(z > 0, z, SLOPE * z), lambda z: z if z > 0 else 0.001 * z, False),  # no kernel takes the array
])  # fmt: skip
def test_activations_of_ones_own_are_inlined_or_left_to_sweeps(
    monkeypatch, function, plain, inlines
):
    own = (("mine", function),)
    config = NeatConfig(
        3, 2, 4, 10, 20, 4, "fast", activations=("tanh", "mine"), own_activations=own
    )
    networks = expressed(config, random_genomes(np.random.default_rng(5), config, 4))
    x = jax.random.normal(jax.random.key(1), (4, 2, 3))
    calls = lambda networks, x: apply(networks, (), x)[0]  # noqa: E731
    monkeypatch.setitem(ACTIVATIONS, "mine", plain)
    genomes = random_genomes(np.random.default_rng(5), config, 4)
    want = [[Network(config, genomes.rows(p))(row) for row in x[p]] for p in range(4)]
    found = kernel(networks, x) if inlines else jax.jit(calls)(networks, x)
    np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert use_kernels(networks) == inlines == ("xla.gpu.triton" in for_cuda(calls, networks, x))


@pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated:DeprecationWarning"
)  # by jax 0.11
@pytest.mark.parametrize("batched", [False, True])
def test_a_generation_lowers_for_cuda(monkeypatch, batched):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    env, params = made("CartPole-v1")
    neat = Neat(NeatConfig(5, 1, 6, 14, 28, 4, "fast"), Episodes(env, 475.0, max_steps=20))
    step = jax.vmap(neat.step, (0, None, None)) if batched else neat.step
    key = jax.random.split(jax.random.key(0), 2) if batched else jax.random.key(0)
    state = jax.eval_shape(lambda: neat.init(jax.random.key(0), None))
    text = for_cuda(step, key, state, params)
    assert "xla.gpu.triton" in text and "play_episodes" in text
