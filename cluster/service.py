"""A router's `Service`, made from the configuration: the same under Ray Serve and in a program's own process."""

import logging
import uuid
from collections.abc import Callable
from pathlib import Path

from cluster.config import Config
from cluster.models import context_length, model_config, model_name
from router.defaults import SamplingDefaults
from router.fleet import Fleet
from router.metrics import Metrics
from router.pooling import Pooling
from router.replicas import Replicas
from router.service import Placer, Service
from router.tokenizer import Tokenizer

log = logging.getLogger(__name__)

UNKNOWN_CONTEXT = 1 << 20  # tokens: for a model whose files name no limit, until a replica has said its own


def open_service(config: Config, folder: Path, placer: Callable[[Fleet, Replicas], Placer]) -> Service:
    """Makes the service for the model in `folder`, which needs no weights. `placer` makes its placer. Raises ValueError
    for a broken `generation_config.json`, or for files about embeddings that are not supported."""
    fleet = Fleet(config.placement)
    metrics = Metrics(router=uuid.uuid4().hex[:8])
    replicas = Replicas(fleet, metrics)
    defaults = SamplingDefaults.read(folder, config.sampling_defaults)
    for problem in defaults.problems:
        log.warning("%s", problem)
    tokenizer = Tokenizer.from_folder(folder)
    return Service(
        tokenizer,
        replicas,
        placer(fleet, replicas),
        fleet,
        metrics,
        model=config.served_model_name or model_name(config.model),
        context_length=config.context_length or context_length(folder) or UNKNOWN_CONTEXT,
        defaults=defaults,
        output_format=tokenizer.output_format(config.tool_call_parser, config.reasoning_parser, model_config(folder)),
        pooling=Pooling.read(folder, config, config.served_model_name or model_name(config.model)),
    )
