"""`shoal pull`: gets a model into the cache."""

import sys

from cluster import models
from shoal.help import Parser

EPILOG = """\
known names, which need no model hub:
{known}

Anything else is a hub's ORG/NAME. The cache is $SHOAL_CACHE, or ~/.cache/shoal. A model that is already there is
checked, and made again if it is damaged. `shoal serve` gets a missing model by itself; this command does it beforehand.

example:
  shoal pull SmolLM2-135M-Instruct
"""


def main(argv: list[str] | None = None) -> int:
    """Gets the model and prints its folder. Returns 0 once it is in the cache, 1 if it is not available."""
    parser = Parser(
        "shoal pull",
        "Get a model, check it, and keep it in the cache.",
        epilog=EPILOG.format(known="\n".join(f"  {name}" for name in models.KNOWN)),
        usage="NAME",
    )
    parser.add_argument("name", metavar="NAME", help="a known name, or a hub's ORG/NAME")
    parser.add_argument("--dequantize", action="store_true", help="convert a GGUF file to float32")
    args = parser.parse_args(argv)
    try:
        folder = models.pull(args.name, dequantize=args.dequantize)
    except models.ModelError as error:
        print(f"shoal pull: {error}", file=sys.stderr)
        return 1
    print(folder)
    return 0
