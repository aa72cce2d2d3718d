"""A world's step equals its plain twin; its energy is kept to the unit; it is the same on a torus and on devices."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fast import jit
from plain_world import PlainWorld, plain_maps

from jaxpar.life import (
    ACTION_WIDTHS,
    NUM_ACTIONS,
    Jitter,
    Laws,
    Lstm,
    Reflex,
    World,
    action_index,
    action_slice,
    bodies,
    join_actions,
)
from jaxpar.life.births import REPRODUCE, newcomers, pair_parents
from jaxpar.life.bodies import SHOWN, nearest, read_actions
from jaxpar.life.brains import sight_of_one
from jaxpar.life.inhabitants import open_world, see, shown
from jaxpar.life.laws import FIRST_LAWS, Prices
from jaxpar.life.terrain import base_maps
from jaxpar.life.units import ONE, wide_sum
from jaxpar.mesh import MeshSpec, make_mesh, shard, use_mesh
from jaxpar.types import UsageError


@dataclasses.dataclass(frozen=True)
class Linear(Reflex):
    """A brain that is quick to compile, does what its bias says, and sees a little where its weights are not 0."""

    def init(self, key, sight, count):
        keys, size = jax.random.split(key), sight.own.shape[0] + sight.ground.shape[0] + 44
        return {"bias": jax.random.normal(keys[0], (count, 44)) / 4,
                "weight": jax.random.normal(keys[1], (count, 44, size)) / 8}  # fmt: skip

    def rest(self, count):
        return jnp.zeros((count, 44))

    def act(self, genomes, carry, sight):
        seen = jnp.concatenate((sight.own, sight.ground, carry), 1)
        outputs = jnp.clip(
            genomes["bias"] + jnp.einsum("noi,ni->no", genomes["weight"], seen), -1, 1
        )
        return outputs, outputs


SMALL = World(
    Linear(Jitter(0.1)), num_agents=16, num_robots=5, size=8, lattice=2, window=3, sight=3, seen_agents=4,
    seen_robots=2, max_births=4, newcomers=4, ticks=2, laws=dataclasses.replace(FIRST_LAWS, fee=1, child=2, start=8),
)  # fmt: skip
THINKING = dataclasses.replace(SMALL, brain=Lstm(8, 8, 2, Jitter(0.1)))


def acting(state, bias):
    """The state, whose agents do what `bias` says."""
    genome = {"bias": jnp.asarray(bias), "weight": jnp.zeros_like(state.agents.genome["weight"])}
    return state._replace(agents=state.agents._replace(genome=genome))


@functools.cache
def programs():
    """A first state, and a step with what was seen before it; both compiled once for this file."""

    def step(key, state, prices):
        near = SMALL.look(state)
        sight = see(state.agents, state.robots, state.terrain, near[0], near[1], SMALL.window)
        state, info = SMALL.step(key, state, prices)
        return state, info, sight, base_maps(state.terrain.angles, SMALL.size)

    return jit(SMALL.init), jit(step)


@functools.cache
def usual_prices():
    return jax.tree.map(jnp.int32, SMALL.laws.prices())


def prices(**changes):
    return usual_prices()._replace(**{name: jnp.int32(value) for name, value in changes.items()})


def crowd(seed, corner=3):
    """A state in which much happens: bodies in a few cells, some dead, some rich, robots of all operations."""
    rng, (init, _) = np.random.default_rng(seed), programs()
    state = init(jax.random.key(seed), None)
    n, r = SMALL.num_agents, SMALL.num_robots
    ints = lambda low, high, *shape: jnp.asarray(rng.integers(low, high + 1, shape), jnp.int32)  # noqa: E731
    alive = jnp.asarray(rng.random(n) < 0.7)
    own, spoken, heard = (ints(-ONE, ONE, n, 16) for _ in range(3))
    energy = jnp.where(alive, ints(1, 60 * ONE, n) // (1 + 99 * ints(0, 1, n)), 0)
    place = lambda k: jnp.mod(ints(-ONE, corner * ONE, k, 2), SMALL.side)  # noqa: E731
    agents = state.agents._replace(
        alive=alive, energy=energy, age=ints(0, 500, n), position=place(n), kind=ints(-ONE, ONE, n, 8), own=own,
        spoken=spoken, heard=heard, last=ints(-ONE, ONE, n, 11), lineage=ints(0, 5, n),
    )  # fmt: skip
    memory = ints(-ONE, ONE, r, 16).at[:, 4].set(ONE * ints(-1, 1, r))
    robots = state.robots._replace(
        energy=ints(0, 9000, r), position=place(r), memory=memory, program=ints(-ONE, ONE, r, 16)
    )
    ground = state.terrain._replace(energy=ints(0, 2 * ONE, 8, 8), bit=ints(0, 1, 8, 8))
    return acting(open_world(agents, robots, ground, state.lineages), ints(-ONE, ONE, n, 44) / ONE)


def flat(state):
    """What a twin must have, by name, as int64."""
    a, r, t = state.agents, state.robots, state.terrain
    found = {
        "alive": a.alive, "energy": jnp.concatenate((a.energy, r.energy)), "age": a.age, "kind": a.kind, "own": a.own,
        "place": jnp.concatenate((a.position, r.position)), "spoken": a.spoken, "heard": a.heard, "last": a.last,
        "lineage": a.lineage, "memory": r.memory, "program": r.program, "cells": t.energy, "fields": t.fields,
        "bit": t.bit,
    }  # fmt: skip
    return {name: np.asarray(x).astype(np.int64) for name, x in found.items()}


@pytest.mark.parametrize("seed", range(6))
def test_a_step_equals_one_inhabitant_after_the_other(seed):
    _, step = programs()
    state, key = crowd(seed, corner=2 + seed % 2), jax.random.key(100 + seed)
    after, info, sight, base = step(key, state, prices())
    plain = PlainWorld(SMALL, state)
    plain.look()
    for i in np.flatnonzero(plain.alive):
        for name, got, want in zip(sight._fields, sight, plain.sight(i), strict=True):
            np.testing.assert_allclose(
                got[i], np.asarray(want, float), rtol=1e-5, atol=1e-6, err_msg=name
            )
    heat = plain.step(np.round(np.asarray(state.agents.genome["bias"]) * ONE).astype(int))
    kind_key = jax.random.split(jax.random.split(key)[1])[0]
    noise = jax.random.randint(
        kind_key, (SMALL.max_births, 8), -ONE // 16, ONE // 16 + 1, jnp.int32
    )
    pairs, fees = plain.bear(np.asarray(noise).astype(object))
    regrowth, overflow, more = plain.grow(np.asarray(base).astype(object))
    for name, got in flat(after).items():
        np.testing.assert_array_equal(
            got, np.asarray(getattr(plain, name)).astype(np.int64), err_msg=name
        )
    book = after.ledger
    assert [x.exact() for x in book[:3]] == [regrowth, overflow, heat + fees + more]
    assert info["births"] == len(pairs) and info["imbalance"] == 0
    for parent, child in pairs:
        for name in ("bias", "weight"):
            noise = after.agents.genome[name][child] - state.agents.genome[name][parent]
            assert 0.05 < np.std(noise) < 0.15, name


def test_these_steps_have_all_there_is():
    after = [
        programs()[1](jax.random.key(100 + seed), crowd(seed, 2 + seed % 2), prices())[:2]
        for seed in range(6)
    ]
    for name in ("births", "deaths", "eaten", "overflow", "heat"):
        assert sum(float(info[name]) for _, info in after) > 0, name
    assert any((state.agents.heard != 0).any() for state, _ in after)


def test_base_maps_are_gradient_noise():
    angles = jax.random.bits(jax.random.key(0), (6, 2, 2)).astype(jnp.int32)
    np.testing.assert_allclose(base_maps(angles, 8) / 2**20, plain_maps(angles, 8), atol=0.05)


def rolled(state, tiles):
    """The same world seen from elsewhere: `tiles` lattice sides further along either axis."""
    cells = tuple(t * SMALL.size // SMALL.lattice for t in tiles)
    move = lambda x: jnp.mod(x + ONE * jnp.asarray(cells)[None], SMALL.side)  # noqa: E731
    t = state.terrain
    return state._replace(
        agents=state.agents._replace(position=move(state.agents.position)),
        robots=state.robots._replace(position=move(state.robots.position)),
        terrain=t._replace(
            energy=jnp.roll(t.energy, cells, (0, 1)), fields=jnp.roll(t.fields, cells, (1, 2)),
            bit=jnp.roll(t.bit, cells, (0, 1)), angles=jnp.roll(t.angles, tiles, (1, 2)),
        ),
    )  # fmt: skip


@pytest.mark.parametrize("tiles", [(1, 0), (0, 1), (1, 1)])
def test_a_shifted_torus_has_the_shifted_outcome(tiles):
    step, still = programs()[1], prices(drift=0)  # weather is drawn by place
    straight, shifted = crowd(1), rolled(crowd(1), tiles)
    for number in range(3):
        key = jax.random.key(number)
        straight, shifted = step(key, straight, still)[0], step(key, shifted, still)[0]
    want = rolled(straight, tiles)
    jax.tree.map(np.testing.assert_array_equal, shifted, want)
    assert (np.asarray(want.terrain.energy) != np.asarray(straight.terrain.energy)).any()


def test_negative_actions_give_no_energy():
    state, (_, step) = crowd(0), programs()
    bias = -jnp.abs(state.agents.genome["bias"])
    keep = jnp.zeros_like(state.robots.program).at[:, 1].set(ONE)
    robots = state.robots._replace(memory=-jnp.abs(state.robots.memory), program=keep)
    negative = acting(state._replace(robots=robots), bias)
    after, info, *_ = step(jax.random.key(0), negative, prices(upkeep=0, aging=0))
    assert info["eaten"] == 0 and info["births"] == 0
    held = [
        int(np.sum(np.concatenate((s.agents.energy, s.robots.energy)), dtype=np.int64))
        for s in (negative, after)
    ]
    assert held[1] < held[0]  # gifts stay among bodies; all else costs
    assert (np.asarray(after.terrain.fields) >= 0).all()
    # Either sign of moving, pushing and shaping costs the same; but for gain, which the ground itself turns into heat.
    numbers = np.arange(NUM_ACTIONS)
    parts = [numbers[action_slice(name)] for name in ("move", "push", "shape")]
    signed = jnp.asarray(np.concatenate(parts)[[0, 1, 2, 4, 5, 6, 7]])
    heats = []
    for size in (0.75, -0.75):
        one_way = acting(state, jnp.zeros_like(bias).at[:, signed].set(size))
        heats.append(step(jax.random.key(0), one_way, prices())[1]["heat"])
    assert heats[0] == heats[1]


def book_of(state):
    """All energies of a state, and its book: exact."""
    agents, robots, cells = state.agents.energy, state.robots.energy, state.terrain.energy
    assert min(np.min(agents), np.min(robots), np.min(cells)) >= 0
    held = sum(int(np.sum(x, dtype=np.int64)) for x in (agents, robots, cells))
    return held, [x.exact() for x in state.ledger]


def check_book(states, infos):
    """The change of what there is, is what came in, less what spilled and went; after every step."""
    births = deaths = 0
    held, _ = book_of(states[0])
    for state, info in zip(states[1:], infos, strict=True):
        before, (held, (regrowth, overflow, heat, total)) = held, book_of(state)
        assert (
            held - before == regrowth - overflow - heat and total == held and info["imbalance"] == 0
        )
        births, deaths = births + info["births"], deaths + info["deaths"]
    assert births > 0 and deaths > 0


def walk(steps, count=0):
    """A world's first state and its states and infos after each step, on that many devices; 0 for no mesh."""
    (init, step), states, infos = programs(), [], []

    def go_on():
        state = init(jax.random.key(0), None)
        states.append(shard(state, SMALL.axes()) if count else state)
        for number in range(steps):
            state, info, *_ = step(
                jax.random.fold_in(jax.random.key(1), number), states[-1], prices()
            )
            states.append(state)
            infos.append(info)
        return jax.device_get((states, infos))

    if not count:
        return go_on()
    with use_mesh(make_mesh(MeshSpec(data=count), devices=jax.devices()[:count])):
        return go_on()


