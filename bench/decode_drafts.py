"""Our side of the speculation cases of `bench/decode.py`: plain decoding and each draft on the same prompts."""

import functools
import time

import decode_pair
import decode_rows
import harness

NEAR = 8
"""Units in the last place within which two best scores are no difference: rounding decides between them."""


@functools.cache
def model_of(folder: str) -> tuple:
    """Returns the configuration and the parameters of a folder, in float32."""
    from jaxpar.lm import from_hf

    return from_hf(folder, dtype="float32")


def draft_of(name: str, folder: str) -> tuple:
    """Returns the draft of a row and its parameters: plain, copy, jacobi, lookahead, or "model k"."""
    from jaxpar.decode import CopyDraft, JacobiDraft, LookaheadDraft, ModelDraft, NoDraft
    from jaxpar.lm import Decoder

    kind, _, length = name.partition(" ")
    options = {}
    if length:
        options["length"] = int(length)
    if kind == "model":
        config, params = model_of(folder)
        return ModelDraft(model=Decoder(config), **options), params
    known = {
        "plain": NoDraft,
        "copy": CopyDraft,
        "jacobi": JacobiDraft,
        "lookahead": LookaheadDraft,
    }
    return known[kind](**options), None


class Drafted:
    """A draft's continuation of all prompts, `rows` at a time."""

    def __init__(self, request: dict):
        """Compiles."""
        import jax
        import jax.numpy as jnp
        from lm_models import generate

        from jaxpar.decode import Sampling

        self.rows, self.new = request["rows"], request["new"]
        config, params = model_of(request["folders"]["target"])
        draft, draft_params = draft_of(
            request["row"].removeprefix("jaxpar "), request["folders"]["draft"]
        )
        sampling = Sampling(self.new, temperature=request["temperature"])
        self.prompts = jnp.asarray(request["prompts"], jnp.int32)
        self.seeds = jnp.arange(len(self.prompts))

        def run(params, draft_params, prompts, seeds):
            return generate(
                jax.random.key(3), params, prompts, config, sampling, seeds=seeds, draft=draft,
                draft_params=draft_params,
            )  # fmt: skip

        begin, self.params = time.perf_counter(), (params, draft_params)
        self.program = (
            jax.jit(run)
            .lower(*self.params, self.prompts[: self.rows], self.seeds[: self.rows])
            .compile()
        )
        self.made, self.request = {"compile_s": time.perf_counter() - begin}, request

    def warm(self) -> dict:
        """Runs once; returns what is known and, where it is asked for, how that compares with plain decoding."""
        import numpy as np

        out = self.all()
        tokens, passes = (
            np.concatenate([getattr(part, name) for part in out]) for name in ("tokens", "passes")
        )
        made = self.made | {"tokens_a_pass": len(tokens) * (self.new - 1) / int(passes.sum())}
        if self.request.get("checked"):
            made |= compared(self.request, plain_tokens(self.request), tokens)
        return made | ({"tokens": tokens.tolist()} if self.request.get("shown") else {})

    def all(self) -> list:
        """Returns what was generated of each batch."""
        size = self.rows
        return [
            self.program(*self.params, self.prompts[i : i + size], self.seeds[i : i + size])
            for i in range(0, len(self.prompts), size)
        ]

    def round(self) -> dict:
        """Times all prompts once: milliseconds for `rows` tokens, the reading of the prompts included."""
        steps = self.new * (len(self.prompts) // self.rows)
        return {"ms": 1e3 * decode_rows.seconds(self.all) / steps}


_plain: dict = {}


def plain_tokens(request: dict):
    """Returns the tokens of plain decoding, one row at a time; kept for the rows of a case."""
    import numpy as np

    key = (
        request["folders"]["target"],
        request["temperature"],
        request["new"],
        len(request["prompts"]),
    )
    if key not in _plain:
        row = Drafted(
            request | {"row": "jaxpar plain", "rows": 1, "checked": False, "shown": False}
        )
        _plain[key] = np.concatenate([part.tokens for part in row.all()])
    return _plain[key]


def compared(request: dict, plain, tokens) -> dict:
    """Counts rows that differ, and of those the near ties: where the two best scores are within `NEAR` ulp.

    Only the first difference of a row says anything: what follows it continues another text.
    """
    import jax
    import jax.numpy as jnp
    import numpy as np

    from jaxpar.decode import gumbel
    from jaxpar.lm import apply

    rows, places = np.nonzero(plain != tokens)
    first = {
        row: place for row, place in zip(rows[::-1].tolist(), places[::-1].tolist(), strict=True)
    }
    config, params = model_of(request["folders"]["target"])
    near = 0
    for row, place in first.items():
        scores = apply(params, jnp.asarray(plain[row : row + 1, :place]), config)[0, -1]
        if request["temperature"]:
            where = (jnp.full((1,), value, jnp.int32) for value in (row, place, 0))
            scores = (
                scores / request["temperature"]
                + gumbel(jax.random.key(3), *where, config.vocab_size)[0]
            )
        a, b = np.sort(np.asarray(scores, np.float32))[:-3:-1]
        near += bool(a - b < NEAR * np.spacing(np.maximum(abs(a), abs(b))))
    made = len(plain) * request["new"]
    return {"compared": made, "differing": len(first), "near_ties": near}


class Coupling:
    """How often a draft's token is the target's, both drawn with one noise, beside the best there is: 1 - TV."""

    def __init__(self, request: dict):
        self.request = request

    def warm(self) -> dict:
        """Measures at every new token of the target's own texts, and once more by drafts of one token."""
        import jax
        import jax.numpy as jnp
        import numpy as np

        from jaxpar.decode import gumbel
        from jaxpar.lm import apply

        request, begin = self.request, time.perf_counter()
        start = len(request["prompts"][0])
        tokens = jnp.asarray(plain_tokens(request))
        (target, params), (draft, small) = (
            model_of(request["folders"][name]) for name in ("target", "draft")
        )

        @jax.jit
        def measured(tokens, seed):
            p, q = (
                apply(weights, tokens[None], config)[0, start - 1 : -1] / request["temperature"]
                for weights, config in ((params, target), (small, draft))
            )
            places = jnp.arange(start, tokens.shape[0], dtype=jnp.int32)
            noise = gumbel(
                jax.random.key(3),
                jnp.full_like(places, seed),
                places,
                jnp.zeros_like(places),
                target.vocab_size,
            )
            same = (p + noise).argmax(-1) == (q + noise).argmax(-1)
            far = 0.5 * jnp.abs(jax.nn.softmax(p) - jax.nn.softmax(q)).sum(-1)
            return same.mean(), 1 - far.mean(), ((1 - far) / (1 + far)).mean()

        each = np.array([measured(row, seed) for seed, row in enumerate(tokens)])
        coupled, most, least = each.mean(0).tolist()
        one = Drafted(request | {"row": "jaxpar model 1", "checked": False, "shown": False}).warm()
        return {
            "compile_s": time.perf_counter() - begin, "coupled": coupled, "most": most, "least": least,
            "kept": one["tokens_a_pass"] - 1, "ratio": coupled / most,
        }  # fmt: skip

    def round(self) -> dict:
        """Nothing to time."""
        return {"ms": 0.0}


decode_rows.KINDS |= {"drafts": Drafted, "coupling": Coupling}

if __name__ == "__main__":
    harness.serve(
        harness.Rows(
            decode_rows.make_row, {"copy": decode_rows.copy_rate, "pair": decode_pair.make}
        )
    )
