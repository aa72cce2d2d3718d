"""Particle tasks for several agents: spread, tag, and speaker and listener.

Discs move on a plane under a push of their own, damping and soft contacts, all pairs at once: O(agents x entities).
Rules and constants are those of the Multi-Agent Particle Environments (Lowe et al., "Multi-Agent Actor-Critic for Mixed
Cooperative-Competitive Environments", 2017) as `simple_spread_v3`, `simple_tag_v3` and `simple_speaker_listener_v4` of
PettingZoo and MPE2 have them: forces are those of the old positions, positions move by the old velocities.

What deviates: 25 steps truncate and never terminate; agents of one task share one width of observations and one space
of actions (zeros fill up shorter observations; the speaker's mask admits its three words); two entities in exactly one
place exert no force on each other, where the original divides zero by zero.
"""

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.env.spaces import Box, Discrete
from jaxpar.fields import AtLeast, check_fields, field
from jaxpar.types import Array, PRNGKey, UsageError

from .discs import Physics, contact_forces, direction, move, others_of, paint, slow_down, touching

__all__ = ["VARIANTS", "SpeakerListener", "Spread", "Tag", "scripted"]


@flax.struct.dataclass
class State:
    """Where everything is.

    Attributes:
        position: float32 `[N, 2]`, of the agents.
        velocity: float32 `[N, 2]`, per unit of time.
        landmarks: float32 `[L, 2]`, which never move.
        time: int32, steps since `init`.
    """

    position: Array
    velocity: Array
    landmarks: Array
    time: Array


@flax.struct.dataclass
class TalkState(State):
    """A `State` with `goal` int32, the landmark to be named, and `message` float32 `[3]`, the speaker's last word."""

    goal: Array
    message: Array


@flax.struct.dataclass
class SpreadParams(Physics):
    """`local_ratio` of an agent's reward is its own collisions, the rest is the team's covering of the landmarks."""

    size: float = 0.15
    push: float = 5.0
    local_ratio: float = 0.5


@flax.struct.dataclass
class TagParams(Physics):
    """Sizes are radii; pushes are accelerations."""

    chaser_size: float = 0.075
    chaser_push: float = 3.0
    chaser_speed: float = 1.0
    prey_size: float = 0.05
    prey_push: float = 4.0
    prey_speed: float = 1.3
    obstacle_size: float = 0.2
    catch: float = 10.0


@flax.struct.dataclass
class TalkParams(Physics):
    """`push` is the listener's acceleration."""

    push: float = 5.0


def action_space(env: Any) -> Box | Discrete:
    """The space of the joint actions: five strengths or one of five choices an agent."""
    return Box(0.0, 1.0, (env.num_agents, 5)) if env.continuous else Discrete(5, (env.num_agents,))


