"""On a CUDA GPU: all networks in one kernel, and whole episodes in one kernel, by Pallas and Triton.

A program has a network's matrix in registers. `feedforward_kernel` sweeps over its nodes until none changes, as often
as that network is deep and not as the deepest of all. `episode_kernel` plays an episode to its end, so a short one need
not run on with longer ones, and no step costs a launch. The environment's step is inlined, number by number
(`jaxpar.neat._scalars`).
"""

import functools
import importlib.util
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.extend.core import Jaxpr, JaxprEqn, Literal

from jaxpar.lower.jaxprs import CALLS, array_of, called, live_equations
from jaxpar.neat._scalars import ELEMENTWISE, NotScalar, scalarize
from jaxpar.neat.config import NeatConfig
from jaxpar.neat.functions import activate
from jaxpar.types import Array, PyTree

if TYPE_CHECKING:  # which imports this file
    from jaxpar.neat.network import Networks

WIDEST = 64
"""Node slots of a network, at most: a matrix of these fills the registers of four warps."""

NUMBERS = {jnp.dtype(name) for name in ("float32", "int32", "uint32", "bool")}


def use_kernels(networks: "Networks") -> bool:
    """Whether JAX's first platform is a GPU and the kernels below can run these networks."""
    config = networks.config
    plain = config.aggregations == ("sum",) and config.kind in ("feedforward", "recurrent")
    fits = networks.width <= WIDEST and networks.bias.dtype == jnp.float32
    own = dict(config.own_activations)
    known = all(is_inlinable(own[name]) for name in config.activations or () if name in own)
    return jax.default_backend() == "gpu" and plain and fits and known and _lowers_to_triton()


@functools.cache
def is_inlinable(function: Callable[[Array], Array]) -> bool:
    """Whether kernels can run an activation of the user's: each of its operations is one of `_scalars.ELEMENTWISE`.

    A kernel has no other operations, and no arrays that it closes over; such networks run by sweeps and in slots.
    """
    closed = jax.make_jaxpr(function)(jax.ShapeDtypeStruct((16,), jnp.float32))

    def plain(jaxpr: Jaxpr, consts: Sequence[Array]) -> bool:
        return not consts and all(map(fits, live_equations(jaxpr)))

    def fits(equation: JaxprEqn) -> bool:
        name = equation.primitive.name
        if any(isinstance(atom, Literal) and (jnp.ndim(atom.val) or isinstance(atom.val, jax.Array))
               for atom in equation.invars):  # fmt: skip
            return False
        if name in CALLS:
            return plain(*called(equation))
        return name in ELEMENTWISE or (
            name == "broadcast_in_dim" and array_of(equation.invars[0]).shape == ()
        )

    return plain(closed.jaxpr, closed.consts)


@functools.cache
def _lowers_to_triton() -> bool:
    """Whether this JAX still has Pallas's way to Triton, deprecated in 0.11; without it episodes run in slots."""
    return importlib.util.find_spec("jax.experimental.pallas.triton") is not None


def slots_of(width: int) -> int:
    """The slots of a kernel's network: the next power of two, which Triton's blocks must have."""
    return max(16, 1 << (width - 1).bit_length())


class _Net(NamedTuple):
    """One network in a program: `[w, w]`, then `[w]` each."""

    matrix: Array
    bias: Array
    response: Array
    activation: Array

    @classmethod
    def read(cls, *refs: Array) -> "_Net":
        """Reads the references of a program, which are indexed as arrays are."""
        return cls(*(ref[0] for ref in refs))

    def sweep(self, config: NeatConfig, values: Array, inputs: Array) -> Array:
        """All nodes from all others; `inputs` at the slots of inputs."""
        total = jnp.sum(self.matrix * values[None, :], 1)
        new = activate(
            config.activation_functions, self.activation, self.bias + self.response * total
        )
        return jnp.where(_slots(values) < config.num_inputs, inputs, new)

    def call(self, config: NeatConfig, memory: Array, inputs: Array) -> Array:
        """The nodes after a call: `sub_steps` sweeps if recurrent, else until none changes."""
        if config.kind == "recurrent":
            begun = jnp.where(_slots(memory) < config.num_inputs, inputs, memory)
            if config.sub_steps == 1:
                return self.sweep(config, begun, inputs)
            sweep = lambda _, values: self.sweep(config, values, inputs)  # noqa: E731
            return jax.lax.fori_loop(0, config.sub_steps, sweep, begun)

        def go_on(carry):
            return carry[1] & (carry[2] < len(inputs))

        def body(carry):
            new = self.sweep(config, carry[0], inputs)
            return new, jnp.max((new != carry[0]).astype(jnp.int32)) > 0, carry[2] + 1

        return jax.lax.while_loop(go_on, body, (inputs, jnp.bool_(True), jnp.int32(0)))[0]


def _slots(values: Array) -> Array:
    return jax.lax.broadcasted_iota(jnp.int32, values.shape, 0)


