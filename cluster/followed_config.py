"""A configuration file that is read again while the server runs.

Other numbers of replicas and routers take effect, since nothing that runs knows them (`unscaled`). All other settings
are in the processes that run, so a change of one is refused by name.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cluster.config import Config, ConfigError, DeploymentConfig, UpstreamEntry, load

_NUMBERS = ("replicas", "routers")


class FollowedConfig:
    """A file with the settings that were given over it, from the last time that it was read."""

    def __init__(self, path: Path, overrides: Mapping[str, Any]) -> None:
        """`overrides`: as `load` has them."""
        self._path = path
        self._overrides = overrides
        self._text = self._read()

    def changed(self, again: bool = False) -> Config | None:
        """The configuration if the file has another content than at the last call; with `again` in any case. Raises
        ConfigError, once for each content, if it is wrong or cannot be read."""
        text = self._read()
        if text == self._text and not again:
            return None
        self._text = text
        return load(self._path, self._overrides)

    def _read(self) -> bytes | None:
        try:
            return self._path.read_bytes()
        except OSError:
            return None


def unscaled(config: Config) -> Config:
    """The configuration without the numbers of replicas and routers, which may change while processes that hold it
    run."""
    return config.changed(unscaled_deployment).model_copy(
        update={name: Config.model_fields[name].default for name in _NUMBERS}
    )


def unscaled_deployment(deployment: DeploymentConfig) -> DeploymentConfig:
    """The same for one model."""
    return deployment.model_copy(update={"replicas": DeploymentConfig.model_fields["replicas"].default})


def rescaled(running: Config, given: Config, new: Config) -> Config:
    """The configuration `running`, made of `given`, with the numbers of replicas and routers of `new`. Raises
    ConfigError with the names of all other settings in which `new` differs from `given`."""
    if differing := list(_differing(given, new)):
        raise ConfigError(
            f"{', '.join(differing)}: cannot change while the server runs. Nothing was changed: put "
            f"{'it' if len(differing) == 1 else 'them'} back, or restart the server"
        )
    numbers = {deployment.name: deployment.replicas for deployment in new.deployments}

    def scaled(deployment: DeploymentConfig) -> DeploymentConfig:
        return deployment.model_copy(update={"replicas": numbers[deployment.name]})

    return running.changed(scaled).model_copy(update={"routers": new.routers})


def _differing(given: Config, new: Config) -> Iterator[str]:
    """The names of settings in which two configurations differ, besides the numbers."""
    for name in Config.model_fields:
        if name not in (*_NUMBERS, "models") and getattr(given, name) != getattr(new, name):
            yield name
    ours = {entry.name: entry for entry in given.models}
    theirs = {entry.name: entry for entry in new.models}
    if list(ours) != list(theirs):
        yield "models"
        return
    for name, entry in ours.items():
        if isinstance(entry, UpstreamEntry) or isinstance(theirs[name], UpstreamEntry):
            if entry != theirs[name]:
                yield f"models.{name}"
            continue
        for key in DeploymentConfig.model_fields:
            if key != "replicas" and getattr(entry, key) != getattr(theirs[name], key):
                yield f"models.{name}.{key}"
