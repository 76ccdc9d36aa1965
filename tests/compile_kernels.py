"""Compile the loss's kernels for compute capability 9.0, as a separate program."""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

TYPES = {
    "target": "*i64", "ks": "*fp32", "weight": "*fp32", "parts": "*fp64", "scaled": "*i32",
    "values": "*fp64", "statistics": "*fp64", "found": "*fp32", "given": "*fp32", "factor": "*fp32",
    "k": "fp32", "smoothing": "fp32", "pos_weight": "*fp32", "scale": "fp32",
}  # fmt: skip
LOGITS = ("z", "grad", "out", "x")


def compile_kernel(
    kernel: Any, logits: str = "*bf16", options: dict[str, int] | None = None, **constants: Any
) -> Any:
    """Compile; a non-constant argument has the type that its name implies, or is an integer.

    With compiler ``options``, hardly any registers may spill.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    of_names = {**TYPES, **dict.fromkeys(LOGITS, logits)}
    if constants.get("probabilities") or "pos_weight" in kernel.arg_names:
        of_names["target"] = "*fp32"
    types = {
        name: "constexpr" if name in constants else of_names.get(name, "i32")
        for name in kernel.arg_names
    }
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    attributes = {
        (position,): [["tt.divisibility", 16]]
        for position, name in enumerate(kernel.arg_names)
        if types[name].startswith("*")
    }
    source = ASTSource(kernel, types, values, attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    if options:
        spilled = re.search(r"STACK:(\d+)", cuobjdump(compiled, "--dump-resource-usage"))
        assert spilled
        assert int(spilled[1]) <= 32, (kernel, constants)
    return compiled


def instructions(compiled: Any) -> int:
    """Return the number of machine instructions."""
    return len(re.findall(r"/\*[0-9a-f]{4,}\*/ +\S", cuobjdump(compiled, "--dump-sass")))


def cuobjdump(compiled: Any, option: str) -> str:
    """Return the output of cuobjdump, which comes with Triton, on the machine code."""
    import triton.backends.nvidia

    tool = Path(triton.backends.nvidia.__path__[0]) / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        command = [str(tool), option, file.name]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def main() -> None:
    from pseudograd.loss.triton import reduction
    from pseudograd.loss.triton.binary import BLOCK, WARPS, binary
    from pseudograd.loss.triton.labels import row as row_kernel
    from pseudograd.loss.triton.labels import tile
    from pseudograd.loss.triton.launch import (
        ROW_REGISTERS,
        SOFT_ROW_REGISTERS,
        SOFT_TILE_REGISTERS,
        TILE_REGISTERS,
    )
    from pseudograd.loss.triton.soft import soft_row, soft_tile

    on_chip = {"num_warps": 1, "maxnreg": TILE_REGISTERS}
    in_turns = {"num_warps": 16, "maxnreg": ROW_REGISTERS}
    training: dict[str, Any] = {"weight": None, "grad": None, "scaled": None, "skip": False}
    at_once: dict[str, Any] = {"found": None, "given": None}
    once = at_once | {"reduced": True, "mean": False}
    whole = at_once | {"statistics": None}
    for special in ("1", "1/2", "any"):
        given = training if special == "any" else training | {"ks": None}
        shape = {"vector": 8, "tile_rows": 1, "outer": 4, "inner": 256}
        code = compile_kernel(
            tile, "*bf16", on_chip, special=special, **shape, **once, **given
        ).asm["ptx"]
        assert "ld.global.v4" in code, "logits are loaded 16 bytes at a time"
        assert "st.global.v4" in code
        shape = {"vector": 4, "tile_rows": 8, "outer": 8, "inner": 16}
        rows_of_100 = compile_kernel(
            tile, "*bf16", on_chip, special=special, **shape, **once, **given
        )
        count = instructions(rows_of_100)
        assert 500 < count < 1600, f"{count}: few threads share a row and compute its scalars"
        code = compile_kernel(
            row_kernel, "*bf16", in_turns, special=special, vector=8, lanes=1024, **whole, **given
        ).asm["ptx"]
        assert code.count("v4.b32") >= 6, "in both passes"
        targets: dict[str, Any] = {"probabilities": True, "smoothing": None, "special": special}
        soft = given | targets
        shape = {"vector": 4, "tile_rows": 8, "outer": 4, "inner": 32, "reduced": True}
        options = {"num_warps": 2, "enable_fp_fusion": False}
        rows_of_100 = compile_kernel(soft_tile, "*bf16", options, **shape, **soft)
        count = instructions(rows_of_100)
        assert 300 < count < 1300, f"{count}: as above, and sides are not stored separately"
        if special != "any":  # it is faster with some spills, at a higher occupancy
            whole_row: dict[str, Any] = {"tile_rows": 1, "outer": 1, "reduced": True, **soft}
            options = options | {"num_warps": 1, "maxnreg": TILE_REGISTERS}
            compile_kernel(soft_tile, "*bf16", options, vector=8, inner=1024, **whole_row)
            options = options | {"num_warps": 4, "maxnreg": SOFT_TILE_REGISTERS}
            compile_kernel(soft_tile, "*bf16", options, vector=8, inner=4096, **whole_row)
            options = {"num_warps": 16, "maxnreg": SOFT_ROW_REGISTERS}
            backward = targets | {"found": None, "values": None, "ks": None}
            compile_kernel(soft_row, "*bf16", options, vector=8, lanes=1024, **backward)
    several: dict[str, Any] = {
        "special": "any",
        "reduced": False,
        "tile_rows": 64,
        "skip": True,
    }
    later: dict[str, Any] = {"weight": None, "parts": None, "values": None, "found": None}
    pieces: dict[str, Any] = {"outer": 8, "inner": 2}
    compile_kernel(tile, "*fp16", vector=2, mean=False, given=None, **pieces, **several)
    compile_kernel(tile, "*fp16", vector=2, mean=False, **pieces, **several | later)
    functional: dict[str, Any] = {"scaled": None, "given": None}  # without a module's state
    compile_kernel(tile, "*fp16", vector=2, mean=False, **pieces, **several | later | functional)
    alone = several | pieces | at_once | {"tile_rows": 1024, "reduced": True}
    compile_kernel(tile, "*bf16", vector=2, mean=True, parts=None, **alone)
    row: dict[str, Any] = {"special": "any", "skip": True}
    for probabilities in (False, True):
        soft = {"probabilities": probabilities}
        compile_kernel(soft_tile, "*fp32", vector=1, **pieces, **several, **soft)
        long: dict[str, Any] = {"special": "any", "lanes": 128, "vector": 8, **soft}
        compile_kernel(soft_row, "*fp32", given=None, **long)
        compile_kernel(soft_row, "*fp32", found=None, values=None, **long)
    compile_kernel(row_kernel, "*fp32", vector=1, lanes=8192, given=None, **row)
    compile_kernel(row_kernel, "*fp32", vector=4, lanes=2048, statistics=None, **row | later)
    compile_kernel(
        row_kernel, "*fp32", vector=4, lanes=2048, statistics=None, **row | later | functional
    )
    split = row | later | training | {"statistics": None}
    compile_kernel(row_kernel, "*bf16", vector=8, lanes=1024, **split)
    elementwise: dict[str, Any] = {"pos_weight": None, "weight": None, "ks": None, "grad": None}
    options = {"num_warps": WARPS}
    for logits in ("*bf16", "*fp32"):
        compile_kernel(binary, logits, options, summed=True, skip=False, block=BLOCK, **elementwise)
    compile_kernel(binary, "*fp16", options, values=None, summed=False, skip=True, block=BLOCK)
    compile_kernel(reduction.count_labels, options={"num_warps": 16}, block=8192)
    compile_kernel(reduction.sum_values, "*fp32", block=1024)
    compile_kernel(reduction.rescale, block=1024)


if __name__ == "__main__":
    main()
