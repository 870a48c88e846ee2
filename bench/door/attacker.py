"""The process of an attacker, on a core of its own.

    python -m bench.door.attacker URL KEY MODEL CORE RATE SEED ATTACK...

It says `ready` as it begins, attacks until its standard input ends, and then says as JSON what answers it got.
"""

import asyncio
import json
import os
import sys
from functools import partial
from random import Random

from bench.door.attacks import ATTACKS, NEIGHBOUR, Attacker, attacking, neighbour
from bench.door.connections import HttpFrom

SOURCE = "127.0.0.3"  # another address than the bystander's


async def attack(url: str, key: str, model: str, rate_s: float, seed: int, names: list[str]) -> None:
    loop = asyncio.get_running_loop()
    attacker = Attacker(HttpFrom(url, key, SOURCE), key, model, Random(seed))
    chosen = [partial(neighbour, rate_s=rate_s) if name == NEIGHBOUR else ATTACKS[name] for name in names]
    async with attacking(attacker, chosen):
        print("ready", flush=True)
        await loop.run_in_executor(None, sys.stdin.read)
    print(json.dumps(attacker.statuses), flush=True)


def main(argv: list[str]) -> None:
    url, key, model, core, rate_s, seed, *names = argv
    os.sched_setaffinity(0, {int(core)})
    asyncio.run(attack(url, key, model, float(rate_s), int(seed), names))


if __name__ == "__main__":
    main(sys.argv[1:])
