"""Compile the loss's kernels for compute capability 9.0, as a program of its own."""

from __future__ import annotations

from typing import Any

TYPES = {
    "target": "*i64", "ks": "*fp32", "weight": "*fp32", "weight_sum": "*fp64", "parts": "*fp64",
    "values": "*fp64", "statistics": "*fp64", "given": "*fp32", "factor": "*fp32",
    "k": "fp32", "smoothing": "fp32",
}  # fmt: skip
LOGITS = ("z", "grad", "out", "x")


def compile_kernel(kernel: Any, logits: str = "*bf16", **constants: Any) -> str:
    """Give the assembly; what is no constant has the type that its name says, or is an integer."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {
        name: "constexpr" if name in constants
        else logits if name in LOGITS
        else TYPES.get(name, "i32")
        for name in kernel.arg_names
    }  # fmt: skip
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    attributes = {
        (position,): [["tt.divisibility", 16]]
        for position, name in enumerate(kernel.arg_names)
        if types[name].startswith("*")
    }
    source = ASTSource(kernel, types, values, attributes)
    assembly: str = triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
    return assembly


def main() -> None:
    from pseudograd.loss import kernels

    for special in ("1", "1/2", "any"):
        tile: dict[str, Any] = {"special": special, "reduced": True, "tile_rows": 1}
        tile |= {"outer": 4, "inner": 256}
        training: dict[str, Any] = {"ks": None, "weight": None, "grad": None, "skip": False}
        code = compile_kernel(kernels.tile, vector=8, mean=False, **tile, **training)
        assert "ld.global.v4" in code, "logits are loaded 16 bytes at a time"
        assert "st.global.v4" in code
        split: dict[str, Any] = {"statistics": None, "given": None}
        code = compile_kernel(
            kernels.row, vector=8, lanes=1024, special=special, **training, **split
        )
        assert code.count("v4.b32") >= 6, "in both passes"
    several: dict[str, Any] = {
        "special": "any",
        "reduced": False,
        "tile_rows": 64,
        "skip": True,
    }
    pieces = {"outer": 8, "inner": 2}
    compile_kernel(kernels.tile, "*fp16", vector=2, mean=False, **pieces, **several)
    alone = several | pieces | {"tile_rows": 1024, "reduced": True}
    compile_kernel(kernels.tile, "*bf16", vector=2, mean=True, parts=None, **alone)
    compile_kernel(kernels.smoothed_tile, "*fp32", vector=1, block=16, **several)
    row: dict[str, Any] = {"special": "any", "skip": True}
    compile_kernel(kernels.smoothed_row, "*fp32", lanes=1024, **row)
    compile_kernel(kernels.row, "*fp32", vector=1, lanes=8192, given=None, **row)
    compile_kernel(kernels.row, "*fp32", vector=4, lanes=2048, statistics=None, **row)
    compile_kernel(kernels.count_labels, block=1024)
    compile_kernel(kernels.sum_values, "*fp32", block=1024)
    compile_kernel(kernels.rescale, block=1024)


if __name__ == "__main__":
    main()
