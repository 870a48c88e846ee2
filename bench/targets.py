"""Reference values for the figures of one replica: vLLM's figure, the hardware's limit, and the target. All are on
H200, but those with `cpu` in their name and those of schemas."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.results import Figure, number


@dataclass(frozen=True)
class Target:
    """Reference values of one figure, in the figure's unit.

    | field | meaning |
    | --- | --- |
    | `vllm` | measured with vLLM 0.22.1, its defaults, on the same machine and workload; None if not measured |
    | `floor` | the best value that the copy and matrix rates measured on the hardware allow; None if not known |
    | `aim` | the value that Shoal is to reach |
    """

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
    # Floors by `bench.replica.floors`.
    "gpu.gpt_oss_20b.mini.output_tok_s": Target(None, 10015, 7010),
    "gpu.gpt_oss_20b.bs1.decode_tok_s": Target(None, 497, 249),
    "gpu.gpt_oss_20b_mxfp4.mini.output_tok_s": Target(None, 23836, 16700),
    "gpu.gpt_oss_20b_mxfp4.bs1.decode_tok_s": Target(None, 963, 482),
    "gpu.gpt_oss_120b.mini.output_tok_s": Target(None, 6922, 4850),
    "gpu.gpt_oss_120b.bs1.decode_tok_s": Target(None, 713, 357),
    "gpu.gemma3_12b.mini.output_tok_s": Target(None, 6057, 4240),
    "gpu.gemma3_12b.bs1.decode_tok_s": Target(None, 151, 75.5),
    "gpu.llama70b.tp4.mini_half.output_tok_s": Target(3205, None, 3500),
    "gpu.llama70b.tp4.prefill_half.input_tok_s": Target(14980, 21000, 16500),
    # The docstring of `bench.replica.floors` says why 8,000 cannot be reached.
    "gpu.qwen3_30b_a3b.mini.output_tok_s": Target(None, 6590, 8000),
    "gpu.qwen3_30b_a3b.bs1.decode_tok_s": Target(None, 581, 400),
    "gpu.qwen3_30b_a3b.prefill.input_tok_s": Target(None, 89809, 53900),
    "gpu.qwen3_next_cut.mini.output_tok_s": Target(None, 8964, 6270),
    "gpu.qwen3_next_cut.bs1.decode_tok_s": Target(None, 1263, 632),
    # These two at the rate of a copy, 4.28 TB/s, and not at the 3.6 TB/s at which products read weights.
    "gpu.deepseek_v2_lite.mini.output_tok_s": Target(None, 15150, 10600),
    "gpu.deepseek_v2_lite.bs1.decode_tok_s": Target(None, 866, 433),
    # Dense shapes against the tree before there were other kinds of models, and adapters against their base model.
    "models.llama8b.mini.vs_before": Target(None, None, 0.99),
    "models.llama8b.bs1.vs_before": Target(None, None, 0.99),
    "models.qwen3_30b_a3b.tp2.mini.vs_one": Target(None, 2, 1.5),
    "models.lora.throughput_vs_base": Target(None, 1, 0.85),
    "gpu.idle_fraction.b64": Target(None, 0, 0.03),
    "gpu.idle_fraction.b256": Target(None, 0, 0.03),
    "gpu.idle_fraction.grammar.b64": Target(None, 0, 0.08),
    "gpu.idle_fraction.grammar.b256": Target(None, 0, 0.08),
    "gpu.http.mini.vs_offline": Target(None, 1, 0.95),
    # Drafts that are right with probabilities 0.8, 0.7, 0.6, against none.
    "drafts.gpu.b1.vs_off": Target(None, None, 2.0),
    "drafts.gpu.b8.vs_off": Target(None, None, 1.7),
    "drafts.gpu.b32.vs_off": Target(None, None, 1.3),
    "drafts.gpu.b256.vs_off": Target(None, None, 0.99),
    "drafts.gpu.host_step": Target(None, None, 1.0),
    "drafts.gpu.pp2.sockets.b8.vs_off": Target(None, None, 1.7),
    # Drafts on SmolLM2-135M on a CPU, against none.
    "drafts.cpu.form.latency_vs_off": Target(None, None, 2.5),
    "drafts.cpu.form.throughput_vs_off": Target(None, None, 2.0),
    "drafts.cpu.schemas.vs_off": Target(None, None, 1.2),
    "drafts.cpu.edit.vs_off": Target(None, None, 2.5),
    "drafts.cpu.chat.vs_off": Target(None, None, 1.0),
    # The 70B shape in four stages on 4 H200, over NVLink and over sockets, which stand for Ethernet between nodes.
    "pipeline.sockets.mini_512.output_tok_s": Target(1714, 5500, 5000),
    "pipeline.sockets.mini_half.output_tok_s": Target(1081, 1780, 1650),
    "pipeline.sockets.prefill_half.input_tok_s": Target(4357, 21000, 16000),
    "pipeline.sockets.decode_bubble": Target(None, 0, 0.05),
    "pipeline.sockets.bubble.vs_fixed_chunk": Target(None, 0, 0.5),
    "pipeline.sockets.capacity_strict.vs_fixed_chunk": Target(None, None, 1.05),
    "pipeline.sockets.ttft_p50.vs_fixed_chunk": Target(None, None, 0.7),
    "pipeline.sockets.capacity_strict.vs_prefill_first": Target(None, None, 1.0),
    "pipeline.sockets.capacity_strict.vs_hybrid": Target(None, None, 1.0),
    "pipeline.sockets.capacity_strict.vs_tp4": Target(None, None, 3.0),
    "pipeline.nvlink.decode_heavy.vs_tp4": Target(None, None, 0.95),
    "pipeline.nvlink.prefill_heavy.vs_tp4": Target(None, None, 1.0),
    "pipeline.cost_model.median_error": Target(None, 0, 0.05),
    "pipeline.simulator.throughput_error": Target(None, 0, 0.1),
    # Published schemas as structured output, on a CPU.
    "schemas.accepted": Target(None, 1, 0.95),
    "schemas.invalid_accepted": Target(None, 0, 0),
    "schemas.valid_refused": Target(None, 0, 0.05),
    "schemas.natural.accepted": Target(None, 1, 0.99),
    "schemas.compile.p50_ms": Target(None, None, 50),
    "schemas.compile.p99_ms": Target(None, None, 2000),
    "schemas.mask_us_per_sequence": Target(None, None, 60),
    "schemas.rank_growth_mib": Target(None, None, 300),
    "schemas.generated_valid": Target(None, 1, 1),
    "pipeline.meter.overhead": Target(None, 0, 0.01),
}


def reached(figure: Figure) -> bool | None:
    """Whether a figure reaches its target. None if there is no target."""
    target = TARGETS.get(figure.name)
    if target is None:
        return None
    return figure.value >= target.aim if figure.higher_is_better else figure.value <= target.aim


def print_table(figures: Sequence[Figure], path: Path | None, reasons: Mapping[str, str] | None = None) -> None:
    """Print every figure with its reference values, then the known reasons why figures miss their targets."""
    from rich.console import Console
    from rich.table import Table

    table = Table("figure", box=None, header_style="dim")
    for heading in ("value", "vLLM", "floor", "to show", ""):
        table.add_column(heading, justify="right")
    for figure in figures:
        target = TARGETS.get(figure.name)
        row = [figure.name, number(figure.value)]
        if target is not None:
            known = (target.vllm, target.floor, target.aim)
            row += ["-" if value is None else number(value) for value in known]
            row.append("reached" if reached(figure) else "MISSED")
        table.add_row(*row)
    console = Console(width=120)
    console.print(table)
    for name, reason in (reasons or {}).items():
        console.print(f"{name} is missed: {reason}", highlight=False, markup=False, soft_wrap=True)
    if path is not None:
        console.print(f"written: {path.name}", style="dim", highlight=False)
