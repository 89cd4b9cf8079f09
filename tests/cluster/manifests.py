"""What is wrong with manifests of Kubernetes: by its schemas, within themselves, and for this mesh.

`faults` takes the documents of a whole overlay. What a schema cannot know is looked at here: names
that nothing bears, ports that nobody listens on, routes and options that mesh does not have, pods
that may do more than they need, and scalers that ask for what the controller does not say.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from mesh import __version__
from mesh.controller.main import read_node_ranges
from mesh.domain.errors import InvalidInput
from mesh.domain.limits import CellLimits
from mesh.wire.access import ROUTES
from mesh_nodes.agent import STOP_S_MAX
from tests.cli.running import mesh

Document = Mapping[str, Any]
CUSTOM = re.compile(r"keda\.sh/|\.example/")
"""The API groups of custom kinds, for which Kubernetes has no schema."""
SCALER = {"url", "valueLocation", "targetValue", "authMode"}
FEWER_S_LEAST = 2 * CellLimits().node_pause_s
LEFT_S = 5.0
"""By then Services lead no new connection to a pod that is to end."""
EDGE_PATHS = ("/edge",)
"""What the edge answers itself."""


class Pod:
    """A template of pods, wherever it stands."""

    def __init__(self, owner: Document, template: Document) -> None:
        self.owner = owner
        self.space: str = owner["metadata"].get("namespace", "")
        self.name = f"{owner['kind']} {owner['metadata']['name']}"
        self.labels: Mapping[str, str] = template.get("metadata", {}).get("labels", {})
        self.spec: Mapping[str, Any] = template["spec"]

    @property
    def containers(self) -> list[Mapping[str, Any]]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]

    @property
    def ports(self) -> dict[str, int]:
        found = [port for one in self.spec["containers"] for port in one.get("ports", ())]
        return {port["name"]: port["containerPort"] for port in found}

    def is_in(self, selector: Mapping[str, Any]) -> bool:
        """Whether a selector of namespaces means its own."""
        rules = selector.get("matchExpressions", ())
        rules = [*rules, *({"key": k, "values": [v]} for k, v in _labels(selector).items())]
        names = [rule["values"] for rule in rules if rule["key"] == "kubernetes.io/metadata.name"]
        return bool(names) and all(self.space in values for values in names)

    def suits(self, selector: Mapping[str, Any]) -> bool:
        """Whether the labels of a selector are its own."""
        wanted = selector.get("matchLabels", selector)
        return all(self.labels.get(key) == value for key, value in wanted.items())

    @property
    def sleeps_s(self) -> float:
        """How long its first container goes on before it is told to stop."""
        hook = self.spec["containers"][0].get("lifecycle", {}).get("preStop", {})
        return float(hook.get("sleep", {}).get("seconds", 0))

    def options(self) -> dict[str, list[str]]:
        """The options of `mesh` that its first container is started with."""
        found: dict[str, list[str]] = {}
        for argument in self.spec["containers"][0].get("args", ()):
            name, equals, value = argument.partition("=")
            found.setdefault(name, []).append(value if equals else "")
        return found


def _labels(selector: Mapping[str, Any]) -> Mapping[str, str]:
    labels: Mapping[str, str] = selector.get("matchLabels", {})
    return labels


def faults(documents: Sequence[Document]) -> list[str]:
    """In words; none where there is nothing wrong."""
    if broken := [fault for document in documents for fault in _by_schema(document)]:
        return broken  # the rest goes by what a schema says
    pods = [pod for document in documents for pod in pods_of(document)]
    found = [fault for pod in pods for fault in (*_locked(pod), *_mounted(pod), *_started(pod))]
    found += [fault for pod in pods for fault in (*_probed(pod), *_before_cells(pod, documents))]
    for space in sorted({_space(document) for document in documents}):
        within = [document for document in documents if _space(document) == space]
        own = [pod for pod in pods if pod.space == space]
        found += [*_selected(within, own, pods), *_reached(within, own), *_scaled(within, own)]
        found += _named(within, own)
    return found


def _space(document: Document) -> str:
    """The namespace that it is in, or that it is."""
    head = document["metadata"]
    return str(head["name"] if document["kind"] == "Namespace" else head.get("namespace"))


def pods_of(document: Document) -> Iterator[Pod]:
    """Those of its own kind, or of any within a custom one."""

    def within(value: Any) -> Iterator[Document]:
        if isinstance(value, Mapping):
            if isinstance(value.get("spec"), Mapping) and "containers" in value["spec"]:
                yield value
            for inner in value.values():
                yield from within(inner)
        elif isinstance(value, list):
            for inner in value:
                yield from within(inner)

    for template in within(document):
        yield Pod(document, template)


def _by_schema(document: Document) -> Iterator[str]:
    import kubernetes_validate  # which only this environment has

    what = f"{document.get('kind')} {document.get('metadata', {}).get('name')}"
    checked: list[Document] = [document]
    if CUSTOM.search(str(document.get("apiVersion"))):
        head = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "within"}}
        checked = [{**head, "spec": pod.spec} for pod in pods_of(document)]
    for one in checked:
        try:
            kubernetes_validate.validate(one, kubernetes_validate.latest_version(), strict=True)
        except kubernetes_validate.SchemaNotFoundError:
            yield f"{what}: Kubernetes has no {one.get('kind')} of {one.get('apiVersion')}"
        except kubernetes_validate.ValidationError as error:
            yield f"{what}: {error.message} at {list(error.path)}"


def _locked(pod: Pod) -> Iterator[str]:
    """It may do no more than it needs."""
    own = pod.spec.get("securityContext", {})
    if pod.spec.get("automountServiceAccountToken", True):
        yield f"{pod.name} has a token of Kubernetes, which nothing of mesh uses"
    for one in pod.containers:
        given = {**own, **one.get("securityContext", {})}
        wanted = {
            "runAsNonRoot": True,
            "readOnlyRootFilesystem": True,
            "allowPrivilegeEscalation": False,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        for name, value in wanted.items():
            if given.get(name) != value:
                yield f"{pod.name}: {name} of {one['name']} is {given.get(name)}"
        if not given.get("runAsUser"):
            yield f"{pod.name}: {one['name']} runs as root, or as anybody"
        if given.get("capabilities", {}).get("drop") != ["ALL"]:
            yield f"{pod.name}: {one['name']} keeps capabilities"


def _mounted(pod: Pod) -> Iterator[str]:
    """Each volume is there and used, and what mesh writes to is one that may be written."""
    claims = pod.owner.get("spec", {}).get("volumeClaimTemplates", ())
    there = {one["name"] for one in pod.spec.get("volumes", ())}
    there |= {claim["metadata"]["name"] for claim in claims}
    used = {m["name"] for one in pod.containers for m in one.get("volumeMounts", ())}
    if there != used:
        yield f"{pod.name}: volumes {sorted(there ^ used)} are missing, or of no use"
    for one in pod.containers:
        writable = [m["mountPath"] for m in one.get("volumeMounts", ()) if not m.get("readOnly")]
        for argument in one.get("args", ()):
            name, _, value = argument.partition("=")
            if name == "--home" and value not in writable:
                yield f"{pod.name}: {value} cannot be written"


def _started(pod: Pod) -> Iterator[str]:
    """What `mesh` is started with is what it takes, and it has the time that its end takes."""
    main = pod.spec["containers"][0]
    stops_s = pod.spec.get("terminationGracePeriodSeconds", 30)
    options = pod.options()
    grace_s = float(options.get("--grace-s", ["0"])[0])
    if stops_s < grace_s + pod.sleeps_s + STOP_S_MAX + 5:
        yield f"{pod.name}: {stops_s} s are too short for {grace_s + pod.sleeps_s:g} s and its end"
    if "mesh" not in main["image"].split(":")[0].split("/")[-1]:
        return
    if main["image"].rpartition(":")[2] != __version__:
        yield f"{pod.name}: {main['image']} is not of version {__version__}"
    values = {"$(MESH_STATE)": "postgresql://mesh@db/mesh"}
    given = list(main.get("args", ()))
    for name, value in values.items():
        given = [argument.replace(name, value) for argument in given]
    ran = mesh(*(g for g in given if not g.startswith("--tls")), "--help")
    if ran.code:
        yield f"{pod.name}: {ran.err}"
    variables = {variable["name"] for variable in main.get("env", ())}
    for name in re.findall(r"\$\((\w+)\)", " ".join(main.get("args", ()))):
        if name not in variables:
            yield f"{pod.name}: there is no {name}"
    for name, listens in (("--listen", "grpc"), ("--http", "http")):
        for at in options.get(name, ()):
            if pod.ports.get(listens) != int(at.rpartition(":")[2]):
                yield f"{pod.name} listens at {at}; its port {listens} is {pod.ports.get(listens)}"


def _probed(pod: Pod) -> Iterator[str]:
    secured = "--tls" in pod.options() or "envoy" in pod.spec["containers"][0]["image"]
    for one in pod.spec["containers"]:
        probes = [value for name, value in one.items() if name.endswith("Probe")]
        if one.get("ports") and not any(name == "readinessProbe" for name in one):
            yield f"{pod.name}: nobody looks whether {one['name']} is ready"
        for probe in probes:
            asked = probe.get("httpGet")
            if asked is None:
                yield f"{pod.name}: {probe} cannot look through TLS, or asks for no route"
                continue
            open_ = [path for path, roles in ROUTES.items() if roles is None] + [*EDGE_PATHS]
            if asked["path"] not in open_:
                yield f"{pod.name}: {asked['path']} is no route that needs no key"
            if asked["port"] not in pod.ports:
                yield f"{pod.name}: there is no port {asked['port']}"
            if (asked.get("scheme") == "HTTPS") is not secured:
                yield f"{pod.name}: {asked['path']} is asked by {asked.get('scheme', 'HTTP')}"


def _before_cells(pod: Pod, documents: Sequence[Document]) -> Iterator[str]:
    """A front knows all controllers of its cells, and shows them a key."""
    variables = {variable["name"] for variable in pod.spec["containers"][0].get("env", ())}
    if "--cells" in pod.options() and "MESH_KEY" not in variables:
        yield f"{pod.name} shows its cells no key"
    sets = {
        (_space(d), d["metadata"]["name"]): d["spec"]
        for d in documents
        if d["kind"] == "StatefulSet"
    }
    for cell in pod.options().get("--cells", ()):
        known, replicas = set(), 0
        for address in cell.partition("=")[2].split(","):
            found = re.fullmatch(r"(.+)-(\d+)\.([^.:]+)\.([^.:]+):7070", address)
            name, number, service, space = found.groups() if found else ("", "0", "", "")
            spec = sets.get((space, name), {})
            known.add(int(number))
            replicas = spec.get("replicas", 1)
            if spec.get("serviceName") != service:
                yield f"{pod.name}: {address} is no controller"
        if known != set(range(replicas)):
            yield f"{pod.name} does not know all controllers of {cell}, or one that is not there"


def _selected(
    documents: Sequence[Document], pods: Sequence[Pod], everywhere: Sequence[Pod]
) -> Iterator[str]:
    """Selectors and rules of scheduling mean pods that there are."""
    for document in documents:
        spec, what = document.get("spec", {}), f"{document['kind']} {document['metadata']['name']}"
        match document["kind"]:
            case "StatefulSet" | "Deployment":
                (pod,) = pods_of(document)
                if not pod.suits(spec["selector"]):
                    yield f"{what} does not select its own pods"
                for term in _terms(pod.spec.get("affinity", {})):
                    if not pod.suits(term["labelSelector"]):
                        yield f"{what} keeps away from others than its own"
            case "HorizontalPodAutoscaler":
                target = spec["scaleTargetRef"]
                owners = [(pod.owner["kind"], pod.owner["metadata"]["name"]) for pod in pods]
                if (target["kind"], target["name"]) not in owners:
                    yield f"{what} scales nothing"
            case "PodDisruptionBudget":
                guarded = [pod for pod in pods if pod.suits(spec["selector"])]
                if len(guarded) != 1:
                    yield f"{what} guards {[pod.name for pod in guarded]}"
            case "NetworkPolicy" if spec["podSelector"]:
                meant = [pod for pod in pods if pod.suits(spec["podSelector"])]
                if not meant:
                    yield f"{what} means no pod"
                for rule in spec.get("ingress", ()):
                    for port in rule.get("ports", ()):
                        if any(port["port"] not in pod.ports for pod in meant):
                            yield f"{what}: no port {port['port']}"
                for rule in (*spec.get("ingress", ()), *spec.get("egress", ())):
                    for peer in (*rule.get("from", ()), *rule.get("to", ())):
                        there: Sequence[Pod] = pods
                        if "namespaceSelector" in peer:
                            there = [p for p in everywhere if p.is_in(peer["namespaceSelector"])]
                        met = [p for p in there if p.suits(peer.get("podSelector", {"": ""}))]
                        if "podSelector" in peer and not met:
                            yield f"{what} lets in or out to nobody"
                        for port in rule.get("ports", ()) if "to" in rule else ():
                            if any(port["port"] not in pod.ports.values() for pod in met):
                                yield f"{what}: nobody listens on {port['port']}"
    if not any(d["kind"] == "NetworkPolicy" and not d["spec"]["podSelector"] for d in documents):
        yield "everybody may reach every pod"


def _terms(affinity: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for rules in affinity.get("podAntiAffinity", {}).values():
        yield from (rule.get("podAffinityTerm", rule) for rule in rules)


def _reached(documents: Sequence[Document], pods: Sequence[Pod]) -> Iterator[str]:
    """Services lead to pods, and what nodes and the edge dial is there."""
    services = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "Service"}
    sets = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "StatefulSet"}
    for name, spec in services.items():
        behind = [pod for pod in pods if pod.suits(spec["selector"])]
        if not behind:
            yield f"Service {name} leads nowhere"
        for port in spec.get("ports", ()):
            if any(pod.ports.get(port["targetPort"]) != port["port"] for pod in behind):
                yield f"Service {name}: port {port['port']} is no {port['targetPort']} of its pods"
        for pod in behind:
            if pod.owner["kind"] == "Deployment" and pod.sleeps_s < LEFT_S:
                yield f"{pod.name} ends while Service {name} leads callers to it"
    for name, spec in sets.items():
        if spec["serviceName"] not in services:
            yield f"StatefulSet {name}: there is no Service {spec['serviceName']}"
    for pod in pods:
        for variable in pod.spec["containers"][0].get("env", ()):
            if variable["name"] != "MESH_CONTROLLER":
                continue
            dialled = set()
            for address in variable["value"].split(","):
                found = re.fullmatch(r"(.+)-(\d+)\.([^.:]+):(\d+)", address)
                assert found is not None, address
                to, number, service, port = found.groups()
                dialled.add(number)
                if to not in sets or int(number) >= sets[to].get("replicas", 1):
                    yield f"{pod.name} dials {address}, which is no pod"
                if sets.get(to, {}).get("serviceName") != service:
                    yield f"{pod.name}: {to} is not found by {service}"
                if int(port) not in [p["port"] for p in services.get(service, {}).get("ports", ())]:
                    yield f"{pod.name}: nothing listens at {address}"
            if to in sets and len(dialled) != sets[to].get("replicas", 1):
                yield f"{pod.name} does not dial all of {to}"
    for document in documents:
        for text in document.get("data", {}).values() if document["kind"] == "ConfigMap" else ():
            yield from _edge(yaml.safe_load(text), services)


def _edge(config: Mapping[str, Any], services: Mapping[str, Any]) -> Iterator[str]:
    for cluster in config["static_resources"]["clusters"]:
        for group in cluster["load_assignment"]["endpoints"]:
            for endpoint in group["lb_endpoints"]:
                at = endpoint["endpoint"]["address"]["socket_address"]
                ports = services.get(at["address"], {}).get("ports", ())
                if at["port_value"] not in [port["port"] for port in ports]:
                    yield f"the edge: nothing listens at {at}"
        for check in cluster["health_checks"]:
            path = check.get("http_health_check", {}).get("path", "/readyz")
            if path not in ROUTES or ROUTES[path] is not None:
                yield f"the edge asks for {path}"


def _scaled(documents: Sequence[Document], pods: Sequence[Pod]) -> Iterator[str]:
    """Scalers ask for what controllers say, and keep to what these may want."""
    names = {(d["kind"], d["metadata"]["name"]) for d in documents}
    services = {d["metadata"]["name"]: d["spec"] for d in documents if d["kind"] == "Service"}
    given = [text for pod in pods for text in pod.options().get("--nodes-wanted", ())]
    try:
        ranges = {str(one.device): (one.least, one.most) for one in read_node_ranges(given)}
    except InvalidInput as error:
        yield error.message
        return
    scaled = [d for d in documents if d["kind"] == "ScaledObject"]
    if len(scaled) != len(ranges):
        yield f"{sorted(ranges)} may be wanted; {len(scaled)} scalers start them"
    for document in scaled:
        spec, what = document["spec"], f"ScaledObject {document['metadata']['name']}"
        target = spec["scaleTargetRef"]
        if (target["kind"], target["name"]) not in names:
            yield f"{what}: there is no {target['kind']} {target['name']}"
        for trigger in spec["triggers"]:
            said = trigger["metadata"]
            if trigger["type"] != "metrics-api" or set(said) != SCALER:
                yield f"{what} has other words than KEDA's: {sorted(said)}"
                continue
            kind, _, field = said["valueLocation"].partition(".")
            if field != "wanted" or said["targetValue"] != "1":
                yield f"{what}: {said['valueLocation']} is not how many are wanted"
            if ranges.get(kind) != (spec.get("minReplicaCount"), spec.get("maxReplicaCount")):
                yield f"{what}: {kind} may be {ranges.get(kind)}"
            pattern = r"https://([^.]+)\.([^.]+)\.svc:(\d+)(/.*)"
            address = re.fullmatch(pattern, said["url"])
            name, space, port, path = address.groups() if address else ("", "", "0", "")
            ports = [p["port"] for p in services.get(name, {}).get("ports", ())]
            behavior = spec["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
            if behavior["scaleDown"]["stabilizationWindowSeconds"] < FEWER_S_LEAST:
                yield f"{what} takes nodes away that a new leader does not know yet"
            if int(port) not in ports or space != document["metadata"]["namespace"]:
                yield f"{what}: nothing answers at {said['url']}"
            if path not in ROUTES:
                yield f"{what}: there is no route {path}"
            shown = ("TriggerAuthentication", trigger.get("authenticationRef", {}).get("name"))
            if shown not in names:
                yield f"{what}: there is no {shown}"


def _named(documents: Sequence[Document], pods: Sequence[Pod]) -> Iterator[str]:
    """All is in the namespace, and several of a kind bear different names."""
    names = [(d["kind"], d["metadata"]["name"]) for d in documents]
    for twice in sorted({name for name in names if names.count(name) > 1}):
        yield f"{twice} is there twice"
    for document in documents:
        space = document["metadata"].get("namespace")
        if document["kind"] != "Namespace" and ("Namespace", space) not in names:
            yield f"{document['kind']} {document['metadata']['name']} is in {space}"
    tokens = [d for d in documents if d["kind"] == "TriggerAuthentication"]
    secrets = {
        variable["valueFrom"]["secretKeyRef"]["name"]
        for pod in pods
        for variable in pod.spec["containers"][0].get("env", ())
        if "secretKeyRef" in variable.get("valueFrom", {})
    }
    for document in tokens:
        for one in document["spec"]["secretTargetRef"]:
            if one["parameter"] != "token" or one["name"] not in secrets:
                yield f"TriggerAuthentication {document['metadata']['name']}: {one}"
