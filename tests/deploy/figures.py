"""The figures of the rehearsals, from what their commands have written to a folder:

python -m tests.deploy.ray_up --stream-s 60 --out FOLDER/ray_up.json
python -m tests.deploy.kubernetes --stream-s 60 --out FOLDER/kubernetes.json
python -m tests.deploy.ray_up --out FOLDER/ray_up_600.json            # streams of ten minutes
python -m tests.deploy.kubernetes --out FOLDER/kubernetes_600.json
python -m tests.start --out FOLDER/start.json
python -m tests.deploy.figures FOLDER --about 'what else ran there'   # deploy.json
"""

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.results import FOLDER, Figure, write

PARTS = ("ray_up", "kubernetes", "ray_up_600", "kubernetes_600", "start")


def figures(parts: Mapping[str, Mapping[str, Any]]) -> list[Figure]:
    """Of what the commands have written, by `PARTS`."""
    rehearsals = [parts[name] for name in PARTS[:4]]
    found = []
    for name in PARTS[:2]:
        found.append(Figure(f"deploy.{name}.failed_requests", parts[name]["failed_requests"], "", False))
        found.append(Figure(f"deploy.{name}.streams", parts[name]["streams"], "", True))
    for name in PARTS[:2]:
        long = parts[f"{name}_600"]["failed_requests"]
        found.append(Figure(f"deploy.{name}.ten_minutes.failed_requests", long, "", False))
    reloaded = sum(part["reloaded_replicas"] for part in rehearsals)
    found.append(Figure("deploy.scale.reloaded_replicas", reloaded, "", False))
    found.append(Figure("deploy.longest_gap_s", max(part["longest_gap_s"] for part in rehearsals), "s", False))
    found.append(Figure("deploy.start.beside_load.vs_alone", round(parts["start"]["ratio"], 2), "ratio", False))
    return found


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the files lie")
    parser.add_argument("--about", default="", help="what else is to be known")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder of the result, deploy.json")
    options = parser.parse_args(arguments)
    if lacking := [name for name in PARTS if not (options.folder / f"{name}.json").exists()]:
        parser.error(f"{options.folder} has no {', '.join(f'{name}.json' for name in lacking)}")
    parts = {name: json.loads((options.folder / f"{name}.json").read_text()) for name in PARTS}
    commands = "python -m tests.deploy.ray_up --stream-s 60; python -m tests.deploy.kubernetes --stream-s 60"
    about = {"about": options.about, **parts}
    print(write("deploy", figures(parts), about, command=f"{commands} (and both with 600)", folder=options.out))
    return 0


if __name__ == "__main__":
    sys.exit(main())
