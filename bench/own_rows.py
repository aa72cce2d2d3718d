"""The sides of `bench/own.py`, which take turns in one process: a worker of `harness`."""

import dataclasses
import functools
import queue
import sys
import threading
import time
from collections.abc import Callable

import harness
import jax
import numpy as np
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.app import own_models
from jaxpar.loop import Fit
from jaxpar.mesh import MeshSpec, make_mesh, simulate_devices, use_mesh
from jaxpar.own import LayoutOptions, lay_out, train_own
from jaxpar.own.model import path_of

BATCH, RATE = 64, 3e-3


def axes_by_hand(layers: int) -> dict[str, tuple]:
    """Returns how one writes the axes of a transformer down, by its parameters' paths; the rest is whole."""
    split = {
        "Embed_0/embedding": ("tensor", "fsdp"),
        f"Dense_{2 * layers}/kernel": ("fsdp", "tensor"),
    }
    for layer in range(layers):
        attention, up, down = (
            f"MultiHeadDotProductAttention_{layer}",
            f"Dense_{2 * layer}",
            f"Dense_{2 * layer + 1}",
        )
        for name in ("query", "key", "value"):
            split[f"{attention}/{name}/kernel"] = ("fsdp", "tensor", None)
            split[f"{attention}/{name}/bias"] = ("tensor", None)
        split[f"{attention}/out/kernel"] = ("tensor", None, "fsdp")
        split |= {
            f"{up}/kernel": ("fsdp", "tensor"),
            f"{up}/bias": ("tensor",),
            f"{down}/kernel": ("tensor", "fsdp"),
        }
    return split


class Turns:
    """Who runs: a side's thread until it has made so many steps, then the next one's."""

    def __init__(self, sides: list[str], steps: int):
        """The first side begins."""
        self.sides, self.steps, self.left = sides, steps, list(sides)
        self.doors = {side: queue.Queue() for side in sides}
        self.calls = dict.fromkeys(sides, 0)
        self.wall: dict[str, list[float]] = {side: [] for side in sides}
        self.cpu: dict[str, list[float]] = {side: [] for side in sides}
        self.doors[sides[0]].put(None)

    def begin(self, side: str) -> None:
        """Waits for the first turn."""
        self.doors[side].get()
        self.start = time.perf_counter(), time.process_time()

    def step(self, side: str) -> None:
        """Is called before each step; after the last one of a turn it waits for the next."""
        if self.calls[side] and self.calls[side] % self.steps == 0:
            jax.block_until_ready(jax.live_arrays())
            self.wall[side].append(time.perf_counter() - self.start[0])
            self.cpu[side].append(time.process_time() - self.start[1])
            self.pass_on(side)
            self.begin(side)
        self.calls[side] += 1

    def pass_on(self, side: str) -> None:
        """Has the next side run."""
        at = self.left.index(side)
        self.doors[self.left[(at + 1) % len(self.left)]].put(None)

    def end(self, side: str) -> None:
        """Leaves the round."""
        if len(self.left) > 1:
            self.pass_on(side)
        self.left.remove(side)


def task_of(request: dict) -> own_models.OwnTask:
    """Returns the transformer of linen on sums, its examples, loss and collate."""
    return own_models.language(request["width"], request["layers"], 0, optax.adam(RATE, eps=1e-6))


def ours(request: dict, turns: Turns, made: dict) -> None:
    """`train_own`: the axes are read off the program."""
    task, side = task_of(request), "jaxpar.own"
    collate = task.model.collate

    def counted(rows):
        turns.step(side)
        return collate(rows)

    begin = task.model.init_variables
    model = dataclasses.replace(
        task.model, collate=counted, init_variables=lambda key: begin(jax.random.key(0))
    )
    turns.begin(side)
    result = train_own(
        model,
        task.examples,
        Fit(request["total"]),
        batch_size=BATCH,
        layout=LayoutOptions(mesh=MeshSpec(**request["mesh"]), tell=lambda text: None),
    )
    made[side] = result.state.params


def by_hand(request: dict, turns: Turns, made: dict) -> None:
    """A plain loop of flax and optax with `NamedSharding`s; the loss is read one step late, as ours is."""
    task, side = task_of(request), "by hand"
    model, rule = task.model, optax.adam(RATE, eps=1e-6)
    turns.begin(side)
    sizes = {"data": 1, "fsdp": 1, "tensor": 1} | request["mesh"]
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(tuple(sizes.values())), tuple(sizes))
    params = model.init_variables(jax.random.key(0))["params"]
    places = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec), hand_specs(params, request["layers"])
    )
    params = jax.device_put(params, places)
    opt_state = jax.jit(rule.init)(params)
    rows = NamedSharding(mesh, P(("data", "fsdp")))

    def step(params, opt_state, batch):
        value, grads = jax.value_and_grad(lambda p: model.loss({"params": p}, batch, None))(params)
        updates, opt_state = rule.update(grads, opt_state, params)
        return (
            jax.lax.with_sharding_constraint(optax.apply_updates(params, updates), places),
            opt_state,
            value,
        )

    program, late = jax.jit(step, donate_argnums=(0, 1)), None
    for number in range(request["total"]):
        turns.step(side)
        batch = jax.device_put(
            model.collate([task.examples[i] for i in chosen(number, len(task.examples))]), rows
        )
        params, opt_state, value = program(params, opt_state, batch)
        if late is not None:
            float(late)
        late = value
    made[side] = params


