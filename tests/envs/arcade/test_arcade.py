import jax
import numpy as np
import pytest
from journey import assert_pictures, legal_action, steps_of, travel
from twin_arcade import BattleShipTwin, CatcherTwin, NavigatorTwin, SkittlesTwin

import envs
from envs.arcade.games import GAMES, SPRITES, TILE, VARIANTS, Arcade, BattleShip, Navigator, _fleets
from jaxpar.types import UsageError

MARKS = " @*Fo#x.~"
VIEWS = ("full", "partial")


def cells(flags):
    return {tuple(int(z) for z in at) for at in np.argwhere(flags)}


def begun(game, full, state):
    """The twin of a start."""
    match game.__name__:
        case "Catcher":
            return CatcherTwin(full, int(state.column))
        case "Skittles":
            return SkittlesTwin(full)
        case "Navigator":
            return NavigatorTwin(full, tuple(map(int, state.player)), tuple(map(int, state.goal)), cells(state.pits))
    return BattleShipTwin(full, cells(state.ships))


def drawn(game, state):
    """What chance gave with a step."""
    if game.__name__ == "Catcher":
        return int(state.column)
    return [int(x) for x in np.flatnonzero(state.rocks[0])] if game.__name__ == "Skittles" else None


def read(image, side):
    """The board of characters that the pixels show."""
    tiles = image.reshape(side, TILE, side, TILE, 3).transpose(0, 2, 1, 3, 4).reshape(-1, 1, TILE, TILE, 3)
    match = (tiles == SPRITES[None]).all((2, 3, 4))
    assert (match.sum(1) == 1).all(), "a cell shows no sprite, or sprites look alike"
    return "".join(MARKS[i] for i in match.argmax(1))


def follow(env, num_steps, act=legal_action):
    """Steps the twin alongside; how many episodes ended, and what they earned."""
    game, twin, earned, ends = type(env.game), None, 0.0, []
    for record in steps_of(env, env.default_params, num_steps, act=act):
        before, after = record["before"], record["after"]
        if record["start"]:
            twin, earned = begun(game, env.observed == "full", before), 0.0
            assert read(record["seen"], twin.side) == twin.board()
        reward, over = twin.step(int(record["action"]), drawn(game, after.state))
        np.testing.assert_allclose(after.reward, reward, rtol=1e-6)
        assert (bool(after.terminated), bool(after.truncated)) == (over, twin.time >= twin.limit)
        assert read(after.obs, twin.side) == twin.board()
        if game is BattleShip:
            assert env.action_mask(after.state, None).tolist() == twin.legal()
        earned += reward
        if record["done"]:
            ends.append(earned)
    return np.array(ends)


@pytest.mark.parametrize("game", GAMES, ids=lambda game: game.__name__)
def test_twin(game):
    ends = follow(Arcade(game(), "partial"), 1000)
    assert len(ends) > 20 and ends.max() <= 1 + 1e-6 and ends.min() < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_twin_for_long(name):
    env = envs.make(name)[0]
    assert env == VARIANTS[name]()
    assert_pictures(env)
    assert len(follow(env, 30_000)) > 500


@pytest.mark.parametrize(
    "game",
    [GAMES[0], *(pytest.param(game, marks=pytest.mark.slow) for game in GAMES[1:])],
    ids=lambda game: game.__name__,
)
def test_full_and_partial_share_states_and_rewards(game):
    a, b = (travel(jax.random.key(5), Arcade(game(), view), Arcade().default_params, 1000) for view in VIEWS)
    jax.tree.map(np.testing.assert_array_equal, a["before"], b["before"])
    jax.tree.map(np.testing.assert_array_equal, a["after"]._replace(obs=0), b["after"]._replace(obs=0))
    assert np.any(np.asarray(a["seen"]) != np.asarray(b["seen"]))


def test_every_fleet_is_two_ships_and_every_flag_can_be_reached():
    fleets = _fleets(6)
    assert len(np.unique(fleets.reshape(len(fleets), -1), axis=0)) > 1000 and (fleets.sum((1, 2)) == 5).all()
    starts = jax.vmap(Navigator().start)(jax.random.split(jax.random.key(0), 300))
    for player, goal, pits in zip(*map(np.asarray, (starts.player, starts.goal, starts.pits)), strict=True):
        assert pits.sum() == 4 and not pits[tuple(player)] and not pits[tuple(goal)] and (player != goal).any()
        reached, edge = {tuple(player)}, [tuple(player)]
        while edge:
            y, x = edge.pop()
            new = {at for at in ((y - 1, x), (y + 1, x), (y, x - 1), (y, x + 1))
                   if min(at) >= 0 and max(at) < 6 and not pits[at]} - reached  # fmt: skip
            reached |= new
            edge += new
        assert tuple(goal) in reached


def test_an_unknown_view_is_refused():
    with pytest.raises(UsageError, match="observed='foggy' is unknown; legal are full, partial"):
        Arcade(observed="foggy")
    assert not hasattr(Arcade(), "action_mask") and hasattr(Arcade(BattleShip()), "action_mask")