@dataclasses.dataclass(frozen=True)
class Spread:
    """Agents cover all landmarks without running into each other (`simple_spread_v3`).

    An agent sees its velocity, its position, the landmarks and the other agents from itself, and two silent channels
    of each other agent (zeros, kept so that trained policies fit): float32 `[4 + 2 L + 4 (N - 1)]`.

    Attributes:
        num_agents: N.
        num_landmarks: L.
        continuous: whether actions are five strengths instead of one of five choices.
    """

    num_agents: int = field(3, AtLeast(1))
    num_landmarks: int = field(3, AtLeast(1))
    continuous: bool = False

    def __post_init__(self) -> None:
        """Refuses what cannot be built."""
        check_fields(self)

    @property
    def name(self) -> str:
        """`Spread-N`."""
        return f"Spread-{self.num_agents}"

    @property
    def default_params(self) -> SpreadParams:
        """Those of the original."""
        return SpreadParams()

    def observation_space(self, params: SpreadParams) -> Box:
        """Of all agents, `[N, ...]`."""
        return Box(-np.inf, np.inf, (self.num_agents, 2 * self.num_landmarks + 4 * self.num_agents))

    def action_space(self, params: SpreadParams) -> Box | Discrete:
        """Strengths `[N, 5]` or choices `[N]`."""
        return action_space(self)

    def init(self, key: PRNGKey, params: SpreadParams) -> State:
        """Everything at rest, uniform on the square from -1 to 1; consumes `key`."""
        place = jax.random.uniform(
            key, (self.num_agents + self.num_landmarks, 2), minval=-1.0, maxval=1.0
        )
        agents, landmarks = place[: self.num_agents], place[self.num_agents :]
        return State(agents, jnp.zeros_like(agents), landmarks, jnp.zeros((), jnp.int32))

    def transition(self, key: PRNGKey, state: State, action: Array, params: SpreadParams) -> State:
        """Deterministic; `key` is not used."""
        size = jnp.full(self.num_agents, params.size, jnp.float32)
        force = params.push * direction(action, self.continuous)
        force = force + contact_forces(state.position, size, state.position, size, params)
        position, velocity = move(state.position, state.velocity, force, params)
        return State(position, velocity, state.landmarks, state.time + 1)

    def observe(
        self, key: PRNGKey, state: State, action: Array | None, params: SpreadParams
    ) -> Array:
        """Deterministic; `key` is not used."""
        agents = state.position
        marks = state.landmarks[None] - agents[:, None]
        others = others_of(agents[None] - agents[:, None])
        seen = [
            part.reshape(self.num_agents, -1) for part in (marks, others, jnp.zeros_like(others))
        ]
        return jnp.concatenate([state.velocity, agents, *seen], axis=1)

    def reward(self, state: State, action: Array, next_state: State, params: SpreadParams) -> Array:
        """`(1 - ratio)` of minus the distances from landmarks to their nearest agents, `ratio` of minus collisions."""
        size = jnp.full(self.num_agents, params.size, jnp.float32)
        hits = touching(next_state.position, size, next_state.position, size) & ~np.eye(
            self.num_agents, dtype=bool
        )
        delta = next_state.landmarks[:, None] - next_state.position[None]
        nearest = jnp.min(jnp.square(delta[..., 0]) + jnp.square(delta[..., 1]), axis=1)
        cover = -jnp.sum(jnp.sqrt(nearest))
        return (1 - params.local_ratio) * cover - params.local_ratio * jnp.sum(hits, axis=1)

    def terminal(self, state: State, params: SpreadParams) -> Array:
        """Never."""
        return jnp.zeros(self.num_agents, bool)

    def truncated(self, state: State, params: SpreadParams) -> Array:
        """After `params.max_steps`."""
        return jnp.full(self.num_agents, state.time >= params.max_steps)

    def render(self, state: State, params: SpreadParams) -> Array:
        """Agents blue, landmarks dark, uint8 `[112, 112, 3]`."""
        size = jnp.concatenate(
            [jnp.full(self.num_agents, params.size), jnp.full(self.num_landmarks, 0.05)]
        )
        colour = np.array([[115, 115, 220]] * self.num_agents + [[50, 50, 50]] * self.num_landmarks)
        return paint(jnp.concatenate([state.position, state.landmarks]), size, colour)


