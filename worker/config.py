"""Settings of one replica. `cluster.config` composes them into the configuration file."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

AUTO_DTYPES: dict[str, Literal["float32", "bfloat16", "float16"]] = {"cpu": "float32", "cuda": "bfloat16"}
DEFAULT_LORAS = 8  # adapters on the device, if no number is set and there are more


class WorkerConfig(BaseModel):
    """Settings of one replica's scheduler and workers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where the model runs; auto is a GPU if there is one, else the CPU"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="dtype of weights and KV cache; auto is bfloat16 on a GPU, float32 on a CPU"
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="auto reads the model's weights; dummy makes random ones and needs only config.json"
    )
    quantization: Literal["fp8"] | None = Field(
        None,
        description=(
            "set fp8 for half the memory of a dense model's weights and more speed, on GPUs from compute "
            "capability 8.9 on: the layers' matrices are rounded to 8 bits as they load. By default the "
            "checkpoint's own format stays"
        ),
    )
    dequantize: bool = Field(
        False,
        description=(
            "set this for a checkpoint whose format is refused: it is computed in dtype. A GGUF file is "
            "converted to float32 in the cache, which takes eight times the disk space of a 4-bit file"
        ),
    )
    tp: int = Field(1, ge=1, description="tensor-parallel ranks per pipeline stage")
    enable_expert_parallel: bool = Field(
        False,
        description=(
            "with tp, each rank holds whole experts, not a part of each; for mixtures of experts that serve "
            "many requests at once. One sequence, and prompts, are faster without"
        ),
    )
    pp: int = Field(1, ge=1, description="pipeline stages per replica")
    stage_layers: str | None = Field(
        None,
        description=(
            "layers of each pipeline stage, as in 20,20,21,19; set it for devices of different speed, or for "
            "prefill or decode alone. By default stages take about the same time for both, with the LM head "
            "counted"
        ),
        json_schema_extra={"pattern": "^0*[1-9][0-9]*(,0*[1-9][0-9]*)*$"},
    )
    page_size: int = Field(16, ge=1, le=64, description="tokens per KV page; prefixes are shared in whole pages")
    kv_tokens: int | None = Field(
        None,
        ge=16,
        description=(
            "capacity of the KV cache in tokens; by default as many as fit into the free memory. Set it to "
            "leave memory to other programs"
        ),
    )
    kv_memory_fraction: float | None = Field(
        None,
        gt=0,
        lt=1,
        description="on a GPU, the fraction of its memory for weights, KV cache and activations together, by default "
        "0.9; on a CPU, the fraction of the free memory for a rank's KV cache, by default 0.25, divided among all "
        "ranks where `shoal serve` starts Ray on this machine",
    )
    window_kv_tokens: int | None = Field(
        None,
        ge=0,
        description=(
            "for models in which some layers see a window of the last tokens only (Gemma, gpt-oss): how many "
            "tokens these layers keep. Lower it to fit more long sequences, raise it for many short ones; 0 "
            "keeps as many as the other layers. By default a quarter of these, or what sequences need that are "
            "3,072 tokens longer than the window, if that is more"
        ),
    )
    state_checkpoints: int | None = Field(
        None,
        ge=0,
        description=(
            "for models with recurrent states (linear attention, short convolutions): how many copies of states "
            "are kept, from which prompts that begin alike go on. Raise it where "
            "shoal_checkpoints_evicted_total grows quickly; with 0 every prompt is computed whole. By default "
            "as many as take the memory of the KV cache, at most one for 64 tokens of it"
        ),
    )
    checkpoint_interval: int = Field(
        2048,
        ge=1,
        description=(
            "for models with recurrent states or windows: tokens after which a long prompt can be continued by "
            "others, in whole pages; with states, long outputs too. Raise it where copies of states run out, "
            "lower it where long prompts part early. A prompt can be continued from its last page boundary, and "
            "where it parts from others, in any case"
        ),
    )
    context_length: int | None = Field(
        None, ge=1, description="most tokens of prompt and output together; by default the model's own limit"
    )
    max_running: int = Field(
        64,
        ge=1,
        description=(
            "most sequences that run at once; lower it for quicker tokens of each. By default on a GPU the "
            "number of sequences of 512 tokens that the KV cache holds, at least 64 and at most 1024"
        ),
    )
    token_budget: int = Field(
        512,
        ge=1,
        description=(
            "most tokens that one step computes, decodes included; 8192 by default on a GPU. With schedule "
            "fixed_chunk, lower it for shorter gaps between tokens, raise it for quicker first tokens"
        ),
    )
    schedule: Literal["uniform", "offline", "fixed_chunk"] | None = Field(
        None,
        description=(
            "what a step is sized for. uniform: even gaps between tokens within tbt_slo, by steps of equal "
            "predicted time; the default on GPUs, for pipelines and where tbt_slo is set. offline: a batch job "
            "whose last request ends soonest; first tokens may take long. fixed_chunk: decodes, then chunks up "
            "to token_budget, without any prediction, as in vLLM and SGLang; the default otherwise"
        ),
    )
    finish: Literal["all", "most"] = Field(
        "all",
        description=(
            "what counts of a job, with schedule offline. all: the end of its last request. most: as many "
            "finished requests as early as possible, for samples of which the first enough are taken and the "
            "others cancelled"
        ),
    )
    tbt_slo: float | None = Field(
        None,
        ge=0,
        description=(
            "seconds between two tokens of a request that 99 of 100 gaps should keep to, with schedule uniform. "
            "Raise it for more throughput; with 0 steps are as long as the lowest cost per token asks for. By "
            "default on a GPU 0.05, or five decode iterations where that is longer"
        ),
    )
    overlap: bool | None = Field(
        None, description="prepare the next step on the host while the device runs one; on by default on a GPU"
    )
    speculation: Literal["auto", "off"] = Field(
        "off",
        description=(
            "set auto for answers that fit a grammar or repeat their prompt: drafts of the next tokens (what "
            "the grammar forces, what the text or recent outputs repeat, what the client predicts) are verified "
            "where that gives more tokens a second. No output changes by it"
        ),
    )
    jump_forward: Literal["exact", "off"] = Field(
        "exact",
        description="what becomes of text that a grammar forces, such as keys and punctuation. exact: with speculation "
        "auto it is drafted and verified; no output changes by it. off: the model writes it token by token",
    )
    num_speculative_tokens: int = Field(
        32, ge=1, description="most drafts of one sequence in a step; fewer are taken where fewer pay"
    )
    draft_model: str | None = Field(
        None,
        min_length=1,
        description=(
            "a smaller model of the same vocabulary, named as a model is, which drafts the next tokens; set it "
            "with speculation auto, for text that neither grammar nor repetition foretells. No output changes "
            "by it. Needs pp 1; with tp it runs on the first rank alone. Fewer KV tokens fit into the memory"
        ),
    )
    lora_modules: dict[str, str] = Field(
        {},
        description="LoRA adapters, by the names that requests give as model: each the folder of an adapter in PEFT's "
        "format. More can be loaded while the server runs (/v1/load_lora_adapter)",
    )
    max_loras: int | None = Field(
        None,
        ge=0,
        description=(
            "LoRA adapters on the device at once, and so most different ones in a step; requests for others "
            "wait. Raise it where many are asked for at once. By default as many as lora_modules has, at most "
            "8; with 0 there are none, and none can be loaded"
        ),
    )
    max_lora_rank: int = Field(
        16, ge=1, le=512, description="largest rank of a LoRA adapter; memory is set aside for max_loras of it"
    )
    max_cpu_loras: int = Field(
        64,
        ge=1,
        description="LoRA adapters that each rank keeps in the host's memory, besides those in use; those used least "
        "recently are read again from their folders",
    )
    max_waiting: int = Field(
        4096,
        ge=1,
        description="most requests that may wait at one replica; further ones are offered to two other replicas, and "
        "refused with 429 if those are full too",
    )
    scheduling_policy: Literal["shortest", "fcfs"] = Field(
        "shortest",
        description=(
            "which waiting request of equal priority starts next. shortest, for the lowest mean latency: the "
            "one with the fewest prompt tokens to compute; while slots or pages are short, the longest wait in "
            "proportion to the expected work, with predicted lengths of outputs. fcfs: the one that came first. "
            "With schedule offline, jobs have an order of their own"
        ),
    )
    starvation_s: float = Field(
        5.0,
        ge=0,
        description=(
            "seconds after which a waiting request goes before those with shorter prompts, while there are "
            "slots and pages for all; lower it where long prompts wait too long. With schedule offline, "
            "requests that arrive within this time are one job, and jobs run one after the other"
        ),
    )
    step_timeout_s: float | None = Field(
        None,
        gt=0,
        description=(
            "seconds after which a step that has not ended counts as hung, and its replica is replaced; raise "
            "it where kernels compile longer than that at their first use. By default 120, on a CPU 600. A kind "
            "of step that has run often may take 20 times its predicted time, but at least 15 s, on a CPU 60 s"
        ),
    )
    cpu_threads: int | None = Field(
        None, ge=1, description="threads of one rank on a CPU; by default PyTorch's own choice"
    )
    grammar_timeout_s: float = Field(
        10.0,
        gt=0,
        description="most CPU time that a grammar may take to compile, in seconds, summed over all threads; a request "
        "whose grammar needs more is refused with 400",
    )

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        if self.tbt_slo and self.schedule not in (None, "uniform"):
            raise ValueError(f"tbt_slo={self.tbt_slo} needs schedule uniform: {self.schedule} keeps to no time")
        return self

    @model_validator(mode="after")
    def _finish_fits(self) -> Self:
        if self.finish != "all" and self.schedule != "offline":
            raise ValueError(f"finish={self.finish} needs schedule offline: only jobs end as a whole")
        return self

    @model_validator(mode="after")
    def _draft_model_fits(self) -> Self:
        if self.draft_model is not None and self.pp > 1:
            raise ValueError(
                f"draft_model needs pp=1, not pp={self.pp}: in a pipeline, the tokens that its drafts would follow are "
                "not known in time"
            )
        if self.draft_model is not None and not self.speculates:
            raise ValueError("draft_model needs speculation auto: with speculation off, no drafts are verified")
        return self

    @model_validator(mode="after")
    def _experts_fit(self) -> Self:
        if self.enable_expert_parallel and self.tp == 1:
            raise ValueError("enable_expert_parallel needs tp above 1: it divides experts among the ranks of a stage")
        return self

    @model_validator(mode="after")
    def _adapters_fit(self) -> Self:
        if self.lora_modules and self.max_loras == 0:
            raise ValueError("lora_modules need room: max_loras is 0")
        return self

    @model_validator(mode="after")
    def _stages_fit(self) -> Self:
        if self.stage_layers is None:
            return self
        counts = self.stage_layers.split(",")
        if not all(count.isdecimal() and int(count) > 0 for count in counts):
            raise ValueError(f"stage_layers={self.stage_layers} are not numbers of layers, as in 20,20,21,19")
        if len(counts) != self.pp:
            raise ValueError(f"stage_layers={self.stage_layers} is of {len(counts)} stages, and pp={self.pp}")
        return self

    @property
    def cut(self) -> tuple[int, ...] | None:
        """`stage_layers` as numbers; None if it is not set."""
        return None if self.stage_layers is None else tuple(map(int, self.stage_layers.split(",")))

    @property
    def schedule_name(self) -> str:
        """`schedule`, or its default on a CPU. `worker.executor.gpu_defaults` sets the default of a GPU."""
        if self.schedule is not None:
            return self.schedule
        return "uniform" if self.pp > 1 or self.tbt_slo else "fixed_chunk"

    @property
    def lora_slots(self) -> int:
        """`max_loras`, or its default."""
        return min(len(self.lora_modules), DEFAULT_LORAS) if self.max_loras is None else self.max_loras

    @property
    def speculates(self) -> bool:
        """Whether drafts are verified."""
        return self.speculation != "off"

    @property
    def longest_step_s(self) -> float:
        """`step_timeout_s`, or its default."""
        if self.step_timeout_s is not None:
            return self.step_timeout_s
        return 600.0 if self.device == "cpu" else 120.0

    @property
    def num_ranks(self) -> int:
        """Processes of a replica. Rank `stage * tp + i` is number i of its stage."""
        return self.tp * self.pp

    @property
    def leading_rank(self) -> int:
        """The first rank of the last stage: tokens are sampled there, and the scheduler runs in its process."""
        return (self.pp - 1) * self.tp
