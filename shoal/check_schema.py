"""Verdict on a JSON schema for structured output: whether it is enforced, by which engine, and what that costs.

    shoal check-schema schema.json
    cat schema.json | shoal check-schema -

enforced by xgrammar: 0.021 s of CPU time, 0.4 MiB
refused: contains at #/properties/tags is not supported
with "strict": false, enforced by llguidance but for this: 0.034 s of CPU time, 2.1 MiB
  contains at #/properties/tags

A schema that is enforced is enforced as a whole: no finished answer violates it. Otherwise the first keyword that no
grammar can enforce is named, with its place, and a request with this schema would be refused with the same words,
unless "strict" is false. Then all keywords that would not be enforced are named. The exit code is 1.
"""

import sys
from pathlib import Path

from shoal.help import Parser

_MAX_SHOWN = 20


def parser() -> Parser:
    p = Parser("shoal check-schema", __doc__)
    p.add_argument("file", help="the schema in JSON; - reads standard input")
    p.add_argument(
        "--model", default="SmolLM2-135M-Instruct", help="whose tokens count (default SmolLM2-135M-Instruct)"
    )
    p.add_argument("--timeout", type=float, default=10.0, help="CPU seconds that compiling may take (default 10)")
    return p


def main(argv: list[str] | None = None) -> int:
    """Checks the schema and prints the verdict. Returns the exit code."""
    args = parser().parse_args(argv)
    from cluster.models import ModelError
    from cluster.schema_check import check

    try:
        text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text()
        verdict = check(text, args.model, args.timeout)
    except (OSError, UnicodeDecodeError, ModelError, RuntimeError) as error:
        print(f"shoal check-schema: {error}", file=sys.stderr)
        return 2
    if verdict.refusal is not None:
        print(f"refused: {verdict.refusal}")
    if verdict.engine:
        cost = f"{verdict.cpu_s:.3f} s of CPU time, {verdict.size_bytes / 2**20:.1f} MiB"
        if verdict.refusal is None:
            print(f"enforced by {verdict.engine}: {cost}")
        else:
            print(f'with "strict": false, enforced by {verdict.engine} but for this: {cost}')
            print("\n".join(f"  {each}" for each in verdict.not_enforced))
        if verdict.narrowed:
            print("not all valid values can be written (docs/SCHEMAS.md says which), by:")
            print("\n".join(f"  {each}" for each in verdict.narrowed[:_MAX_SHOWN]))
            if (more := len(verdict.narrowed) - _MAX_SHOWN) > 0:
                print(f"  and {more} more")
    return 0 if verdict.refusal is None else 1


if __name__ == "__main__":
    sys.exit(main())
