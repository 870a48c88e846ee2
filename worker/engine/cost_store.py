"""Cost models of a replica's stages: a roofline at first, then fitted to measured steps, and saved on disk.

The roofline only has to be right about relative costs, because it is scaled to the first measured steps. An unknown
device therefore gets the roofline of a known one.
"""

import logging
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.cost import CostModel, slowest_s
from pipeline.padding import UNPADDED, PaddedSizes
from pipeline.policy import Objective, Policy, PolicySettings
from pipeline.roofline import DEVICES, LINKS, DeviceSpec, StageSpec
from pipeline.schedule import make_policy, policy_class
from pipeline.shape import BatchShape
from worker.config import WorkerConfig
from worker.engine.step_costs import step_costs
from worker.folders import replaced
from worker.messages import StepCosts
from worker.models.config import decoder_config, in_memory, read_config
from worker.models.layer_specs import roofline_model
from worker.models.sharding import Shard
from worker.saver import Saver

log = logging.getLogger(__name__)

# Exposed time of a step, in seconds: ENDS_S for its tokens and the next plan, if the scheduler waits for the tokens,
# and BETWEEN_S for each transfer between two stages.
ENDS_S, BETWEEN_S = 1e-3, 2e-4
# The default objective on a GPU is 50 ms: 20 tokens a second, faster than anyone reads. Measured on one H200 with
# Azure's conversations (8B, 24 requests/s): the 99th percentile of TBT is 47 ms instead of 171 ms, and TPOT is 11%
# shorter. In return the median TTFT is 10% longer, and its 99th percentile twice as long
# (bench/results/first_day.json). If a decode iteration is long, as with 70B models or on small GPUs, the objective is
# TBT_SLO_ITERATIONS iterations instead: Sarathi-Serve's strict objective (arXiv 2403.02310, section 5.1).
TBT_SLO_S, TBT_SLO_ITERATIONS = 0.05, 5