@functools.cache
def short_walk():
    return walk(200)


def test_the_book_of_energy_balances_to_the_unit():
    check_book(*short_walk())


def test_devices_give_the_same_bits():
    states, _ = walk(12, 8)
    jax.tree.map(np.testing.assert_array_equal, states, short_walk()[0][:13])
    assert (
        not states[0].agents.genome["bias"].tobytes() == states[-1].agents.genome["bias"].tobytes()
    )


def long_run(count, chunks, chunk=100):
    """States of `THINKING` after each chunk of steps, and of all steps energies and the book."""

    def body(state, step):
        state, info = THINKING.step(jax.random.fold_in(jax.random.key(1), step), state, None)
        held = (
            wide_sum(jnp.concatenate((state.agents.energy, state.robots.energy))),
            wide_sum(state.terrain.energy),
        )
        return state, (held, state.ledger, info)

    def go_on():
        state = jit(THINKING.init)(jax.random.key(0), None)
        states, rows = [shard(state, THINKING.axes()) if count else state], []
        program = jax.jit(lambda state, start: jax.lax.scan(body, state, start + jnp.arange(chunk)))
        for number in range(chunks):
            state, row = program(states[-1], jnp.int32(chunk * number))
            states, rows = [*states, state], [*rows, row]
        return jax.device_get(states), jax.tree.map(
            lambda *x: np.concatenate(x), *jax.device_get(rows)
        )

    if not count:
        return go_on()
    with use_mesh(make_mesh(MeshSpec(data=count), devices=jax.devices()[:count])):
        return go_on()


