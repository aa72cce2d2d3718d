"""Errors planted by someone who has not read the proof: each is small, traces, and is wrong."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

from experiments.app.lm.validation import row_length
from experiments.app.mesh_flags import shares as shares_of
from jaxpar.lm.loss import _on_device, _SumAxes
from jaxpar.lm.params import leaves
from jaxpar.lm.tuning import next_average
from jaxpar.mesh import RULES, constrain, gather, in_role, is_axes, local, mesh_axes, num_shares
from jaxpar.mesh import place_rows as rows_placed
from jaxpar.nn.attention.context import in_order, padded
from jaxpar.nn.experts.sharded import AllToAll, Gather, bytes_sent
from jaxpar.nn.experts.transport import mine_of, mixture
from jaxpar.nn.leaf import Leaf
from jaxpar.nn.linear import on_weight
from jaxpar.nn.mixer import TRAINING, TokenInfo
from jaxpar.pipeline._chunks import AXIS, rounds_of
from jaxpar.pipeline._work import added
from tests.verify.planted import Planted

NOTHING_KEPT = jax.checkpoint_policies.nothing_saveable


# Rules.


def _hybrid_over_fsdp(right):
    """Leaves the gradients of the hybrid layout split over fsdp as well."""

    def rules_from(changes=None, layout="zero3"):
        rules = right(changes, layout)
        if "hybrid" not in layout.split("+"):
            return rules
        return rules | {"embed_grad": RULES["embed_grad"]}

    return rules_from


def _nested_in_another_order(right):
    """Splits the optimizer over data before fsdp, so that its shares are no slices."""

    def rules_from(changes=None, layout="zero3"):
        rules = right(changes, layout)
        if "nested" not in layout.split("+"):
            return rules
        return rules | {"embed": ("inner", "data", "fsdp")}

    return rules_from


def _gradients_as_weights(right):
    """Has gradients take the row of the weights that a step holds."""

    def in_role(axes, role):
        if role == "grad":
            role = "weight"
        return right(axes, role)

    return in_role


def _output_weight_whole(right):
    """Declares the weight out of attention without the axis that fsdp splits."""

    def declared(self, embed_dim, std, out_std):
        out = right(self, embed_dim, std, out_std)
        return out | {"wo": out["wo"]._replace(axes=("heads", "head_dim", None))}

    return declared


# Batches.


def _order_of_the_stream(right):
    """Puts tokens in order by the shares of the residual stream, not by the shares of attention."""
    del right

    def place(config, rows):
        length = row_length(config)
        count = shares_of("seq")
        order = config.model.order(length)

        def ordered(part):
            return in_order(padded(rows(part), length), order, count)

        return rows_placed(ordered, config.data.batch_size, ("batch", "seq_layer"))

    return place


def _tokens_whole(right):
    """Splits a batch by its rows alone."""
    return lambda rows, num_rows, axes=("batch",): right(rows, num_rows, axes[:1])


def _rows_dealt_out(right):
    """Deals rows out one by one, where devices are to hold runs of them."""

    def place_rows(rows, num_rows, axes=("batch",)):
        count = num_shares(*mesh_axes(axes[0]))

        def dealt(part):
            def one(x):
                return np.concatenate([x[first::count] for first in range(count)])

            return jax.tree.map(one, rows(part))

        return right(dealt, num_rows, axes)

    return place_rows


def _weights_in_turn(right):
    """Leaves the weights of tokens in sequence where all else is put in order."""

    def ordered(batch, order, shares):
        out = right(batch, order, shares)
        if "weights" in batch:
            return out | {"weights": batch["weights"]}
        return out

    return ordered


# Keys.


def _parts_from_one(right):
    """Numbers microbatches from one."""
    return lambda key, index, count: right(key, index + 1, count)


def _alike_on_all_devices(right):
    """Draws a mask on each device for its own rows, with the key that all have."""

    def dropout(x, rate, key):
        if key is None or not rate:
            return x
        data = jax.random.key_data(key)
        axes = TRAINING.outside

        def own(x, data):
            return right(x, rate, jax.random.wrap_key_data(data))

        return local(own, [axes, (None,) * data.ndim], axes, check=False)(x, data)

    return dropout


def _embedding_as_last_layer(right):
    """Folds the embedding's key with the number of the last layer, not with the one after it."""

    def embed_for_training(params, tokens, positions, config, dropout_key=None):
        one_less = dataclasses.replace(config, num_layers=config.num_layers - 1)
        return right(params, tokens, positions, one_less, dropout_key)

    return embed_for_training


