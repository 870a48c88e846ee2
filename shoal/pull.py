"""`shoal pull`: a model into the cache."""

import argparse
import sys

from cluster import models

EPILOG = """\
known names, which need no model hub:
{known}

Anything else is a hub's ORG/NAME. The cache is $SHOAL_CACHE, or ~/.cache/shoal. What is there already is checked, and
made anew when it is damaged. `shoal serve` pulls by itself; this command is for doing it before.

example:
  shoal pull SmolLM2-135M-Instruct
"""


def main(argv: list[str] | None = None) -> int:
    """Returns 0 once the model is in the cache (its folder is printed), 1 when it is not to be had."""
    parser = argparse.ArgumentParser(
        prog="shoal pull",
        description="Get a model, check it, and keep it in the cache.",
        epilog=EPILOG.format(known="\n".join(f"  {name}" for name in models.KNOWN)),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("name", metavar="NAME", help="a known name, or a hub's ORG/NAME")
    args = parser.parse_args(argv)
    try:
        folder = models.pull(args.name)
    except models.ModelError as error:
        print(f"shoal pull: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0
