"""Compiles Triton kernels for sm_90 without a GPU and tells what the machine code uses; run in a process of its own.

Reads a JSON list of {text, name, dtypes, constants, num_warps, num_stages} from standard input,
writes one of facts.
"""

import json
import pathlib
import re
import subprocess
import sys
import tempfile

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from jaxpar.lower.triton import compiled

POINTERS = {"bfloat16": "*bf16", "float16": "*fp16", "float32": "*fp32", "int32": "*i32"}
COPY = r"cp\.async\.c[ag]\S* \[[^\]]*\], \[[^\]]*\], 0x(\w+)"
"""An asynchronous copy into shared memory, and its bytes a thread."""
TOOLS = pathlib.Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


def disassembled(cubin: bytes, flag: str) -> str:
    """What cuobjdump says of machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run(
            [TOOLS / "cuobjdump", flag, file.name], check=True, capture_output=True, text=True
        ).stdout


def facts(call: dict) -> dict:
    """Compiles as jax_triton does: pointers are multiples of 16 bytes, sizes are constants."""
    function = compiled(call["text"], call["name"])
    dtypes, constants = iter(call["dtypes"]), call["constants"]
    signature = {
        x: "constexpr" if x in constants else POINTERS[next(dtypes)] for x in function.arg_names
    }
    pointers = {
        (place,): [["tt.divisibility", 16]]
        for place, x in enumerate(signature)
        if x not in constants
    }
    source = ASTSource(function, signature, constexprs=constants, attrs=pointers)
    options = {"num_warps": call["num_warps"], "num_stages": call["num_stages"]}
    program = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    code, usage = (disassembled(program.asm["cubin"], flag) for flag in ("-sass", "-res-usage"))
    used = dict(re.findall(r"(REG|STACK|LOCAL):(\d+)", usage))
    return {
        "name": call["name"],
        "registers": int(used["REG"]),
        "spilled": int(used["STACK"])
        + int(used["LOCAL"])
        + len(re.findall(r"\b(?:STL|LDL)\b", code)),
        "shared": program.metadata.shared,
        "wgmma": sorted(
            set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(\S+)", program.asm["ptx"]))
        ),
        "hgmma": len(re.findall(r"\bHGMMA\b", code)),
        "hmma": len(re.findall(r"\bHMMA\b", code)),
        "copies": sorted({int(size, 16) for size in re.findall(COPY, program.asm["ptx"])}),
    }


if __name__ == "__main__":
    json.dump([facts(call) for call in json.load(sys.stdin)], sys.stdout)