def _heads_share_a_seed(right):
    """Gives all heads of a device the seed of its first one."""

    def attend(q, k, v, seen, *, seeds=None, **rest):
        if seeds is not None:
            seeds = jnp.broadcast_to(seeds[:, :1], seeds.shape)
        return right(q, k, v, seen, seeds=seeds, **rest)

    return attend


def _no_key_when_it_leaves(right):
    """Differentiates what enters a pipeline as if nothing of it had been dropped."""
    del right

    def leave(self, cell, state):
        where = self.where(cell["chunk"], 0, cell["microbatch"])
        _, pull = jax.vjp(lambda ends: self.stages.first(ends, where.data, None), self.ends)
        sums = state.sums
        return state._replace(sums=sums._replace(ends=added(sums.ends, pull(state.message)[0])))

    return leave


# Stages.


def _layers_without_documents(right):
    """Gives the layers of a stage a batch without the numbers of its documents."""

    def stages(config, smoothing=0.0):
        pieces = right(config, smoothing)

        def layer(params, index, x, data, key):
            data = {name: part for name, part in data.items() if name != "segments"}
            return pieces.layer(params, index, x, data, key)

        return pieces._replace(layer=layer)

    return stages


def _layers_without_weights(right):
    """Gives the layers of a stage a batch without the weights of its tokens."""

    def stages(config, smoothing=0.0):
        pieces = right(config, smoothing)

        def layer(params, index, x, data, key):
            data = {name: part for name, part in data.items() if name != "weights"}
            return pieces.layer(params, index, x, data, key)

        return pieces._replace(layer=layer)

    return stages


def _layers_of_a_stage(right):
    """Numbers layers from the first one of a device."""

    def where(self, chunk, turn, j):
        here = right(self, chunk, turn, j)
        index = jnp.asarray(chunk * self.size + turn, here.index.dtype)
        return dataclasses.replace(here, index=index)

    return where


def _total_of_the_first_part(right):
    """Divides by the weights of the first microbatch, times how many there are."""

    def with_total(self, stages, params, batch, key, count):
        out = right(self, stages, params, batch, key, count)
        first = jax.tree.map(lambda x: x[0], out.given.parts)
        return out._replace(given=out.given._replace(total=stages.total(first) * count))

    return with_total


def _layer_losses_in_full(right):
    """Counts the losses of layers in full, in the backward pass of each microbatch."""

    def backward(self, params, kept, where, g, share):
        del share
        return right(self, params, kept, where, g, 1.0)

    return backward


# Context.


def _documents_of_other_tokens(right):
    """Leaves documents' numbers in the order of devices, where heads' tokens are put in sequence."""
    del right

    def together(how, x):
        return lax.all_gather(x, how.axis, axis=1, tiled=True, axis_index_groups=how.groups())

    return together


def _gradient_without_documents(right):
    """Computes the gradient of a pair of parts as if a row were one document."""

    def attend_pair_gradient(*arrays, segments=None, **rest):
        del segments
        return right(*arrays, **rest)

    return attend_pair_gradient


def _places_lost(right):
    """Loses the positions of tokens, so that nothing is known of their order."""

    def apply(self, params, x, info=TokenInfo(), **rest):
        return right(self, params, x, info._replace(places=None), **rest)

    return apply


def _keys_repeated_first(right):
    """Gives each query head a copy of its keys before these travel."""

    def context_attention(q, k, v, *rest, **options):
        k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
        return right(q, k, v, *rest, **options)

    return context_attention


def _halves_one_after_the_other(right):
    """Joins the halves of keys' gradients as if a device held one part of the sequence."""

    def whole_pieces(how, pieces):
        if how.move.name != "two_way":
            return right(how, pieces)
        join = lambda *halves: jnp.concatenate(halves, 1)  # noqa: E731
        return jax.tree.map(join, pieces["low"], pieces["high"])

    return whole_pieces


