"""The Legendre memory: d numbers that hold the last theta inputs of a channel, in four forms that agree.

m[t] = A m[t-1] + B u[t], with A and B constant: a step costs d^2 a channel, and since the system never changes its
impulse response K[j] = A^j B is known beforehand. Coefficient i is that of the Legendre polynomial P_i over the window:
u[t - s] is about sum_i m_i P_i(2 s / theta - 1), for 0 <= s <= theta (Voelker et al. 2019, section 2.1).
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import scipy  # its parts are loaded when they are first used
from jaxtyping import Array, Bool, Float

from jaxpar.nn.mixers.fence import finite, mark, marks_of
from jaxpar.scan import affine_scan
from jaxpar.types import UsageError

__all__ = ["FORMS", "chunk_for", "impulse_response", "legendre", "memory"]

FORMS = ("auto", "affine", "chunks", "fft", "scan")
LARGEST = 2**20  # numbers of the constant [C, d, d]: four megabytes in float32


@functools.cache
def legendre(size: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """Returns A [d, d] and B [d] of a window of `theta` steps, in float64.

    The continuous system theta m' = a m + b u with a_ij = (2i+1) (-1 if i < j else (-1)^(i-j+1)), b_i = (2i+1) (-1)^i
    (arXiv:2402.04882, section 3), under inputs that are constant over a step: A = exp(a / theta) and
    B = a^-1 (A - 1) b, both from one exponential of [[a, b], [0, 0]] / theta. In float32 it would lose its digits from
    about d = 64 on, since a's norm is of the size d^2.
    """
    i = np.arange(size, dtype=np.float64)
    sign = np.where(i[:, None] < i[None, :], -1.0, (-1.0) ** (i[:, None] - i[None, :] + 1))
    both = np.zeros((size + 1, size + 1))
    both[:size, :size] = (2 * i[:, None] + 1) * sign
    both[:size, size] = (2 * i + 1) * (-1.0) ** i
    both = scipy.linalg.expm(both / theta)
    return both[:size, :size], both[:size, size]


@functools.lru_cache(maxsize=8)
def impulse_response(size: int, theta: float, length: int) -> np.ndarray:
    """Returns K [T, d], the memory j steps after an input of 1: A^j B, in float64. Cost: T d^2, by doubling."""
    power, drive = legendre(size, theta)
    out = drive[None]
    while len(out) < length:
        out = np.concatenate([out, out @ power.T])
        power = power @ power
    return out[:length]


@functools.lru_cache(maxsize=8)
def _powers(size: int, theta: float, count: int) -> np.ndarray:
    """A^1 .. A^C, [C, d, d]."""
    out = np.empty((count, size, size))
    out[0] = legendre(size, theta)[0]
    for j in range(1, count):
        out[j] = out[0] @ out[j - 1]
    return out


def chunk_for(size: int, length: int) -> int:
    """Returns C: 64 steps, fewer of a memory so large that its C powers would be large, and no more than there are."""
    return max(1, min(64, LARGEST // size**2, length))


def memory(
    u: Float[Array, "B T H"],
    before: Float[Array, "B H d"] | None = None,
    starts: Bool[Array, "B T"] | None = None,
    *,
    size: int,
    theta: float,
    form: str = "auto",
    chunk: int = 0,
) -> Float[Array, "B T H d"]:
    """Computes the memory after each step: m[t] = A m[t-1] + B u[t].

    Args:
      u: Inputs of H channels.
      before: The memory before the first step; None for zeros.
      starts: Where the memory is emptied before a step's input enters.
      size: d.
      theta: Steps that are remembered.
      form: "scan" is step by step; "chunks" takes C steps at once and carries A^C from chunk to chunk; "fft" convolves
        with the impulse response by transforms of 2 T, which neither a memory from before nor starts allow; "affine"
        is `affine_scan(kind="matrix")`, whose tree multiplies matrices. "auto" takes chunks.
      chunk: C; 0 takes `chunk_for`.

    Cost, a channel: T d^2 in T steps; T d (C + d) in T / C; T d log T; in a tree T d^2, and once T d^3, or once a row
    where documents begin.

    Raises:
      UsageError: For an unknown form, or one that cannot honour what it is given.
    """
    if form not in FORMS:
        raise UsageError(f"form={form!r} is unknown; legal are {', '.join(FORMS)}.")
    if u.size == 0:  # no step, or no row: there is no chunk
        return jnp.zeros((*u.shape, size), u.dtype)
    if form == "fft":
        if before is not None or starts is not None:
            raise UsageError(
                "form=fft begins with an empty memory and one document a row; take form=chunks."
            )
        return _by_transform(u, size, theta)
    if form == "affine":
        return _of_documents(_by_tree, u, before, starts, size, theta)
    chunk = chunk or chunk_for(size, u.shape[1])
    if before is None and (form == "scan" or chunk < u.shape[1]):
        before = jnp.zeros((u.shape[0], u.shape[2], size), u.dtype)
    if form == "scan":
        return _step_by_step(u, before, starts, size, theta)
    return _of_documents(_by_chunks, u, before, starts, size, theta, chunk)


def _einsum(equation: str, *arrays: Array) -> Array:
    # At full precision: what a product of bfloat16 or TF32 loses a step's memory keeps for theta steps.
    return jnp.einsum(equation, *arrays, precision="highest")


def _step_by_step(u, before, starts, size, theta):
    a, b = (jnp.asarray(x, u.dtype) for x in legendre(size, theta))
    starts = jnp.zeros(u.shape[:2], bool) if starts is None else starts

    def step(m, now):
        u, start = now
        m = jnp.where(start[:, None, None], 0, m)
        m = _einsum("bhd,ed->bhe", m, a) + u[..., None] * b[None, None]
        return m, m

    _, states = jax.lax.scan(step, before, (jnp.moveaxis(u, 1, 0), starts.T))
    return jnp.moveaxis(states, 0, 1)


def _of_documents(run, u, before, starts, *how):
    """Runs a form with products over documents, none of which sees what is not finite in another."""
    if starts is None:
        return run(u, before, starts, *how)
    u, drive = finite(u[..., None])
    first = jnp.zeros_like(drive[:, 0])
    if before is not None:
        before, first = finite(before)
    marks = marks_of(drive, jnp.zeros_like(drive), first, starts)
    return mark(run(u[..., 0], before, starts, *how), marks.tokens)


def _by_chunks(u, before, starts, size, theta, chunk):
    """Inside a chunk a product with the Toeplitz matrix of K; what came before it enters by powers of A."""
    batch, length, channels = u.shape
    response = jnp.asarray(impulse_response(size, theta, chunk), u.dtype)
    lag = np.arange(chunk)[:, None] - np.arange(chunk)[None]
    toeplitz = jnp.where((lag >= 0)[..., None], response[np.maximum(lag, 0)], 0)
    fill = -length % chunk
    u = jnp.pad(u, ((0, 0), (0, fill), (0, 0))).reshape(batch, -1, chunk, channels)
    if starts is None:
        inside, carries = _einsum("bnsh,tsd->bnthd", u, toeplitz), None
    else:
        begun = jnp.pad(starts, ((0, 0), (0, fill))).reshape(batch, -1, chunk).cumsum(2)
        same = (begun[:, :, :, None] == begun[:, :, None, :]).astype(u.dtype)
        inside = _einsum("bnts,bnsh,tsd->bnthd", same, u, toeplitz)
        carries = (begun == 0).astype(u.dtype)
    if before is None:  # one chunk, and nothing before it
        return inside.reshape(batch, -1, channels, size)[:, :length]
    powers = jnp.asarray(_powers(size, theta, chunk), u.dtype)

    def step(m, now):
        end, carried = now
        passed = _einsum("bhd,ed->bhe", m, powers[-1])
        passed = passed if carried is None else passed * carried[:, None, None]
        return passed + end, m

    ends = jnp.moveaxis(inside[:, :, -1], 1, 0), None if carries is None else carries[:, :, -1].T
    _, entering = jax.lax.scan(step, before, ends)
    passed = _einsum("nbhd,ted->bnthe", entering, powers)
    passed = passed if carries is None else passed * carries[..., None, None]
    return (inside + passed).reshape(batch, -1, channels, size)[:, :length]


def _by_tree(u, before, starts, size, theta):
    """Channels are columns of one state [d, H], and so are rows where all have the same transitions."""
    a, b = (jnp.asarray(x, u.dtype) for x in legendre(size, theta))
    batch, length, channels = u.shape
    drive = u[:, :, None] * b[None, None, :, None]
    before = None if before is None else jnp.swapaxes(before, 1, 2)
    if starts is not None:
        kept = jnp.where(starts[..., None, None], 0, a[None, None])
        return jnp.swapaxes(affine_scan(kept, drive, before, kind="matrix", axis=1), 2, 3)
    columns = lambda x: jnp.moveaxis(x, 0, -2).reshape(*x.shape[1:-1], batch * channels)  # noqa: E731
    before = None if before is None else columns(before)
    m = affine_scan(
        jnp.broadcast_to(a[None], (length, size, size)), columns(drive), before, kind="matrix"
    )
    return jnp.transpose(m.reshape(length, size, batch, channels), (2, 0, 3, 1))


def _by_transform(u, size, theta):
    length = u.shape[1]
    response = jnp.asarray(impulse_response(size, theta, length), u.dtype)
    # Twice as long, so that what leaves at the end does not come in again at the start.
    product = (
        jnp.fft.rfft(u, 2 * length, axis=1)[..., None]
        * jnp.fft.rfft(response, 2 * length, axis=0)[None, :, None]
    )
    return jnp.fft.irfft(product, 2 * length, axis=1)[:, :length]
