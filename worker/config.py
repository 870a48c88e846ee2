"""Settings of one replica. `cluster.config` composes them into the configuration file."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

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
        description="fp8 rounds the layers' weight matrices to 8 bits as they load and multiplies in 8 bits: half the "
        "memory, on GPUs from compute capability 8.9 on; matrices that a checkpoint has in 8 bits stay as they are; by "
        "default the format of the checkpoint decides",
    )
    dequantize: bool = Field(
        False,
        description="compute a quantized checkpoint in dtype, and keep none of its formats: a GGUF file is converted "
        "to float32 in the cache, which takes eight times the disk space of a 4-bit file",
    )
    tp: int = Field(1, ge=1, description="tensor-parallel ranks per pipeline stage")
    enable_expert_parallel: bool = Field(
        False,
        description="with tp, each rank holds whole experts of every layer, in place of a part of each expert; "
        "attention and shared experts are cut as without",
    )
    pp: int = Field(1, ge=1, description="pipeline stages per replica")
    stage_layers: str | None = Field(
        None,
        description="number of layers of each pipeline stage, as in 20,20,21,19: for devices of different speed, or "
        "for a load of prefill alone or decode alone; by default stages take about the same time for both, with the "
        "LM head on the last stage counted",
        json_schema_extra={"pattern": "^0*[1-9][0-9]*(,0*[1-9][0-9]*)*$"},
    )
    page_size: int = Field(16, ge=1, le=64, description="tokens per KV page; prefixes are shared in whole pages")
    kv_tokens: int | None = Field(
        None, ge=16, description="capacity of the KV cache in tokens; by default as many as fit into the free memory"
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
        description="for models in which some layers see a window of the last tokens only (Gemma, gpt-oss): how many "
        "tokens of these layers are kept; 0 to keep all that the other layers keep. By default a quarter of these, or "
        "what sequences need that are 3,072 tokens longer than the window, if that is more; fewer leave more room for "
        "long sequences",
    )
    state_checkpoints: int | None = Field(
        None,
        ge=0,
        description="for models with recurrent states (linear attention, short convolutions): how many copies of states"
        " are kept, from which prompts that begin alike go on; 0 for none, so that every prompt is computed whole. By "
        "default as many as take the memory of the KV cache, and at most one for 64 tokens of it",
    )
    checkpoint_interval: int = Field(
        2048,
        ge=1,
        description="for models with recurrent states: tokens after which a long prompt or output gets the next copy, "
        "rounded up to whole pages; a prompt also gets one at its last page boundary, and one where it parts from "
        "others. For models with windows: tokens after which a long prompt can be continued by others",
    )
    context_length: int | None = Field(
        None, ge=1, description="most tokens of prompt and output together; by default the model's own limit"
    )
    max_running: int = Field(
        64,
        ge=1,
        description="most sequences that run at once; the default on a GPU is the number of sequences of 512 tokens "
        "that the KV cache holds, at least 64 and at most 1024",
    )
    token_budget: int = Field(
        512, ge=1, description="most tokens that one step computes, decodes included; 8192 by default on a GPU"
    )
    schedule: Literal["uniform", "offline", "fixed_chunk"] | None = Field(
        None,
        description="what goes into a step. uniform: prefill is cut into chunks of equal predicted time, so that all "
        "steps take the same time on every stage. offline: for batch jobs, where only the end of the last request "
        "counts; requests with the longest outputs start first, and prefill is spread over the decode steps. "
        "fixed_chunk: decodes, then chunks up to token_budget, without any prediction, as in vLLM and SGLang. By "
        "default uniform on GPUs, for pipelines and where tbt_slo is set, else fixed_chunk",
    )
    finish: Literal["all", "most"] = Field(
        "all",
        description="what counts of a job, with schedule offline. all: the end of its last request. most: as many "
        "finished requests as early as possible, for samples of which the first enough are taken and the others "
        "cancelled. Requests with the least expected work start first then, and prompts are computed as fast as "
        "possible",
    )
    tbt_slo: float | None = Field(
        None,
        ge=0,
        description="objective for the 99th percentile of the time between two tokens of a request, in seconds, for "
        "schedule uniform; 0 for no objective: steps are then long enough for the lowest cost per token. By default "
        "on a GPU 0.05, or the time of five decode iterations where that is longer",
    )
    overlap: bool | None = Field(
        None, description="prepare the next step on the host while the device runs one; on by default on a GPU"
    )
    speculation: Literal["auto", "off"] = Field(
        "off",
        description="auto verifies drafts of the next tokens (what the grammar forces, what the text or recent "
        "outputs repeat, what the client predicts) where that gives more tokens a second, as predicted by the costs of "
        "steps; no output changes by it",
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
        description="a smaller model of the same vocabulary, named as a model is, whose greedy tokens are drafts, with "
        "its own time counted; no output changes by it. Needs speculation auto, and pp 1; with tp it runs on the first "
        "rank alone. Its KV cache has the same pages, so fewer fit into the memory",
    )
    lora_modules: dict[str, str] = Field(
        {},
        description="LoRA adapters, by the names that requests give as model: each the folder of an adapter in PEFT's "
        "format. More can be loaded while the server runs (/v1/load_lora_adapter)",
    )
    max_loras: int | None = Field(
        None,
        ge=0,
        description="LoRA adapters that are in the device's memory at once, and so most different ones in a step; a "
        "request for another one waits until one of these is not used. By default as many as lora_modules has, at most "
        "8; with 0 there are none, and none can be loaded",
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
        description="which of the waiting requests of equal priority starts next. shortest: the one with the fewest "
        "prompt tokens to compute; while slots or pages are short, the one that has waited the longest in proportion "
        "to its expected work, with the length of its output predicted from what the replica has served. fcfs: the "
        "one that came first. With schedule offline, jobs have an order of their own",
    )
    starvation_s: float = Field(
        5.0,
        ge=0,
        description="seconds after which a waiting request goes before requests with fewer tokens left to prefill, "
        "while there are slots and pages for all; "
        "with schedule offline, requests that arrive within this time are one job, and jobs run one after the other",
    )
    step_timeout_s: float | None = Field(
        None,
        gt=0,
        description="seconds after which a step that has not ended counts as hung, and its replica is replaced; must "
        "be longer than the compilation of a kernel at its first use; by default 120, on a CPU 600. A step of a kind "
        "that has run often may take 20 times its predicted time, but at least 15 s, on a CPU 60 s",
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
            raise ValueError(f"stage_layers={self.stage_layers} are no numbers of layers, as in 20,20,21,19")
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