@pytest.mark.slow  # 3 min on a busy core, of which compiling takes one
def test_it_does_for_ten_thousand_steps_of_the_usual_brain(optimised):
    states, (held, book, info) = long_run(0, 100)
    wide = lambda x: np.asarray(x.high, np.int64) * 2**20 + x.low  # noqa: E731
    sums = np.concatenate([[book_of(states[0])[0]], wide(held[0]) + wide(held[1])])
    np.testing.assert_array_equal(
        np.diff(sums), wide(book.regrowth) - wide(book.overflow) - wide(book.heat)
    )
    np.testing.assert_array_equal([book_of(state)[0] for state in states[1:]], sums[100::100])
    assert info["births"].sum() > 100 and info["deaths"].sum() > 100 and not info["imbalance"].any()


@pytest.mark.slow  # 60 s
def test_devices_give_the_same_bits_with_the_usual_brain(optimised):
    jax.tree.map(np.testing.assert_array_equal, long_run(8, 1)[0], long_run(0, 1)[0])


@dataclasses.dataclass(frozen=True)
class Shuffled(World):
    """The original's defect: parents are read from another order than the one that they were chosen in."""

    def children(self, key, agents, births, prices):
        anyone = jax.random.categorical(
            key, jnp.where(agents.alive, 0.0, -jnp.inf), shape=births.parent.shape
        )
        return super().children(key, agents, births._replace(parent=anyone), prices)


