"""`shoal serve`: reads the configuration from a file and from flags, then starts the server."""

import sys
import textwrap
from pathlib import Path

from cluster import quantity
from cluster.config import Config, ConfigError, load
from cluster.followed_config import FollowedConfig
from shoal import __version__, flags
from shoal.help import Parser

EXAMPLES = """\
examples:
  shoal serve                                          a small model, two replicas, http://127.0.0.1:8000/v1
  shoal serve ./my-model --replicas 4                  a Hugging Face folder; --model is the same
  shoal serve --config shoal.yaml --port 9000          a file, and a flag over it
  shoal serve --config shoal.yaml --follow             another number of replicas in the file takes effect
  shoal serve --host 0.0.0.0 --api-key-file keys.txt   for others, who must show a key

A configuration file uses the same names, with underscores. An unknown key is an error.
  model: ./my-model
  replicas: 4
  kv_tokens: 100000

Several models behind one address, each with replicas and settings of its own, or at another OpenAI-compatible endpoint:
  kv_tokens: 100000               # for each model that does not say otherwise
  models:
    - {name: small, model: ./my-model, replicas: 2, aliases: [default]}
    - {name: large, model: ORG/NAME, replicas: 1, tp: 4}
    - {name: other, upstream: {url: https://example.com/v1, model: ITS_NAME, api_key_env: OTHER_API_KEY}}

The first lines are the settings that are not the defaults, as such a file. Ctrl-C ends the server and everything
that it started; SIGTERM lets answers that are on their way end first, within drain_s.
"""


def parser() -> Parser:
    """The command line of `shoal serve`."""
    made = Parser("shoal serve", "Start a server that speaks OpenAI's HTTP protocol.", EXAMPLES, "[MODEL] [options]")
    made.add_argument("model_given", nargs="?", metavar="MODEL", help="as --model")
    made.add_argument("--config", type=Path, metavar="FILE", help="settings from a YAML file; flags win over it")
    made.add_argument(
        "--follow",
        action="store_true",
        help="read FILE again when it changes, and at SIGHUP: other numbers of replicas and routers take effect, and "
        "touch none that goes on running",
    )
    made.add_argument("--check", action="store_true", help="only say whether the configuration is right")
    made.add_argument(
        "--show-settings",
        action="store_true",
        help="only print every setting and its value; null is chosen at the start",
    )
    flags.add(made, Config, as_typed=quantity.SETTINGS)
    return made


def main(argv: list[str] | None = None) -> int:
    """Serves until Ctrl-C. Returns 0; 1 when the server did not start or did not live; 2 for a wrong configuration."""
    args = parser().parse_args(argv)
    settings = flags.given(args, Config)
    if args.model_given is not None:
        if "model" in settings:
            parser().error(f"two models: {args.model_given} and --model {settings['model']}")
        settings["model"] = args.model_given
    if args.follow and args.config is None:
        parser().error("--follow: there is no file to follow; give one with --config")
    try:
        # Made before the file is read, so that a change while it is read counts.
        followed = FollowedConfig(args.config, settings) if args.follow else None
        config = load(args.config, settings)
    except ConfigError as error:
        print(f"shoal serve: {error}", file=sys.stderr)
        return 2
    if args.check:
        return 0
    if args.show_settings:
        print(config.to_yaml(defaults=True), end="")
        return 0
    print(f"Shoal {__version__}: the settings that are not the defaults (shoal serve --show-settings prints all)")
    print(textwrap.indent(config.to_yaml(), "  "), flush=True)

    from cluster import launch  # Ray takes seconds to import: not before the configuration is right

    return launch.serve(config, followed=followed)
