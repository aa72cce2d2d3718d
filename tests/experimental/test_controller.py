"""The single controller: random graphs end, and compute what NumPy computes one node at a time."""

import pathlib
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax._src.dispatch import runtime_tokens

from jaxpar.experimental.controller import Client, Event, NodeError, plot_trace, start_pathways
from jaxpar.mesh import MeshSpec, constrain, local, make_mesh, use_mesh
from jaxpar.types import UsageError

SIZE = 8


def product(x, y):
    # The sum over "embed" crosses devices where the mesh has fsdp, the other constraints where it has tensor.
    return constrain(constrain(x, None, "embed") @ constrain(y, "embed", None), None, "mlp") % 97


def cut_sum(x, y):
    return constrain(constrain(x, "batch", None) + y.T, "mlp", None) % 97


def spread(x, y):
    return constrain(x, "heads", None) - x.sum() % 13 + y[::-1]


FUNCTIONS = (product, cut_sum, spread)  # of integers, so that every order of sums gives the same
AXES = ((None, None), ("batch", None), ("batch", "mlp"), (None, "embed"))


def lay_out(shape):
    devices = jax.devices()
    if shape == "halves":
        return {"a": MeshSpec(fsdp=2, tensor=2), "b": MeshSpec(data=4)}
    if shape == "uneven":
        return {
            "a": MeshSpec(data=2, tensor=2),
            "b": MeshSpec(fsdp=2),
            "c": MeshSpec(),
            "d": MeshSpec(),
        }
    return {  # overlapping
        "a": make_mesh(MeshSpec(data=2, fsdp=2, tensor=2), devices),
        "b": make_mesh(MeshSpec(fsdp=4), devices[4:]),
        "c": make_mesh(MeshSpec(tensor=4), devices[2:6]),
        "d": make_mesh(MeshSpec(tensor=2), [devices[5], devices[1]]),
    }


@st.composite
def graphs(draw):
    """A layout, and nodes: (function, two earlier nodes or inputs (negative), mesh, axes of both)."""
    shape = draw(st.sampled_from(["halves", "uneven", "overlapping"]))
    names = sorted(lay_out(shape))
    nodes = []
    for index in range(draw(st.integers(1, 12))):
        source, axes = st.integers(-2, index - 1), st.sampled_from(AXES)
        function, mesh = draw(st.sampled_from(FUNCTIONS)), draw(st.sampled_from(names))
        in_axes = draw(st.one_of(st.none(), st.tuples(axes, axes)))
        nodes.append((function, draw(source), draw(source), mesh, in_axes))
    return shape, nodes


INPUTS = np.random.default_rng(0).integers(0, 97, (2, SIZE, SIZE), dtype=np.int32)


def run(graph, **options):
    shape, nodes = graph
    with Client(lay_out(shape), **options) as client:
        futures = []
        for function, first, second, mesh, in_axes in nodes:
            args = [futures[i] if i >= 0 else INPUTS[i] for i in (first, second)]
            futures.append(client.submit(function, *args, on=mesh, in_axes=in_axes))
        return [np.asarray(future.result()) for future in reversed(futures)][::-1]


