"""The shapes of `bench/linear_attention.py`, and the inputs that all its rows share."""

import numpy as np

SHAPES = {  # batch, length, heads, columns of keys and of values
    "G1": (8, 4096, 4, 128, 256),
    "G2": (4, 2048, 16, 128, 128),
    "G3": (2, 16384, 16, 128, 128),
    "G4": (1, 8192, 96, 128, 128),
    "M1": (64, 1024, 8, 256, 512),
    "M2": (8, 8192, 8, 256, 512),
    "M3": (2, 32768, 8, 256, 512),
    "M4": (8, 8192, 8, 64, 128),
    "D1": (64, 1, 32, 128, 128),
    "D2": (64, 1, 16, 128, 256),
}
TINY = (1, 70, 2, 32, 32)
SIDES = {
    "rows": {"jaxpar": ["kernel", "chunked"], "torch": ["fla gla"]},
    "heads": {"jaxpar": ["kernel", "chunked"], "torch": ["fla simple_gla", "fla retention"]},
    "none": {"jaxpar": ["kernel", "chunked", "cudnn attention"], "torch": []},
    "delta": {"jaxpar": ["chunked", "chunked, loop"], "torch": ["fla gated_delta_rule"]},
    "exponential": {
        "jaxpar": ["kernel", "chunked"],
        "torch": ["mlstm_kernels limit", "mlstm_kernels xl"],
    },
    "sigmoid": {"jaxpar": ["kernel", "chunked"], "torch": ["mlstm_kernels siging"]},
}
CASES = {
    f"{shape}.{decay}": dict(shape=shape, decay=decay)
    for shape in SHAPES
    for decay in {
        "G": list(SIDES)[:-1],
        "M": ["exponential", "sigmoid"],
        "D": ["rows", "heads", "exponential"],
    }[shape[0]]
}
STEP = {"jaxpar": ["sequential"], "torch": ["fla step"]}
"""Rows of D1 and D2: one token and a state, in float32, that is read and written."""


WIDE = ("log_decay", "log_input", "beta", "log_state")
"""Arrays that are float32 whatever the others are, in the order of a row's arguments."""


def rows_of(case: dict) -> dict:
    """Returns the names of a case's rows, by side."""
    if case["shape"][0] != "D":
        return SIDES[case["decay"]]
    return STEP if case["decay"] != "exponential" else STEP | {"torch": []}


def directions_of(name: str) -> tuple[str, ...]:
    """Returns the passes in which a case is timed."""
    return ("step",) if name[0] == "D" else ("fwd", "fwd+bwd")


def arrays(request: dict) -> dict[str, np.ndarray]:
    """Returns q (scaled), k, v, the outputs' gradient, and log decays, float32; those of retention where it asks."""
    batch, length, heads, depth, width = request["sizes"]
    rng = np.random.default_rng(0)
    normal = lambda *shape: rng.standard_normal(shape, np.float32)  # noqa: E731
    tokens = batch, length, heads
    made = {
        "q": normal(*tokens, depth) * depth**-0.5,
        "k": normal(*tokens, depth),
        "v": normal(*tokens, width),
    }
    made["g"] = normal(*tokens, width)
    if request["decay"] == "rows":  # GLA's: logarithms of sigmoids, by 16
        made["log_decay"] = -np.log1p(np.exp(-normal(*tokens, depth))) / 16
    elif "retention" in request["row"]:
        made["log_decay"] = np.broadcast_to(
            np.log1p(-(2.0 ** (-5 - np.arange(heads)))), tokens
        ).astype(np.float32)
    elif request["decay"] in ("heads", "delta"):
        made["log_decay"] = -np.log1p(np.exp(-normal(*tokens))) / 16
    elif request["decay"] in ("exponential", "sigmoid"):
        made |= {"log_decay": -np.log1p(np.exp(-normal(*tokens) - 3)), "log_input": normal(*tokens)}
    if request["decay"] == "delta":
        made["k"] /= np.linalg.norm(made["k"], axis=-1, keepdims=True)
        made["beta"] = 1 / (1 + np.exp(-normal(*tokens)))
    if request["direction"] == "step":
        width += request["decay"] == "exponential"
        made["log_state"] = normal(batch, heads, depth, width)
    return made


def num_bytes(request: dict) -> float:
    """Returns what must be read and written at least: inputs, outputs, and backwards these and as many gradients."""
    batch, length, heads, depth, width = request["sizes"]
    if request["direction"] == "step":
        return 8.0 * batch * heads * depth * width
    decays = {"rows": 4 * depth, "heads": 4, "none": 0, "exponential": 8, "sigmoid": 8, "delta": 8}[
        request["decay"]
    ]
    once = batch * length * heads * (2 * (2 * depth + 2 * width) + decays)
    return once * (3 if request["direction"] == "fwd+bwd" else 1)


def told(parts: list[float], names: list[str]) -> dict:
    """Returns the error of outputs, and where there are errors of gradients, the worst and each by its name."""
    each = ", ".join(f"{name} {part:.1e}" for name, part in zip(names, parts[1:], strict=False))
    row = {"error": parts[0], "worst_error": float(np.max(parts))}
    return row | ({"note": each} if each else {})
