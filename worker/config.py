"""What one replica may be told. `cluster.config` composes this into the configuration file."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class WorkerConfig(BaseModel):
    """Settings of one replica's scheduler and workers."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    device: Literal["auto", "cpu", "cuda"] = Field(
        "auto", description="where the model runs; auto takes a GPU if there is one"
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="type of weights and KV cache; auto is bfloat16 on a GPU, float32 on a CPU"
    )
    load_format: Literal["auto", "dummy"] = Field(
        "auto", description="auto reads the model's weights; dummy makes random ones, for which config.json is enough"
    )
    quantization: Literal["fp8"] | None = Field(
        None,
        description="fp8 rounds the layers' matrices to 8 bits as they load and multiplies in 8 bits: half the memory, "
        "for GPUs from compute capability 8.9 on; by default they stay as they are",
    )
    tp: int = Field(1, ge=1, description="tensor-parallel ranks in a stage")
    pp: int = Field(1, ge=1, description="pipeline stages in a replica")
    stage_layers: str | None = Field(
        None,
        description="layers of each stage, as in 20,20,21,19, for devices that differ or work that is all of one kind; "
        "by default cut so that stages take about as long, the last with its head, for prompts and for decodes",
    )
    page_size: int = Field(16, ge=1, le=64, description="tokens in a KV page; prefixes are shared in whole pages")
    kv_tokens: int | None = Field(
        None, ge=16, description="tokens that the KV cache holds; by default as many as fit in the memory that is free"
    )
    kv_memory_fraction: float = Field(
        0.9, gt=0, lt=1, description="part of a GPU's memory that weights, KV cache and activations may take together"
    )
    context_length: int | None = Field(
        None, ge=1, description="longest prompt and output together, in tokens; by default the model's own"
    )
    max_running: int = Field(64, ge=1, description="most sequences that run at once; on a GPU 256 by default")
    token_budget: int = Field(
        512, ge=1, description="most tokens that one step computes, decodes included; on a GPU 8192 by default"
    )
    schedule: Literal["uniform", "offline", "fixed_chunk", "prefill_first", "hybrid", "throttle"] | None = Field(
        None,
        description="what goes into a step: uniform cuts prompts so that all steps take the same time on every stage; "
        "offline is for requests that are there all at once, of which only the end of the last counts: it starts those "
        "with the longest outputs first, and spreads prompts over the decodes; fixed_chunk fills each up to "
        "token_budget; prefill_first and hybrid leave prompts whole, without decodes and beside them; throttle goes by "
        "what waits and what is free; by default uniform for pipelines and where tbt_slo is set, else fixed_chunk",
    )
    tbt_slo: float | None = Field(
        None,
        gt=0,
        description="seconds between two tokens of a request that 99 of 100 are to stay within, for schedule uniform; "
        "by default steps are as long as makes a token cheap",
    )
    overlap: bool | None = Field(
        None, description="prepare the next step while one runs; by default on a GPU, which runs without the host"
    )
    max_waiting: int = Field(4096, ge=1, description="most requests that may wait; more are refused with 429")
    starvation_s: float = Field(
        5.0,
        ge=0,
        description="seconds after which a waiting request goes before those with longer cached prefixes; with "
        "schedule offline, requests that come within so many seconds are a job, and jobs go one after the other",
    )
    cpu_threads: int | None = Field(
        None, ge=1, description="threads of one rank on a CPU; by default torch's own choice"
    )
    grammar_timeout_s: float = Field(
        10.0, gt=0, description="longest time that a grammar may take to compile, in seconds"
    )

    @model_validator(mode="after")
    def _schedule_fits(self) -> Self:
        if self.tbt_slo is not None and self.schedule not in (None, "uniform"):
            raise ValueError(f"tbt_slo={self.tbt_slo} needs schedule uniform: {self.schedule} keeps to no time")
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
        """`stage_layers` as numbers."""
        return None if self.stage_layers is None else tuple(map(int, self.stage_layers.split(",")))

    @property
    def schedule_name(self) -> str:
        """`schedule`, or what it is by default."""
        if self.schedule is not None:
            return self.schedule
        return "uniform" if self.pp > 1 or self.tbt_slo is not None else "fixed_chunk"

    @property
    def num_ranks(self) -> int:
        """Processes of a replica. Rank `stage * tp + i` is the i-th of its stage."""
        return self.tp * self.pp

    @property
    def leading_rank(self) -> int:
        """The first of the last stage, where tokens are sampled: the scheduler is with it."""
        return (self.pp - 1) * self.tp
