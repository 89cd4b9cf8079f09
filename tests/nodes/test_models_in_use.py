"""A model is in use from the decision to load it until its last instance is gone."""

from pathlib import Path

import pytest

from mesh.domain.errors import Unavailable
from mesh.domain.ids import DeploymentName, InstanceId
from mesh.domain.messages import InstanceGone, LoadFailed, LoadInstance
from mesh.domain.model import ModelInfo
from mesh_loader.store import ModelStore
from mesh_nodes.models import ModelsInUse
from tests.support.profiles import PROFILE
from tests.support.tiny_model import write_tiny_llama

FIRST, SECOND = InstanceId("i-1"), InstanceId("i-2")


def start(instance_id: InstanceId, model: ModelInfo) -> LoadInstance:
    return LoadInstance(
        instance_id=instance_id,
        deployment=DeploymentName("chat"),
        model=model,
        kv_blocks=8,
        context_tokens_max=256,
        batch_max=4,
        profile=PROFILE,
    )


def test_a_model_is_free_with_the_end_of_its_last_instance(tmp_path: Path) -> None:
    store = ModelStore(tmp_path / "store")
    info = store.import_model(f"file://{write_tiny_llama(tmp_path / 'model')}").info
    in_use = ModelsInUse(store.root)
    in_use.record(0.0, None, [start(FIRST, info), start(SECOND, info)])
    broke = LoadFailed(instance_id=FIRST, error="ModelError", message="", hint="")
    in_use.record(1.0, broke, [])
    with pytest.raises(Unavailable, match="is in use by a node"):
        store.remove(info.model_id)
    in_use.record(2.0, InstanceGone(instance_id=SECOND), [])
    store.remove(info.model_id)
    assert store.models() == []
    # A load that waits for its import holds the model before it is there.
    in_use.record(3.0, None, [start(FIRST, info)])
    store.import_model(f"file://{tmp_path / 'model'}")
    with store.unused(info.model_id) as free:
        assert not free
    in_use.close()
    with store.unused(info.model_id) as free:
        assert free
