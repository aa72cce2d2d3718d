"""The torch peers of `bench/decode.py`: a static-cache decoder under `torch.compile`, and attention of one token.

The decoder is what gpt-fast showed to be enough: one compiled step over static buffers, captured once as a CUDA graph
that also feeds its token and position back, so that the host only replays it. Its weights are random: only its speed
is asked for. Attention of a token is written twice, as products by groups of heads and as masked SDPA; the faster one
counts. A worker: `make` compiles a row, `round` times it once, `drop` frees it.
"""

import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch_rows import (  # noqa: E402
    CUDA,
    DEVICE,
    FLOATS,
    begin_peak,
    device_facts,
    forget,
    medians,
    peak_memory,
    wait,
)  # fmt: skip


def turned(x, cos, sin):
    """Rotates the halves of [..., K] by an angle a pair."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def normed(x):
    """RMSNorm; its scale is one."""
    return F.rms_norm(x, (x.shape[-1],))


class Decoder:
    """A Llama of random weights that draws the likeliest token of B rows, a step a call."""

    def __init__(self, model: dict, rows: int, slots: int, attention: str):
        """Draws weights and a cache of `slots` tokens; `attention` is "groups" or "sdpa"."""
        torch.manual_seed(0)
        dtype, width = FLOATS[model["dtype"]], model["embed_dim"]
        self.heads, self.groups = model["num_heads"], model["num_kv_heads"]
        self.size, self.rows, self.attention = (
            model.get("head_dim") or width // self.heads,
            rows,
            attention,
        )

        def matrix(outputs, inputs):
            return torch.randn(outputs, inputs, device=DEVICE, dtype=dtype) * inputs**-0.5

        self.embedding = matrix(model["vocab_size"], width)
        inner, mlp = self.heads * self.size, model["mlp_dim"]
        self.layers = [
            (matrix(inner + 2 * self.groups * self.size, width), matrix(width, inner), matrix(2 * mlp, width),
             matrix(width, mlp))
            for _ in range(model["num_layers"])
        ]  # fmt: skip
        shape = (rows, self.groups, slots, self.size)
        self.cache = [
            tuple(torch.randn(shape, device=DEVICE, dtype=dtype) for _ in "kv") for _ in self.layers
        ]
        angle = torch.arange(slots)[:, None] * 5e5 ** (-torch.arange(0, self.size, 2) / self.size)
        self.cos, self.sin = angle.cos().to(DEVICE, dtype), angle.sin().to(DEVICE, dtype)
        self.places = torch.arange(slots, device=DEVICE)
        self.token = torch.zeros(rows, dtype=torch.long, device=DEVICE)
        self.place = torch.zeros(1, dtype=torch.long, device=DEVICE)

    def step(self, token, place):
        """Reads a token [B] at a place [1]; returns the next one."""
        x = self.embedding[token]
        cos, sin = self.cos[place], self.sin[place]
        seen = (self.places <= place)[None, None, None]
        for (qkv, out, up, down), (keys, values) in zip(self.layers, self.cache, strict=True):
            q, k, v = (
                (normed(x) @ qkv.T)
                .view(self.rows, -1, 1, self.size)
                .split((self.heads, self.groups, self.groups), 1)
            )
            keys.index_copy_(2, place, turned(k, cos, sin))
            values.index_copy_(2, place, v)
            mixed = self.attend(turned(q, cos, sin), keys, values, seen)
            x = x + mixed.reshape(self.rows, -1) @ out.T
            gate, value = (normed(x) @ up.T).chunk(2, -1)
            x = x + (F.silu(gate) * value) @ down.T
        return (normed(x) @ self.embedding.T).argmax(-1)

    def attend(self, q, keys, values, seen):
        """Attention of one token, [B, H, 1, K]."""
        if self.attention == "sdpa":
            return F.scaled_dot_product_attention(q, keys, values, attn_mask=seen, enable_gqa=True)
        q = q.view(self.rows, self.groups, -1, self.size)
        scores = (q @ keys.transpose(-1, -2)).float() * self.size**-0.5
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).to(values.dtype)
        return weights @ values

    def compile(self, options: dict) -> None:
        """Compiles the step and captures it with what feeds it back."""
        step = torch.compile(self.step, fullgraph=True, dynamic=False, options=options)

        def advance():
            self.token.copy_(step(self.token, self.place))
            self.place.add_(1)

        self.advance = advance
        for _ in range(3):
            advance()
        if CUDA:
            wait()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                advance()
            self.advance = graph.replay


class Steps(harness.Row):
    """A row that draws `new` tokens after a prompt whose keys and values are random."""

    def __init__(self, request: dict):
        """Compiles."""
        slots = request["prompt"] + request["new"]
        self.prompt, self.new = request["prompt"], request["new"]
        self.decoder = Decoder(
            request["model"],
            request["rows"] * request.get("readers", 1),
            slots,
            request["row"].split()[2],
        )
        options: dict = {"coordinate_descent_tuning": True} if CUDA else {}
        if "autotuned" in request["row"]:
            options["max_autotune"] = True
        with torch.no_grad():
            self.decoder.compile(options)

    def round(self) -> dict:
        """Times all steps once."""
        self.decoder.place.fill_(self.prompt)
        with torch.no_grad():
            begin = wait()
            for _ in range(self.new - 1):
                self.decoder.advance()
            return {"ms": 1e3 * (wait() - begin) / (self.new - 1)}


class Calls(harness.Row):
    """A row that calls one function of arrays."""

    def __init__(self, request: dict):
        """Draws the arrays and compiles."""
        self.call, self.spend_s = CALLS[request["kind"]](request), request["spend_s"]
        with torch.no_grad():
            self.call()
        wait()

    def round(self) -> dict:
        """Median of several queued calls."""
        with torch.no_grad():
            return medians(self.call, self.spend_s)


def attend_row(request: dict):
    """Attention of one token to S: SDPA, products by groups, or FlexAttention."""
    dtype, (batch, heads, groups, slots, size) = FLOATS[request["dtype"]], request["shape"]
    q, k, v = (torch.randn(batch, n, s, size, device=DEVICE, dtype=dtype)
               for n, s in ((heads, 1), (groups, slots), (groups, slots)))  # fmt: skip
    row = request["row"]
    if "flex" in row:
        from torch.nn.attention.flex_attention import flex_attention

        flex = torch.compile(flex_attention, dynamic=False)
        return lambda: flex(q, k, v, enable_gqa=True)
    if "groups" in row:

        def products(q, k, v):
            scores = (q.view(batch, groups, -1, size) @ k.transpose(-1, -2)).float() * size**-0.5
            return scores.softmax(-1).to(dtype) @ v

        compiled = torch.compile(products, dynamic=False)
        return lambda: compiled(q, k, v)
    return lambda: F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


def prompt_row(request: dict):
    """The attention and the products of a prompt, and nothing else: what a prefill cannot do without."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    model, length, dtype = request["model"], request["prompt"], FLOATS[request["model"]["dtype"]]
    decoder = Decoder(model, request["rows"], 1, "sdpa")
    x = torch.randn(request["rows"], length, model["embed_dim"], device=DEVICE, dtype=dtype)
    heads = decoder.heads, decoder.groups, decoder.groups
    # Heads that a kernel does not group are repeated, apart from what is timed.
    q, k, v = (torch.randn(request["rows"], decoder.heads, length, decoder.size, device=DEVICE, dtype=dtype)
               for _ in heads)  # fmt: skip
    backends = (
        [SDPBackend.CUDNN_ATTENTION] if CUDA else [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    )

    def call():
        for qkv, out, up, down in decoder.layers:
            with sdpa_kernel(backends):
                mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x @ qkv.T
            mixed.transpose(1, 2).reshape(x.shape[0], length, -1) @ out.T
            (x @ up.T)[..., : down.shape[1]] @ down.T
        return x[:, -1] @ decoder.embedding.T

    return call


def copy_rate(request: dict) -> dict:
    """Returns the bytes/s, read plus written, of a large copy."""
    x = torch.ones(request["bytes"] // 4, device=DEVICE)
    y = torch.empty_like(x)
    ms = medians(lambda: y.copy_(x), request["spend_s"])["ms"]
    return {"rate": 2 * x.nbytes / ms * 1e3} | device_facts()


CALLS = {"attend": attend_row, "prompt": prompt_row}


def compile_row(request: dict) -> Steps | Calls:
    """Returns a row that is compiled."""
    begin = wait()
    begin_peak()
    row = (Calls if request["kind"] in CALLS else Steps)(request)
    most = peak_memory()
    row.made = {"compile_s": wait() - begin} | most
    return row


if __name__ == "__main__":
    harness.serve(harness.Rows(compile_row, {"copy": copy_rate}, forget))
