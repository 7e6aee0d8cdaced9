"""What must hold of every rendering, and which no schema sees."""

import pathlib
import re

import yaml

ROOT = pathlib.Path(__file__).resolve().parents[2]
METRICS = set(re.findall(r"^\| `(\w+)`", (ROOT / "docs/metrics.md").read_text(), re.MULTILINE))


def pod_of(document: dict) -> dict | None:
    if document["kind"] == "Pod":
        return {"metadata": document["metadata"], "spec": document["spec"]}
    return document["spec"]["template"] if document["kind"] in ("Deployment", "StatefulSet") else None


def seconds(arguments: list[str], flag: str) -> int:
    return next(int(argument.removeprefix(f"{flag}=").removesuffix("s")) for argument in arguments if argument.startswith(f"{flag}="))


def matches(selector: dict, labels: dict) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


def check_security(name: str, pod: dict) -> None:
    security = pod["securityContext"]
    assert security["runAsNonRoot"] and security["seccompProfile"]["type"] == "RuntimeDefault", name
    assert not any(pod.get(field) for field in ("hostNetwork", "hostPID", "hostIPC")), name
    for container in pod["containers"] + pod.get("initContainers", []):
        own = container["securityContext"]
        assert own["readOnlyRootFilesystem"] and own["allowPrivilegeEscalation"] is False, name
        assert own["capabilities"] == {"drop": ["ALL"]} and "privileged" not in own, name
        assert not container["image"].endswith(":latest") and ":" in container["image"], name
        mounts = {mount["name"] for mount in container["volumeMounts"]} if "volumeMounts" in container else set()
        volumes = {volume["name"] for volume in pod.get("volumes", [])}
        assert mounts <= volumes | {"model"}, f"{name} mounts {mounts - volumes}"
    for volume in pod.get("volumes", []):
        assert "secret" not in volume or volume["secret"]["defaultMode"] == 0o440, name


def check_lifecycle(name: str, pod: dict, routers: list[dict]) -> None:
    """Probes ask the metrics port; the process ends by itself before it is killed; streams have time to move before the drain ends."""
    container = pod["containers"][0]
    probes = [container[f"{kind}Probe"] for kind in ("startup", "readiness", "liveness")]
    assert all(probe["httpGet"]["port"] == "metrics" for probe in probes), name
    assert probes[2]["httpGet"]["path"] == "/livez", f"{name}: liveness is of the process alone"
    drain = seconds(container["args"], "--drain-timeout")
    stop = container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    assert pod["terminationGracePeriodSeconds"] >= drain + stop + 5, name
    if container["name"] == "worker":
        for router in routers:
            assert drain > seconds(router["args"], "--drain-grace"), name
        loads = probes[0]["periodSeconds"] * probes[0]["failureThreshold"]
        assert loads >= 2 and "requests" in container["resources"], name


def check_spread(name: str, pod: dict) -> None:
    """Pods of the revision before do not count in a rolling update of a Deployment: they are about to go."""
    for constraint in pod.get("topologySpreadConstraints", []):
        assert constraint["matchLabelKeys"] == ["pod-template-hash"], name


def check_scaling(documents: list[dict]) -> None:
    workloads = {(d["kind"], d["metadata"]["name"]): d for d in documents if d["kind"] in ("Deployment", "StatefulSet")}
    for document in documents:
        if document["kind"] not in ("HorizontalPodAutoscaler", "ScaledObject"):
            continue
        target = document["spec"]["scaleTargetRef"]
        workload = workloads[target["kind"], target["name"]]
        assert "replicas" not in workload["spec"], "an upgrade would set back what the autoscaler chose"
        for trigger in document["spec"].get("triggers", []):
            query = trigger["metadata"]["query"]
            assert query.count("(") == query.count(")") and query.count("{") == query.count("}"), query
            unknown = set(re.findall(r"\binflight_\w+", query)) - METRICS
            assert not unknown, f"{unknown} in {query}"


