"""The benchmark of published schemas: its corpus stands by itself, its instances are what they are called, and its
figures tell a grammar that is too wide from one that is right."""

import json
import random
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from bench.schemas import gather
from bench.schemas.command import Tally
from bench.schemas.instances import Instances, instances, judge
from bench.schemas.plain import GrammarVerdict

SCHEMAS: list[Any] = [
    {"type": "object", "properties": {"a": {"type": "integer", "minimum": 3}, "b": {"enum": ["x"]}}, "required": ["a"]},
    {"type": "array", "items": {"$ref": "#/$defs/d"}, "minItems": 1, "$defs": {"d": {"pattern": "^[a-c]+-\\d{2}$"}}},
    {"$schema": "http://json-schema.org/draft-04/schema#", "type": "number", "minimum": 1, "exclusiveMinimum": True},
    {"if": {"required": ["k"]}, "then": {"required": ["l"]}, "type": "object", "properties": {"k": {}, "l": {}}},
]


@pytest.mark.parametrize("schema", SCHEMAS, ids=json.dumps)
def test_instances_are_valid_and_invalid(schema: Any) -> None:
    made = instances(schema, "seed")
    assert made.valid and made.invalid
    assert made == instances(schema, "seed")
    assert all(judge(schema).is_valid(json.loads(text)) for text in made.valid)
    assert not any(judge(schema).is_valid(json.loads(text)) for text in made.invalid)


def test_the_corpus_is_of_schemas_that_stand_by_themselves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    described = {"components": {"schemas": {"A": {"items": {"$ref": "#/components/schemas/B"}}, "B": {"type": "null"}}}}
    files = {
        "good.json": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"},
        "again.json": {"$schema": "http://json-schema.org/draft-07/schema#", "type": "object"},
        "other.json": {"type": "object", "properties": {"a": {"$ref": "b.json"}}},
        "wrong.json": {"type": "object", "properties": {"a": {"type": 3}}},
        "data.json": {"name": "x"},
        "api.json": described,
    }
    wheel = tmp_path / "archives" / "one==1" / "one-1.whl"
    wheel.parent.mkdir(parents=True)
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, value in files.items():
            archive.writestr(name, json.dumps(value))
    packed = tmp_path / "archives" / "@two+x@2" / "two.tgz"
    packed.parent.mkdir()
    with tarfile.open(packed, "w:gz") as archive:
        for name, text in {"a.json": b'{"type": "array", "items": {}}', "b.json": b"{"}.items():
            member = tarfile.TarInfo(name)
            member.size = len(text)
            archive.addfile(member, BytesIO(text))
    sources = tmp_path / "sources.toml"
    sources.write_text('[pip]\n"one==1" = 9\n[npm]\n"@two/x@2" = 9\n')
    monkeypatch.setattr(gather, "SOURCES", sources)
    found = {each.name: each.schema for each in gather.corpus(tmp_path)}
    assert found.pop("one==1:api.json:A") == {"items": {"$ref": "#/$defs/B"}, "$defs": {"B": {"type": "null"}}}
    same = [name for name in found if name in ("one==1:good.json", "one==1:again.json")]
    assert len(same) == 1
    assert found.keys() - same == {"one==1:api.json:B", "@two/x@2:a.json"}
    sources.unlink()
    assert len(gather.corpus(tmp_path)) == 4  # as it was gathered


def test_what_is_wrongly_accepted_and_refused_is_counted() -> None:
    tally = Tally()
    made = Instances(("1", "2"), ("true", "null"))
    tally.add("a", made, GrammarVerdict(None, frozenset(("1", "null"))))
    tally.add("b", made, GrammarVerdict("not at #/x is not supported", frozenset()))
    tally.add("c", made, GrammarVerdict("not at #/y is not supported", frozenset()))
    assert {figure.name: figure.value for figure in tally.figures("schemas")} == {
        "schemas.accepted": pytest.approx(1 / 3),
        "schemas.invalid_accepted": 1,
        "schemas.valid_refused": 0.5,
    }
    assert tally.invalid_accepted == [("a", "null")] and tally.valid_refused == [("a", "2")]
    assert tally.reasons == [("not _ is not supported", 2)]


def test_instances_do_not_depend_on_the_random_state() -> None:
    random.seed(1)
    first = instances(SCHEMAS[0], "x")
    random.seed(2)
    assert instances(SCHEMAS[0], "x") == first