EATER, IDLER = (np.zeros(NUM_ACTIONS, np.float32) for _ in range(2))
EATER[[action_index("eat"), action_index("reproduce")]] = 1
IDLER[action_index("reproduce")] = 1


def fixed_worlds(kind, count, steps):
    """In how many of `count` worlds eaters are alone in the end, and idlers.

    Death comes to all alike, by chance, so that only who is a parent decides.
    """
    world = kind(
        Reflex(), num_agents=10, num_start=10, num_robots=2, size=4, lattice=1, window=1, seen_agents=1, seen_robots=1,
        max_births=10, newcomers=0, ticks=1, laws=Laws(start=1, child=0.5, fee=0, upkeep=0, aging=0, drift=0),
    )  # fmt: skip

    def one(key):
        first, rest = jax.random.split(key)
        state = world.init(first)
        genome = jnp.stack([jnp.asarray(EATER), jnp.asarray(IDLER)] * 5)
        state = state._replace(agents=state.agents._replace(genome=genome))

        def body(carry, step):
            state, winner = carry
            step_key, death_key = jax.random.split(jax.random.fold_in(rest, step))
            state, _ = world.step(step_key, state)
            struck = jax.random.uniform(death_key, (10,)) < 0.05
            agents = state.agents
            alive = agents.alive & ~struck
            state = state._replace(
                agents=agents._replace(alive=alive, energy=jnp.where(alive, agents.energy, 0))
            )
            eats = agents.genome[:, action_index("eat")] > 0
            left = jnp.stack((jnp.any(alive & eats), jnp.any(alive & ~eats)))
            now = jnp.where(left[0] == left[1], -1, jnp.where(left[0], 0, 1))
            return (state, jnp.where(winner < 0, now, winner)), None

        return jax.lax.scan(body, (state, jnp.int32(-1)), jnp.arange(steps))[0][1]

    winners = np.asarray(jit(jax.vmap(one))(jax.random.split(jax.random.key(0), count)))
    return (winners == 0).sum(), (winners == 1).sum()