@dataclasses.dataclass(frozen=True)
class Tag:
    """Slow chasers catch fast prey between obstacles (`simple_tag_v3`); agents are the chasers, then the prey.

    An agent sees its velocity, its position, the obstacles and the other agents from itself, and the velocities of the
    other prey (a prey's row ends in two zeros, since it sees one prey less).

    Attributes:
        num_chasers: C.
        num_prey: G.
        num_obstacles: L.
        continuous: whether actions are five strengths instead of one of five choices.
    """

    num_chasers: int = field(3, AtLeast(1))
    num_prey: int = field(1, AtLeast(1))
    num_obstacles: int = field(2, AtLeast(0))
    continuous: bool = False

    def __post_init__(self) -> None:
        """Refuses what cannot be built."""
        check_fields(self)

    @property
    def num_agents(self) -> int:
        """C + G."""
        return self.num_chasers + self.num_prey

    @property
    def name(self) -> str:
        """`Tag-CvG`."""
        return f"Tag-{self.num_chasers}v{self.num_prey}"

    @property
    def default_params(self) -> TagParams:
        """Those of the original."""
        return TagParams()

    def observation_space(self, params: TagParams) -> Box:
        """Of all agents, `[N, ...]`."""
        width = 2 + 2 * self.num_obstacles + 2 * self.num_agents + 2 * self.num_prey
        return Box(-np.inf, np.inf, (self.num_agents, width))

    def action_space(self, params: TagParams) -> Box | Discrete:
        """Strengths `[N, 5]` or choices `[N]`."""
        return action_space(self)

    def init(self, key: PRNGKey, params: TagParams) -> State:
        """At rest; agents uniform on the square from -1 to 1, obstacles to 0.9; consumes `key`."""
        agent_key, obstacle_key = jax.random.split(key)
        agents = jax.random.uniform(agent_key, (self.num_agents, 2), minval=-1.0, maxval=1.0)
        obstacles = jax.random.uniform(
            obstacle_key, (self.num_obstacles, 2), minval=-0.9, maxval=0.9
        )
        return State(agents, jnp.zeros_like(agents), obstacles, jnp.zeros((), jnp.int32))

    def by_role(self, chasers: Any, prey: Any) -> Array:
        """One number a role, as float32 `[N]`."""
        return jnp.where(
            np.arange(self.num_agents) < self.num_chasers, jnp.float32(chasers), jnp.float32(prey)
        )

    def transition(self, key: PRNGKey, state: State, action: Array, params: TagParams) -> State:
        """Deterministic; `key` is not used."""
        size = self.by_role(params.chaser_size, params.prey_size)
        force = self.by_role(params.chaser_push, params.prey_push)[:, None] * direction(
            action, self.continuous
        )
        entities = jnp.concatenate([state.position, state.landmarks])
        sizes = jnp.concatenate(
            [size, jnp.full(self.num_obstacles, params.obstacle_size, jnp.float32)]
        )
        force = force + contact_forces(state.position, size, entities, sizes, params)
        position, velocity = move(state.position, state.velocity, force, params)
        velocity = slow_down(velocity, self.by_role(params.chaser_speed, params.prey_speed))
        return State(position, velocity, state.landmarks, state.time + 1)

    def observe(self, key: PRNGKey, state: State, action: Array | None, params: TagParams) -> Array:
        """Deterministic; `key` is not used."""
        agents, count, chasers = state.position, self.num_agents, self.num_chasers
        obstacles = (state.landmarks[None] - agents[:, None]).reshape(count, -1)
        others = others_of(agents[None] - agents[:, None]).reshape(count, -1)
        fleeing = state.velocity[chasers:]
        to_chasers = jnp.broadcast_to(fleeing.reshape(-1), (chasers, 2 * self.num_prey))
        to_prey = others_of(jnp.broadcast_to(fleeing[None], (self.num_prey, self.num_prey, 2)))
        to_prey = jnp.concatenate(
            [to_prey.reshape(self.num_prey, -1), jnp.zeros((self.num_prey, 2))], axis=1
        )
        return jnp.concatenate(
            [state.velocity, agents, obstacles, others, jnp.concatenate([to_chasers, to_prey])], 1
        )

    def reward(self, state: State, action: Array, next_state: State, params: TagParams) -> Array:
        """Chasers share 10 a touch; prey lose 10 a touch of theirs, and more and more outside of the arena."""
        chasers, prey = (
            next_state.position[: self.num_chasers],
            next_state.position[self.num_chasers :],
        )
        chaser_size = jnp.full(self.num_chasers, params.chaser_size, jnp.float32)
        prey_size = jnp.full(self.num_prey, params.prey_size, jnp.float32)
        caught = params.catch * touching(prey, prey_size, chasers, chaser_size)
        lost = jnp.sum(caught, axis=1) + jnp.sum(outside(prey), axis=1)
        return jnp.concatenate([jnp.full(self.num_chasers, jnp.sum(caught)), -lost])

    def terminal(self, state: State, params: TagParams) -> Array:
        """Never."""
        return jnp.zeros(self.num_agents, bool)

    def truncated(self, state: State, params: TagParams) -> Array:
        """After `params.max_steps`."""
        return jnp.full(self.num_agents, state.time >= params.max_steps)

    def render(self, state: State, params: TagParams) -> Array:
        """Chasers red, prey green, obstacles dark, uint8 `[112, 112, 3]`."""
        size = self.by_role(params.chaser_size, params.prey_size)
        size = jnp.concatenate(
            [jnp.full(self.num_obstacles, params.obstacle_size, jnp.float32), size]
        )
        kinds = [0] * self.num_obstacles + [1] * self.num_chasers + [2] * self.num_prey
        colour = np.array([[60, 60, 60], [220, 90, 90], [80, 190, 80]])[kinds]
        return paint(jnp.concatenate([state.landmarks, state.position]), size, colour)


