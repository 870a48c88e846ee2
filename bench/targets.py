"""What the figures of one replica are held against, all on H200: another engine's, the hardware's floor, the aim."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Target:
    """`vllm` was measured (0.22.1, its defaults, same machine and workload), `floor` follows from the copy and matrix
    rates measured there, `aim` is what Shoal wants to reach; None where there is none."""

    vllm: float | None
    floor: float | None
    aim: float


TARGETS: dict[str, Target] = {
    "gpu.llama8b.mini.output_tok_s": Target(9667, 11600, 10650),
    "gpu.llama8b.bs1.decode_tok_s": Target(201, 240, 221),
    "gpu.llama8b.prefill.input_tok_s": Target(41042, 51000, 46000),
    "gpu.llama8b.sharedprefix.seconds": Target(7.43, 4.9, 6.0),
    "gpu.llama8b.sharedprefix_interleaved.seconds": Target(None, 4.9, 6.0),
    "gpu.llama8b.start_to_first_token.seconds": Target(45, None, 45),
    "gpu.qwen3_06b.mini.output_tok_s": Target(24024, None, 28800),
    "gpu.qwen3_06b.bs1.decode_tok_s": Target(604, 3600, 850),
    "gpu.llama70b.tp4.mini_half.output_tok_s": Target(3205, None, 3500),
    "gpu.llama70b.tp4.prefill_half.input_tok_s": Target(14980, 21000, 16500),
    "gpu.idle_fraction.b64": Target(None, 0, 0.03),
    "gpu.idle_fraction.b256": Target(None, 0, 0.03),
    "gpu.idle_fraction.grammar.b64": Target(None, 0, 0.08),
    "gpu.idle_fraction.grammar.b256": Target(None, 0, 0.08),
    "gpu.http.mini.vs_offline": Target(None, 1, 0.95),
}
