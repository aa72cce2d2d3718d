"""Errors planted by those who wrote the checker: all of an outside review, and their brothers."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from jax import lax

from jaxpar.mesh import constrain, gather, in_role
from tests.verify.planted import Planted

EXPERTS = ("model.experts.num_experts=4",)


def _with_result(change):
    """Returns an error that changes the result of a function."""

    def wrong(right):
        def changed(*args, **options):
            return change(right(*args, **options))

        return changed

    return wrong


def _unsplit_moments(axes):
    moments = jax.tree.map(_unsplit, axes.opt_state, is_leaf=_is_axes)
    return axes.replace(opt_state=moments)


def _is_axes(x):
    return type(x) is tuple and all(name is None or isinstance(name, str) for name in x)


def _unsplit(axes):
    return (None,) * len(axes)


def _unsplit_average(axes):
    return axes.replace(average=jax.tree.map(_unsplit, axes.average, is_leaf=_is_axes))


def _crossed(axes):
    layers = dict(axes.params["layers"])
    stack, first, second = layers["w_down"]
    layers["w_down"] = (stack, second, first)
    return axes.replace(params=axes.params | {"layers": layers})


def _whole_embedding(axes):
    return axes | {"embedding": (None, None)}


def _rows_everywhere(right):
    def place_rows(rows, num_rows, axes=("batch",)):
        return right(rows, num_rows, (None,) * len(axes))

    return place_rows


def _parts_in_turn(right):
    del right

    def parts_of(batch, count):
        def cut(x):
            return x.reshape(count, x.shape[0] // count, *x.shape[1:])

        return jax.tree.map(cut, batch)

    return parts_of


def _whole_parts(right):
    def parts_of(batch, count):
        parts = right(batch, count)
        return jax.tree.map(lambda x: constrain(x, *(None,) * x.ndim), parts)

    return parts_of


def _heavy_padding(right):
    def padded(batch, length):
        out = right(batch, length)
        width = next(iter(batch.values())).shape[1]
        out["weights"][:, width:] = 1
        return out

    return padded


def _constant_key(right):
    def step(self, key, state, inputs):
        return right(self, jax.random.key(0), state, inputs)

    return step


def _same_key_of_parts(right):
    del right
    return lambda key, index, count: key


def _same_key_of_layers(right):
    def layer(self, layer, index, x, context, *args, **options):
        # The key is folded with the index of the first layer.
        if context.key is not None:
            return right(self, layer, index * 0, x, context, *args, **options)
        return right(self, layer, index, x, context, *args, **options)

    return layer


def _dropout_of_first_row(right):
    def dropout(x, rate, key):
        if key is None or rate == 0.0:
            return right(x, rate, key)
        kept = jax.random.bernoulli(key, 1 - rate, x.shape[1:])
        return jnp.where(kept, x / (1 - rate), 0).astype(x.dtype)

    return dropout


def _size_for_weights(right):
    del right
    return lambda batch, config: jnp.float32(batch["targets"].size)


def _positions_of_rows(right):
    del right

    def positions(data):
        shape = data["tokens"].shape
        return jnp.broadcast_to(jnp.arange(shape[1]), shape)

    return positions


def _undropped(right):
    del right
    return lambda key, config: None


def _first_layer_always(right):
    def stages(*args, **options):
        pieces = right(*args, **options)

        def layer(params, index, x, data, key):
            return pieces.layer(params, 0 * index, x, data, key)

        return pieces._replace(layer=layer)

    return stages


def _no_documents(right):
    del right
    return lambda queries, keys: None


def _gathered_sequence(right):
    def attend(self, mixer, q, k, v, context):
        q, k, v = (constrain(x, "batch", None, None, None) for x in (q, k, v))
        return right(self, mixer, q, k, v, context)

    return attend


def _every_pair_seen(right):
    def pairs(self, turn, device):
        return [(own, other, True, causal) for own, other, _, causal in right(self, turn, device)]

    return pairs


def _future_seen(right):
    def pairs(self, turn, device):
        pairs_of = right(self, turn, device)
        return [(own, other, is_used, False) for own, other, is_used, _ in pairs_of]

    return pairs


def _balance_of_rows(right):
    def balance_loss(*arrays):
        return jax.vmap(right)(*arrays).mean()

    return balance_loss


def _detached_router(right):
    def route(logits, *args, **options):
        return right(lax.stop_gradient(logits), *args, **options)

    return route


def _without_balance(right):
    def balance_loss(scores, *args, **options):
        return right(lax.stop_gradient(scores), *args, **options)

    return balance_loss


def _weights_not_normalised(right):
    def route(logits, k, *, scores="softmax", normalise=True, bias=None):
        del normalise
        return right(logits, k, scores=scores, normalise=False, bias=bias)

    return route


def _doubled(right):
    def schedule(self, stages, params, batch, key, count):
        (value, aux), grads = right(self, stages, params, batch, key, count)
        return (value, aux), jax.tree.map(lambda g: count * g, grads)

    return schedule


def _layer_losses_whole(right):
    def backward(self, params, kept, where, g, share):
        del share
        return right(self, params, kept, where, g, 1.0)

    return backward


def _second_copy_counts_on(right):
    def where(self, chunk, turn, j):
        out = right(self, chunk, turn, j)
        index = self.own[chunk] * self.size + turn
        return dataclasses.replace(out, index=index)

    return where


def _first_chunk_of_all(right):
    def where(self, chunk, turn, j):
        out = right(self, chunk, turn, j)
        return dataclasses.replace(out, index=out.index * 0)

    return where


def _key_of_batch(right):
    def where(self, chunk, turn, j):
        return dataclasses.replace(right(self, chunk, turn, j), key=self.key)

    return where


def _whole_share(right):
    def schedule(self, stages, params, batch, key, count):
        def whole(params, data, key, total, share):
            del share
            return stages.whole(params, data, key, total, 1.0)

        return right(self, stages._replace(whole=whole), params, batch, key, count)

    return schedule


def _last_part_twice(right):
    def schedule(self, stages, params, batch, key, count):
        def again(x):
            parts = x.reshape(x.shape[0] // count, count, *x.shape[1:])
            return parts.at[:, 0].set(parts[:, -1]).reshape(x.shape)

        return right(self, stages, params, jax.tree.map(again, batch), key, count)

    return schedule


def _total_of_part(right):
    def schedule(self, stages, params, batch, key, count):
        return right(
            self,
            stages._replace(total=lambda b: count * stages.total(b)),
            params,
            batch,
            key,
            count,
        )

    return schedule


def _clip_by_leaf(right):
    del right

    def clip(self):
        def update(updates, state, params=None):
            def one(g):
                return g * jnp.minimum(1, self.clip_norm / jnp.linalg.norm(g.ravel()))

            return jax.tree.map(one, updates), state

        return optax.GradientTransformation(lambda params: optax.EmptyState(), update)

    return clip


def _late_rate(right):
    def scheduled(self, state):
        return right(self, state) * 0 + self.schedule(state[1][-1].count + 1)

    return scheduled


def _everything_decays(decays):
    return jax.tree.map(lambda _: True, decays)


def _average_turned_round(right):
    def next_average(average, trained, decay, good):
        return right(average, trained, 1 - decay, good)

    return next_average


def _average_before_the_step(right):
    del right

    def next_average(average, trained, decay, good):
        del trained, decay, good
        return average

    return next_average


def _uncast_hold(right):
    def hold(self, params):
        held = right(dataclasses.replace(self, dtype="float32"), params)
        layers = jax.tree.map(lambda w: w.astype(self.dtype), held["layers"])
        return held | {"layers": layers}

    return hold


def _uncast_head(right):
    def sharded(x, head, *args, **options):
        return right(x, constrain(head, "vocab", None), *args, **options)

    return sharded


def _cast_after_gather(right):
    def gather_wide(x, split, whole, grad=None, name="activation"):
        if x.dtype != jnp.bfloat16:
            return right(x, split, whole, grad, name)
        return right(x.astype(jnp.float32), split, whole, grad, name).astype(x.dtype)

    return gather_wide


def _narrow_norm(right):
    def apply(self, params, x):
        return right(self, params, x.astype(jnp.float32)).astype(x.dtype)

    return apply


def _narrow_moments(right):
    def update(self, grads, state, params, **options):
        narrow = jax.tree.map(lambda g: g.astype(jnp.float32).astype(g.dtype), grads)
        return right(self, narrow, state, params, **options)

    return update


def _hold_whole(right):
    def hold(self, params):
        held = right(self, params)

        def whole(leaf, w):
            at_rest = in_role(leaf.axes, "weight")
            return gather(w, at_rest, in_role(leaf.axes, "use"), in_role(leaf.axes, "grad"))

        is_leaf = lambda leaf: hasattr(leaf, "init")  # noqa: E731
        layers = jax.tree.map(whole, self.leaves()["layers"], held["layers"], is_leaf=is_leaf)
        return held | {"layers": layers}

    return hold


def _gathered_again(right):
    def apply(self, params, x, *args, **options):
        # The residual stream is made whole at each norm.
        if x.ndim == 3:
            x = constrain(x, None, None, None)
        return right(self, params, x)

    return apply


def _gathered_batch(right):
    def hidden(params, tokens, *args, **options):
        return right(params, constrain(tokens, None, None), *args, **options)

    return hidden


def _half_z(right):
    def sharded(x, head, targets, weights, options, with_grads):
        if with_grads:
            options = options._replace(z_loss=options.z_loss / 2)
        return right(x, head, targets, weights, options, with_grads)

    return sharded


def _squared_weights(batch):
    return {**batch, "weights": batch["weights"] * batch["weights"]}


def _unweighted(batch):
    weights = batch["weights"]
    return {**batch, "weights": jnp.where(weights > 0, 1, 0).astype(weights.dtype)}


def _own_normaliser(right):
    def losses(params, batch, config, *, normaliser=None, **options):
        del normaliser
        return right(params, batch, config, normaliser=None, **options)

    return losses


TRAINER = "jaxpar.lm.train:Trainer"
TURN = "jaxpar.pipeline.accumulation:InTurn.__call__"
WORK = "jaxpar.pipeline._work:Work.where"
BITPIPE = "stage2.data4/bitpipe"

ERRORS = (
    # rules
    Planted(
        "rules",
        "moments lie whole",
        f"{TRAINER}.axes",
        _with_result(_unsplit_moments),
        "fsdp8",
    ),
    Planted(
        "rules",
        "the average lies whole",
        f"{TRAINER}.axes",
        _with_result(_unsplit_average),
        "fsdp8",
    ),
    Planted(
        "rules",
        "the embedding lies whole",
        "jaxpar.lm.params:axes",
        _with_result(_whole_embedding),
        "fsdp8",
    ),
    Planted(
        "rules",
        "two axes of a weight are crossed",
        f"{TRAINER}.axes",
        _with_result(_crossed),
        "fsdp4.tensor2",
    ),
    # batch
    Planted(
        "batch",
        "every device gets all rows",
        "jaxpar.mesh:place_rows",
        _rows_everywhere,
        "fsdp8",
    ),
    Planted(
        "batch",
        "microbatches are blocks of rows",
        "jaxpar.pipeline.accumulation:parts_of",
        _parts_in_turn,
        "data8",
    ),
    Planted(
        "batch",
        "microbatches lie whole",
        "jaxpar.pipeline.accumulation:parts_of",
        _whole_parts,
        "data8",
    ),
    Planted(
        "batch",
        "padding counts",
        "jaxpar.nn.attention.context.token_orders:padded",
        _heavy_padding,
        "data2.context4",
        flags=("data.seq_len=31",),
    ),
    # keys
    Planted(
        "keys",
        "all steps have one key",
        f"{TRAINER}.step",
        _constant_key,
        "data8",
    ),
    Planted(
        "keys",
        "all microbatches have one key",
        "jaxpar.pipeline.accumulation:key_of_part",
        _same_key_of_parts,
        "fsdp8",
    ),
    Planted(
        "keys",
        "all layers have one key",
        "jaxpar.nn.stack:Stack.layer",
        _same_key_of_layers,
        "data8",
    ),
    Planted(
        "keys",
        "all rows have one mask",
        "jaxpar.nn.block:dropout",
        _dropout_of_first_row,
        "data8",
    ),
    # stages
    Planted(
        "stages",
        "tokens are counted, not weights",
        "jaxpar.lm.text.batches:normaliser_of",
        _size_for_weights,
        "fsdp4.tensor2",
    ),
    Planted(
        "stages",
        "documents do not start over",
        "jaxpar.lm.stages:_positions",
        _positions_of_rows,
        "stage2.data4/1f1b",
        flags=("model.positions=learned",),
    ),
    Planted(
        "stages",
        "nothing is dropped",
        "jaxpar.lm.stages:_dropped",
        _undropped,
        "stage2.data4/zb_v",
    ),
    Planted(
        "stages",
        "each layer is the first",
        "jaxpar.lm.stages:stages",
        _first_layer_always,
        "stage2.data4/zb_v",
    ),
    # context
    Planted(
        "context",
        "documents see each other",
        "jaxpar.nn.attention.context._partial:_documents",
        _no_documents,
        "data2.context4",
    ),
    Planted(
        "context",
        "rows are gathered",
        "jaxpar.nn.attention.context.split_sequence:SplitSequence.__call__",
        _gathered_sequence,
        "data2.context4",
    ),
    Planted(
        "context",
        "pairs that attention excludes count",
        "jaxpar.nn.attention.context._partial:ByTable._pairs",
        _every_pair_seen,
        "data2.context4",
        flags=("model.execution.context_order=contiguous",),
    ),
    Planted(
        "context",
        "a part sees what follows",
        "jaxpar.nn.attention.context._partial:ByTable._pairs",
        _future_seen,
        "fsdp4.context2",
    ),
    # experts
    Planted(
        "experts",
        "the balance has no gradient",
        "jaxpar.nn.experts.losses:balance_loss",
        _without_balance,
        "fsdp2.expert4",
    ),
    Planted(
        "experts",
        "the balance is taken over each row",
        "jaxpar.nn.experts.losses:balance_loss",
        _balance_of_rows,
        "data4.expert2",
    ),
    Planted(
        "experts",
        "weights do not sum to 1",
        "jaxpar.nn.experts.route:route",
        _weights_not_normalised,
        "fsdp2.expert4",
    ),
    Planted(
        "experts",
        "the router does not learn",
        "jaxpar.nn.experts.route:route",
        _detached_router,
        "data2.context2.expert2",
    ),
    # pipelines
    Planted(
        "pipelines",
        "losses of layers count m times",
        "jaxpar.pipeline._turn:Turn.backward",
        _layer_losses_whole,
        BITPIPE,
        flags=EXPERTS,
    ),
    Planted(
        "pipelines",
        "the second copy counts on",
        WORK,
        _second_copy_counts_on,
        BITPIPE,
    ),
    Planted(
        "pipelines",
        "each chunk is the first",
        WORK,
        _first_chunk_of_all,
        "stage2.data4/interleaved",
    ),
    Planted(
        "pipelines",
        "microbatches share a key",
        WORK,
        _key_of_batch,
        "stage2.data4/1f1b",
    ),
    # accumulation
    Planted(
        "accumulation",
        "gradients are doubled",
        TURN,
        _doubled,
        "fsdp8",
    ),
    Planted(
        "accumulation",
        "losses of layers count twice",
        TURN,
        _whole_share,
        "data4.expert2",
    ),
    Planted(
        "accumulation",
        "the last part counts twice",
        TURN,
        _last_part_twice,
        "data8",
    ),
    Planted(
        "accumulation",
        "the mean is taken over parts",
        TURN,
        _total_of_part,
        "data8",
    ),
    # optimizer
    Planted(
        "optimizer",
        "leaves are clipped apart",
        "jaxpar.optim.update:Optimizer._clip",
        _clip_by_leaf,
        "fsdp8",
        flags=("optimizer.clip_norm=0.05",),
    ),
    Planted(
        "optimizer",
        "the rate belongs to the next step",
        "jaxpar.optim.update:Optimizer._scheduled",
        _late_rate,
        "data8",
    ),
    Planted(
        "optimizer",
        "norms decay",
        "jaxpar.lm.params:decay_mask",
        _with_result(_everything_decays),
        "data8",
    ),
    Planted(
        "optimizer",
        "the average forgets",
        "jaxpar.lm.tuning:next_average",
        _average_turned_round,
        "fsdp8",
    ),
    # casts
    Planted(
        "casts",
        "weights are gathered before they are cast",
        "jaxpar.nn.stack:Stack.hold",
        _uncast_hold,
        "fsdp8/zero2",
        "bfloat16",
    ),
    Planted(
        "casts",
        "the head is gathered before it is cast",
        "jaxpar.lm.loss:_sharded",
        _uncast_head,
        "fsdp8",
        "bfloat16",
    ),
    Planted(
        "casts",
        "experts are gathered in float32",
        "jaxpar.mesh:gather",
        _cast_after_gather,
        "fsdp2.expert4",
        "bfloat16",
    ),
    Planted(
        "casts",
        "norms are computed in float32",
        "jaxpar.nn.norm:Norm.apply",
        _narrow_norm,
        "data8",
    ),
    Planted(
        "casts",
        "gradients pass float32",
        "jaxpar.optim.update:Optimizer.update",
        _narrow_moments,
        "data8",
    ),
    # gathers
    Planted(
        "gathers",
        "weights are whole through the step",
        "jaxpar.nn.stack:Stack.hold",
        _hold_whole,
        "fsdp8",
    ),
    Planted(
        "gathers",
        "weights are whole along tensor",
        "jaxpar.nn.stack:Stack.hold",
        _hold_whole,
        "fsdp4.tensor2",
    ),
    Planted(
        "gathers",
        "the stream is gathered",
        "jaxpar.nn.norm:Norm.apply",
        _gathered_again,
        "data8",
    ),
    Planted(
        "gathers",
        "tokens are gathered",
        "jaxpar.lm.model:hidden",
        _gathered_batch,
        "data8",
    ),
    # losses
    Planted(
        "losses",
        "half of z has a gradient",
        "jaxpar.lm.loss:_sharded",
        _half_z,
        "data8",
    ),
    Planted(
        "losses",
        "weights count twice",
        "jaxpar.lm.text.batches:valid_batch",
        _with_result(_squared_weights),
        "fsdp8",
    ),
    Planted(
        "losses",
        "weights are 0 or 1",
        "jaxpar.lm.text.batches:valid_batch",
        _with_result(_unweighted),
        "fsdp4.tensor2",
    ),
    Planted(
        "losses",
        "each part has its own mean",
        "jaxpar.lm.loss:losses",
        _own_normaliser,
        "data8",
    ),
)
"""All of them; a layout has eight devices."""
