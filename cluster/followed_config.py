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
            f"{'it' if len(differing) == 1 else 'them'} back, or restart the server (on machines of `ray up`, "
            "run that again)"
        )
    numbers = {deployment.name: deployment.replicas for deployment in new.deployments}

    def scaled(deployment: DeploymentConfig) -> DeploymentConfig:
        return deployment.model_copy(update={"replicas": numbers[deployment.name]})

    return running.changed(scaled).model_copy(update={"routers": new.routers})


def settings(config: Config) -> dict[str, Any]:
    """All settings but the numbers, by name: `models.NAME.KEY` for those of an entry of `models`, `models.NAME` for one
    at another endpoint, and `models` for the names."""
    found = {name: getattr(config, name) for name in Config.model_fields if name not in (*_NUMBERS, "models")}
    found["models"] = [entry.name for entry in config.models]
    for entry in config.models:
        if isinstance(entry, UpstreamEntry):
            found[f"models.{entry.name}"] = entry
        else:
            keys = (key for key in DeploymentConfig.model_fields if key != "replicas")
            found |= {f"models.{entry.name}.{key}": getattr(entry, key) for key in keys}
    return found


def _differing(given: Config, new: Config) -> Iterator[str]:
    """The names of settings in which two configurations differ, besides the numbers."""
    ours, theirs = settings(given), settings(new)
    for name in ours | theirs:
        if ours["models"] != theirs["models"] and name.startswith("models."):
            continue
        if name not in ours or name not in theirs or ours[name] != theirs[name]:
            yield name
