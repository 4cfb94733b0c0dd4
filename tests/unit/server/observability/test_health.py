"""What the server tells about itself."""

import dataclasses

from ds4py.config import ServerConfig
from ds4py.contracts import Health, StageStatus
from ds4py.layer_range import LayerRange
from ds4py.server.observability.health import health_object, model_objects, served_name
from tests.support.fakes import FakeBackend

STAGES = (
    StageStatus(name="coordinator", layers=None),
    StageStatus(
        name="10.0.0.2:8001",
        layers=LayerRange(0, 1),
        weight_bytes=1000,
        prefill_tokens=512,
        prefill_usec=1_000_000,
        decode_tokens=10,
        decode_usec=500_000,
        decode_hop_usec=2500,
    ),
    StageStatus(name="10.0.0.3:8002", layers=LayerRange(2, 3, has_output=True)),
)


def test_every_stage_is_listed_with_its_rates():
    health = Health(ready=True, missing="", stages=STAGES)
    body = health_object(FakeBackend(), ServerConfig(), health, (1, 2))
    coordinator, first, last = body["stages"]
    assert (coordinator["layers"], coordinator["has_output"]) == (None, False)
    assert first == {
        "name": "10.0.0.2:8001",
        "layers": "0-1",
        "has_output": False,
        "weight_bytes": 1000,
        "prefill_tokens": 512,
        "prefill_per_second": 512.0,
        "decode_tokens": 10,
        "decode_per_second": 20.0,
        "decode_hop_usec": 250.0,
    }
    assert (last["layers"], last["has_output"], last["decode_hop_usec"]) == ("2-3", True, 0.0)
    assert body["requests"] == {"running": 1, "waiting": 2}


def test_an_incomplete_route_is_named():
    health = Health(ready=False, missing="layers 2-3 and the output head")
    body = health_object(FakeBackend(), ServerConfig(), health, (0, 0))
    assert body["status"] == "route incomplete"
    assert body["missing"] == "layers 2-3 and the output head"


def test_a_model_entry_has_the_fields_that_clients_read():
    (entry,) = model_objects(FakeBackend(n_ctx=256), ServerConfig(max_tokens=100))
    assert entry["id"] == entry["name"] == "Fake Model"
    assert entry["object"] == "model"
    assert entry["context_length"] == entry["top_provider"]["context_length"] == 256
    assert entry["top_provider"]["max_completion_tokens"] == 100


def test_output_can_not_exceed_the_context():
    (entry,) = model_objects(FakeBackend(n_ctx=256), ServerConfig())
    assert entry["top_provider"]["max_completion_tokens"] == 256


def test_an_alias_renames_the_model():
    (entry,) = model_objects(FakeBackend(), ServerConfig(model_alias="mine"))
    assert (entry["id"], entry["name"]) == ("mine", "Fake Model")


def test_both_models_of_ds4_are_listed_whichever_is_served():
    fake = FakeBackend()
    fake._card = dataclasses.replace(fake.card, model_id=1, name="DeepSeek V4 Pro")
    entries = model_objects(fake, ServerConfig())
    assert [entry["id"] for entry in entries] == ["deepseek-v4-flash", "deepseek-v4-pro"]
    assert {entry["name"] for entry in entries} == {"DeepSeek V4 Pro"}
    assert served_name(fake.card, ServerConfig()) == "deepseek-v4-pro"
    (entry,) = model_objects(fake, ServerConfig(model_alias="mine"))
    assert entry["id"] == "mine"


def test_a_model_without_a_name_has_its_architecture_as_id():
    fake = FakeBackend()
    fake._card = dataclasses.replace(fake.card, name="")
    (entry,) = model_objects(fake, ServerConfig())
    assert entry["id"] == entry["name"] == "fake"