# Experts.


def _balance_of_each_device(right):
    """Evens the experts' loads on each device by itself, and takes the mean."""

    def balance_loss(scores, expert, weights=None):
        count = num_shares(*mesh_axes("batch"))
        arrays = [scores, expert]
        if weights is not None:
            arrays.append(weights)
        cut = (x.reshape(count, -1, *x.shape[1:]) for x in arrays)
        return jnp.mean(jax.vmap(right)(*cut))

    return balance_loss


def _padding_is_balanced(right):
    """Counts tokens that weigh nothing in the experts' loads."""

    def balance_loss(scores, expert, weights=None):
        del weights
        return right(scores, expert)

    return balance_loss


def _most_sent(right):
    """Takes that one of two transports that sends more."""
    del right

    def of(self, layer, sizes):
        del self
        return max((Gather(), AllToAll()), key=lambda one: bytes_sent(one, layer, sizes))

    return of


def _summed_whole(right):
    """Sums what experts made of all tokens on every device, which then takes its own."""
    del right

    def gather_tokens(layer, tokens, weights, axes, *, kept=True):
        rows = tokens.x.shape[0]
        x, expert, weight = (lax.all_gather(a, axes, axis=0, tiled=True) for a in tokens)
        y = mixture(layer.activation, x, mine_of(expert, weights), weight, weights, kept=kept)
        return lax.dynamic_slice_in_dim(lax.psum(y, axes), lax.axis_index(axes) * rows, rows)

    return gather_tokens


def _experts_again(right):
    """Keeps nothing of the experts, so that tokens travel and are computed once more."""

    def compute(self, params, x, expert, weight, context):
        def run(params, x, expert, weight):
            return right(self, params, x, expert, weight, context)

        return jax.checkpoint(run, policy=NOTHING_KEPT)(params, x, expert, weight)

    return compute


# Pipelines.


