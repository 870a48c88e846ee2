"""A router's `Models`, made from the configuration: the same under Ray Serve and in a program's own process."""

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from pydantic import SecretStr

from cluster.config import Config, DeploymentConfig
from cluster.models import context_length, model_config, sampling_defaults
from router.fleet.demand import Sleep
from router.fleet.fleet import Fleet
from router.http.upstream import Upstream
from router.metrics.metrics import Metrics
from router.models import Models
from router.prepare.pooling import Pooling
from router.replicas.replicas import Replicas
from router.service import Placer, Service
from router.text.tokenizer import Tokenizer
from router.text.turn_ends import unended_turn
from worker.models.end_tokens import eos_token_ids

log = logging.getLogger(__name__)

UNKNOWN_CONTEXT_TOKENS = 1 << 20  # tokens: for a model whose files name no limit, until a replica has said its own


def open_service(
    config: DeploymentConfig,
    folder: Path,
    metrics: Metrics,
    placer: Callable[[Fleet, Replicas], Placer],
    secret: bytes,
    peer_host: str | None = None,
    drain_s: float | None = None,
) -> Service:
    """Makes the service for the model in `folder`, which needs no weights. `placer` makes its placer. `secret`,
    `peer_host`, `drain_s`: as `Replicas` has them. Raises ValueError for a broken `generation_config.json`, or for
    files about embeddings that are not supported."""
    fleet = Fleet(config.placement)
    model_metrics = metrics.model(config.name)
    replicas = Replicas(fleet, model_metrics, secret, peer_host, drain_s)
    defaults = sampling_defaults(config.model, folder, config.sampling_defaults)
    for problem in defaults.problems:
        log.warning("%s", problem)
    tokenizer = Tokenizer.from_folder(folder)
    output_format = tokenizer.output_format(config.tool_call_parser, config.reasoning_parser, model_config(folder))
    if (written := unended_turn(tokenizer, output_format, eos_token_ids(folder, None))) is not None:
        log.warning(
            "%s: the chat template ends turns with %r, which is not an end token, so answers may go on behind it: add "
            "it to eos_token_id in generation_config.json",
            config.name,
            written,
        )
    return Service(
        tokenizer,
        replicas,
        placer(fleet, replicas),
        fleet,
        model_metrics,
        model=config.name,
        context_length=config.context_length or context_length(folder) or UNKNOWN_CONTEXT_TOKENS,
        defaults=defaults,
        output_format=output_format,
        config=config,
        pooling=Pooling.read(folder, config, config.name),
        sleep=Sleep(config.start_timeout_s) if config.may_sleep else None,
        adapters=config.lora_modules,
    )


def open_models(
    config: Config, services: Mapping[str, Service], metrics: Metrics, keys: Mapping[str, SecretStr] | None = None
) -> Models:
    """Makes the table of all models of a configuration, of which `services` are those with replicas, by name. `keys`:
    of `cluster.config.upstream_keys`."""
    upstreams = [
        Upstream(
            entry.name,
            entry.upstream,
            metrics,
            entry.aliases,
            None if keys is None or entry.name not in keys else keys[entry.name].get_secret_value(),
        )
        for entry in config.upstreams
    ]
    answers = {upstream.model: upstream for upstream in upstreams} | dict(services)
    return Models([answers[entry.name] for entry in config.entries], metrics, config)
