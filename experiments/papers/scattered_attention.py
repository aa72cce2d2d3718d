"""Linear attention in windows of any sizes, all held as one flat sequence: no window is filled up to the longest.

    python -m experiments.papers.scattered_attention                     # two CPU cores, twenty seconds
    python -m experiments.papers.scattered_attention voxels=2048
    python -m experiments.papers.scattered_attention voxels=32768
    python -m experiments.papers.scattered_attention sides=[64]          # 4,096 windows, most of which hold a few
    python -m experiments.papers.scattered_attention sides=[1,2]         # nearly one window, where nothing is gained

ScatterFormer (He et al. 2024, arXiv:2401.00912): voxels of a scene fall into windows, few into most and many into some.
With w_i the window of token i and phi = 1 + elu,

    S_w = sum over i in w of phi(k_i) v_i^T,  z_w = sum of phi(k_i),  y_i = phi(q_i) S_w_i / (phi(q_i) z_w_i),

by sums into windows over chunks of the flat sequence, whatever its order, and one read of S a token. The plain form
lays windows out as rows of the longest. Both are the same numbers; the table tells what each multiplies.
"""

import dataclasses
import time

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jaxpar.fields import AtLeast, Each, field
from jaxpar.lower.flops import count_flops

from ..app import small_commands

CHUNK = 256


def phi(x: Array) -> Array:
    """Returns 1 + elu(x), which is positive."""
    return 1 + jax.nn.elu(x)


def attend(
    q: Float[Array, "N H K"],
    k: Float[Array, "N H K"],
    v: Float[Array, "N H V"],
    window: Int[Array, " N"],
    num_windows: int,
    chunk: int = CHUNK,
) -> Float[Array, "N H V"]:
    """Attends within windows: 4 N H K (V + 1) operations, however tokens fall. Chunks bound memory: C H K (V + 1)."""
    num, heads, depth = k.shape

    def cut(x):  # what fills the last chunk has values of 0, which it adds to window 0
        x = jnp.pad(x, [(0, -num % chunk)] + [(0, 0)] * (x.ndim - 1))
        return x.reshape(-1, chunk, *x.shape[1:])

    ones = jnp.ones((num, heads, 1), v.dtype)
    lanes = cut(phi(q)), cut(phi(k)), cut(jnp.concatenate([v, ones], 2)), cut(window)

    def write(sums, lane):
        _, k, v, window = lane
        return sums.at[window].add(jnp.einsum("nhk,nhv->nhkv", k, v)), None

    zeros = jnp.zeros((num_windows, heads, depth, v.shape[2] + 1), v.dtype)
    sums, _ = jax.lax.scan(write, zeros, lanes)

    def read(_, lane):
        q, _, _, window = lane
        return None, jnp.einsum("nhk,nhkv->nhv", q, sums[window])

    out = jax.lax.scan(read, None, lanes)[1].reshape(-1, heads, v.shape[2] + 1)[:num]
    return out[..., :-1] / out[..., -1:]


def padded(
    q: Array, k: Array, v: Array, window: Int[Array, " N"], num_windows: int, longest: int
) -> Array:
    """The same by rows of `longest` slots, one a window; tokens lie window after window."""
    first = jnp.searchsorted(window, jnp.arange(num_windows))
    place = jnp.arange(len(window)) - first[window]

    def rows(x):
        return jnp.zeros((num_windows, longest, *x.shape[1:]), x.dtype).at[window, place].set(x)

    ones = jnp.ones((*v.shape[:2], 1), v.dtype)
    sums = jnp.einsum("wnhk,wnhv->whkv", rows(phi(k)), rows(jnp.concatenate([v, ones], 2)))
    out = jnp.einsum("wnhk,whkv->wnhv", rows(phi(q)), sums)[window, place]
    return out[..., :-1] / out[..., -1:]


def scene(seed: int, num: int, side: int) -> np.ndarray:
    """Returns the windows, sorted, of `num` voxels around the middle of a plane of side x side windows."""
    places = np.random.default_rng(seed).standard_normal((num, 2)) / 6 + 0.5
    cells = np.clip((places * side).astype(int), 0, side - 1)
    return np.sort(cells[:, 0] * side + cells[:, 1]).astype(np.int32)


def compare(
    num: int, side: int, heads: int = 4, depth: int = 16, seed: int = 0
) -> dict[str, float]:
    """Returns operations and seconds of both forms, of values and with gradients, and how far apart those are."""
    rng, window, windows = np.random.default_rng(seed), scene(seed, num, side), side * side
    longest = int(np.bincount(window).max())
    arrays = [jnp.asarray(rng.standard_normal((num, heads, depth)), jnp.float32) for _ in range(3)]
    found, out = {"longest": longest, "mean": num / len(np.unique(window))}, []
    for name, form, size in (("flat", attend, CHUNK), ("padded", padded, longest)):

        def loss(arrays, form=form, size=size):
            y = form(*arrays, window, windows, size)
            return (y * jnp.sin(jnp.arange(y.size, dtype=y.dtype)).reshape(y.shape)).sum(), y

        found[f"{name} operations"] = count_flops(loss, arrays).total
        run = jax.jit(jax.value_and_grad(loss, has_aux=True))
        (_, y), grads = jax.block_until_ready(run(arrays))
        out.append([y, *grads])
        start = time.perf_counter()
        jax.block_until_ready(run(arrays))
        found[f"{name} seconds"] = time.perf_counter() - start
    pairs = zip(*jax.device_get(out), strict=True)
    found["error"] = float(np.max([np.abs(a - b).max() / np.abs(b).max() for a, b in pairs]))
    return found


@dataclasses.dataclass(frozen=True)
class Config(small_commands.SmallConfig):
    """What it compares.

    Attributes:
      voxels: Of a scene.
      sides: Windows along each side of it, a row each.
    """

    voxels: int = field(8192, AtLeast(2))
    sides: list[int] = field(legal=Each(AtLeast(1)), default_factory=lambda: [4, 8, 16, 32])


def execute(config: Config) -> None:
    """Prints a row for each number of windows."""
    for side in config.sides:
        row = compare(config.voxels, side)
        print(f"{side * side:5} windows, mean {row['mean']:7.1f}, longest {row['longest']:5}: " + ", ".join(
            f"{name} {row[name + ' operations'] / 1e6:8.1f} Mop {1e3 * row[name + ' seconds']:7.1f} ms"
            for name in ("flat", "padded")) + f", apart by {row['error']:.1e}", flush=True)  # fmt: skip


if __name__ == "__main__":
    small_commands.launch("scattered_attention", Config, execute)
