"""LoRA adapters through a real server: by name, by number, as models, coming and going."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import tritonclient.grpc as grpcclient
from minisgl_client import Client, InvalidArgument, Unsupported
from openai import OpenAI

from minisgl_backend import LLM
from minisgl_backend.config import DEMO_MODEL
from minisgl_backend.models.catalog import load_spec
from minisgl_backend.server.process import TritonServer
from minisgl_kit.adapters import write_adapter
from minisgl_kit.repositories import repository_with
from tests.gateway.conftest import Gateway, gateway_of
from tests.server.client import PATIENCE_S
from tests.server.conftest import running
from tests.waiting import wait_until

pytestmark = pytest.mark.server

PROMPT = "What is the capital of France?"
ADMIN = {"Authorization": "Bearer admin-key"}
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": 12}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The adapters ``doll``, ``sheep``, ``zeros`` (which changes nothing), and a broken one."""
    folder, spec = tmp_path_factory.mktemp("adapters"), load_spec(Path(DEMO_MODEL))
    for seed, name in enumerate(("doll", "sheep"), start=1):
        write_adapter(folder / name, spec, rank=4 * seed, seed=seed)
    write_adapter(folder / "zeros", spec, rank=4, strength=0)
    write_adapter(folder / "broken", spec, rank=8)
    shutil.copy(folder / "doll" / "adapter_model.safetensors", folder / "broken")
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, str]:
    """What each adapter answers to ``PROMPT``, in process; the base model is ``base``."""
    named = ",".join(f"{name}={folder / name}" for name in ("doll", "sheep"))
    with LLM(enable_lora=True, lora_modules=named, device="cpu") as llm:
        params = [{**GREEDY, "lora_name": name} for name in ("doll", "sheep")] + [GREEDY]
        outputs = llm.generate([PROMPT] * 3, params)
        assert llm.adapters() == ["doll", "sheep"]
    texts = dict(zip(("doll", "sheep", "base"), (each.text for each in outputs), strict=True))
    assert len(set(texts.values())) == 3
    return texts


@pytest.fixture(scope="module")
def adapted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    """A server with ``multi_lora.json`` in the same place as the vLLM backend."""
    repository = repository_with({}, tmp_path_factory.mktemp("adapted"))
    listed = {name: str(folder / name) for name in ("doll", "sheep")}
    (repository / "llm_engine" / "1" / "multi_lora.json").write_text(json.dumps(listed))
    options = {
        "enable_lora": "true",
        "max_loras": "2",
        "lora_updates": "true",
        "lora_task_ids": "1=doll,2=sheep",
    }
    with running(repository, options=options) as started:
        yield started


@pytest.fixture(scope="module")
def client(adapted: TritonServer) -> Iterator[Client]:
    with Client(f"127.0.0.1:{adapted.grpc_port}") as started:
        yield started


