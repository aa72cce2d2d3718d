"""The shapes of `bench/experts.py`, and the choices of experts that all its rows share."""

import numpy as np

SHAPES = {
    "E8": dict(tokens=16384, depth=2048, width=8192, experts=8, k=2),
    "E64": dict(tokens=16384, depth=2048, width=1024, experts=64, k=8),
    "E128": dict(tokens=32768, depth=1024, width=512, experts=128, k=8),
}
TINY = dict(tokens=64, depth=32, width=64, experts=4, k=2, dtype="float32")
PRODUCTS = {
    "jaxpar": [
        "jax dense",
        "jaxpar sorted",
        "jaxpar read",
        "jaxpar write",
        "jax ragged_dot",
        "jax mosaic",
        "jax tokamax",
    ],
    "torch": ["torch dense", "torch grouped_mm", "torch scattermoe"],
}
LAYERS = {
    "jaxpar": ["jaxpar layer", "jaxpar layer with copies", "jax ragged_dot"],
    "torch": ["torch grouped_mm compiled", "torch grouped_mm eager", "torch scattermoe"],
}
CASES = {
    f"{name}.{kind}": dict(kind=kind, full=shape | {"dtype": "bfloat16"}, tiny=TINY, sides=sides)
    for name, shape in SHAPES.items()
    for kind, sides in (("product", PRODUCTS), ("layer", LAYERS))
}


def flops(request: dict) -> float:
    """Returns what a product, or the three of a layer, cannot do without; a gradient costs twice as much again."""
    one = 2 * request["tokens"] * request["k"] * request["depth"] * request["width"]
    return (
        one
        * (3 if request["kind"] == "layer" else 1)
        * (3 if request["direction"] == "fwd+bwd" else 1)
    )


def choices(request: dict) -> tuple[np.ndarray, np.ndarray]:
    """Returns the choices in the order of their experts, [N k], and how many each expert has, by k of E at random.

    A share `skew` of the tokens chooses the first k.
    """
    rng = np.random.default_rng(0)
    scores = rng.random((request["tokens"], request["experts"]), np.float32)
    scores[: int(request.get("skew", 0.0) * request["tokens"]), : request["k"]] += 1
    expert = np.argpartition(-scores, request["k"] - 1, axis=1)[:, : request["k"]].reshape(-1)
    sizes = np.bincount(expert, minlength=request["experts"])
    return np.argsort(expert, kind="stable").astype(np.int32), sizes.astype(np.int32)


def routes(shape: dict, skew: float) -> np.ndarray:
    """Returns what each token chooses, [N, k]: k of E at random, or for a share of tokens the first k."""
    rng = np.random.default_rng(0)
    scores = rng.random((shape["tokens"], shape["experts"]), np.float32)
    scores[rng.random(shape["tokens"]) < skew, : shape["k"]] += 1
    return np.argpartition(-scores, shape["k"] - 1, axis=1)[:, : shape["k"]].astype(np.int32)