def check_references(documents: list[dict]) -> None:
    """Selectors select, and the Secrets and accounts that a pod names are there or come from the deployer by name."""
    pods = [(d["metadata"]["name"], pod) for d in documents if (pod := pod_of(d))]
    labels = [pod["metadata"]["labels"] for _, pod in pods]
    for document in documents:
        kind, name, spec = document["kind"], document["metadata"]["name"], document.get("spec", {})
        selector = {"Service": spec.get("selector"), "NetworkPolicy": spec.get("podSelector", {}).get("matchLabels"),
                    "PodDisruptionBudget": spec.get("selector", {}).get("matchLabels") if kind == "PodDisruptionBudget" else None,
                    "StatefulSet": spec.get("selector", {}).get("matchLabels") if kind == "StatefulSet" else None,
                    "Deployment": spec.get("selector", {}).get("matchLabels") if kind == "Deployment" else None}.get(kind)
        if selector is None:
            continue
        selected = [pod for pod in labels if matches(selector, pod)]
        assert selected, f"{kind} {name} selects nothing"
        if kind in ("StatefulSet", "Deployment"):
            assert len(selected) == 1, f"{kind} {name} selects pods of others"
    names = {(d["kind"], d["metadata"]["name"]) for d in documents}
    assert len(names) == len(documents), "two objects of a kind have one name"
    accounts = [name for kind, name in names if kind == "ServiceAccount"]
    for name, pod in pods:
        for account in {pod["spec"].get("serviceAccountName")} - {None, "default"}:
            # With serviceAccount.create: false, the deployer has made it.
            assert ("ServiceAccount", account) in names or not accounts, f"{name} runs as {account}"
        watches = any("kubernetes://" in argument for c in pod["spec"]["containers"] for argument in c.get("args", []))
        assert pod["spec"]["automountServiceAccountToken"] is watches, f"{name}: a token is for watching EndpointSlices alone"


def reached(rules: list[dict]) -> set[object]:
    """Ports that rules for outgoing connections let through, to anyone."""
    return {port["port"] for rule in rules for port in rule["ports"]}


def check_callers_of_workers(name: str, incoming: list[dict], documents: list[dict]) -> None:
    """Pods of routers, of the same namespace, and no others may connect to the gRPC port of a worker."""
    peers = [peer for rule in incoming if {"port": "grpc"} in rule["ports"] for peer in rule["from"]]
    assert len(peers) == 1 and set(peers[0]) == {"podSelector"}, f"{name}: {peers} may connect"
    labels = peers[0]["podSelector"].get("matchLabels")
    assert labels, f"{name}: every pod may connect"
    for document in documents:
        if (pod := pod_of(document)) and "labels" in pod["metadata"]:
            is_router = document["kind"] == "Deployment" and pod["spec"]["containers"][0]["name"] == "router"
            allowed = matches(labels, pod["metadata"]["labels"])
            assert allowed == is_router, f"{name}: {document['metadata']['name']} may connect: {allowed}"


def check_network(documents: list[dict]) -> None:
    """What a pod connects to by its arguments is let through, what only others need is not; peers can reach what they must."""
    policies = [d for d in documents if d["kind"] == "NetworkPolicy"]
    for document in documents if policies else []:
        if document["kind"] not in ("Deployment", "StatefulSet"):
            continue
        name, pod = document["metadata"]["name"], document["spec"]["template"]
        container = pod["spec"]["containers"][0]
        own = [d["spec"] for d in policies if matches(d["spec"]["podSelector"]["matchLabels"], pod["metadata"]["labels"])]
        incoming = [rule for spec in own for rule in spec.get("ingress", [])]
        assert all("Ingress" in spec["policyTypes"] or "ingress" not in spec for spec in own), name
        assert reached(incoming) == {port["name"] for port in container["ports"]}, f"{name}: policies open {reached(incoming)}, which are not its ports"
        if container["name"] == "worker":
            assert all("from" in rule for rule in incoming), f"{name}: everyone may connect to a worker"
            check_callers_of_workers(name, incoming, documents)
        if not any("Egress" in spec["policyTypes"] for spec in own):
            continue
        ports = reached([rule for spec in own for rule in spec.get("egress", [])])
        endpoint = next((a.partition("=")[2] for a in container["args"] if a.startswith("--otlp-endpoint=")), None)
        host = endpoint and endpoint.removeprefix("http://").partition("/")[0]
        wanted = {int(host.partition(":")[2] or 80)} if host else set()
        if container["name"] == "router":
            wanted |= {"grpc"}
        if container["name"] == "router" or host or "initContainers" in pod["spec"]:
            wanted |= {53, 5353}
        assert wanted <= ports, f"{name}: policies keep it from {wanted - ports}"
        watches, downloads = pod["spec"]["automountServiceAccountToken"], "initContainers" in pod["spec"]
        # Ports of the examples: 443 of both, others of tests/chart/values.
        further = ({443, 6443, 8443} if watches else set()) | ({80, 443, 9000} if downloads else set()) | {9001, 9002}
        assert ports <= wanted | further, f"{name}: policies let it connect to {ports - wanted - further}"
        assert not watches or ports & {443, 8443}, f"{name}: policies keep it from the API server"
        assert not downloads or ports & {443, 9000}, f"{name}: policies keep it from its download"


