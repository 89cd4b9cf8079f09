"""What Ray's autoscaler gets machines from here: each is a Ray of its own host name and home."""

import json
import subprocess
from pathlib import Path
from typing import Any

import psutil
from ray.autoscaler._private.fake_multi_node.node_provider import (
    FAKE_HEAD_NODE_ID,
    FAKE_HEAD_NODE_TYPE,
    FakeMultiNodeProvider,
)
from ray.autoscaler.tags import (
    NODE_KIND_WORKER,
    STATUS_UP_TO_DATE,
    TAG_RAY_NODE_KIND,
    TAG_RAY_NODE_NAME,
    TAG_RAY_NODE_STATUS,
    TAG_RAY_USER_NODE_TYPE,
)

from tests.support.ray_machines import RayMachines, started

HEAD = {
    "RAY_FAKE_CLUSTER": "1",
    "RAY_OVERRIDE_NODE_ID_FOR_TESTING": FAKE_HEAD_NODE_ID,
    "AUTOSCALER_UPDATE_INTERVAL_S": "1",
}
"""The environment of the head."""

_NOT_USED = (
    "cluster_synced_files",
    "initialization_commands",
    "setup_commands",
    "head_setup_commands",
    "worker_setup_commands",
    "head_start_ray_commands",
    "worker_start_ray_commands",
)


def configuration(folder: Path, most: int) -> dict[str, Any]:
    """The autoscaler's: up to `most` machines of one device, which go when they are idle."""
    return {
        "cluster_name": "machines",
        "max_workers": most,
        "idle_timeout_minutes": 0.1,
        "provider": {
            "type": "external",
            "module": "tests.ray.provider.Machines",
            "use_node_id_as_ip": True,
            "disable_node_updaters": True,
            "disable_launch_config_check": True,
            "launch_multiple": True,
            "head_node_id": FAKE_HEAD_NODE_ID,
            "folder": str(folder),
        },
        "available_node_types": {
            FAKE_HEAD_NODE_TYPE: {"resources": {"CPU": 0}, "max_workers": 0, "node_config": {}},
            "machine": {
                "resources": {"CPU": 1, "mesh_cpu": 1},
                "min_workers": 0,
                "max_workers": most,
                "node_config": {},
            },
        },
        "head_node_type": FAKE_HEAD_NODE_TYPE,
        "auth": {},
        "file_mounts": {},
        "file_mounts_sync_continuously": False,
        **{key: [] for key in _NOT_USED},
    }


class Machines(FakeMultiNodeProvider):  # type: ignore[misc]
    def _create_node_with_resources_and_labels(
        self, node_config: Any, tags: Any, count: int, resources: Any, labels: Any
    ) -> None:
        with self.lock:
            name = self._next_hex_node_id()
            given = {key: value for key, value in resources.items() if key.startswith("mesh_")}
            machine = started(
                Path(self.provider_config["folder"]),
                f"m{int(name[-5:])}",
                *("--address", RayMachines.address, "--num-cpus", "1", "--block"),
                *("--resources", json.dumps(given)),
                RAY_OVERRIDE_NODE_ID_FOR_TESTING=name,
                RAY_CLOUD_INSTANCE_ID=name,
                RAY_NODE_TYPE_NAME=tags[TAG_RAY_USER_NODE_TYPE],
            )
            own = {
                TAG_RAY_NODE_KIND: NODE_KIND_WORKER,
                TAG_RAY_NODE_NAME: name,
                TAG_RAY_NODE_STATUS: STATUS_UP_TO_DATE,
            }
            self._nodes[name] = {"tags": {**own, **tags}, "node": machine}

    def _terminate_node(self, node: Any) -> None:
        machine: subprocess.Popen[str] = node["node"]
        for process in psutil.Process(machine.pid).children(recursive=True):
            process.kill()
        machine.kill()
        machine.wait()
