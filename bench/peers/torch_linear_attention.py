"""The torch peers of `bench/linear_attention.py`: fla-core's chunked forms and mlstm_kernels, where importable.

A worker: `make` compiles (autotunes) a row, `round` times it once, `drop` frees it.
"""

import functools
import pathlib
import sys

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

import harness  # noqa: E402
import linear_cases  # noqa: E402
import torch  # noqa: E402
from torch_rows import DEVICE, FLOATS, Call, device_facts, free  # noqa: E402


def function_of(request: dict):
    """Returns a function of (q, k, v, decays ...) in our layout, time before heads."""
    name = request["row"]
    if request["direction"] == "step":
        from fla.ops.gla import fused_recurrent_gla
        from fla.ops.simple_gla import fused_recurrent_simple_gla

        run = fused_recurrent_gla if request["decay"] == "rows" else fused_recurrent_simple_gla
        gate = "gk" if request["decay"] == "rows" else "g"
        return lambda q, k, v, g, state: run(
            q, k, v, **{gate: g}, scale=1.0, initial_state=state, output_final_state=True
        )
    if name == "fla gla":
        from fla.ops.gla import chunk_gla

        return lambda q, k, v, g: chunk_gla(q, k, v, g, scale=1.0)[0]
    if name == "fla retention":  # its decays are its own, so that ours have no gradient there
        from fla.ops.retention import chunk_retention

        return lambda q, k, v, _: chunk_retention(q, k, v, scale=1.0)[0]
    if name == "fla simple_gla":
        from fla.ops.simple_gla import chunk_simple_gla

        return lambda q, k, v, g: chunk_simple_gla(q, k, v, g, scale=1.0)[0]
    if name == "fla gated_delta_rule":
        from fla.ops.gated_delta_rule import chunk_gated_delta_rule

        return lambda q, k, v, g, beta: chunk_gated_delta_rule(
            q, k, v, g, beta.to(q.dtype), scale=1.0
        )[0]
    if name.endswith("siging"):
        from mlstm_kernels.torch.chunkwise.triton_xl_chunk_siging import (
            mlstm_siging_chunkwise__xl_chunk as mlstm_sig,
        )

        how = dict(chunk_size=128, normalize=False)
        return lambda q, k, v, f, i: mlstm_sig(q, k, v, i, f, autocast_kernel_dtype=q.dtype, **how)
    if name.endswith("limit"):
        from mlstm_kernels.torch.chunkwise.triton_limit_chunk import (
            mlstm_chunkwise__limit_chunk as mlstm,
        )

        size = 64
    else:
        from mlstm_kernels.torch.chunkwise.triton_xl_chunk import mlstm_chunkwise__xl_chunk as mlstm

        size = 128
    return lambda q, k, v, forget, gate: mlstm(
        q, k, v, gate, forget, chunk_size=size, autocast_kernel_dtype=q.dtype
    )


def arranged(name: str, given: list) -> list:
    """Returns the arrays as a row wants them: mlstm_kernels has heads before time, and scales queries itself.

    It takes forget gates before their sigmoid.
    """
    if "mlstm" not in name:
        return given
    q, k, v, *gates = (x.transpose(1, 2).contiguous() for x in given)
    if gates:
        gates[0] = gates[0] - torch.log(-torch.expm1(gates[0]))
    return [q * q.shape[-1] ** 0.5, k, v, *gates]


def truth(q, k, v, decay, g):
    """Step by step in float64: outputs of the first row's first two heads, and gradients."""
    args = [x[:1, :, :2].detach().double().requires_grad_() for x in (q, k, v, decay)]
    q, k, v, decay = args
    kept = decay.exp() if decay.dim() == 4 else decay.exp()[..., None]
    state, outs = 0.0, []
    for t in range(q.shape[1]):
        state = kept[:, t, :, :, None] * state + k[:, t, :, :, None] * v[:, t, :, None, :]
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    out = torch.stack(outs, 1)
    out.backward(g[:1, :, :2].double())
    return [out.detach(), *(x.grad for x in args)]


def truth_of_mlstm(q, k, v, forget, gate, g, sigmoid: bool):
    """All tokens by all in float64: outputs of the first row's first two heads, and gradients; heads before time."""
    args = [x[:1, :2].detach().double().requires_grad_() for x in (q, k, v, forget, gate)]
    q, k, v, forget, gate = args
    decay = torch.nn.functional.logsigmoid(forget).cumsum(-1)
    written = torch.nn.functional.logsigmoid(gate) if sigmoid else gate
    logs = decay[..., :, None] - decay[..., None, :] + written[..., None, :]
    logs = logs.masked_fill(
        torch.ones(logs.shape[-2:], device=logs.device).triu(1).bool(), -torch.inf
    )
    largest = torch.zeros_like(logs[..., :1]) if sigmoid else logs.detach().amax(-1, keepdim=True)
    weight = (q @ k.transpose(-1, -2)) * q.shape[-1] ** -0.5 * (logs - largest).exp()
    norm = 1.0 if sigmoid else torch.maximum(weight.sum(-1, keepdim=True).abs(), (-largest).exp())
    out = weight @ v / norm
    out.backward(g[:1, :2].double())
    return [out.detach(), *(x.grad for x in args)]


class Attention(Call):
    """A row of linear attention, or of one of its steps."""

    def __init__(self, request: dict):
        """Calls it until it is compiled; compares on a prefix of `check` tokens."""
        made = linear_cases.arrays(request)
        here = {name: torch.from_numpy(x.copy()).to(DEVICE) for name, x in made.items()}
        dtype = FLOATS[request["dtype"]]
        self.names = [name for name in ("q", "k", "v", *linear_cases.WIDE) if name in here]
        args = [
            here[name] if name in linear_cases.WIDE else here[name].to(dtype) for name in self.names
        ]
        args = [x.detach().requires_grad_() for x in arranged(request["row"], args)]
        g = here["g"].to(dtype)
        g = g.transpose(1, 2).contiguous() if "mlstm" in request["row"] else g
        super().__init__(function_of(request), args, request["direction"], g)
        out = self.compile(request["spend_s"])
        judged = request["row"] != "fla retention" and request["decay"] != "delta"
        if judged and request["direction"] != "step":
            self.made |= self.errors(out, request["row"], request["check"])

    def errors(self, out, name: str, length: int) -> dict:
        """Relative errors of a prefix: its outputs; its gradients from a call on it alone."""
        mlstm = functools.partial(truth_of_mlstm, sigmoid=name.endswith("siging"))
        time, heads, truth_of = (2, 1, mlstm) if "mlstm" in name else (1, 2, truth)
        length = min(length, out.shape[time])
        prefix = [x.narrow(time, 0, length).detach().clone().requires_grad_() for x in self.args]
        g = self.g.narrow(time, 0, length).contiguous()
        want = truth_of(*prefix, g)
        self.function(*prefix).backward(g)
        got = [out.narrow(time, 0, length), *(x.grad for x in prefix)]
        parts = [
            ((mine[:1].narrow(heads, 0, 2).detach().double() - right).norm() / right.norm()).item()
            for mine, right in zip(got, want, strict=True)
        ]
        return linear_cases.told(parts, self.names)


if __name__ == "__main__":
    harness.serve(harness.Rows(Attention, {"rates": lambda _: device_facts()}, free))
