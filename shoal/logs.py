"""`shoal logs`: what all machines have written about a request."""

import sys

from shoal.help import Parser

DESCRIPTION = "Print the lines about a request in the logs of routers and replicas, of all machines, oldest first."
EPILOG = """\
A request's id is in the header X-Request-Id of its answer, and in the message of an error. A client may give its own.
Without --address, the logs are those of the servers of this machine that `shoal serve` has started with a Ray of their
own; if there is none, those of the Ray cluster that this machine is part of.

examples:
  shoal logs 5f2c9a...
  ray exec cluster/ray/machines.yaml 'shoal logs 5f2c9a...'

exit code: 0 if there is a line, 1 if there is none or the logs cannot be read.
"""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = Parser("shoal logs", DESCRIPTION, EPILOG, "REQUEST_ID [options]")
    parser.add_argument("request_id", metavar="REQUEST_ID", help="the request's id, or any other text")
    parser.add_argument("--address", metavar="HOST:PORT", help="of the Ray cluster, or auto for this machine's")
    args = parser.parse_args(argv)

    from cluster import local, logs  # Ray takes seconds to import

    try:
        lines = logs.find(args.request_id, args.address)
    except local.NoCluster as error:
        print(f"shoal logs: {error}", file=sys.stderr)
        return 1
    for line in lines:
        print(line)
    if not lines:
        print(f"shoal logs: no line about {args.request_id}", file=sys.stderr)
    return 0 if lines else 1