def _copy_over_copy(right):
    """Puts the gradient of one copy of a chunk over the gradient of the other."""
    del right

    def collect_chunks(gradients, schedule):
        me = lax.axis_index(AXIS)

        def one(x):
            out = jnp.zeros((schedule.depth // schedule.devices, *x.shape[1:]), x.dtype)
            for pairs, read, put in rounds_of(schedule):
                sent = x[jnp.asarray(put)[me]]
                if any(a != b for a, b in pairs):
                    sent = lax.ppermute(sent, AXIS, [(goal, source) for source, goal in pairs])
                out = out.at[jnp.asarray(read)[me]].set(sent)
            return out.reshape(-1, *x.shape[2:])

        return jax.tree.map(one, gradients)

    return collect_chunks


def _metrics_of_one_copy(right):
    """Reads the metrics of layers from the chunks of the first copy for every microbatch."""
    del right

    def in_order_of_layers(self, metrics):
        schedule = self.schedule
        own = [schedule.chunks_of(device) for device in range(schedule.devices)]
        pairs = [(device, place) for device, row in enumerate(own) for place in range(len(row))]
        at = {own[device][place]: device * len(own[0]) + place for device, place in pairs}
        rows = np.array([[at[chunk] for chunk in schedule.path(0)]] * schedule.microbatches)
        columns = np.arange(schedule.microbatches)[:, None]
        return jax.tree.map(
            lambda x: x[rows, columns].reshape(len(rows), -1, *x.shape[3:]), metrics
        )

    return in_order_of_layers


def _a_slot_too_many(right):
    """Keeps room for the activations of one more microbatch than there ever are."""

    def packed(schedule, latency):
        table = right(schedule, latency)
        slots = table.slots | {"stash": table.slots["stash"] + 1}
        return dataclasses.replace(table, slots=slots)

    return packed


def _messages_whole_along_the_row(right):
    """Has stages exchange residual streams that are split by rows alone."""
    del right
    return lambda x: jax.tree.map(lambda leaf: constrain(leaf, "batch", None, None), x)


# Accumulation.


def _mean_of_means(right):
    """Divides each microbatch by its own weights, and averages."""

    def stages(config, smoothing=0.0):
        pieces = right(config, smoothing)

        def whole(params, data, key, total, share):
            del total
            return pieces.whole(params, data, key, pieces.total(data) / share, share)

        return pieces._replace(whole=whole)

    return stages


def _layer_losses_summed(right):
    """Adds up the losses of layers over microbatches, where they are to be averaged."""

    def stages(config, smoothing=0.0):
        pieces = right(config, smoothing)

        def whole(params, data, key, total, share):
            del share
            return pieces.whole(params, data, key, total, 1.0)

        return pieces._replace(whole=whole)

    return stages


def _parts_whole_along_the_row(right):
    """Names the tokens of a part for not split."""

    def parts_of(batch, count):
        return jax.tree.map(lambda x: constrain(x, None, "batch", None), right(batch, count))

    return parts_of


# Optimizer.


def _stacked_norms_decay(right):
    """Takes stacks of scales for matrices."""
    del right

    def decay_mask(config):
        is_leaf = lambda value: isinstance(value, Leaf)  # noqa: E731
        return jax.tree.map(lambda leaf: len(leaf.shape) > 1, leaves(config), is_leaf=is_leaf)

    return decay_mask


def _whole_under(name):
    """Returns an error that leaves whole what lies under a field of this name."""

    def wrong(right):
        def axes_like(tree, params, param_axes):
            def one(path, axes):
                is_lost = any(getattr(step, "name", None) == name for step in path)
                if is_lost:
                    return (None,) * len(axes)
                return axes

            found = right(tree, params, param_axes)
            return jax.tree_util.tree_map_with_path(one, found, is_leaf=is_axes)

        return axes_like

    return wrong


def _average_one_step_late(right):
    """Averages the parameters that a step began with."""

    def step(self, key, state, inputs):
        new, info = right(self, key, state, inputs)
        before = self._trained(state.params)
        good = new.health.skipped_in_a_row == 0
        average = next_average(state.average, before, self.tuning.ema, good)
        return new.replace(average=average), info

    return step


def _decay_before_the_rule(right):
    """Adds the decay to the gradient, so that Adam rescales it."""

    def chain(self, schedule, clip):
        decay = self.weight_decay
        rule = self.rule
        decays = self.decays

        def update(grads, state, params=None):
            mask = decays
            if callable(decays):
                mask = decays(params)

            def one(g, p, is_one):
                if is_one:
                    return g + decay * p
                return g

            return rule.update(jax.tree.map(one, grads, params, mask), state, params)

        both = optax.GradientTransformation(rule.init, update)
        return right(dataclasses.replace(self, rule=both, weight_decay=0.0), schedule, clip)

    return chain


# Casts.


def _gathered_before_cast(right):
    """Gathers the weights that a step holds before it casts them."""

    def hold(self, params):
        if isinstance(params["layers"], tuple):
            return right(self, params)

        def lower(leaf, x):
            if isinstance(leaf.init, str):
                return x
            held = in_role(leaf.axes, "weight")
            summed = in_role(leaf.axes, "grad")
            one = lambda w: gather(w, leaf.axes, held, summed).astype(self.dtype)  # noqa: E731
            return on_weight(one, x)

        is_leaf = lambda value: isinstance(value, Leaf)  # noqa: E731
        layers = jax.tree.map(lower, self.leaves()["layers"], params["layers"], is_leaf=is_leaf)
        return params | {"layers": layers}

    return hold


def _not_pinned(right):
    """Says where an array is gathered to, and no longer from where."""
    del right

    def gather(x, split, whole, grad=None, name="activation"):
        @jax.custom_vjp
        def constrained(x):
            return constrain(x, *whole, name=name)

        def backward(_, g):
            return (constrain(g, *(grad or split), name=name),)

        constrained.defvjp(lambda x: (constrained(x), None), backward)
        return constrained(x)

    return gather


def _gradients_summed_wide(right):
    """Sums the gradients of weights over devices in float32."""

    def weight_gradient(how, weight, x, g):
        wide = jnp.promote_types(x.dtype, jnp.float32)
        out = right(how, *(a.astype(wide) for a in (weight, x, g)))
        return out.astype(weight.dtype)

    return weight_gradient


def _of_tokens_and_symbols(weight_of, rows):
    """Returns the loss with a head made ready by `weight_of`; its rows have axis `rows`."""

    def wrong(right):
        del right

        def sharded(x, head, targets, weights, options, with_grads):
            tokens = ("batch", "seq_layer")
            value_axes = ()
            if options.z_loss:
                value_axes = (None,)
            in_axes = [(*tokens, None), (rows, None), tokens, tokens]
            out_axes = value_axes
            if with_grads:
                out_axes = (value_axes, (*tokens, None), (rows, None))
            vocab_axes = ()
            if rows:
                vocab_axes = mesh_axes(rows)

            axes = _SumAxes(
                vocab=vocab_axes,
                tokens=(*mesh_axes("batch"), *mesh_axes("seq_layer")),
            )

            def own(*arrays):
                return _on_device(
                    *arrays,
                    options=options,
                    spread=options.smoothing / head.shape[0],
                    with_grads=with_grads,
                    axes=axes,
                )

            arrays = x, weight_of(head, x.dtype), targets, weights
            return local(own, in_axes, out_axes, check=False)(*arrays)

        return sharded

    return wrong


def _head_whole(head, dtype):
    """Returns the head gathered, then cast."""
    return constrain(head, "vocab", None).astype(dtype)


def _head_of_all_symbols(head, dtype):
    """Returns the head cast, then gathered with all its rows."""
    return constrain(constrain(head.astype(dtype), "vocab", "embed"), None, None)


def _swapped_wide(right):
    """Exchanges heads for tokens in float32."""

    def swapped(how, x):
        return right(how, x.astype(jnp.promote_types(x.dtype, jnp.float32))).astype(x.dtype)

    return swapped


def _messages_wide(right):
    """Sends residual streams to the next stage in float32."""

    def sent(x, step, devices):
        wide = jax.tree.map(lambda a: a.astype(jnp.promote_types(a.dtype, jnp.float32)), x)
        return jax.tree.map(lambda a, b: a.astype(b.dtype), right(wide, step, devices), x)

    return sent


# Gathers.


def _gathered_weight_kept(right):
    """Leaves the derivative of a product to JAX, which keeps the gathered weight."""
    del right

    def product(how, x, weight):
        equation, axes, precision, _ = how
        held, used, summed = (in_role(axes, role) for role in ("weight", "product", "grad"))
        whole = gather(weight, held, used, summed, "a weight")
        return jnp.einsum(equation, x, whole, precision=precision)

    return product


def _cotangent_as_value(right):
    """Sums the cotangent of a gather into the layout of its value."""

    def gather(x, split, whole, grad=None, name="activation"):
        del grad
        return right(x, split, whole, whole, name)

    return gather


def _some_held_whole(right):
    """Gathers the weights out of a branch once a step, and holds them."""

    def hold(self, params):
        held = right(self, params)
        if isinstance(held["layers"], tuple) or self.period > 1:
            return held
        declared = self.leaves()["layers"]
        layers = dict(held["layers"])
        for name in ("wo", "w_down"):
            axes = declared[name].axes
            roles = (in_role(axes, role) for role in ("weight", "use", "grad"))
            layers[name] = gather(layers[name], *roles, name)
        return held | {"layers": layers}

    return hold


def _embedding_of_all_symbols(right):
    """Gathers the embedding over the shares of the vocabulary, too."""
    del right

    def embed_tokens(table, tokens, axes=TRAINING.inside):
        at_rest = ("vocab", "embed")
        summed = ("vocab", "embed_grad")
        table = gather(table, at_rest, (None, None), summed, "the embedding")
        return local(lambda table, at: table[at], [(None, None), axes[:2]], axes)(table, tokens)

    return embed_tokens


# Losses.


def _weights_as_mask(right):
    """Takes the weights of tokens for whether they count."""

    def valid_batch(batch, config):
        valid = right(batch, config)
        weights = valid["weights"]
        return valid | {"weights": (weights != 0).astype(weights.dtype)}

    return valid_batch


def _head_of_own_tokens(right):
    """Sums the head's gradient over rows, and not over the shares of a sequence."""

    def on_device(*arrays, batch_axes, with_grads, **rest):
        along = mesh_axes("seq_layer")
        rows = tuple(axis for axis in batch_axes if axis not in along)
        out = right(*arrays, batch_axes=rows, with_grads=with_grads, **rest)
        if not with_grads:
            out = (out,)
        value, *grads = out
        if along:
            value = lax.psum(value, along)
        if with_grads:
            return (value, *grads)
        return value

    return on_device


BEYOND = {
    "The hybrid layout leaves gradients split over fsdp as well.": "the rule table is what is declared",
    "The nested layout splits the optimizer over data before fsdp.": "the rule table is what is declared",
    "Gradients are summed into the layout of the held weights.": "XLA for CPU sums whole and cuts afterwards",
    "Tokens are put in order by the shares of the residual stream.": "the program computes the same",
    "A stage has room for the activations of one microbatch too many.": "memory of a pipeline's slots is not judged",
    "Experts keep nothing, so that tokens travel once more for the backward pass.": "XLA merges both computations",
}
"""Errors that the proof cannot see, by name, with the reason; they are planted all the same."""

OUTSIDE: tuple[Planted, ...] = (
    Planted(
        "rules",
        "The hybrid layout leaves gradients split over fsdp as well.",
        "jaxpar.mesh:rules_from",
        _hybrid_over_fsdp,
        "fsdp8.inner4/hybrid",
    ),
    Planted(
        "rules",
        "The nested layout splits the optimizer over data before fsdp.",
        "jaxpar.mesh:rules_from",
        _nested_in_another_order,
        "data2.fsdp4.inner2/nested",
    ),
    Planted(
        "rules",
        "Gradients are summed into the layout of the held weights.",
        "jaxpar.mesh:in_role",
        _gradients_as_weights,
        "data2.fsdp4.inner2/nested",
    ),
    Planted(
        "rules",
        "The weight out of attention does not name the axis that fsdp splits.",
        "jaxpar.nn.attention.mixer:Attention.leaves",
        _output_weight_whole,
        "fsdp8",
    ),
    Planted(
        "batch",
        "Tokens are put in order by the shares of the residual stream.",
        "experiments.app.lm.validation:place",
        _order_of_the_stream,
        "data4.tensor2/sequence",
    ),
    Planted(
        "batch",
        "Devices that share a sequence hold all of its tokens.",
        "jaxpar.mesh:place_rows",
        _tokens_whole,
        "data2.context4",
    ),
    Planted(
        "batch",
        "Rows are dealt out one by one, where devices are to hold runs of them.",
        "jaxpar.mesh:place_rows",
        _rows_dealt_out,
        "fsdp8",
    ),
    Planted(
        "batch",
        "The weights of tokens stay in sequence where tokens do not.",
        "jaxpar.nn.attention.context.token_orders:in_order",
        _weights_in_turn,
        "data2.context4",
    ),
    Planted(
        "keys",
        "Microbatches are numbered from one where their keys are folded.",
        "jaxpar.pipeline.accumulation:key_of_part",
        _parts_from_one,
        "fsdp8",
    ),
    Planted(
        "keys",
        "All devices drop the same of their own rows.",
        "jaxpar.nn.block:dropout",
        _alike_on_all_devices,
        "data8",
    ),
    Planted(
        "keys",
        "The embedding is dropped with the key of the last layer.",
        "jaxpar.lm.model:embed_for_training",
        _embedding_as_last_layer,
        "fsdp4.tensor2",
    ),
    Planted(
        "keys",
        "All heads of a device drop the same attention weights.",
        "jaxpar.nn.attention.state:attend",
        _heads_share_a_seed,
        "fsdp4.tensor2",
    ),
    Planted(
        "keys",
        "The backward pass of the embedding in a pipeline forgets its dropout.",
        "jaxpar.pipeline._work:Work.leave",
        _no_key_when_it_leaves,
        "stage2.fsdp4/zb_v",
    ),
    Planted(
        "stages",
        "The layers of a stage do not know where documents begin.",
        "jaxpar.lm.stages:stages",
        _layers_without_documents,
        "stage2.data4/1f1b",
    ),
    Planted(
        "stages",
        "A stage numbers its layers from its own first one.",
        "jaxpar.pipeline._work:Work.where",
        _layers_of_a_stage,
        "stage2.data4/1f1b",
    ),
    Planted(
        "stages",
        "A pipeline divides by the weights of the first microbatch, times their number.",
        "jaxpar.pipeline.run:Pipelined._made",
        _total_of_the_first_part,
        "stage2.data4/interleaved",
    ),
    Planted(
        "stages",
        "The gradient of the layers' own losses counts in full for each microbatch.",
        "jaxpar.pipeline._turn:Turn.backward",
        _layer_losses_in_full,
        "stage2.expert4/1f1b",
    ),
    Planted(
        "stages",
        "The experts of a stage count tokens that weigh nothing.",
        "jaxpar.lm.stages:stages",
        _layers_without_weights,
        "stage2.expert4/1f1b",
    ),
    Planted(
        "context",
        "Documents' numbers are not put in order where heads are exchanged for tokens.",
        "jaxpar.nn.attention.context.walk:_together",
        _documents_of_other_tokens,
        "fsdp4.context2",
    ),
    Planted(
        "context",
        "The gradient of attention forgets documents, and the outputs do not.",
        "jaxpar.nn.attention.pairs:attend_pair_gradient",
        _gradient_without_documents,
        "data2.context4",
    ),
    Planted(
        "context",
        "Positions get lost on the way to attention, which then computes every pair of tokens.",
        "jaxpar.nn.stack:Stack.apply",
        _places_lost,
        "data2.context4",
    ),
    Planted(
        "context",
        "Key heads are repeated before they travel.",
        "jaxpar.nn.attention.context.walk:context_attention",
        _keys_repeated_first,
        "data2.context4",
    ),
    Planted(
        "context",
        "The halves of the keys' gradients are joined in the wrong order.",
        "jaxpar.nn.attention.context.walk:_whole_pieces",
        _halves_one_after_the_other,
        "data2.context4",
    ),
    Planted(
        "experts",
        "The experts' loads are evened on each device by itself.",
        "jaxpar.nn.experts.losses:balance_loss",
        _balance_of_each_device,
        "data4.expert2",
    ),
    Planted(
        "experts",
        "Tokens that weigh nothing count among the experts' loads.",
        "jaxpar.nn.experts.losses:balance_loss",
        _padding_is_balanced,
        "data2.context2.expert2",
    ),
    Planted(
        "experts",
        "Of two transports the one that sends more is taken.",
        "jaxpar.nn.experts.sharded.choose:LeastSent.of",
        _most_sent,
        "fsdp2.expert4",
    ),
    Planted(
        "experts",
        "The results of experts are summed whole on every device, and then cut.",
        "jaxpar.nn.experts.sharded.gather:gather_tokens",
        _summed_whole,
        "data4.expert2",
    ),
    Planted(
        "experts",
        "Experts keep nothing, so that tokens travel once more for the backward pass.",
        "jaxpar.nn.experts.layer:Experts._compute",
        _experts_again,
        "data2.context2.expert2",
    ),
    Planted(
        "pipelines",
        "The gradient of one copy of the model is put over the gradient of the other.",
        "jaxpar.pipeline._chunks:collect_chunks",
        _copy_over_copy,
        "stage2.data4/bitpipe",
    ),
    Planted(
        "pipelines",
        "The metrics of layers are read from the first copy of the model alone.",
        "jaxpar.pipeline.run:Pipelined._in_order",
        _metrics_of_one_copy,
        "stage2.expert4/bitpipe",
    ),
    Planted(
        "pipelines",
        "A stage has room for the activations of one microbatch too many.",
        "jaxpar.pipeline.run:_packed",
        _a_slot_too_many,
        "stage2.data4/1f1b",
    ),
    Planted(
        "pipelines",
        "Messages between stages are split by rows alone.",
        "jaxpar.pipeline._work:_split",
        _messages_whole_along_the_row,
        "stage2.data2.tensor2/sequence+1f1b",
    ),
    Planted(
        "accumulation",
        "Each microbatch is divided by its own weights, and all are averaged.",
        "jaxpar.lm.stages:stages",
        _mean_of_means,
        "fsdp2.data4/zero2",
    ),
    Planted(
        "accumulation",
        "The losses of layers are added up over microbatches.",
        "jaxpar.lm.stages:stages",
        _layer_losses_summed,
        "fsdp2.expert4",
    ),
    Planted(
        "accumulation",
        "The parts of a batch are gathered along the sequence.",
        "jaxpar.pipeline.accumulation:parts_of",
        _parts_whole_along_the_row,
        "data2.context4",
    ),
    Planted(
        "optimizer",
        "Stacked scales of norms decay as matrices do.",
        "jaxpar.lm.params:decay_mask",
        _stacked_norms_decay,
        "fsdp8",
    ),
    Planted(
        "optimizer",
        "Second moments are whole on every device.",
        "jaxpar.mesh:axes_like",
        _whole_under("nu"),
        "fsdp8",
    ),
    Planted(
        "optimizer",
        "The running average is whole on every device.",
        "jaxpar.mesh:axes_like",
        _whole_under("average"),
        "fsdp2.data4/zero2",
    ),
    Planted(
        "optimizer",
        "The running average takes the parameters before a step.",
        "jaxpar.lm.train:Trainer.step",
        _average_one_step_late,
        "data8",
    ),
    Planted(
        "optimizer",
        "Weight decay is added to the gradient, and rescaled by the moments.",
        "jaxpar.optim.update:Optimizer._chain",
        _decay_before_the_rule,
        "fsdp8/zero1",
    ),
    Planted(
        "casts",
        "Weights that a step holds are gathered before they are cast.",
        "jaxpar.nn.stack:Stack.hold",
        _gathered_before_cast,
        "fsdp8/zero2",
        "bfloat16",
    ),
    Planted(
        "casts",
        "A gather does not say how the array lies that it begins with.",
        "jaxpar.mesh:gather",
        _not_pinned,
        "fsdp2.data4/zero2",
        "bfloat16",
    ),
    Planted(
        "casts",
        "Gradients of weights are summed over devices in float32.",
        "jaxpar.nn.linear:_weight_gradient",
        _gradients_summed_wide,
        "fsdp8",
        "bfloat16",
    ),
    Planted(
        "casts",
        "The head is gathered before it is cast.",
        "jaxpar.lm.loss:_sharded",
        _of_tokens_and_symbols(_head_whole, "vocab"),
        "fsdp8",
        "bfloat16",
    ),
    Planted(
        "casts",
        "Heads are exchanged for tokens in float32.",
        "jaxpar.nn.attention.context.walk:_swapped",
        _swapped_wide,
        "fsdp4.context2",
        "bfloat16",
    ),
    Planted(
        "casts",
        "Messages between stages travel in float32.",
        "jaxpar.pipeline._work:_from",
        _messages_wide,
        "stage2.data4/1f1b",
        "bfloat16",
    ),
    Planted(
        "gathers",
        "Products keep their gathered weights for the backward pass.",
        "jaxpar.nn.linear:_product",
        _gathered_weight_kept,
        "fsdp8",
    ),
    Planted(
        "gathers",
        "The cotangent of a gather lies as its value does.",
        "jaxpar.mesh:gather",
        _cotangent_as_value,
        "fsdp8/zero2",
    ),
    Planted(
        "gathers",
        "The weights out of a branch are gathered once a step, and held.",
        "jaxpar.nn.stack:Stack.hold",
        _some_held_whole,
        "fsdp4.tensor2",
    ),
    Planted(
        "gathers",
        "The embedding is gathered over the shares of the vocabulary as well.",
        "jaxpar.lm.model:embed_tokens",
        _embedding_of_all_symbols,
        "fsdp4.tensor2",
    ),
    Planted(
        "losses",
        "The weights of tokens are taken for a mask.",
        "jaxpar.lm.text.batches:valid_batch",
        _weights_as_mask,
        "data8",
    ),
    Planted(
        "losses",
        "The head's gradient is not summed over the shares of a sequence.",
        "jaxpar.lm.loss:_on_device",
        _head_of_own_tokens,
        "data2.context4",
    ),
    Planted(
        "losses",
        "Every device along tensor computes the logits of all symbols.",
        "jaxpar.lm.loss:_sharded",
        _of_tokens_and_symbols(_head_of_all_symbols, None),
        "data4.tensor2/sequence",
    ),
)