def backends(document: dict) -> list[dict]:
    """Services and ports to which an Ingress or a route leads."""
    if document["kind"] == "Ingress":
        return [path["backend"]["service"] for rule in document["spec"]["rules"] for path in rule["http"]["paths"]]
    if document["kind"] in ("HTTPRoute", "GRPCRoute"):
        return [{"name": ref["name"], "port": {"number": ref["port"]}} for rule in document["spec"]["rules"] for ref in rule["backendRefs"]]
    return []


def check_exposure(documents: list[dict]) -> None:
    """An Ingress and a route lead to the port of their protocol, its controller can connect to it, and knows the protocol."""
    services = {d["metadata"]["name"]: d for d in documents if d["kind"] == "Service"}
    routers = [d["spec"]["template"] for d in documents if d["kind"] == "Deployment"]
    policies = [d["spec"] for d in documents if d["kind"] == "NetworkPolicy"]
    for document in documents:
        name = f"{document['kind']} {document['metadata']['name']}"
        for backend in backends(document):
            service = services[backend["name"]]
            [port] = [p for p in service["spec"]["ports"] if backend["port"] in ({"name": p["name"]}, {"number": p["port"]})]
            assert service["spec"]["selector"] == {key: routers[0]["metadata"]["labels"][key] for key in service["spec"]["selector"]}, name
            grpc = document["kind"] == "GRPCRoute" or document["metadata"]["name"].endswith("-grpc")
            assert port["name"] == ("grpc" if grpc else "http"), f"{name} leads to {port['name']}"
            secured = any(a.startswith("--tls-cert=") for a in routers[0]["spec"]["containers"][0]["args"])
            assert not grpc or secured or port["appProtocol"] == "kubernetes.io/h2c", name
            verified = [target["sectionName"] for d in documents if d["kind"] == "BackendTLSPolicy" for target in d["spec"]["targetRefs"]]
            assert document["kind"] == "Ingress" or (port["name"] in verified) == secured, f"{name}: {verified} are connected to by TLS"
            spoken = document["metadata"].get("annotations", {}).get("nginx.ingress.kubernetes.io/backend-protocol")
            assert spoken in (None, ("GRPC" if grpc else "HTTP") + ("S" if secured else "")), f"{name}: {spoken}"
            # A controller is no pod of the release, so a rule without peers, or one whose peers are of another namespace.
            rules = [rule for spec in policies if matches(spec["podSelector"]["matchLabels"], routers[0]["metadata"]["labels"])
                     for rule in spec["ingress"] if {"port": port["name"]} in rule["ports"]]
            restricted = all("from" in rule for rule in rules)
            assert not policies or not restricted or len(rules) == 2, f"{name}: policies keep its controller from the routers"


def check(documents: list[dict]) -> None:
    workloads = [d for d in documents if d["kind"] in ("Deployment", "StatefulSet")]
    routers = [d["spec"]["template"]["spec"]["containers"][0] for d in workloads if d["kind"] == "Deployment"]
    for document in documents:
        if pod := pod_of(document):
            check_security(document["metadata"]["name"], pod["spec"])
    for document in workloads:
        check_lifecycle(document["metadata"]["name"], document["spec"]["template"]["spec"], routers)
        check_spread(document["metadata"]["name"], document["spec"]["template"]["spec"])
    check_scaling(documents)
    check_references(documents)
    check_network(documents)
    check_exposure(documents)
    rules = [d for d in documents if d["kind"] == "Role"]
    assert all(rule["resources"] == ["endpointslices"] for role in rules for rule in role["rules"])


def keys(values: object) -> set[str]:
    if isinstance(values, list):
        return set().union(*map(keys, values))
    return set().union(*({key} | keys(value) for key, value in values.items())) if isinstance(values, dict) else set()


def check_documentation(chart: pathlib.Path) -> None:
    """Templates use every value, and the README of the chart has it."""
    values = yaml.safe_load((chart / "values.yaml").read_text())
    # Contents of the defaults, not names of values.
    for part in (values["router"], values["poolDefaults"]):
        part.update(resources={})
    values["networkPolicy"]["monitoring"] = []
    values["monitoring"]["dashboard"]["labels"] = {}
    templates = "".join(file.read_text() for file in chart.glob("templates/**/*") if file.is_file())
    readme = (chart / "README.md").read_text()
    schema = (chart / "values.schema.json").read_text()
    for where, text in (("templates", templates), ("README.md", readme), ("values.schema.json", schema)):
        # Parts of an issuer go into the Certificate as they are.
        missing = {key for key in keys(values) if not re.search(rf"\b{key}\b", text)} - ({"group"} if where != "README.md" else set())
        assert not missing, f"{where}: nothing about {sorted(missing)}"
