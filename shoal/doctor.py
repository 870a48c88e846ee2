"""`shoal doctor`: whether this machine can run a server, and what to do if not."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

from shoal.help import Parser

DESCRIPTION = "Check this machine: programs, GPUs and their links, kernels, network, limits, disks, the model."
EPILOG = """\
Each line is a check: ok, warning (it runs, but slowly or not for long), failed (it does not run), or skipped (it does
not apply here). Below it is what to do. Run it on every machine of a cluster.

examples:
  shoal doctor
  shoal doctor --config shoal.yaml --json
  shoal doctor --model meta-llama/Llama-3.1-8B-Instruct --compile
  ray exec cluster/ray/machines.yaml 'shoal doctor'  on the head, from elsewhere

exit code: 0 if no check has failed, 1 if one has, 2 if --config cannot be read.
"""
SIGNS = {"ok": "ok", "warning": "warning", "failed": "FAILED", "skipped": "-"}
# A replica with random weights compiles what a server with this model would; its output is of no use.
COMPILE = """\
import sys, shoal
with shoal.Engine(sys.argv[1], load_format="dummy", **({"tp": int(sys.argv[2])} if int(sys.argv[2]) > 1 else {})) as e:
    e.generate(["a"], max_tokens=2)
"""


def main(argv: list[str] | None = None) -> int:
    """Returns the exit code."""
    parser = Parser("shoal doctor", DESCRIPTION, EPILOG)
    parser.add_argument("--config", type=Path, metavar="FILE", help="that of the server: its ports and its model")
    parser.add_argument("--model", help="a known name, a folder, or a Hugging Face id")
    parser.add_argument("--compile", action="store_true", help="compile the kernels that the model needs, for minutes")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    args = parser.parse_args(argv)

    from cluster.config import ConfigError, load  # Ray takes seconds to import
    from cluster.doctor import ExaminedMachine, WantedHere, examine

    try:
        config = load(args.config)
    except ConfigError as error:
        print(f"shoal doctor: {error}", file=sys.stderr)
        return 2
    given = config.deployments[0].model if args.config is not None and config.deployments else None
    model = args.model or given
    tp = config.deployments[0].tp if config.deployments else 1
    if args.compile and (why := _compiled(model, tp)):
        print(f"shoal doctor: --compile: {why}", file=sys.stderr)
        return 1
    largest = max((each.tp for each in config.deployments), default=1)
    found = examine(ExaminedMachine(), WantedHere(config.host, config.port, config.metrics_port, model, largest))
    failed = any(finding.state == "failed" for finding in found)
    if args.json:
        print(json.dumps({"ok": not failed, "findings": [asdict(finding) for finding in found]}, indent=1))
        return int(failed)
    widest = max(len(finding.check) for finding in found)
    for finding in found:
        print(f"{finding.check:{widest}}  {SIGNS[finding.state]:7}  {finding.says}")
        if finding.remedy:
            print(f"{'':{widest}}  {'':7}  → {finding.remedy}")
    return int(failed)


def _compiled(model: str | None, tp: int) -> str | None:
    """Compiles what a replica of the model needs. Returns why that cannot be, or None."""
    if model is None:
        return "which kernels depends on the model: give --model or --config"
    print(f"compiling kernels for {model}: some minutes", file=sys.stderr)
    done = subprocess.run([sys.executable, "-c", COMPILE, model, str(tp)], stdout=subprocess.DEVNULL, check=False)
    return None if done.returncode == 0 else f"the model does not start (exit code {done.returncode}); see above"
