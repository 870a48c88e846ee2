"""`shoal stop`: ends a server, also one whose `shoal serve` was killed."""

import sys

from shoal.help import Parser

DESCRIPTION = "End a server: answers that are on their way first, within its drain_s. Then nothing of it is left."
EPILOG = """\
Without --address, it is the server of this machine that `shoal serve` has started with a Ray of its own; if there is
none, the one on the Ray cluster that this machine is part of. A `shoal serve` that looks after the server ends too.

examples:
  shoal stop
  shoal stop --address auto                        on the head of a cluster
  ray exec cluster/ray/machines.yaml 'shoal stop'  from elsewhere

exit code: 0 if a server was ended, 1 if there was none or it cannot be ended.
"""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = Parser("shoal stop", DESCRIPTION, EPILOG)
    parser.add_argument("--address", metavar="HOST:PORT", help="of the Ray cluster, or auto for this machine's")
    parser.add_argument("--pid", type=int, help="the process of `shoal serve`, where several run on this machine")
    args = parser.parse_args(argv)

    from cluster import local, stop  # Ray takes seconds to import

    try:
        print(stop.stop(args.address, args.pid))
    except (stop.NotStopped, local.NoCluster) as error:
        print(f"shoal stop: {error}", file=sys.stderr)
        return 1
    return 0