def outside(position: Array) -> Array:
    """The price of each coordinate for leaving the arena: 0 to 0.9, linear to 1, `exp(2 x - 2)` to at most 10."""
    x = jnp.abs(position)
    return jnp.where(
        x < 0.9, 0.0, jnp.where(x < 1.0, (x - 0.9) * 10, jnp.minimum(jnp.exp(2 * x - 2), 10.0))
    )


@dataclasses.dataclass(frozen=True)
class SpeakerListener:
    """One agent knows the goal and can only speak, the other hears and can only move (`simple_speaker_listener_v4`).

    Rows of observations are float32 `[11]`: the speaker sees the goal's colour and zeros; the listener its velocity,
    the three landmarks from itself, and the last word. Actions: the speaker's are three words, the listener's five
    pushes; a speaker's illegal choice says nothing.

    Attributes:
        continuous: whether actions are five strengths (the speaker's first three are its word).
    """

    continuous: bool = False
    num_agents = 2
    name = "SpeakerListener"

    @property
    def default_params(self) -> TalkParams:
        """Those of the original."""
        return TalkParams()

    def observation_space(self, params: TalkParams) -> Box:
        """Of all agents, `[N, ...]`."""
        return Box(-np.inf, np.inf, (2, 11))

    def action_space(self, params: TalkParams) -> Box | Discrete:
        """Strengths `[N, 5]` or choices `[N]`."""
        return action_space(self)

    def init(self, key: PRNGKey, params: TalkParams) -> TalkState:
        """At rest and uniform on the square from -1 to 1, any landmark the goal, nothing said; consumes `key`."""
        place_key, goal_key = jax.random.split(key)
        place = jax.random.uniform(place_key, (5, 2), minval=-1.0, maxval=1.0)
        goal = jax.random.randint(goal_key, (), 0, 3)
        return TalkState(
            place[:2], jnp.zeros((2, 2)), place[2:], jnp.zeros((), jnp.int32), goal, jnp.zeros(3)
        )

    def transition(
        self, key: PRNGKey, state: TalkState, action: Array, params: TalkParams
    ) -> TalkState:
        """Deterministic; `key` is not used. There are no contacts."""
        message = (
            jnp.clip(action[0, :3], 0, 1)
            if self.continuous
            else (action[0] == np.arange(3)).astype(jnp.float32)
        )
        force = (
            params.push * direction(action, self.continuous) * np.array([[0.0], [1.0]], np.float32)
        )
        position, velocity = move(state.position, state.velocity, force, params)
        return TalkState(position, velocity, state.landmarks, state.time + 1, state.goal, message)

    def observe(
        self, key: PRNGKey, state: TalkState, action: Array | None, params: TalkParams
    ) -> Array:
        """Deterministic; `key` is not used."""
        colour = jnp.where(np.arange(3) == state.goal, 0.65, 0.15)
        marks = (state.landmarks - state.position[1:]).reshape(-1)
        heard = jnp.concatenate([state.velocity[1], marks, state.message])
        return jnp.stack([jnp.concatenate([colour, jnp.zeros(8)]), heard])

    def reward(
        self, state: TalkState, action: Array, next_state: TalkState, params: TalkParams
    ) -> Array:
        """Minus the squared distance from the listener to the goal, for both."""
        squared = jnp.sum(jnp.square(next_state.landmarks - next_state.position[1:]), axis=1)
        return jnp.full(2, -jnp.sum(jnp.where(np.arange(3) == next_state.goal, squared, 0.0)))

    def terminal(self, state: TalkState, params: TalkParams) -> Array:
        """Never."""
        return jnp.zeros(2, bool)

    def truncated(self, state: TalkState, params: TalkParams) -> Array:
        """After `params.max_steps`."""
        return jnp.full(2, state.time >= params.max_steps)

    @property
    def action_mask(self) -> Callable[[TalkState, TalkParams], Array]:
        """`(state, params) -> bool [2, 5]`: three words, five pushes; missing where actions are continuous."""
        if self.continuous:
            raise AttributeError("continuous actions have no mask")
        return lambda state, params: jnp.asarray(
            np.array([[True, True, True, False, False], [True] * 5])
        )

    def render(self, state: TalkState, params: TalkParams) -> Array:
        """Landmarks red, green, blue; the listener in the goal's pale colour, the speaker in its word's."""
        base = np.full((3, 3), 40) + 170 * np.eye(3, dtype=int)
        listener = jnp.take(jnp.asarray(base), state.goal, axis=0) // 2 + 120
        speaker = 60 + 180 * state.message
        colour = jnp.concatenate(
            [jnp.asarray(base), jnp.stack([speaker.astype(jnp.int32), listener])]
        )
        size = np.array([0.05, 0.05, 0.05, 0.075, 0.075], np.float32)
        return paint(jnp.concatenate([state.landmarks, state.position]), jnp.asarray(size), colour)


