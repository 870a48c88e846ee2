"""A JSON object whose form is fixed: the program writes the names, the model only the values, each of its type."""

import json
import sys

import shoal


@shoal.function
def city(s, name):
    s += f"The facts about the city of {name} as a JSON object:\n"
    with s.var_scope("json"):
        s += '{"name": ' + shoal.gen("name", regex='"[A-Z][a-z]{1,15}"', max_tokens=20)
        s += ', "population": ' + shoal.gen_int("population", max_tokens=10)
        s += ', "on_the_sea": ' + shoal.gen("on_the_sea", regex="(true|false)", max_tokens=4)
        s += ', "climate": "' + shoal.gen("climate", choices=["mild", "hot", "cold"]) + '"}'


def main(name="Lisbon"):
    return json.loads(city.run(name, temperature=0)["json"])


if __name__ == "__main__":
    shoal.set_default_backend(shoal.ShoalServer(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:8000"))
    print(main())