@pytest.fixture(scope="module")
def gated(adapted: TritonServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gated")
    (folder / "admin").write_text("admin-key\n")
    options = ("--admin-key-file", str(folder / "admin"))
    with gateway_of(f"127.0.0.1:{adapted.grpc_port}", folder / "log", *options) as started:
        yield started


def generated(server: TritonServer, body: dict[str, Any]) -> dict[str, Any]:
    url = f"http://127.0.0.1:{server.http_port}/v2/models/minisgl/generate"
    answer: dict[str, Any] = httpx.post(url, json=body, timeout=PATIENCE_S).json()
    return answer


def test_requests_of_vllm_backends_ci(adapted: TritonServer, expected: dict[str, str]) -> None:
    """Its multi-LoRA test: sampling parameters as a tensor, over a gRPC stream."""
    for name, wanted in (
        ("doll", expected["doll"]),
        ("sheep", expected["sheep"]),
        ("unavailable_lora_name", None),
    ):
        sampling = json.dumps({**GREEDY, "temperature": "0", "max_tokens": "12", "lora_name": name})
        inputs = []
        for key, value in (("text_input", PROMPT), ("sampling_parameters", sampling)):
            inputs.append(grpcclient.InferInput(key, [1], "BYTES"))
            inputs[-1].set_data_from_numpy(np.array([value.encode()], dtype=np.object_))
        done = threading.Event()
        answers: list[Any] = []

        def receive(result: Any, error: Any, answers: Any = answers, done: Any = done) -> None:
            answers.append(error if error is not None else result)
            done.set()

        with grpcclient.InferenceServerClient(f"127.0.0.1:{adapted.grpc_port}") as asked:
            asked.start_stream(receive)
            asked.async_stream_infer("minisgl", inputs, outputs=[])
            assert done.wait(PATIENCE_S)
            asked.stop_stream()
        if wanted is None:
            known = "we currently support ['doll', 'sheep']"
            assert f"LoRA unavailable_lora_name is not supported, {known}" in str(answers[0])
        else:
            assert answers[0].as_numpy("text_output")[0].decode() == wanted


def test_adapters_by_name_and_by_number(
    adapted: TritonServer, client: Client, expected: dict[str, str]
) -> None:
    for number, name in ((1, "doll"), (2, "sheep")):
        assert client.generate(PROMPT, lora_name=name, **GREEDY).text == expected[name]
        assert client.generate(PROMPT, lora_task_id=number, **GREEDY).text == expected[name]
        body = {"text_input": PROMPT, "lora_name": name, **GREEDY}
        assert generated(adapted, body)["text_output"] == expected[name]
    assert client.generate(PROMPT, **GREEDY).text == expected["base"]
    with pytest.raises(InvalidArgument, match="lora_task_id 3 is none of lora_task_ids"):
        client.generate(PROMPT, lora_task_id=3)
    with pytest.raises(InvalidArgument, match="one of lora_name and lora_task_id"):
        client.generate(PROMPT, lora_name="doll", lora_task_id=1)


def test_without_the_option_adapters_are_refused(server: TritonServer) -> None:
    with Client(f"127.0.0.1:{server.grpc_port}") as base:
        with pytest.raises(Unsupported, match=r"LoRA feature is not enabled\."):
            base.generate(PROMPT, lora_name="doll")
        with pytest.raises(Unsupported, match="lora_updates"):
            base.load_adapter("doll", "/doll")
        assert base.adapters() == ()


@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_adapters_come_and_go_beside_streams(
    protocol: str, adapted: TritonServer, folder: Path, expected: dict[str, str]
) -> None:
    address = (
        f"127.0.0.1:{adapted.grpc_port}"
        if protocol == "grpc"
        else f"http://127.0.0.1:{adapted.http_port}"
    )
    with Client(address) as client:
        stream = client.stream("Count to 5.", max_tokens=200, ignore_eos=True, lora_name="doll")
        texts = [next(iter(stream)).text]
        client.load_adapter("zeros", str(folder / "zeros"))
        assert [each.name for each in client.adapters()] == ["doll", "sheep", "zeros"]
        assert client.generate(PROMPT, lora_name="zeros", **GREEDY).text == expected["base"]
        with pytest.raises(InvalidArgument, match=r"layers\.0\.mlp\.down_proj\.lora_A\.weight"):
            client.load_adapter("broken", str(folder / "broken"))
        with pytest.raises(InvalidArgument, match="loaded already"):
            client.load_adapter("doll", str(folder / "sheep"))
        # the name now stands for another adapter, which must not get prefixes of the old one
        client.unload_adapter("zeros")
        client.load_adapter("zeros", str(folder / "sheep"))
        assert client.generate(PROMPT, lora_name="zeros", **GREEDY).text == expected["sheep"]
        left = client.unload_adapter("zeros")
        assert [each.name for each in left] == ["doll", "sheep"]
        with pytest.raises(InvalidArgument, match="LoRA zeros is not supported"):
            client.generate(PROMPT, lora_name="zeros")
        texts += [delta.text for delta in stream]
        assert stream.result.num_output_tokens == 200


def test_metrics_name_the_adapters_that_run(adapted: TritonServer, client: Client) -> None:
    def labels() -> str:
        """The labels of the newest set."""
        url = f"http://127.0.0.1:{adapted.metrics_port}/metrics"
        lines = httpx.get(url, timeout=PATIENCE_S).text.splitlines()
        found = [line for line in lines if line.startswith("vllm:lora_requests_info{")]
        return max(found, key=lambda line: float(line.rpartition(" ")[2]))

    with client.stream("Count.", max_tokens=8000, ignore_eos=True, lora_name="sheep") as stream:
        next(iter(stream))
        wait_until(lambda: 'running_lora_adapters="sheep"' in labels())
    wait_until(lambda: 'running_lora_adapters=""' in labels())
    assert 'max_lora="2"' in labels()


def test_adapters_are_models_of_openais_api(gated: Gateway, expected: dict[str, str]) -> None:
    client = OpenAI(base_url=f"{gated.url}/v1", api_key="none")
    listed = {model.id: model.to_dict().get("parent") for model in client.models.list()}
    assert listed == {"minisgl": None, "doll": "minisgl", "sheep": "minisgl"}
    for name, wanted in (*expected.items(),):
        model = "minisgl" if name == "base" else name
        answer = client.completions.create(model=model, prompt=PROMPT, **GREEDY)
        assert (answer.model, answer.choices[0].text) == (model, wanted)
        assert client.models.retrieve(model).id == model
    chats = {
        model: client.chat.completions.create(
            model=model, messages=[{"role": "user", "content": PROMPT}], **GREEDY
        )
        .choices[0]
        .message.content
        for model in listed
    }
    assert chats["minisgl"] == "Paris" and len(set(chats.values())) == 3
    embedded = [client.embeddings.create(model=model, input=PROMPT).data[0] for model in listed]
    assert len({tuple(each.embedding) for each in embedded}) == 3
    refused = gated.post("/v1/completions", {"model": "cow", "prompt": PROMPT})
    assert refused.status_code == 404 and refused.json()["error"]["code"] == "model_not_found"


def test_operators_load_and_unload_by_vllms_routes(
    gated: Gateway, folder: Path, expected: dict[str, str]
) -> None:
    body = {"lora_name": "lamb", "lora_path": str(folder / "sheep")}
    assert gated.post("/v1/load_lora_adapter", body).status_code == 401
    loaded = gated.post("/v1/load_lora_adapter", body, headers=ADMIN)
    assert loaded.text == "Success: LoRA adapter 'lamb' added successfully."
    asked = {"model": "lamb", "prompt": PROMPT, **GREEDY}
    answer = gated.post("/v1/completions", asked).json()
    assert answer["choices"][0]["text"] == expected["sheep"]
    broken = {"lora_name": "broken", "lora_path": str(folder / "broken")}
    refused = gated.post("/v1/load_lora_adapter", broken, headers=ADMIN)
    assert refused.status_code == 400
    assert "layers.0.mlp.down_proj.lora_A.weight" in refused.json()["error"]["message"]
    unloaded = gated.post("/v1/unload_lora_adapter", {"lora_name": "lamb"}, headers=ADMIN)
    assert unloaded.text == "Success: LoRA adapter 'lamb' removed successfully."
    assert gated.post("/v1/completions", asked).status_code == 404


def test_a_callers_own_key_is_known_but_loads_nothing(
    adapted: TritonServer, folder: Path, tmp_path: Path
) -> None:
    for name in ("admin", "caller"):
        (tmp_path / name).write_text(f"{name}-key\n")
    options = ("--admin-key-file", str(tmp_path / "admin"), "--api-key-file")
    triton = f"127.0.0.1:{adapted.grpc_port}"
    body = {"lora_name": "lamb", "lora_path": str(folder / "sheep")}
    with gateway_of(triton, tmp_path / "log", *options, str(tmp_path / "caller")) as gateway:
        for key, status, code in (
            ("caller-key", 403, "admin_key_needed"),
            ("other-key", 401, "invalid_api_key"),
        ):
            headers = {"Authorization": f"Bearer {key}"}
            refused = gateway.post("/v1/load_lora_adapter", body, headers=headers)
            assert (refused.status_code, refused.json()["error"]["code"]) == (status, code)


def test_what_clients_of_vllm_may_add(gated: Gateway, folder: Path) -> None:
    """So does the sidecar of Gateway API Inference Extension, which loads adapters by ConfigMap."""
    body = {"lora_name": "lamb", "lora_path": str(folder / "sheep")}
    added = {"load_inplace": False, "base_model_name": "minisgl"}
    loaded = gated.post("/v1/load_lora_adapter", {**body, **added}, headers=ADMIN)
    assert loaded.text == "Success: LoRA adapter 'lamb' added successfully."
    again = gated.post("/v1/load_lora_adapter", {**body, "load_inplace": True}, headers=ADMIN)
    assert again.status_code == 400
    assert "load_inplace is not supported, got true" in again.json()["error"]["message"]
    number = {"lora_name": "lamb", "lora_int_id": 3}
    assert gated.post("/v1/unload_lora_adapter", number, headers=ADMIN).status_code == 200
    gone = gated.post("/v1/unload_lora_adapter", number, headers=ADMIN)
    assert gone.status_code == 404
    assert gone.json()["error"]["message"] == "there is no adapter 'lamb'"
    assert gone.json()["error"]["param"] == "lora_name"


def test_an_adapter_that_has_just_gone_is_no_model(
    gated: Gateway, client: Client, folder: Path
) -> None:
    """Another Triton client has unloaded it, so the gateway's list is out of date."""
    body = {"lora_name": "lamb", "lora_path": str(folder / "sheep")}
    gated.post("/v1/load_lora_adapter", body, headers=ADMIN)
    client.unload_adapter("lamb")
    for route, asked in (
        ("completions", {"prompt": PROMPT}),
        ("chat/completions", {"messages": [{"role": "user", "content": PROMPT}]}),
        ("embeddings", {"input": PROMPT}),
        ("rerank", {"query": PROMPT, "documents": ["Paris"]}),
    ):
        refused = gated.post(f"/v1/{route}", {"model": "lamb", **asked})
        assert refused.status_code == 404
        assert refused.json()["error"]["code"] == "model_not_found"


def test_no_adapter_takes_the_base_models_place(
    gated: Gateway, client: Client, folder: Path, expected: dict[str, str]
) -> None:
    body = {"lora_name": "minisgl", "lora_path": str(folder / "sheep")}
    refused = gated.post("/v1/load_lora_adapter", body, headers=ADMIN)
    assert refused.status_code == 400
    assert refused.json()["error"]["param"] == "lora_name"
    client.load_adapter("minisgl", str(folder / "sheep"))  # any Triton client may
    try:
        other = {"lora_name": "lamb", "lora_path": str(folder / "sheep")}
        gated.post("/v1/load_lora_adapter", other, headers=ADMIN)  # its answer lists all
        gated.post("/v1/unload_lora_adapter", {"lora_name": "lamb"}, headers=ADMIN)
        models = [model["id"] for model in gated.get("/v1/models").json()["data"]]
        assert models.count("minisgl") == 1
        asked = {"model": "minisgl", "prompt": PROMPT, **GREEDY}
        answer = gated.post("/v1/completions", asked).json()
        assert answer["choices"][0]["text"] == expected["base"]
    finally:
        client.unload_adapter("minisgl")


def test_an_engine_that_is_loaded_again_has_the_adapters_of_the_one_before(
    adapted: TritonServer, client: Client, folder: Path, expected: dict[str, str]
) -> None:
    """Except one that can no longer be read."""
    shutil.copytree(folder / "sheep", folder / "passing")
    client.load_adapter("lamb", str(folder / "sheep"))
    client.load_adapter("passing", str(folder / "passing"))
    client.unload_adapter("doll")
    shutil.rmtree(folder / "passing")
    adapted.reload("llm_engine", timeout_s=120, check=lambda: None)
    assert [each.name for each in client.adapters()] == ["sheep", "lamb"]
    assert client.generate(PROMPT, lora_name="lamb", **GREEDY).text == expected["sheep"]
    client.unload_adapter("lamb")
    client.load_adapter("doll", str(folder / "doll"))
    assert adapted.adapters() == {name: str(folder / name) for name in ("sheep", "doll")}


def test_a_gateway_without_admin_keys_changes_nothing(gateway: Gateway) -> None:
    body = {"lora_name": "lamb", "lora_path": "/sheep"}
    refused = gateway.post("/v1/load_lora_adapter", body, headers=ADMIN)
    assert refused.status_code == 403
    assert refused.json()["error"]["code"] == "admin_key_needed"