class CostStore:
    """The cost models, one for each stage. `models` is empty if costs are not predicted."""

    def __init__(
        self, models: Sequence[CostModel] = (), folder: Path | None = None, objective: Objective | None = None
    ) -> None:
        """Loads what earlier runs learned from `folder`, where `save` also writes. Without a folder nothing is saved.
        `objective`: default for schedule uniform if the configuration sets none."""
        self.models = list(models)
        self._default = objective
        self._folder = folder
        if folder is not None:
            for model in self.models:
                _load(model, self._file(folder, model))
        self._saver = Saver("what steps cost", lambda: self._num_observed, self._write)

    @classmethod
    def load(
        cls,
        model: Path,
        config: WorkerConfig,
        device: torch.device,
        folder: Path | None = None,
        device_name: str | None = None,
    ) -> "CostStore":
        """Returns the cost models of a model, given as a folder or file, on devices like this one. `folder` is as in
        `__init__`. `device_name`: of another device of this type, as PyTorch calls it."""
        whole = in_memory(decoder_config(read_config(model)), device.type, config.dtype, config.dequantize)
        name = device_name or (torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu")
        rows = rows_of(config, device)
        shards = [Shard(whole, stage=stage, stages=config.pp, cut=config.cut) for stage in range(config.pp)]
        called = model.stem if model.is_file() else model.name  # a folder's name may have dots: Llama-3.1-8B
        objective = Objective(TBT_SLO_S, TBT_SLO_ITERATIONS) if device.type == "cuda" else None
        return cls([_guess(called, shard, config, name, rows) for shard in shards], folder, objective)

    def policy(self, config: WorkerConfig, overlap: bool) -> Policy:
        """Returns the policy of the configured schedule. `overlap`: whether tokens pass from the last stage to the
        first from device to device."""
        ends_s = BETWEEN_S if overlap and predicts(config) else ENDS_S
        exposed_s = ends_s + (config.pp - 1) * BETWEEN_S if config.pp > 1 else 0.0
        models = self.models if predicts(config) else ()
        settings = PolicySettings(config.pp, config.token_budget, models, self.objective(config), exposed_s)
        return make_policy(config.schedule_name, settings)

    def objective(self, config: WorkerConfig) -> Objective | None:
        """Returns the objective of the configured schedule, None if the schedule has none."""
        if config.schedule_name != "uniform" or config.tbt_slo == 0:
            return None
        return self._default if config.tbt_slo is None else Objective(config.tbt_slo)

    def observe(self, shape: BatchShape, seconds: Sequence[float]) -> None:
        """Learns from a step. `seconds`: measured time on each stage."""
        if self.models:
            for model, measured in zip(self.models, seconds, strict=True):
                model.observe(shape, measured)

    def seconds(self, shape: BatchShape) -> float:
        """Predicted seconds of a step on the slowest stage; 1 without models."""
        return slowest_s(self.models, shape) if self.models else 1.0

    def step_costs(self, config: WorkerConfig) -> StepCosts:
        """The costs that routers are told."""
        return step_costs(self.models, self.objective(config), config.token_budget)

    @property
    def rows(self) -> PaddedSizes:
        """The sizes to which steps are padded; unpadded without models."""
        return self.models[0].rows if self.models else UNPADDED

    def decode_s(self, shape: BatchShape) -> float:
        """Predicted seconds of a step on the last stage that its decodes cause; 0 without models."""
        if not self.models:
            return 0.0
        cost = self.models[-1].coefficients
        return cost.decode * shape.decodes + cost.decode_context * shape.decode_context

    def save(self) -> None:
        """Writes the models to the folder, if they have learned anything since the last time."""
        self._saver.save()

    def save_if_due(self) -> None:
        """As `Saver.save_if_due`."""
        self._saver.save_if_due()

    def _write(self) -> None:
        if self._folder is not None:
            for model in self.models:
                with replaced(self._file(self._folder, model)) as half:
                    model.save(half)

    @property
    def _num_observed(self) -> int:
        return sum(model.num_observed for model in self.models)

    @staticmethod
    def _file(folder: Path, model: CostModel) -> Path:
        """File of a model, named by all that its costs depend on."""
        identity = model.identity
        parts = (
            identity["model"],
            identity["device"],
            identity["dtype"],
            f"tp{identity['tp']}",
            f"pp{identity['pp']}",
            f"stage{identity['stage']}",
        )
        return folder / (re.sub(r"[^A-Za-z0-9.]+", "_", "-".join(parts)) + ".json")


def predicts(config: WorkerConfig) -> bool:
    """Whether the configured schedule needs predicted costs of steps."""
    return policy_class(config.schedule_name).predicts


def needs_costs(config: WorkerConfig) -> bool:
    """Whether a replica learns what its steps cost: for its schedule, for drafts, or, with several stages, to tell what
    they wait for (`Meter.planned`)."""
    return predicts(config) or config.pp > 1 or config.speculates


def rows_of(config: WorkerConfig, device: torch.device) -> PaddedSizes:
    """Returns the padded sizes of a replica's steps on such a device. `config` limits the sizes."""
    return PaddedSizes.of_graphs(config.max_running, config.token_budget) if device.type == "cuda" else UNPADDED


def _load(model: CostModel, file: Path) -> None:
    """Loads a saved model, if there is one and it can be read."""
    try:
        model.load(file)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        log.warning("%s is ignored, and the costs of steps are learned again: %s", file, error)


def known_device(name: str) -> DeviceSpec | None:
    """The rates of a device by its name; None if they are not known."""
    return next((found for key, found in DEVICES.items() if key in name.lower()), None)


def stage_spec(model: str, shard: Shard, config: WorkerConfig, device: DeviceSpec, rows: PaddedSizes) -> StageSpec:
    """A stage of a model of this name as the roofline sees it."""
    link = LINKS["nvlink"] if config.tp > 1 else None
    sizes = roofline_model(model, shard.whole)
    layers = shard.layers
    return StageSpec(sizes, device, len(layers), shard.config.is_last, config.tp, link, rows, layers.start)


def _guess(name: str, shard: Shard, config: WorkerConfig, device: str, rows: PaddedSizes) -> CostModel:
    stage = stage_spec(name, shard, config, known_device(device) or DEVICES["h200"], rows)
    whole = shard.whole
    identity: dict[str, Any] = {
        "model": name,
        "sizes": [whole.num_layers, whole.hidden_size, whole.intermediate_size, whole.num_heads, whole.num_kv_heads],
        "layers": len(shard.layers),
        "device": device,
        "dtype": config.quantization or config.dtype,
        "tp": config.tp,
        "pp": config.pp,
        "stage": shard.stage,
    }
    if whole.experts is not None:
        identity["experts"] = [whole.experts.count, whole.experts.routing.top_k, whole.experts.intermediate_size]
        if whole.experts.in_mxfp4:
            identity["dtype"] += "+mxfp4"
    if config.enable_expert_parallel:
        identity["enable_expert_parallel"] = True
    return CostModel(stage.seconds, identity, shard.stage, rows)
