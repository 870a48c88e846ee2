"""What steps cost the stages of a replica: guessed from the sizes of the model, then learned, and kept on disk.

The guess only has to be right about what costs more than what: it is scaled to the first steps that are measured. So a
device that is not known by name stands in for another of its kind.
"""

import logging
import os
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from pipeline.cost import CostModel
from pipeline.policy import Policy, Settings
from pipeline.roofline import DEVICES, LINKS, Device, Model, Stage
from pipeline.rows import UNPADDED, Rows
from pipeline.schedule import POLICIES, make_policy
from pipeline.shape import BatchShape
from worker.config import WorkerConfig
from worker.models.config import DecoderConfig, decoder_config, read_config
from worker.models.shard import Shard

log = logging.getLogger(__name__)

SAVE_EVERY_S = 60.0  # at most, and only while nothing runs
# What a step spends outside the stages: its tokens' way and its plan's, where the scheduler waits for the tokens, and a
# way between two stages.
ENDS_S, BETWEEN_S = 1e-3, 2e-4


class Costs:
    """One model for each stage, or none where nobody asks."""

    def __init__(self, models: Sequence[CostModel] = (), folder: Path | None = None) -> None:
        """What was learned earlier is taken from `folder`, and kept there; without one, it is forgotten."""
        self.models = list(models)
        self._folder = folder
        self._saved_s = time.monotonic()
        self._num_saved = 0
        if folder is not None:
            for model in self.models:
                _load(model, self._file(folder, model))
            self._num_saved = self._num_observed

    @classmethod
    def of(cls, model: Path, config: WorkerConfig, device: torch.device, folder: Path | None = None) -> "Costs":
        """Those of the model in a folder or file, on devices like this one."""
        whole = decoder_config(read_config(model))
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        rows = rows_of(config, device)
        shards = [Shard(whole, stage=stage, stages=config.pp, cut=config.cut) for stage in range(config.pp)]
        called = model.stem if model.is_file() else model.name  # a folder's has dots of its own: Llama-3.1-8B
        return cls([_guess(called, shard, config, name, rows) for shard in shards], folder)

    def policy(self, config: WorkerConfig, overlap: bool) -> Policy:
        """The schedule that is configured. `overlap`: whether tokens pass from the last stage to the first on the
        devices."""
        ends_s = BETWEEN_S if overlap and predicts(config) else ENDS_S
        exposed_s = ends_s + (config.pp - 1) * BETWEEN_S if config.pp > 1 else 0.0
        models = self.models if predicts(config) else ()
        settings = Settings(config.pp, config.token_budget, models, config.tbt_slo, exposed_s)
        return make_policy(config.schedule_name, settings)

    def observe(self, shape: BatchShape, seconds: Sequence[float]) -> None:
        """A step took the stages so long."""
        if self.models:
            for model, measured in zip(self.models, seconds, strict=True):
                model.observe(shape, measured)

    def decode_s(self, shape: BatchShape) -> float:
        """The part of a step's time on a stage that its decodes cause; 0 without models."""
        if not self.models:
            return 0.0
        cost = self.models[-1].coefficients
        return cost.decode * shape.decodes + cost.decode_context * shape.decode_context

    def save(self) -> None:
        """Keeps what was learned since the last time."""
        if self._folder is None or self._num_observed == self._num_saved:
            return
        self._saved_s, self._num_saved = time.monotonic(), self._num_observed
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for model in self.models:
                file = self._file(self._folder, model)
                half = file.with_suffix(f".{os.getpid()}")
                model.save(half)
                half.replace(file)
        except OSError as error:
            log.warning("what steps cost is not kept: %s", error)
            self._folder = None

    def save_if_due(self) -> None:
        """To be called now and then, while there is nothing else to do."""
        if time.monotonic() - self._saved_s > SAVE_EVERY_S:
            self.save()

    @property
    def _num_observed(self) -> int:
        return sum(model.num_observed for model in self.models)

    @staticmethod
    def _file(folder: Path, model: CostModel) -> Path:
        """By all that it depends on."""
        of = model.identity
        parts = (of["model"], of["device"], of["dtype"], f"tp{of['tp']}", f"pp{of['pp']}", f"stage{of['stage']}")
        return folder / (re.sub(r"[^A-Za-z0-9.]+", "_", "-".join(parts)) + ".json")


def predicts(config: WorkerConfig) -> bool:
    """Whether the configured schedule goes by what steps are going to cost."""
    return POLICIES[config.schedule_name].predicts


def rows_of(config: WorkerConfig, device: torch.device) -> Rows:
    """Those that a replica's steps compute on such devices. `config` says how large they may be."""
    return Rows.of_graphs(config.max_running, config.token_budget) if device.type == "cuda" else UNPADDED


def _load(model: CostModel, file: Path) -> None:
    """What was learned, if it is there and can be read."""
    try:
        model.load(file)
    except FileNotFoundError:
        return
    except (OSError, ValueError) as error:
        log.warning("%s is ignored, and what steps cost is learned anew: %s", file, error)


def _guess(name: str, shard: Shard, config: WorkerConfig, device: str, rows: Rows) -> CostModel:
    known: Device = next((found for key, found in DEVICES.items() if key in device.lower()), DEVICES["h200"])
    link = LINKS["nvlink"] if config.tp > 1 else None
    stage = Stage(_sizes(name, shard.whole), known, len(shard.layers), shard.config.is_last, config.tp, link, rows)
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
    return CostModel(stage.seconds, identity, shard.stage, rows)


def _sizes(name: str, config: DecoderConfig) -> Model:
    return Model(
        name,
        config.num_layers,
        config.hidden_size,
        config.intermediate_size,
        config.num_heads,
        config.num_kv_heads,
        config.head_dim,
        config.vocab_size,
    )
