"""`shoal serve`: the configuration from a file and from flags, then the server."""

import argparse
import sys
from pathlib import Path

from cluster.config import Config, ConfigError, load
from shoal import flags

EXAMPLES = """\
examples:
  shoal serve                                          a small model, two replicas, http://127.0.0.1:8000/v1
  shoal serve --model ./my-model --replicas 4          a Hugging Face folder
  shoal serve --config shoal.yaml --port 9000          a file, and a flag over it
  shoal serve --host 0.0.0.0 --api-key-file keys.txt   for others, who must show a key

A configuration file has the same names, with underscores, and is checked as strictly: an unknown key is an error.
  model: ./my-model
  replicas: 4
  kv_tokens: 100000

What is in force is printed at the start, as such a file. Ctrl-C ends the server and everything that it started.
"""


def parser() -> argparse.ArgumentParser:
    """The command line of `shoal serve`."""
    made = argparse.ArgumentParser(
        prog="shoal serve",
        usage="shoal serve [--config FILE] [--SETTING VALUE ...]",
        description="Start a server that speaks OpenAI's HTTP protocol.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    made.add_argument("--config", type=Path, metavar="FILE", help="settings from a YAML file; flags win over it")
    flags.add(made, Config)
    return made


def main(argv: list[str] | None = None) -> int:
    """Serve until Ctrl-C. Returns 0; 1 when the server did not start or did not live; 2 for a wrong configuration."""
    line = parser()
    args, unknown = line.parse_known_args(argv)
    if unknown:
        line.error(f"no setting {unknown[0]!r}{flags.did_you_mean(unknown[0], Config)}")
    try:
        config = load(args.config, flags.given(args, Config))
    except ConfigError as error:
        print(f"shoal serve: {error}", file=sys.stderr)
        return 2
    print(config.to_yaml(), flush=True)

    from cluster import launch  # Ray takes seconds to import: not before the configuration is right

    return launch.serve(config)
