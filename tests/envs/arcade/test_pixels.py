"""Card games and cart poles in pixels: what pictures say is read back, and compared with plain lists and numbers."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from journey import assert_pictures, steps_of, travel

import envs
from envs.arcade.pixels import (
    CARDS,
    TILE,
    VARIANTS,
    CardPixels,
    CartPolePixels,
    NoisyCartPolePixels,
    drawn,
)
from envs.classic.cart_pole import CartPoleState
from envs.memory.card_games import Autoencode, CountRecall, RepeatFirst
from jaxpar.types import UsageError

MARKS = " ~?abcdABCD0123456789"


def read(image):
    """The table of characters that the pixels show, a string a row."""
    rows, columns = image.shape[0] // TILE, image.shape[1] // TILE
    tiles = (
        image.reshape(rows, TILE, columns, TILE, 3)
        .transpose(0, 2, 1, 3, 4)
        .reshape(-1, 1, TILE, TILE, 3)
    )
    match = (tiles == CARDS[None]).all((2, 3, 4))
    assert (match.sum(1) == 1).all(), "a cell shows no sprite, or sprites look alike"
    marks = "".join(MARKS[i] for i in match.argmax(1))
    return [marks[i * columns : (i + 1) * columns] for i in range(rows)]


class CodeTwin:
    """Autoencode as a pile of cards."""

    def __init__(self, n, state):
        self.n, self.dealt, self.time = n, [int(state.cards[0])], 0

    def table(self, full):
        answering = self.time >= self.n - 1
        front = (
            ("abcd"[self.dealt[self.time]] if self.time < self.n else "~")
            + ("?" if answering else " ")
            + "  "
        )
        below = ["abcd"[card] for card in self.dealt] + ["~"] * (self.n - len(self.dealt))
        if answering:
            asked = max(2 * (self.n - 1) - self.time, 0)
            below[asked] = below[asked].upper()
        below += [" "] * (-self.n % 4)
        return [front] + [
            "".join(below[i : i + 4]) if full else "~~~~" for i in range(0, len(below), 4)
        ]

    def step(self, action, state):
        answering, asked = self.time >= self.n - 1, 2 * (self.n - 1) - self.time
        earned = (1 if action == self.dealt[asked] else -1) / self.n if answering else 0.0
        self.time += 1
        if self.time < self.n:
            self.dealt.append(int(state.cards[self.time]))
        return earned, self.time == 2 * self.n - 1


class CountTwin:
    """CountRecall as two piles."""

    def __init__(self, n, state):
        self.n, self.cards, self.queries = n, [int(state.card)], [int(state.query)]

    def table(self, full):
        front = "abcd"[self.cards[-1]] + " " + "ABCD"[self.queries[-1]] + "  "
        rows = [
            f"{'abcd'[kind]}{self.cards.count(kind):02}{self.queries.count(kind):02}"
            for kind in range(2)
        ]
        return [front, *(rows if full else ["~~~~~"] * 2)]

    def step(self, action, state):
        earned = (1 if action == self.cards.count(self.queries[-1]) else -1) / (self.n - 1)
        self.cards.append(int(state.card))
        self.queries.append(int(state.query))
        return earned, len(self.cards) == self.n


def follow(env, num_steps):
    kind, twin, ends = (CodeTwin if isinstance(env.game, Autoencode) else CountTwin), None, 0
    full = env.observed == "full"
    for record in steps_of(env, env.default_params, num_steps):
        if record["start"]:
            twin = kind(env.game.num_cards, record["before"])
            assert read(record["seen"]) == twin.table(full)
        earned, over = twin.step(int(record["action"]), record["after"].state)
        np.testing.assert_allclose(record["after"].reward, earned, rtol=1e-6)
        assert record["after"].terminated == over and not record["after"].truncated
        assert read(record["after"].obs) == twin.table(full)
        ends += over
    return ends


@pytest.mark.parametrize(
    "env", [CardPixels(Autoencode(10, 2)), CardPixels(CountRecall(24), "partial")]
)
def test_card_twin(env):
    assert follow(env, 1000) >= 40


@pytest.mark.slow  # 20 s
@pytest.mark.parametrize("name", VARIANTS)
def test_twin_for_long(name):
    env = envs.make(name)[0]
    assert_pictures(env)
    if isinstance(env, CardPixels):
        assert follow(env, 10_000) > 100


def read_pole(image, velocities):
    """Position, angle and, of the full view, velocities that a picture shows, by centres of mass and lengths."""
    ink = 1 - image.astype(np.float64) / 255
    black = ink[28].min(-1)  # a row of the cart
    x = ((np.arange(32) + 0.5) * black).sum() / black.sum()
    red = ink[:, :, 1] - ink[:, :, 0]  # nothing but the pole; bars are above it
    red[:7] = 0
    dy, dx = (((np.indices((32, 32)) + 0.5) * red).sum((1, 2)) / red.sum()) - (27, x)
    numbers = [(x - 16) / 12 * 2.4, np.arctan2(dx, -dy) / 4]
    for y, channel, full in ((2, 0, 197 / 255), (5, 0, 195 / 255)) if velocities else ():
        bar = ink[y, :, channel] / full
        numbers.append((bar[16:].sum() - bar[:16].sum()) / 14)
    return np.array(numbers)


def test_the_picture_of_a_cart_pole_shows_its_numbers():
    rng = np.random.default_rng(0)
    x, theta = rng.uniform(-1.5, 1.5, 40), rng.uniform(-0.12, 0.12, 40)
    fast, turn = rng.uniform(-3, 3, (2, 40))
    states = CartPoleState(
        *(jnp.asarray(z, jnp.float32) for z in (x, fast, theta, turn)), jnp.zeros(40, jnp.int32)
    )
    params = CartPolePixels().default_params
    for velocities in (True, False):
        pictures = jax.jit(jax.vmap(lambda s, velocities=velocities: drawn(s, params, velocities)))(
            states
        )
        numbers = np.stack([read_pole(image, velocities) for image in np.asarray(pictures)], 1)
        np.testing.assert_allclose(numbers[0], x, atol=0.03)
        np.testing.assert_allclose(numbers[1], theta, atol=0.012)
        if velocities:
            np.testing.assert_allclose(numbers[2:], np.tanh(np.stack([fast, turn]) / 2), atol=0.08)
        else:
            assert (np.asarray(pictures)[:, :7] == 255).all(), "the partial view has no bars"


def test_noise_moves_what_is_seen_and_nothing_else():
    noisy, plain = NoisyCartPolePixels("partial"), CartPolePixels("partial")
    params = noisy.default_params
    state = noisy.init(jax.random.key(0), params)
    keys = jax.random.split(jax.random.key(1), 200)
    seen = np.asarray(jax.jit(jax.vmap(lambda key: noisy.observe(key, state, None, params)))(keys))
    shown = np.stack([read_pole(image, False) for image in seen], 1)
    for numbers, exact in zip(shown, (state.x, state.theta), strict=True):
        assert (
            abs(numbers.mean() - float(exact)) < 4 * 0.1 / np.sqrt(200)
            and abs(numbers.std() - 0.1) < 0.02
        )
    quiet = noisy.observe(keys[0], state, None, params.replace(noise=0.0))
    np.testing.assert_array_equal(quiet, plain.observe(keys[0], state, None, plain.default_params))
    a, b = (travel(jax.random.key(2), env, env.default_params, 100) for env in (noisy, plain))
    jax.tree.map(np.testing.assert_array_equal, a["before"], b["before"])


def test_what_cannot_be_drawn_is_refused():
    with pytest.raises(
        UsageError, match="CardPixels draws Autoencode and CountRecall, not RepeatFirst"
    ):
        CardPixels(RepeatFirst())
    with pytest.raises(UsageError, match="at most 4 kinds and 99 cards, not 5 and 10"):
        CardPixels(Autoencode(10, 5))
    for make in (CardPixels, CartPolePixels):
        with pytest.raises(
            UsageError, match="observed='foggy' is unknown; legal are full, partial"
        ):
            make(observed="foggy")