@pytest.mark.parametrize("kind", [World, pytest.param(Shuffled, marks=pytest.mark.slow)])
def test_who_eats_inherits_the_world(kind):
    eaters, idlers = fixed_worlds(kind, 100, 400)
    if kind is World:
        assert eaters >= 95, (eaters, idlers)
    else:
        assert eaters + idlers >= 90 and 35 <= eaters <= 65, (eaters, idlers)


def candidates():
    """Sixteen slots, of which the first seven could be parents but for one thing each, and prices."""
    agents = crowd(0).agents
    number = jnp.arange(16)
    price = jnp.full(16, 100, jnp.int32).at[5].set(50)
    energy = jnp.zeros(16, jnp.int32).at[:7].set(jnp.asarray([201, 200, 900, 900, 300, 101, 300]))
    wants = jnp.zeros(16, jnp.int32).at[:7].set(jnp.asarray([1, ONE, 0, ONE, 7, 1, 1]))
    alive = ((number < 7) & (number != 3)) | (number == 8)
    last = agents.last.at[:, REPRODUCE].set(wants)
    return agents._replace(alive=alive, energy=energy, last=last), price


def test_births_need_what_they_need():
    agents, price = candidates()
    # 1 has no more than twice the price, 2 does not want to, 3 is dead; 4 and 6 are as rich.
    found = pair_parents(agents, price, 8)
    assert found.born.tolist() == [True] * 4 + [False] * 4
    assert found.parent[:4].tolist() == [4, 6, 0, 5]
    assert found.slot.tolist() == [3, 7, 9, 10] + [16] * 4
    assert pair_parents(agents, price, 3).parent.tolist() == [4, 6, 0]
    negative = agents._replace(last=-agents.last)
    assert not pair_parents(negative, price, 8).born.any()
    one_free = agents._replace(alive=agents.alive.at[7:].set(True).at[9].set(False))
    one_free = one_free._replace(
        alive=one_free.alive.at[3].set(True), last=one_free.last.at[3].set(0)
    )
    found = pair_parents(one_free, price, 8)
    assert found.parent[:1].tolist() == [4] and found.slot.tolist() == [9] + [16] * 7
    full = agents._replace(alive=jnp.ones(16, bool))
    assert not pair_parents(full, price, 8).born.any()


@dataclasses.dataclass(frozen=True)
class Rested(Linear):
    """A brain whose newborn remember a quarter of everything."""

    def rest(self, count):
        return jnp.full((count, 44), 0.25)


def test_children_begin_without_their_parents_memory():
    world = dataclasses.replace(SMALL, brain=Rested(Jitter(0.1)))
    agents, _ = candidates()
    state = crowd(0)
    before = agents._replace(
        energy=agents.energy * ONE, carry=jnp.full((16, 44), 0.75), age=jnp.full(16, 9, jnp.int32)
    )
    bear = jit(lambda agents: world.bear(jax.random.key(0), agents, state, usual_prices())[:2])
    after, born = bear(before)
    pairs = {3: 4, 7: 6, 9: 0, 10: 1}  # every price is far below half of these energies
    assert born.tolist() == [True] * 4
    for child, parent in pairs.items():
        assert (after.carry[child] == 0.25).all() and after.age[child] == 0
        for name in ("own", "spoken", "heard", "last"):
            assert not getattr(after, name)[child].any(), name
            assert getattr(before, name)[parent].any(), name
        assert after.alive[child] and after.energy[child] == usual_prices().child
        assert after.lineage[child] == before.lineage[parent]
        assert after.position[child].tolist() == before.position[parent].tolist()
        assert after.energy[parent] <= before.energy[parent] - usual_prices().child
        np.testing.assert_array_equal(after.carry[parent], before.carry[parent])
        np.testing.assert_array_equal(after.own[parent], before.own[parent])


def test_newcomers_begin_without_a_memory():
    brain, sight = Rested(Jitter(0.1)), sight_of_one(3, 4, 2)
    found = newcomers(jax.random.key(0), brain, sight, 3, SMALL.side, 70, jnp.int32(5))
    assert (found.carry == 0.25).all() and found.lineage.tolist() == [5, 6, 7]
    for name in ("age", "own", "spoken", "heard", "last"):
        assert not getattr(found, name).any(), name
    assert found.energy.tolist() == [70] * 3 and found.alive.all()


