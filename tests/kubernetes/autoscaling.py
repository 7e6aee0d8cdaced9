"""Prometheus and KEDA beside the control plane, as the chart's ScaledObjects need them."""

import json
import pathlib
import shutil
import subprocess
import urllib.parse
import urllib.request

from cluster import BIN, CONTROL, PACKAGES, RUN, command

NAMESPACE = "keda"
METRICS_PORT = 6444
PROMETHEUS = f"http://{CONTROL}:9090"
CRDS = ("scaledobjects", "scaledjobs", "triggerauthentications", "clustertriggerauthentications")


def prometheus(up):
    """Scrapes the pods that the chart's annotations name, with the labels that its query selects by."""
    file = RUN / "prometheus.json"
    label = "__meta_kubernetes_pod"
    file.write_text(json.dumps({
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s"},
        "scrape_configs": [{
            "job_name": "pods",
            "kubernetes_sd_configs": [{"role": "pod", "kubeconfig_file": str(up.admin)}],
            "relabel_configs": [
                {"source_labels": [f"{label}_annotation_prometheus_io_scrape"], "regex": "true", "action": "keep"},
                # A target for each port is discovered: one is enough.
                {"source_labels": [f"{label}_container_port_name"], "regex": "metrics", "action": "keep"},
                {"source_labels": [f"{label}_ip", f"{label}_annotation_prometheus_io_port"], "separator": ":",
                 "target_label": "__address__"},
                {"source_labels": ["__meta_kubernetes_namespace"], "target_label": "namespace"},
                {"source_labels": [f"{label}_name"], "target_label": "pod"},
            ],
        }],
    }))
    up.start("prometheus", [PACKAGES / "usr/bin/prometheus", f"--config.file={file}", f"--storage.tsdb.path={RUN}/prometheus",
                            f"--web.listen-address={CONTROL}:9090"])
    up.wait("Prometheus", lambda: urllib.request.urlopen(f"{PROMETHEUS}/-/ready", timeout=2).status == 200)


def query(expression):
    """The first value of a query, or None."""
    with urllib.request.urlopen(f"{PROMETHEUS}/api/v1/query?{urllib.parse.urlencode({'query': expression})}", timeout=5) as answer:
        result = json.load(answer)["data"]["result"]
    return float(result[0]["value"][1]) if result else None


def keda(up):
    """KEDA's operator and its API of external metrics, as processes of the control plane."""
    folder = RUN / "keda"
    folder.mkdir()
    server = f"keda-metrics-apiserver.{NAMESPACE}.svc"
    certificate, key = up.certificates.sign("keda", "/CN=keda", ["keda-operator", server, "localhost", "127.0.0.1", CONTROL])
    for name, source in (("ca.crt", up.certificates.ca), ("tls.crt", certificate), ("tls.key", key)):
        shutil.copy(source, folder / name)
    module = json.loads(command("go", "list", "-m", "-json", "github.com/kedacore/keda/v2",
                                cwd=pathlib.Path(__file__).parent / "modules/keda"))["Dir"]
    for crd in CRDS:
        # Larger than what `apply` notes of it.
        up.kubectl("create", f"--filename={module}/config/crd/bases/keda.sh_{crd}.yaml")
    up.kubectl("create", "namespace", NAMESPACE)
    environment = {"WATCH_NAMESPACE": "", "POD_NAMESPACE": NAMESPACE, "KEDA_CLUSTER_OBJECT_NAMESPACE": NAMESPACE}
    up.start("keda-operator", [BIN / "operator", f"--cert-dir={folder}", "--leader-elect=false", "--enable-webhook-patching=false",
                               "--enable-apiservice-patching=false", "--metrics-bind-address=127.0.0.1:8080",
                               "--health-probe-bind-address=127.0.0.1:8082", "--metrics-service-bind-address=127.0.0.1:9666"],
             **environment)
    up.start("keda-adapter", [BIN / "adapter", f"--secure-port={METRICS_PORT}", "--port=8083", "--metrics-service-address=127.0.0.1:9666",
                              f"--client-ca-file={folder}/ca.crt", f"--tls-cert-file={folder}/tls.crt",
                              f"--tls-private-key-file={folder}/tls.key", f"--cert-dir={folder}",
                              f"--authentication-kubeconfig={up.admin}", f"--authorization-kubeconfig={up.admin}"],
             **environment)
    name = "keda-metrics-apiserver"
    group = "external.metrics.k8s.io"
    port = {"name": "https", "port": 443, "protocol": "TCP"}
    up.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": NAMESPACE},
         "spec": {"ports": [{**port, "targetPort": METRICS_PORT}]}},
        {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
         "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"kubernetes.io/service-name": name}},
         "ports": [{**port, "port": METRICS_PORT}], "endpoints": [{"addresses": [CONTROL], "conditions": {"ready": True}}]},
        {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": f"v1beta1.{group}"},
         "spec": {"group": group, "version": "v1beta1", "groupPriorityMinimum": 100, "versionPriority": 100,
                  "insecureSkipTLSVerify": True, "service": {"name": name, "namespace": NAMESPACE}}})
    up.wait("API of external metrics", lambda: up.kubectl("get", "--raw", f"/apis/{group}/v1beta1"))


def watch_replicas(up, statefulset):
    """A process whose lines are the numbers of replicas that the StatefulSet is given, one after the other."""
    return subprocess.Popen([BIN / "kubectl", "get", statefulset, "--watch", "--output=jsonpath={.spec.replicas}{'\\n'}"],
                            stdout=subprocess.PIPE, text=True, env=up.environment)
