"""Ring self-attention as it was first told (arXiv:2105.13120), in NumPy: the plain form of a ring of partial sums.

Keys go round for whole rows of scores, then values for the outputs; both once more with the sums of
their gradients.
"""

import math

import numpy as np


def by_two_rings(q, k, v, g, shares):
    """Returns outputs and gradients; all arrays are of the whole sequence, in turn, under a causal rule."""
    size, again = q.shape[1] // shares, q.shape[2] // k.shape[2]
    qs, ks, vs, gs = (np.split(np.asarray(x, np.float64), shares, 1) for x in (q, k, v, g))
    seen = np.tril(np.ones((q.shape[1],) * 2, bool)).reshape(shares, size, -1)

    def ring(parts):  # whose part each device holds, turn after turn
        return [
            (device, (device - turn) % shares, parts)
            for turn in range(shares)
            for device in range(shares)
        ]

    def product(equation, *arrays):
        return np.einsum(
            equation,
            *(np.repeat(x, again, 2) if x.shape[2:] == ks[0].shape[2:] else x for x in arrays),
        )

    scores, out = (
        np.zeros((shares, len(q), q.shape[2], size, q.shape[1])),
        np.zeros((shares, *qs[0].shape)),
    )
    for device, other, held in ring(ks):
        at = slice(other * size, (other + 1) * size)
        scores[device, ..., at] = product("bthk,bshk->bhts", qs[device], held[other]) / math.sqrt(
            q.shape[-1]
        )
    scores = np.where(seen[:, None, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    for device, other, held in ring(vs):
        out[device] += product(
            "bhts,bshk->bthk", weights[device, ..., other * size : (other + 1) * size], held[other]
        )
    dq, dk, dv, slopes = (
        np.zeros_like(out),
        np.zeros_like(out),
        np.zeros_like(out),
        np.zeros_like(scores),
    )
    for device, other, held in ring(vs):
        at = slice(other * size, (other + 1) * size)
        dv[other] += product("bhts,bthk->bshk", weights[device, ..., at], gs[device])
        slopes[device, ..., at] = product("bthk,bshk->bhts", gs[device], held[other])
    slopes = weights * (slopes - (weights * slopes).sum(-1, keepdims=True)) / math.sqrt(q.shape[-1])
    for device, other, held in ring(ks):
        at = slice(other * size, (other + 1) * size)
        dq[device] += product("bhts,bshk->bthk", slopes[device, ..., at], held[other])
        dk[other] += product("bhts,bthk->bshk", slopes[device, ..., at], qs[device])
    out, dq, dk, dv = (np.concatenate(x, 1) for x in (out, dq, dk, dv))
    return out, dq, *(x.reshape(*k.shape[:3], again, -1).sum(3) for x in (dk, dv))