def _options(width: int, interpret: bool) -> dict[str, PyTree]:
    if interpret:
        return {"interpret": True}
    from jax.experimental.pallas import triton

    return {
        "compiler_params": triton.CompilerParams(
            num_warps=max(1, width * width // 1024), num_stages=1
        )
    }


def _padded(networks: "Networks") -> tuple[Array, ...]:
    """The arrays of `_Net` of all networks, at a kernel's width."""
    count, width = networks.bias.shape
    wide = slots_of(width)
    more = wide - width
    if networks.matrix is not None:
        matrix = (
            jnp.pad(networks.matrix, ((0, 0), (0, more), (0, more))) if more else networks.matrix
        )
    else:
        assert (
            networks.source is not None
            and networks.target is not None
            and networks.weight is not None
        )
        is_edge = networks.target < width
        place = jnp.where(is_edge, networks.target * wide + networks.source, wide * wide)
        flat = jnp.zeros((count, wide * wide), networks.weight.dtype)
        flat = flat.at[jnp.arange(count)[:, None], place].set(
            networks.weight, mode="drop", unique_indices=True
        )
        matrix = flat.reshape(count, wide, wide)
    rest = (networks.bias, networks.response, networks.activation)
    return matrix, *(jnp.pad(x, ((0, 0), (0, more))) for x in rest)


def _net_specs(wide: int, owner: Callable[[Array], Array]) -> list[pl.BlockSpec]:
    return [pl.BlockSpec((1, wide, wide), lambda i: (owner(i), 0, 0)),
            *(pl.BlockSpec((1, wide), lambda i: (owner(i), 0)) for _ in range(3))]  # fmt: skip


def feedforward_kernel(networks: "Networks", x: Array, *, interpret: bool = False) -> Array:
    """`apply` of feed-forward networks: float32 `[G, B, O]` from `[G, B, I]`; a program a network."""
    config, wide = networks.config, slots_of(networks.width)
    count, rows = x.shape[:2]
    placed = jnp.pad(x, ((0, 0), (0, 0), (0, wide - config.num_inputs)))

    def kernel(*refs):
        net, x_ref, out_ref = _Net.read(*refs[:4]), refs[4], refs[5]

        def row(b, _):
            inputs = x_ref[0, b]
            out_ref[0, b] = net.call(config, inputs, inputs)
            return 0

        jax.lax.fori_loop(0, rows, row, 0)

    block = pl.BlockSpec((1, rows, wide), lambda i: (i, 0, 0))
    out = pl.pallas_call(
        kernel, grid=(count,), in_specs=[*_net_specs(wide, lambda i: i), block], out_specs=block,
        out_shape=jax.ShapeDtypeStruct(placed.shape, placed.dtype), name="feedforward_networks",
        **_options(wide, interpret),
    )(*_padded(networks), placed)  # fmt: skip
    return out[..., config.num_inputs : config.num_io]


class ScalarStep(NamedTuple):
    """A step of an episode as a function of scalars: made once by `ScalarStep.of`, or refused.

    Attributes:
        step: numbers of the state, of the parameters and the network's outputs in; the state's, the observation's,
            the reward and whether the episode ended, out.
        state: dtypes of the state's numbers.
        params: the environment's parameters, numbers by dtype.
    """

    step: Callable[..., list[Array]]
    state: tuple[np.dtype, ...]
    params: PyTree

    @classmethod
    def of(
        cls,
        move: Callable[[PyTree, PyTree, Array], tuple],
        state: PyTree,
        params: PyTree,
        outputs: int,
    ) -> "ScalarStep":
        """Takes `move(state, params, y) -> (state, obs, reward, ended)` of one episode apart.

        Args:
            move: pure; what it draws must not matter.
            state: its state, or `jax.ShapeDtypeStruct`s.
            params: arrays or numbers.
            outputs: O, the length of `y`.

        Raises:
            NotScalar: with the reason.
        """
        params = jax.tree.map(jnp.asarray, params)
        trees = state, params, jax.ShapeDtypeStruct((outputs,), jnp.float32)
        leaves, structure = jax.tree.flatten(trees)
        for leaf in leaves:
            if leaf.dtype not in NUMBERS:
                raise NotScalar(f"an array is {leaf.dtype}")

        def flat(*leaves: Array) -> list[Array]:
            state, obs, reward, ended = move(*jax.tree.unflatten(structure, leaves))
            numbers = [jnp.asarray(x, jnp.float32) for x in jax.tree.leaves(obs)]
            return [
                *jax.tree.leaves(state),
                *numbers,
                jnp.asarray(reward, jnp.float32),
                jnp.asarray(ended, bool),
            ]

        dtypes = tuple(leaf.dtype for leaf in jax.tree.leaves(state) for _ in range(leaf.size))
        return cls(scalarize(flat, *leaves), dtypes, params)


def _columns(leaves: list[Array], lead: int) -> tuple[Array, Array]:
    """All numbers of arrays `[*lead, ...]` as float32 and int32 columns, at least one of each."""
    kinds: tuple[list[Array], list[Array]] = ([], [])
    for leaf in leaves:
        flat = leaf.reshape(*leaf.shape[:lead], -1)
        is_real = leaf.dtype == jnp.float32
        if leaf.dtype == jnp.uint32:
            flat = jax.lax.bitcast_convert_type(flat, jnp.int32)
        kinds[not is_real].append(flat if is_real else flat.astype(jnp.int32))
    shape = leaves[0].shape[:lead] if leaves else ()
    nothing = [jnp.zeros((*shape, 1), dtype) for dtype in (jnp.float32, jnp.int32)]
    reals, whole = (
        jnp.concatenate([*kind, none], lead) for kind, none in zip(kinds, nothing, strict=True)
    )
    return reals, whole


def _read(
    dtypes: tuple[np.dtype, ...], real: Callable[[int], Array], whole: Callable[[int], Array]
) -> list[Array]:
    """The numbers that `_columns` put away, in their order."""
    found, used = [], [0, 0]
    for dtype in dtypes:
        kind = int(dtype != jnp.float32)
        value = (real, whole)[kind](used[kind])
        used[kind] += 1
        if dtype == jnp.uint32:
            value = jax.lax.bitcast_convert_type(value, jnp.uint32)
        found.append(value != 0 if dtype == jnp.bool_ else value)
    return found


def episode_kernel(
    play: ScalarStep, networks: "Networks", states: PyTree, obs: PyTree, episodes: int, max_steps: int, constant: bool,
    *, interpret: bool = False,
) -> tuple[Array, Array]:  # fmt: skip
    """Plays all episodes of G networks: float32 `[G E]` returns and int32 `[G E]` lengths; a program an episode.

    Args:
        play: the step, in numbers.
        networks: G of them.
        states: of all episodes at their beginning, `[G E, ...]`; network g has those from g E on.
        obs: the observations of these.
        episodes: E.
        max_steps: of an episode.
        constant: whether a last input of 1 follows the observation.
        interpret: runs on any platform, slowly.
    """
    config, wide = networks.config, slots_of(networks.width)
    jobs = len(networks.bias) * episodes
    dtypes = tuple(x.dtype for x in jax.tree.leaves(play.params) for _ in range(x.size))
    numbers = [jnp.asarray(x, jnp.float32).reshape(jobs, -1) for x in jax.tree.leaves(obs)]
    reals, wholes = _columns([*jax.tree.leaves(states), *numbers], 1)
    given = _columns(jax.tree.leaves(play.params), 0)
    count = config.num_inputs - constant

    def kernel(*refs):
        net, (real, whole, param, flag, returns, lengths) = _Net.read(*refs[:4]), refs[4:]
        state_and_obs = (*play.state, *(jnp.dtype("float32"),) * count)
        started = _read(state_and_obs, lambda k: real[0, k], lambda k: whole[0, k])
        params = _read(dtypes, lambda k: param[k], lambda k: flag[k])
        slot = _slots(net.bias)

        def go_on(carry):
            return ~carry[-1] & (carry[-2] < max_steps)

        def body(carry):
            *numbers, memory, total, time, _ = carry
            state, obs = numbers[: len(play.state)], numbers[len(play.state) :]
            inputs = jnp.where(slot == count, float(constant), 0.0)
            for k, value in enumerate(obs):
                inputs = jnp.where(slot == k, value, inputs)
            nodes = net.call(config, memory, inputs)
            y = [
                jnp.sum(jnp.where(slot == config.num_inputs + o, nodes, 0.0))
                for o in range(config.num_outputs)
            ]
            *after, reward, ended = play.step(*state, *params, *y)
            after = [jnp.asarray(x, dtype) for x, dtype in zip(after, state_and_obs, strict=True)]
            return (*after, nodes, total + reward, time + 1, jnp.asarray(ended, bool))

        first = (*started, jnp.zeros_like(net.bias), jnp.float32(0), jnp.int32(0), jnp.bool_(False))
        *_, total, time, _ = jax.lax.while_loop(go_on, body, first)
        returns[0], lengths[0] = total, time

    own = lambda x: pl.BlockSpec((1, x.shape[1]), lambda i: (i, 0))  # noqa: E731
    shared = lambda x: pl.BlockSpec(x.shape, lambda i: (0,))  # noqa: E731
    number = pl.BlockSpec((1,), lambda i: (i,))
    shape = functools.partial(jax.ShapeDtypeStruct, (jobs,))
    specs = [
        *_net_specs(wide, lambda i: i // episodes),
        own(reals),
        own(wholes),
        *map(shared, given),
    ]
    return tuple(pl.pallas_call(
        kernel, grid=(jobs,), in_specs=specs, out_specs=[number, number],
        out_shape=[shape(jnp.float32), shape(jnp.int32)], name="play_episodes", **_options(wide, interpret),
    )(*_padded(networks), reals, wholes, *given))  # fmt: skip