def within(seconds, function, *args, **options):
    """Calls it in a thread, so that a deadlock fails the test instead of holding it up."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(function, *args, **options).result(timeout=seconds)
    finally:
        pool.shutdown(wait=False)


def in_numpy(nodes):
    def evaluate(function, x, y):
        if function is product:
            return x @ y % 97
        return (x + y.T) % 97 if function is cut_sum else x - x.sum() % 13 + y[::-1]

    values = []
    for function, first, second, *_ in nodes:
        values.append(
            evaluate(function, *(values[i] if i >= 0 else INPUTS[i] for i in (first, second)))
        )
    return values


@settings(max_examples=20, deadline=None)
@given(graphs(), st.sampled_from([1, 3, 256]))
def test_random_graphs_equal_numpy_and_never_deadlock(graph, max_in_flight):
    for got in (
        within(120, run, graph, max_in_flight=max_in_flight),
        within(120, run, graph, serial=True),
    ):
        for value, want in zip(got, in_numpy(graph[1]), strict=True):
            np.testing.assert_array_equal(value, want)


@pytest.mark.slow
@settings(max_examples=400, deadline=None)
@given(graphs(), st.sampled_from([1, 3, 256]))
def test_many_random_graphs_equal_numpy_and_never_deadlock(graph, max_in_flight):
    for value, want in zip(
        within(120, run, graph, max_in_flight=max_in_flight), in_numpy(graph[1]), strict=True
    ):
        np.testing.assert_array_equal(value, want)


@pytest.mark.slow
def test_a_long_graph_from_several_threads_ends():
    with Client(lay_out("overlapping"), max_in_flight=16) as client:

        def chain(seed):
            rng, x = np.random.default_rng(seed), INPUTS[0]
            for _ in range(60):
                axes = [AXES[rng.integers(len(AXES))], AXES[rng.integers(len(AXES))]]
                x = client.submit(product, x, INPUTS[1], on="abcd"[rng.integers(4)], in_axes=axes)
            return np.asarray(x.result())

        with ThreadPoolExecutor(3) as pool:
            ends = [
                future.result(timeout=200)
                for future in [pool.submit(chain, seed) for seed in range(3)]
            ]
    want = INPUTS[0]
    for _ in range(60):
        want = want @ INPUTS[1] % 97
    for end in ends:
        np.testing.assert_array_equal(end, want)


# ---------------------------------------------------------------- dispatch ahead of compute


def long(x):
    return jax.lax.fori_loop(0, 150, lambda _, c: jnp.tanh(constrain(c, "batch", "mlp") @ c), x)


def pipeline(**options):
    """Eight long nodes, each on another mesh than the one before, of other size and layout."""
    x = jnp.full((256, 256), 0.004)
    meshes = {"a": MeshSpec(data=2, tensor=2), "b": MeshSpec(tensor=2), "c": MeshSpec(fsdp=2)}
    for _ in range(2):  # the first time compiles
        with Client(meshes, **options) as client:
            future = x
            for index in range(8):
                axes = [(("batch", None), (None, "mlp"))[index % 2]]
                future = client.submit(
                    long, future, on="abc"[index % 3], in_axes=axes, name=f"n{index}"
                )
            value = np.asarray(future.result())
    return client.trace, value


def test_dispatch_runs_ahead_and_the_trace_shows_it(tmp_path):
    trace, value = pipeline(trace=True)
    assert [event.node for event in trace] == [f"n{index}" for index in range(8)]
    assert [event.after for event in trace] == [(), *((f"n{index}",) for index in range(7))]
    assert trace[-1].dispatched < trace[0].ready, "the last is enqueued before the first is done"
    assert all(event.submitted <= event.dispatched < event.ready for event in trace)
    assert all(early.ready < late.ready for early, late in zip(trace, trace[1:], strict=False))
    plot_trace(trace, tmp_path / "trace.png")
    assert (tmp_path / "trace.png").read_bytes().startswith(b"\x89PNG")

    serial, same = pipeline(serial=True)
    assert all(
        early.ready <= late.submitted for early, late in zip(serial, serial[1:], strict=False)
    )
    np.testing.assert_array_equal(value, same)


def test_work_in_flight_is_bounded():
    x = jnp.full((256, 256), 0.004)
    with Client({"a": MeshSpec(data=2), "b": MeshSpec(data=2)}, max_in_flight=2) as client:
        futures = []
        for index in range(6):
            futures.append(client.submit(long, x, on="ab"[index % 2]))
            assert all(future.ready() for future in futures[:-2])
    assert all(future.ready() for future in futures), "the end of a client waits"


def test_the_past_is_forgotten():
    with Client({"a": MeshSpec()}, max_in_flight=2) as client:
        future = INPUTS[0]
        for _ in range(50):
            future = client.submit(cut_sum, future, INPUTS[1], on="a")
        assert len(future._node.ancestors()) <= 3


# ---------------------------------------------------------------- values and errors


def test_trees_keys_and_numbers_are_arguments():
    with Client({"a": MeshSpec(data=2), "b": MeshSpec(tensor=2)}) as client:
        made = client.submit(
            lambda key, n: {"x": jax.random.normal(key, (4, 4)) * n, "n": n},
            jax.random.key(0),
            3,
            on="a",
        )
        both = client.submit(lambda tree: tree[0]["x"] + tree[1], [made, 1.0], on="b")
        assert isinstance(made.value["x"], jax.Array) and made.result()["n"] == 3
        want = jax.random.normal(jax.random.key(0), (4, 4)) * 3 + 1
        np.testing.assert_allclose(both.result(), want, rtol=1e-6)
        assert both.value.sharding.device_set == set(jax.devices()[2:4])


def test_an_ambient_mesh_of_the_caller_does_not_matter():
    with use_mesh(make_mesh(MeshSpec(data=-1))), Client(lay_out("halves")) as client:
        first = client.submit(product, *INPUTS, on="a", in_axes=[("batch", "mlp"), (None, "embed")])
        second = client.submit(spread, first, INPUTS[1], on="b", in_axes=[("batch", None)] * 2)
        third = client.submit(spread, second, first, on="a")
    x, y = INPUTS
    one = x @ y % 97
    two = one - one.sum() % 13 + y[::-1]
    np.testing.assert_array_equal(third.result(), two - two.sum() % 13 + one[::-1])


def stop(x):
    raise ValueError("no such sum\nand more")


def broken(x):
    def fail(block):
        time.sleep(0.2)  # on a quiet machine the dependents are enqueued by then
        raise ValueError("the sensor is off")

    # Of several devices, since a callback of one device alone is called before dispatch returns.
    fallible = local(
        lambda x: jax.pure_callback(fail, x, x), [("batch", None)], ("batch", None), check=False
    )
    return fallible(x)


@pytest.mark.parametrize(
    ("fn", "reason"), [(stop, "ValueError: no such sum"), (broken, "JaxRuntimeError: ")]
)
def test_an_error_is_that_of_the_node_where_it_began(fn, reason):
    with Client({"a": MeshSpec(), "b": MeshSpec(data=2), "c": MeshSpec(data=2)}) as client:
        good = client.submit(cut_sum, *INPUTS, on="b")
        bad = client.submit(fn, good, on="c", name="sensor")
        next_ = client.submit(cut_sum, good, bad, on="b", name="filter")
        last = client.submit(spread, next_, good, on="a", name="controller")
        beside = client.submit(product, good, good, on="a")
        with pytest.raises(
            NodeError, match="node 'controller' has no result, because node 'sensor' failed: "
        ) as error:
            last.result()
        assert error.value.node == "sensor" and error.value.reason.startswith(reason)
        with pytest.raises(NodeError, match=f"^node 'sensor' failed: {reason}"):
            bad.result()
        with pytest.raises(
            NodeError, match="node 'filter' has no result, because node 'sensor' failed"
        ):
            next_.result()
        assert last.ready() and bad.ready()
        np.testing.assert_array_equal(beside.result(), good.result() @ good.result() % 97)
    runtime_tokens.clear()  # JAX would tell of the failed callback again when Python exits


def test_mistakes_are_one_sentence():
    with (
        Client({"a": MeshSpec(data=2), "b": MeshSpec()}) as client,
        Client({"a": MeshSpec()}) as other,
    ):
        with pytest.raises(UsageError, match="there is no mesh 'c'; this client has a, b."):
            client.submit(cut_sum, *INPUTS, on="c")
        with pytest.raises(UsageError, match="in_axes has 1 entries for 2 arguments."):
            client.submit(cut_sum, *INPUTS, on="a", in_axes=[("batch", None)])
        with pytest.raises(
            UsageError, match="dimension 0 .batch. of size 3 does not divide over data=2"
        ):
            client.submit(lambda x: x, np.ones(3), on="a", in_axes=[("batch",)])
        with pytest.raises(UsageError, match="a future belongs to the client that made it"):
            other.submit(cut_sum, client.submit(cut_sum, *INPUTS, on="a"), INPUTS[0], on="a")
        assert len(client.trace) == 1
    for meshes, sentence in [
        ({"a": MeshSpec(data=-1)}, "mesh 'a' leaves a size open"),
        (
            {"a": MeshSpec(data=6), "b": MeshSpec(data=4)},
            "mesh 'b' ends at device 10 but 8 are here.",
        ),
    ]:
        with pytest.raises(UsageError, match=sentence):
            Client(meshes)
    with pytest.raises(UsageError, match="max_in_flight=0 must be at least 1."):
        Client({"a": MeshSpec()}, max_in_flight=0)
    with pytest.raises(UsageError, match="no node of this trace is done"):
        plot_trace([Event("n", "a", (), 0.0, 0.1)], None)


def test_threads_end_with_the_client():
    before = threading.active_count()
    with Client({"a": MeshSpec()}, trace=True) as client:
        client.submit(cut_sum, *INPUTS, on="a")
        assert threading.active_count() > before
    assert threading.active_count() == before and np.isfinite(client.trace[0].ready)


# ---------------------------------------------------------------- Pathways


def test_pathways_is_initialised_where_it_is_installed(tmp_path, monkeypatch):
    assert start_pathways() is False
    (tmp_path / "pathwaysutils.py").write_text(
        "calls = []\ndef initialize():\n    calls.append(1)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    assert start_pathways() is True
    import pathwaysutils

    with Client({"a": MeshSpec()}):
        assert len(pathwaysutils.calls) == 2
    monkeypatch.delitem(sys.modules, "pathwaysutils")


# ---------------------------------------------------------------- the page


def test_the_page_says_what_happens():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "single_controller.md").read_text()
    names = {}
    exec(re.search(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)[1], names)
    nodes = [event for event in names["trace"] if "weights" not in event.node]
    assert len(nodes) == 12 and nodes[-1].dispatched < nodes[0].ready