def towards(target: Array, state: State, push: Any, continuous: bool, params: Any) -> Array:
    """Actions `[N]` or `[N, 5]` that bring agents to rest at `target` `[N, 2]`: push while coasting ends elsewhere."""
    glide = params.dt / params.damping  # how far a velocity of one coasts
    miss = target - state.position - glide * state.velocity
    reach = jnp.broadcast_to(
        push * params.dt * glide, (len(target),)
    )  # how much one push moves the place of rest
    if continuous:
        strength = jnp.clip(miss / reach[:, None], -1.0, 1.0)
        sides = jnp.stack([-strength, strength], axis=-1).reshape(-1, 4)
        return jnp.concatenate([jnp.zeros((len(target), 1)), jnp.maximum(sides, 0.0)], axis=1)
    axis = jnp.argmax(jnp.abs(miss), axis=1)
    along = jnp.where(axis == 0, miss[:, 0], miss[:, 1])
    return jnp.where(jnp.abs(along) > reach / 2, 1 + 2 * axis + (along > 0), 0).astype(jnp.int32)


def scripted(env: Spread | Tag | SpeakerListener, state: Any, params: Any) -> Array:
    """Joint actions that know the whole state and play well, as a return to compare with; N! in `Spread`.

    Spread: the assignment of agents to landmarks with the least total distance. Tag: chasers run for the nearest
    prey's next place, prey for the corner of the arena that is farthest from the nearest chaser. SpeakerListener: the
    speaker names the goal, the listener goes there.

    Mean returns per agent, uniform play in brackets: Spread-3 -8.8 (-26.5), Spread-5 -12.7 (-35.4), SpeakerListener
    -7.5 (-40.2), chasers of Tag-3v1 55 against uniform prey (4.5), its prey -4.3 against uniform chasers (-15.5).
    """
    if isinstance(env, Spread):
        if env.num_landmarks != env.num_agents:
            raise UsageError(
                f"scripted play of Spread needs as many landmarks as agents, not {env.num_landmarks}."
            )
        orders = np.array(list(itertools.permutations(range(env.num_agents))))
        places = state.landmarks[orders]
        cost = jnp.sum(
            jnp.sqrt(jnp.sum(jnp.square(places - state.position[None]), axis=-1)), axis=1
        )
        return towards(places[jnp.argmin(cost)], state, params.push, env.continuous, params)
    if isinstance(env, SpeakerListener):
        target = jnp.broadcast_to(state.landmarks[state.goal], (2, 2))
        listener = towards(target, state, params.push, env.continuous, params)[1]
        return jnp.stack(
            [jax.nn.one_hot(state.goal, 5) if env.continuous else state.goal, listener]
        )
    chasers, prey = state.position[: env.num_chasers], state.position[env.num_chasers :]
    ahead = prey + 2 * params.dt * state.velocity[env.num_chasers :]
    apart = jnp.sum(jnp.square(chasers[:, None] - prey[None]), axis=-1)
    corners = jnp.array([[-0.85, -0.85], [-0.85, 0.85], [0.85, -0.85], [0.85, 0.85]])
    threat = jnp.min(jnp.sum(jnp.square(corners[:, None] - chasers[None]), axis=-1), axis=1)
    away = jnp.broadcast_to(corners[jnp.argmax(threat)], prey.shape)
    target = jnp.concatenate([ahead[jnp.argmin(apart, axis=1)], away])
    push = env.by_role(params.chaser_push, params.prey_push)
    return towards(target, state, push, env.continuous, params)


VARIANTS = {
    "Spread-3": Spread,
    "Spread-5": lambda: Spread(num_agents=5, num_landmarks=5),
    "Tag-3v1": Tag,
    "Tag-6v2": lambda: Tag(num_chasers=6, num_prey=2, num_obstacles=3),
    "SpeakerListener": SpeakerListener,
}
