"""LoRA adapters by name over a server's endpoints: those of the configuration, and those that clients load."""

import asyncio
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM

import shoal
from shoal.engine import Engine, RequestError
from tests.worker.adapters import merged, write_adapter

pytestmark = pytest.mark.slow  # an engine is a process of its own

PROMPT = list(range(40, 75))
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}


@pytest.fixture(scope="module")
def folders(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("adapters")
    return {name: write_adapter(folder / name, tiny_model, seed) for seed, name in enumerate(("one", "two"))}


@pytest.fixture(scope="module")
def wanted(folders: dict[str, Path], tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list]:
    into = tmp_path_factory.mktemp("merged")
    models = {"base": tiny_model} | {name: merged(into / name, tiny_model, path) for name, path in folders.items()}
    found = {}
    for name, path in models.items():
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
        prompt = torch.tensor([PROMPT])
        settings = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        output = model.generate(prompt, attention_mask=torch.ones_like(prompt), **settings)
        found[name] = output[0, len(PROMPT) :].tolist()
    assert len({tuple(tokens) for tokens in found.values()}) == 3
    return found


@pytest.fixture(scope="module")
def llm(tiny_model: Path, folders: dict[str, Path]) -> Iterator[Engine]:
    settings = {"device": "cpu", "dtype": "float32", "kv_tokens": 4096, "cpu_threads": 1, "max_loras": 1}
    adapters = {"lora_modules": {"one": str(folders["one"])}, "allow_runtime_lora_updating": True}
    with shoal.Engine(tiny_model, served_model_name="base", **settings, **adapters) as engine:
        yield engine


def send(llm: Engine, method: str, path: str, body: dict | None = None) -> httpx.Response:
    async def sent() -> httpx.Response:
        async with httpx.AsyncClient(transport=llm.transport, base_url=llm.base_url, timeout=60) as client:
            return await client.request(method, path, json=body)

    return asyncio.run(sent())


def test_an_adapter_is_a_model_by_its_name(llm: Engine, wanted: dict, folders: dict[str, Path]) -> None:
    body = {"model": "one", "prompt": PROMPT, "return_token_ids": True, **GREEDY}
    answer = send(llm, "POST", "/completions", body)
    assert answer.status_code == 200
    assert answer.json()["model"] == "one"
    assert answer.json()["choices"][0]["token_ids"] == wanted["one"]
    for name in ("base", "one", "base"):  # each has a cache of its own
        assert llm.generate(PROMPT, model=name, **GREEDY).token_ids == wanted[name]
    cards = {card["id"]: card for card in (send(llm, "GET", "/models")).json()["data"]}
    assert cards["one"]["parent"] == "base"
    assert cards["one"]["root"] == str(folders["one"])
    page = (send(llm, "GET", "http://engine/metrics")).text
    assert 'shoal_max_loras{model="base",replica="0"} 1.0' in page
    assert 'shoal_lora_adapters{adapter="one",model="base",replica="0",state="resident"} 1.0' in page


def test_adapters_come_and_go_while_it_serves(llm: Engine, wanted: dict, folders: dict[str, Path]) -> None:
    two = {"lora_name": "two", "lora_path": str(folders["two"])}
    with pytest.raises(RequestError) as missing:
        llm.generate(PROMPT, model="two", **GREEDY)
    assert missing.value.code == "model_not_found"
    assert (send(llm, "POST", "/load_lora_adapter", two)).status_code == 200
    assert llm.generate(PROMPT, model="two", **GREEDY).token_ids == wanted["two"]
    again = send(llm, "POST", "/load_lora_adapter", two)
    assert again.status_code == 400
    assert "taken" in again.json()["error"]["message"]
    in_place = {**two, "lora_path": str(folders["one"]), "load_inplace": True}
    assert (send(llm, "POST", "/load_lora_adapter", in_place)).status_code == 200
    assert llm.generate(PROMPT, model="two", **GREEDY).token_ids == wanted["one"]
    assert (send(llm, "POST", "/unload_lora_adapter", {"lora_name": "two"})).status_code == 200
    with pytest.raises(RequestError) as missing:
        llm.generate(PROMPT, model="two", **GREEDY)
    assert missing.value.code == "model_not_found"
    assert (send(llm, "POST", "/unload_lora_adapter", {"lora_name": "two"})).status_code == 404


def test_a_folder_that_is_no_adapter_is_refused(llm: Engine, tiny_model: Path, wanted: dict) -> None:
    bad = send(llm, "POST", "/load_lora_adapter", {"lora_name": "bad", "lora_path": str(tiny_model)})
    assert bad.status_code == 400
    assert "adapter_config.json" in bad.json()["error"]["message"]
    assert llm.generate(PROMPT, **GREEDY).token_ids == wanted["base"]
