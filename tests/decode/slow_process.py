"""What `jaxpar.decode.process` does, one row and one token at a time, in double precision; and how near a call was."""

import math

import numpy as np


def slow_process(logits, sampling, tokens=None, start=0, bias=None, allowed=None):
    """Processed logits as a list of floats, and the least distance of any cumulative mass from top-p's p.

    `tokens` is the row so far, of which those from `start` on were generated.
    """
    row = [float(z) for z in np.asarray(logits, np.float64)]
    if bias is not None:
        row = [z + float(b) for z, b in zip(row, bias, strict=True)]
    tokens = [] if tokens is None else list(tokens)
    for v in range(len(row)):
        if v in tokens:
            row[v] = (
                row[v] / sampling.repetition_penalty
                if row[v] > 0
                else row[v] * sampling.repetition_penalty
            )
        times = tokens[start:].count(v)
        row[v] -= sampling.frequency_penalty * times + sampling.presence_penalty * (times > 0)
        if allowed is not None and not allowed[v]:
            row[v] = -math.inf
    if sampling.temperature == 0:
        return row, math.inf
    row = [z / sampling.temperature for z in row]
    ranked = sorted((v for v in range(len(row)) if row[v] > -math.inf), key=lambda v: (-row[v], v))
    if not ranked:
        return row, math.inf
    top, margin = row[ranked[0]], math.inf
    if sampling.top_k:
        ranked = ranked[: sampling.top_k]
    if sampling.top_p < 1:
        total, mass, kept = math.fsum(math.exp(row[v] - top) for v in ranked), 0.0, []
        for v in ranked:
            kept.append(v)
            mass += math.exp(row[v] - top) / total
            margin = min(margin, abs(mass - sampling.top_p))
            if mass >= sampling.top_p:
                break
        ranked = kept
    if sampling.min_p > 0:
        margin = min([margin, *(abs(row[v] - top - math.log(sampling.min_p)) for v in ranked)])
        ranked = [v for v in ranked if row[v] - top >= math.log(sampling.min_p)]
    return [row[v] if v in set(ranked) else -math.inf for v in range(len(row))], margin
