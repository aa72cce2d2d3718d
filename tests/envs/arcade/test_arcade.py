import jax
import numpy as np
import pytest
from journey import assert_pictures, legal_action, steps_of
from twin_arcade import BattleShipTwin, CatcherTwin, NavigatorTwin, SkittlesTwin
from twin_tetris import TetrisTwin

import envs
from envs.arcade import brick_breaker, games, mine_sweeper, pixels, tetris
from envs.arcade.games import GAMES, SPRITES, TILE, Arcade, BattleShip, Navigator, _fleets
from envs.arcade.tetris import Tetris
from jaxpar.types import UsageError

MARKS = " @*Fo#x.~"
VARIANTS = games.VARIANTS | tetris.VARIANTS
ALL = VARIANTS | brick_breaker.VARIANTS | mine_sweeper.VARIANTS | pixels.VARIANTS
TWINS = [name for name in ALL if f"{name}-Partial" in ALL]


def cells(flags):
    return {tuple(int(z) for z in at) for at in np.argwhere(flags)}


def begun(game, full, state):
    """The twin of a start."""
    match type(game).__name__:
        case "Catcher":
            return CatcherTwin(full, int(state.column))
        case "Skittles":
            return SkittlesTwin(full)
        case "Navigator":
            return NavigatorTwin(
                full, tuple(map(int, state.player)), tuple(map(int, state.goal)), cells(state.pits)
            )
        case "Tetris":
            return TetrisTwin(full, int(state.kind), game.width)
    return BattleShipTwin(full, cells(state.ships))


def drawn(game, state):
    """What chance gave with a step."""
    match type(game).__name__:
        case "Catcher":
            return int(state.column)
        case "Tetris":
            return int(state.kind)
        case "Skittles":
            return [int(x) for x in np.flatnonzero(state.rocks[0])]
    return None


def read(image, side):
    """The board of characters that the pixels show."""
    tiles = (
        image.reshape(side, TILE, side, TILE, 3)
        .transpose(0, 2, 1, 3, 4)
        .reshape(-1, 1, TILE, TILE, 3)
    )
    match = (tiles == SPRITES[None]).all((2, 3, 4))
    assert (match.sum(1) == 1).all(), "a cell shows no sprite, or sprites look alike"
    return "".join(MARKS[i] for i in match.argmax(1))


def follow(env, num_steps, act=legal_action):
    """Steps the twin alongside; how many episodes ended, and what they earned."""
    game, twin, earned, ends = env.game, None, 0.0, []
    for record in steps_of(env, env.default_params, num_steps, act=act):
        before, after = record["before"], record["after"]
        if record["start"]:
            twin, earned = begun(game, env.observed == "full", before), 0.0
            assert read(record["seen"], twin.side) == twin.board()
        reward, over = twin.step(int(record["action"]), drawn(game, after.state))
        np.testing.assert_allclose(after.reward, reward, rtol=1e-6)
        assert (bool(after.terminated), bool(after.truncated)) == (over, twin.time >= twin.limit)
        assert read(after.obs, twin.side) == twin.board()
        if isinstance(game, BattleShip):
            assert env.action_mask(after.state, None).tolist() == twin.legal()
        earned += reward
        if record["done"]:
            ends.append(earned)
    return np.array(ends)


@pytest.mark.parametrize(
    "game", [game() for game in GAMES] + [Tetris(4)], ids=lambda game: type(game).__name__
)
def test_twin(game):
    ends = follow(Arcade(game, "partial"), 1000)
    assert len(ends) > 20 and ends.max() <= 1 + 1e-6 and ends.min() < 0.5


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_twin_for_long(name):
    env = envs.make(name)[0]
    assert env == VARIANTS[name]()
    assert_pictures(env)
    assert len(follow(env, 30_000)) > 500


@pytest.mark.parametrize("name", TWINS)
def test_full_and_partial_share_states_and_rewards(name):
    """Not in samples: the two programs are the same text, with the same constants, but for what is seen."""
    key, texts = jax.random.key(5), []
    for view in (name, f"{name}-Partial"):
        env, params = envs.make(view)

        def moved(key, state, action, params, env=env):
            after = env.transition(key, state, action, params)
            mask = env.action_mask(state, params) if hasattr(env, "action_mask") else None
            cut = env.truncated(after, params) if hasattr(env, "truncated") else None
            return (
                after,
                mask,
                env.reward(state, action, after, params),
                env.terminal(after, params),
                cut,
            )

        args = (
            key,
            jax.eval_shape(env.init, key, params),
            jax.numpy.int32(0),
            jax.tree.map(jax.numpy.asarray, params),
        )
        parts = (env.init, (key, args[-1])), (moved, args), (env.observe, args)
        programs = [
            jax.make_jaxpr(lambda *args, part=part: part(*args))(*args) for part, args in parts
        ]
        texts.append(
            [
                (str(program), [np.asarray(const).tolist() for const in program.consts])
                for program in programs
            ]
        )
    assert texts[0][:2] == texts[1][:2] and texts[0][2] != texts[1][2]


def test_the_arcade_has_ten_games_and_more():
    games_seen = {ALL[name]().name.split("-")[0] for name in TWINS}
    assert len(games_seen) == 11, games_seen


def test_every_fleet_is_two_ships_and_every_flag_can_be_reached():
    fleets = _fleets(6)
    assert (
        len(np.unique(fleets.reshape(len(fleets), -1), axis=0)) > 1000
        and (fleets.sum((1, 2)) == 5).all()
    )
    starts = jax.vmap(Navigator().start)(jax.random.split(jax.random.key(0), 300))
    for player, goal, pits in zip(
        *map(np.asarray, (starts.player, starts.goal, starts.pits)), strict=True
    ):
        assert (
            pits.sum() == 4
            and not pits[tuple(player)]
            and not pits[tuple(goal)]
            and (player != goal).any()
        )
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
    with pytest.raises(UsageError, match="width"):
        Tetris(10)
    assert not hasattr(Arcade(), "action_mask") and hasattr(Arcade(BattleShip()), "action_mask")