def test_outputs_have_one_named_layout():
    assert tuple(ACTION_WIDTHS) == bodies.Actions._fields and NUM_ACTIONS == 44
    rows = jnp.arange(2 * NUM_ACTIONS).reshape(2, NUM_ACTIONS) - 60
    parts = {name: rows[:, action_slice(name)] for name in ACTION_WIDTHS}
    np.testing.assert_array_equal(join_actions(parts), rows)
    acts = read_actions(rows)
    for name, width in ACTION_WIDTHS.items():
        want = parts[name]
        if name in ("eat", "strength"):
            want = np.maximum(want, 0)
        np.testing.assert_array_equal(getattr(acts, name).reshape(2, width), want, name)
    alone = join_actions({"hit": jnp.ones((3, 1))})
    assert np.flatnonzero(alone[2]).tolist() == [action_index("hit")] and alone.sum() == 3
    np.testing.assert_array_equal(shown(acts)[:, REPRODUCE], acts.reproduce)
    np.testing.assert_array_equal(shown(acts)[:, action_slice("shape", SHOWN)], acts.shape)
    with pytest.raises(UsageError, match="action='sing': there is none; expected one of move, pu"):
        action_index("sing")
    with pytest.raises(UsageError, match="action='strength': there is none"):
        action_index("strength", SHOWN)


def test_leaves_of_one_shape_get_noise_of_their_own():
    zeros = {"a": jnp.zeros((2, 3)), "b": jnp.zeros((2, 3))}
    noise = Jitter(1.0)(jax.random.key(0), zeros)
    assert (np.asarray(noise["a"]) != np.asarray(noise["b"])).all()


def test_the_table_of_distances_may_come_in_parts(monkeypatch):
    rng = np.random.default_rng(0)
    places = jnp.asarray(rng.integers(0, 8 * ONE, (10, 2)), jnp.int32)
    there = jnp.asarray(rng.random(10) < 0.8)
    whole = nearest(places, jnp.arange(10), places, there, 3, 8 * ONE, 3 * ONE)
    in_parts = jax.make_jaxpr(
        lambda x: nearest(x, jnp.arange(10), x, there, 3, 8 * ONE, 3 * ONE, 4)
    )(places)
    assert any(eqn.primitive.name == "scan" for eqn in in_parts.eqns)
    for where in ("cpu", "gpu"):  # by sorting, and by looking
        monkeypatch.setattr(bodies, "platform", lambda where=where: where)
        found = nearest(places, jnp.arange(10), places, there, 3, 8 * ONE, 3 * ONE, 4)
        jax.tree.map(np.testing.assert_array_equal, found, whole)


@pytest.mark.parametrize("k", [1, 3, 8])
def test_the_nearest_are_found_by_looking_as_by_sorting(k, monkeypatch):
    far = (
        jnp.asarray(np.random.default_rng(k).integers(0, 9, 30), jnp.int32)
        .at[4:7]
        .set(bodies._NOBODY)
    )
    order = np.argsort(np.asarray(far), kind="stable")[:k]
    for where in ("cpu", "gpu"):
        monkeypatch.setattr(bodies, "platform", lambda where=where: where)
        least, index = bodies._least(far, k)
        np.testing.assert_array_equal(index, order)
        np.testing.assert_array_equal(least, far[order])


def test_sums_beyond_32_bits_are_exact():
    values = np.random.default_rng(0).integers(0, 2**31, 5000)
    assert wide_sum(jnp.asarray(values, jnp.int32)).exact() == values.sum() > 2**42


def test_what_no_world_can_be_is_refused():
    for changes, words in (
        (dict(lattice=3), "lattice=3 must divide size=128"),
        (dict(window=4), "window=4 must be odd"),
        (dict(seen_agents=200), "seen_agents=200 must be at most num_agents=128"),
        (dict(newcomers=17), "newcomers=17 must be at most max_births=16"),
    ):
        with pytest.raises(UsageError, match=words):
            World(**changes)
    with pytest.raises(UsageError, match="laws.stomach=8 must hold laws.start=64"):
        Laws(stomach=8)
    assert Prices(*Laws().prices()).upkeep == 128 and Laws(shape=1e-9).prices().shape == 1
