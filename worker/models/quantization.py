"""The format of a quantized checkpoint, from `quantization_config` in config.json."""

from dataclasses import dataclass
from typing import Any, Literal

Method = Literal["fp8", "compressed-tensors", "modelopt", "awq", "gptq", "mxfp4"]

UNDERSTOOD = (
    "fp8 (e4m3), compressed-tensors (float-quantized, int-quantized, pack-quantized, nvfp4-pack-quantized), modelopt "
    "(FP8, NVFP4), awq (4 bits, gemm), gptq (4 and 8 bits), mxfp4 of gpt-oss"
)

# `quant_algo`: a scale for a matrix, for each row, for blocks; numbers of 4 bits; matrices of several kinds.
_MODELOPT = ("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "NVFP4", "MIXED_PRECISION")


@dataclass(frozen=True)
class Quantization:
    """The format of a checkpoint's matrices.

    | field | meaning |
    | --- | --- |
    | `method` | `quant_method` |
    | `bits` | of an integer, for `awq` and `gptq` |
    | `group` | input columns that share a scale, for `awq` and `gptq`; None: all |
    | `block` | rows and columns that share a scale, for numbers of 8 bits; None: a scale for each row, or for all |
    | `is_v2` | for `gptq`: zeros are stored as they are, and not less one |
    """

    method: Method
    bits: int = 8
    group: int | None = None
    block: tuple[int, int] | None = None
    is_v2: bool = False


def quantization(said: dict[str, Any] | None, has_mxfp4: bool = False) -> Quantization | None:
    """The format that a configuration says; None if it says none. `said`: its `quantization_config`. `has_mxfp4`:
    whether the family has experts in MXFP4.

    Raises ValueError, with the format's name, for one that is not understood.
    """
    if not said:
        return None
    method = said.get("quant_method", "an unknown method")
    if method == "mxfp4" and has_mxfp4:
        return Quantization("mxfp4", bits=4)
    known = {
        "fp8": _fp8,
        "compressed-tensors": _compressed_tensors,
        "modelopt": _modelopt,
        "awq": _awq,
        "gptq": _gptq,
    }
    if method not in known:
        raise _refusal(method)
    return known[method](said)


def _refusal(name: str) -> ValueError:
    return ValueError(
        f"the checkpoint is quantized ({name}), which is not supported: take one in bfloat16, float16 or float32, for "
        f"a CPU a GGUF file, or one in {UNDERSTOOD}"
    )


def _fp8(said: dict[str, Any]) -> Quantization:
    if (numbers := said.get("fmt", "e4m3")) not in ("e4m3", "float8_e4m3fn"):
        raise _refusal(f"fp8, {numbers}")
    block = said.get("weight_block_size")
    return Quantization("fp8", block=None if block is None else (int(block[0]), int(block[1])))


def _modelopt(said: dict[str, Any]) -> Quantization:
    """Which matrices are in FP8 and which in NVFP4, tensors say."""
    algorithm = said.get("quant_algo")
    if algorithm is not None and algorithm.upper() not in _MODELOPT:
        raise _refusal(f"modelopt, {algorithm}")
    return Quantization("modelopt", block=(128, 128) if algorithm and algorithm.upper() == "FP8_PB_WO" else None)


def _awq(said: dict[str, Any]) -> Quantization:
    bits, version = int(said.get("bits", 4)), str(said.get("version") or said.get("format") or "gemm").lower()
    if bits != 4 or version != "gemm":
        raise _refusal(f"awq, {bits} bits, {version}")
    return Quantization("awq", bits, _group(said))


def _gptq(said: dict[str, Any]) -> Quantization:
    bits, layout = int(said.get("bits", 4)), said.get("checkpoint_format") or said.get("format") or "gptq"
    if bits not in (4, 8) or layout not in ("gptq", "gptq_v2") or said.get("is_marlin_format"):
        raise _refusal(f"gptq, {bits} bits, {'marlin' if said.get('is_marlin_format') else layout}")
    return Quantization("gptq", bits, _group(said), is_v2=layout == "gptq_v2")


def _group(said: dict[str, Any]) -> int | None:
    group = int(said.get("group_size", 128))
    return group if group > 0 else None


def _compressed_tensors(said: dict[str, Any]) -> Quantization:
    """Formats whose tensors' names, dtypes and shapes say all but the size of blocks. Groups of modules may have
    formats of their own."""
    blocks: set[tuple[int, int] | None] = set()
    for group in (said.get("config_groups") or {}).values():
        kind, weights = group.get("format") or said.get("format"), group.get("weights") or {}
        numbers, bits = weights.get("type", "int"), weights.get("num_bits", 8)
        strategy = weights.get("strategy") or "tensor"
        name = f"compressed-tensors, {kind}, {numbers} of {bits} bits, {strategy}"
        in_8_bits = kind in ("float-quantized", "int-quantized", "naive-quantized") and bits == 8
        packed = kind == "pack-quantized" and numbers == "int" and bits in (4, 8)
        if kind == "nvfp4-pack-quantized" and (numbers, bits) == ("float", 4):
            continue
        if not (in_8_bits or packed) or strategy not in ("tensor", "channel", "group", "block"):
            raise _refusal(name)
        if in_8_bits and strategy == "block":
            rows, columns = weights.get("block_structure") or (128, 128)
            blocks.add((int(rows), int(columns)))
        elif in_8_bits and strategy == "group":
            blocks.add((1, int(weights["group_size"])))
        elif in_8_bits:
            blocks.add(None)
    if not said.get("config_groups"):
        raise _refusal(f"compressed-tensors, {said.get('format', 'no format')}")
    if (sparsity := (said.get("sparsity_config") or {}).get("format", "dense")) != "dense":
        raise _refusal(f"compressed-tensors, {sparsity}")
    if said.get("transform_config"):
        raise _refusal("compressed-tensors, with rotated activations (transform_config)")
    if len(blocks) > 1:
        raise _refusal("compressed-tensors, scales for blocks of several sizes")
    return Quantization("compressed-tensors", block=next(iter(blocks), None))
