"""Axes derived from programs: those of the papers' layouts by hand, what they cost, what is left whole and why."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

from experiments.app import own_models
from jaxpar.aot import hlo
from jaxpar.mesh import MeshSpec, make_mesh, named_shardings, rules_from, use_mesh
from jaxpar.own import OwnModel, lay_out
from jaxpar.types import UsageError

RULE = optax.adam(1e-3)


def own(module, sample, loss=None):
    """The model of a module of linen whose loss is a mean square, of a batch {"x": ...}."""

    def mean_square(variables, batch, key):
        return jnp.square(module.apply(variables, batch["x"])).mean()

    return OwnModel(lambda key: module.init(key, sample), loss or mean_square, None, RULE, None)


def on(**sizes):
    return use_mesh(make_mesh(MeshSpec(**sizes)))


def axes_of(model, batch, sizes=(("data", 2), ("tensor", 4)), given=None):
    """Path -> axes as one string, "-" for a whole dimension."""
    with on(**dict(sizes)):
        laid = lay_out(model, batch, given)
    return {
        row.path.removeprefix("params/"): " ".join(name or "-" for name in row.axes)
        for row in laid.rows
    }


class Mlp(nn.Module):
    sizes: tuple

    @nn.compact
    def __call__(self, x):
        for size in self.sizes[:-1]:
            x = nn.relu(nn.Dense(size)(x))
        return nn.Dense(self.sizes[-1])(x)


class Residual(nn.Module):
    """Blocks x + W2 f(W1 norm(x))."""

    blocks: int = 2

    @nn.compact
    def __call__(self, x):
        for _ in range(self.blocks):
            x = x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(16)(nn.LayerNorm()(x))))
        return x


X = jnp.zeros((8, 8))


def test_layers_in_a_row_are_split_by_outputs_then_by_inputs():
    found = axes_of(own(Mlp((16, 16, 16, 16, 3)), X), {"x": X})
    assert [found[f"Dense_{i}/kernel"] for i in range(5)] == [
        "- mlp",
        "mlp -",
        "- mlp",
        "mlp -",
        "- -",
    ]
    assert [found[f"Dense_{i}/bias"] for i in range(5)] == ["mlp", "-", "mlp", "-", "-"]


def test_a_transformer_is_split_as_megatron_splits_it():
    task = own_models.language(16, 2, 0, RULE)
    with on(fsdp=2, tensor=4):
        batch = task.model.collate(list(task.examples[:8]))
        laid = lay_out(task.model, batch)
    found = {row.path.removeprefix("params/"): row for row in laid.rows}
    for layer in (0, 1):
        attention = f"MultiHeadDotProductAttention_{layer}"
        for name in ("query", "key", "value"):
            assert found[f"{attention}/{name}/kernel"].axes == ("embed", "heads", None)
        assert found[f"{attention}/out/kernel"].axes == ("heads", None, "embed")
        assert found[f"{attention}/out/bias"].axes == (None,)
        assert found[f"Dense_{2 * layer}/kernel"].axes == ("embed", "mlp")
        assert found[f"Dense_{2 * layer + 1}/kernel"].axes == ("mlp", "embed")
    assert found["Embed_0/embedding"].axes == ("vocab", "embed") and found[
        "Dense_4/kernel"
    ].axes == ("embed", "vocab")
    assert (
        found["Dense_0/kernel"].bytes == 16 * 64 * 4 // 8 and found["LayerNorm_0/scale"].bytes == 64
    )
    assert [row.path for row in laid.rows if row.why] == ["params/places"]
    lines = [" ".join(line.split()) for line in str(laid).splitlines()]
    assert lines[0] == "parameter shape axes bytes a device" and len(laid.rows) == 37
    assert "params/Dense_0/kernel 16 x 64 embed=fsdp, mlp=tensor 512" in lines
    assert f"{sum(row.bytes for row in laid.rows):,} bytes of parameters a device" in str(laid)
    assert (
        "note: params/places [16, 16]: whole over tensor: 16 of the batch; 16 costs more sums"
        in lines[-1]
    )


def test_kernels_that_are_reshaped_into_heads_divide_as_heads():
    class Grouped(nn.Module):
        """Eight query heads, two heads of keys and values, in kernels of two dimensions."""

        @nn.compact
        def __call__(self, x):
            q = nn.Dense(32, use_bias=False, name="q")(x).reshape(*x.shape[:2], 2, 4, 4)
            k, v = (
                nn.Dense(8, use_bias=False, name=n)(x).reshape(*x.shape[:2], 2, 4) for n in "kv"
            )
            weights = nn.softmax(jnp.einsum("bqhgd,bkhd->bhgqk", q, k))
            y = jnp.einsum("bhgqk,bkhd->bqhgd", weights, v).reshape(*x.shape[:2], 32)
            return x + nn.Dense(8, use_bias=False, name="o")(y)

    x = jnp.zeros((4, 3, 8))
    assert set(axes_of(own(Grouped(), x), {"x": x}, (("data", 4), ("tensor", 2))).values()) == {
        "- heads",
        "heads -",
    }
    with on(data=2, tensor=4):  # more than the heads of keys
        notes = lay_out(own(Grouped(), x), {"x": x}).warnings
    assert len(notes) == 4 and "8 in parts of 2 does not divide over tensor=4" in notes[0], notes


def test_layers_in_a_scan_are_laid_out_like_one():
    class Scanned(nn.Module):
        @nn.compact
        def __call__(self, x):
            body = lambda block, x, _: (block(x), None)  # noqa: E731
            every = nn.scan(
                body, variable_axes={"params": 0}, split_rngs={"params": True}, length=4
            )
            return every(Residual(1), x, None)[0]

    found = axes_of(own(Scanned(), X), {"x": X}, (("fsdp", 2), ("tensor", 4)))
    kernels = sorted(axes for path, axes in found.items() if path.endswith("kernel"))
    assert kernels == ["- embed mlp", "- mlp embed"], found


def test_what_is_cut_convolved_tied_or_recurrent():
    class Fused(nn.Module):
        @nn.compact
        def __call__(self, x):
            gate, up = jnp.split(nn.Dense(32, name="both")(x), 2, -1)
            return nn.Dense(8, name="down")(nn.silu(gate) * up)

    with on(tensor=8):
        laid = lay_out(own(Fused(), X), {"x": X})
    assert (
        laid.rows[1].axes == (None, None)
        and "32 is cut or put together (split)" in laid.rows[1].why
    )

    class Convolved(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Conv(8, (3, 3))(x))
            return nn.Conv(5, (3, 3))(x).mean((1, 2))

    image = jnp.zeros((4, 6, 6, 3))
    found = axes_of(own(Convolved(), image), {"x": image})
    assert (found["Conv_0/kernel"], found["Conv_1/kernel"]) == ("- - - mlp", "- - mlp -")

    class Tied(nn.Module):
        @nn.compact
        def __call__(self, x):
            table = nn.Embed(16, 4)
            return table.attend(table(x))

    tokens = jnp.zeros((4, 5), jnp.int32)
    assert axes_of(own(Tied(), tokens), {"x": tokens}) == {"Embed_0/embedding": "vocab -"}

    class Recurrent(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.RNN(nn.SimpleCell(16))(x)

    series = jnp.zeros((4, 5, 3))
    with on(data=2, tensor=4):
        notes = lay_out(own(Recurrent(), series), {"x": series}).warnings
    assert any("16 is both input and output of a weight" in note for note in notes), notes


def collectives_of(fn, model, batch, axes, mesh):
    """Kind and mesh axes of the collectives of arrays, not of scalars, one for each array."""
    state = jax.eval_shape(model.init, jax.random.key(0))
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), state.params)
    shardings = named_shardings(params, model.param_axes(params)), named_shardings(batch, axes)
    out = shardings[0] if fn is jax.grad else None
    program = fn(
        lambda params, batch: model.valued(params, state.collections, batch, jax.random.key(0))[0]
    )
    text = (
        jax.jit(program, in_shardings=shardings, out_shardings=out)
        .lower(params, batch)
        .compile()
        .as_text()
    )
    return [(c.kind, c.axes) for c in hlo.collectives(text, mesh) for shape in c.shapes if shape]


def test_a_block_costs_one_sum_forward_and_one_backward():
    batch, axes = {"x": X}, {"x": ("batch", None)}
    with on(tensor=8) as mesh:
        model = lay_out(own(Residual(3), X), batch).model
        assert collectives_of(lambda f: f, model, batch, axes, mesh) == 3 * [
            ("all-reduce", ("tensor",))
        ]
        # The gradient with respect to a block's input is summed where it leaves the block, but for the first, whose
        # norm alone asks for it.
        backward = collectives_of(jax.grad, model, batch, axes, mesh)
    assert set(backward) == {("all-reduce", ("tensor",))} and len(backward) == 6, backward


def test_what_the_user_says_goes_before_the_rules():
    model, batch = own(Mlp((16, 4)), X), {"x": X}
    found = axes_of(
        model, batch, (("fsdp", 2), ("tensor", 4)), {"params/Dense_0/kernel": ("mlp", None)}
    )
    assert found["Dense_0/kernel"] == "mlp -" and found["Dense_1/kernel"] == "mlp embed"
    for given, sentence in (
        (
            {"*/Dense_7/*": (None,)},
            "no parameter is called '.*Dense_7.*'; they are params/Dense_0/bias, ",
        ),
        (
            {"*/Dense_0/*": (None,)},
            r"Dense_0/kernel of shape \(8, 16\) is given 1 axes; legal is one a dimension",
        ),
        (
            {"*/kernel": ("embedding", None)},
            "is given the unknown axis 'embedding'; legal are batch, ",
        ),
        ({"*/Dense_1/kernel": (None, "embed")}, None),
        ({"*/Dense_1/kernel": ("embed", "embed")}, "uses mesh axis 'fsdp' twice"),
    ):
        if sentence is None:
            axes_of(model, batch, (("fsdp", 2), ("tensor", 4)), given)
            continue
        with pytest.raises(UsageError, match=sentence):
            axes_of(model, batch, (("fsdp", 2), ("tensor", 4)), given)
    with pytest.raises(
        UsageError,
        match="Dense_1/kernel: dimension 1 .mlp. of size 4 does not divide over tensor=8",
    ):
        axes_of(model, batch, (("tensor", 8),), {"*/Dense_1/kernel": (None, "mlp")})
    with pytest.raises(
        UsageError, match=r"mesh.context=2 splits nothing of such a model; legal are data, fsdp and"
    ):
        axes_of(model, batch, (("data", 4), ("context", 2)))
    with use_mesh(make_mesh(MeshSpec(tensor=8)), rules_from({"mlp": "none"})):
        assert lay_out(model, batch).rows[1].split == ("", "")
    assert not any(any(row.axes) for row in lay_out(model, batch).rows), (
        "without a mesh all is whole"
    )