def redco(request: dict, turns: Turns, made: dict) -> None:
    """Redco's `Trainer`, with the rules of its `Deployer`."""
    from redco import Deployer, Trainer

    task, side = task_of(request), "redco"
    model = task.model
    turns.begin(side)
    deployer = Deployer(jax_seed=0, n_model_shards=request["mesh"].get("tensor", 1), verbose=False)
    params = model.init_variables(jax.random.key(0))["params"]

    def collate(examples):
        turns.step(side)
        return model.collate(examples)

    def loss(rng, state, params, batch, is_training):
        del state, is_training
        return model.loss({"params": params}, batch, rng)

    trainer = Trainer(
        deployer=deployer, collate_fn=collate, apply_fn=None, loss_fn=loss, params=params,
        optimizer=optax.adam(RATE, eps=1e-6), params_sharding_rules=deployer.get_sharding_rules(params),
    )  # fmt: skip
    left, examples = request["total"], list(task.examples)
    while left:
        count = min(left, len(examples) // BATCH)
        shares = request["devices"] // request["mesh"].get("tensor", 1)
        trainer.train(examples[: count * BATCH], per_device_batch_size=BATCH // shares)
        left -= count
    params = trainer._state.params
    made[side] = (
        params if request["mesh"].get("tensor", 1) > 1 else jax.tree.map(lambda x: x[0], params)
    )


def chosen(step: int, count: int) -> list[int]:
    """Returns the examples of a step, as `train_own` takes them: so both sides end with the same loss."""
    found = []
    for epoch, place in (divmod(step * BATCH + i, count) for i in range(BATCH)):
        found.append(int(order_of(epoch, count)[place]))
    return found


@functools.lru_cache(maxsize=2)
def order_of(epoch: int, count: int) -> np.ndarray:
    """Returns an epoch's order."""
    return np.random.default_rng([0, epoch]).permutation(count)


def hand_specs(params, layers: int):
    """Returns a spec a parameter, by `axes_by_hand`."""
    split = axes_by_hand(layers)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: P(*split.get(path_of(path), ())), params
    )


def axes_of(request: dict) -> dict:
    """Returns the mesh axes of every parameter as each side has them: path -> side -> a name or "-" a dimension."""
    task = task_of(request)
    with use_mesh(make_mesh(MeshSpec(**request["mesh"]))):
        laid = lay_out(task.model, task.model.collate(list(task.examples[:BATCH])))
    params = jax.eval_shape(task.model.init_variables, jax.random.key(0))["params"]
    said = {row.path.removeprefix("params/"): {"jaxpar.own": list(row.split)} for row in laid.rows}
    is_spec = lambda x: isinstance(x, P)  # noqa: E731
    split = {axis for axis, size in request["mesh"].items() if size > 1}
    for path, spec in jax.tree_util.tree_leaves_with_path(
        hand_specs(params, request["layers"]), is_leaf=is_spec
    ):
        rank = len(said[path_of(path)]["jaxpar.own"])
        said[path_of(path)]["by hand"] = [
            axis if axis in split else "" for axis in [*spec, *[None] * (rank - len(spec))]
        ]
    if "redco" in request["sides"] and request["mesh"].get("tensor", 1) > 1:
        from redco.deployers.partition_utils import get_params_spec, get_sharding_rules

        found = get_params_spec(params, get_sharding_rules(params, request["mesh"]["tensor"]))
        for path, spec in jax.tree_util.tree_leaves_with_path(dict(found), is_leaf=is_spec):
            name = path_of(path)
            rank = len(said[name]["by hand"])
            said[name]["redco"] = [
                "tensor" if axis == "mp" else "" for axis in [*spec, *[None] * (rank - len(spec))]
            ]
    return {"axes": said}


SIDES: dict[str, Callable] = {"jaxpar.own": ours, "by hand": by_hand, "redco": redco}


def run(request: dict) -> dict:
    """Runs the sides in turns; ours in the main thread, as it minds Ctrl-C."""
    sides, made, failed = request["sides"], {}, {}
    turns = Turns(sides, request["steps"])

    def guarded(side: str) -> None:
        try:
            SIDES[side](request, turns, made)
        except Exception as error:  # its row fails, and the others go on
            failed[side] = f"{type(error).__name__}: {error}"
        turns.end(side)

    threads = [threading.Thread(target=guarded, args=(side,)) for side in sides[1:]]
    for thread in threads:
        thread.start()
    guarded(sides[0])
    for thread in threads:
        thread.join()
    task = task_of(request)
    batch = task.model.collate(list(task.held_out))
    loss = jax.jit(lambda params: task.model.loss({"params": params}, batch, None))
    rows = {}
    for side in sides:
        if side in failed:
            rows[side] = {"failed": failed[side]}
            continue
        rows[side] = {
            "wall": turns.wall[side],
            "cpu": turns.cpu[side],
            "loss": float(loss(jax.tree.map(np.asarray, jax.device_get(dict(made[side]))))),
        }
    return {"rows": rows} | axes_of(request)


def answer(request: dict) -> dict:
    """Simulates the devices and runs."""
    simulate_devices(request["devices"])
    if request["redco"]:
        sys.path.append(request["redco"])
    return run(request)


if __name__ == "__main__":
    harness.serve(answer)
