"""Prometheus and an API of external metrics beside the control plane, by which pools are scaled."""

import base64
import contextlib
import json
import pathlib
import re
import ssl
import subprocess
import sys
import threading
import time
import urllib.request

from cluster import API, BIN, CONTROL, PACKAGES, RUN

HERE = pathlib.Path(__file__).resolve().parent
PROMETHEUS = f"http://{CONTROL}:9090"
NAMESPACE, NAME, PORT = "monitoring", "external-metrics", 6444
GROUP = "external.metrics.k8s.io"
METRIC = "inflight-demo-requests"


def targets(connection):
    """The pods that the chart's annotations name, with the labels that its query selects by."""
    found = []
    with urllib.request.urlopen(f"{API}/api/v1/pods", context=connection, timeout=5) as answer:
        for pod in json.load(answer)["items"]:
            annotations, address = pod["metadata"].get("annotations", {}), pod["status"].get("podIP")
            if annotations.get("prometheus.io/scrape") == "true" and address and pod["status"]["phase"] == "Running":
                found.append({"targets": [f"{address}:{annotations['prometheus.io/port']}"],
                              "labels": {"namespace": pod["metadata"]["namespace"], "pod": pod["metadata"]["name"]}})
    return found


def discover(up, file):
    """Writes the targets for Prometheus, because Debian's build of it has no discovery by the Kubernetes API."""
    connection = ssl.create_default_context(cafile=up.certificates.ca)
    folder = up.certificates.folder
    connection.load_cert_chain(folder / "admin.crt", folder / "admin.key")
    while True:
        with contextlib.suppress(OSError):
            unfinished = file.with_suffix(".unfinished")
            unfinished.write_text(json.dumps(targets(connection)))
            unfinished.rename(file)
        time.sleep(1)


def prometheus(up):
    file, discovered = RUN / "prometheus.json", RUN / "targets.json"
    file.write_text(json.dumps({
        "global": {"scrape_interval": "2s", "scrape_timeout": "2s"},
        "scrape_configs": [{"job_name": "pods", "file_sd_configs": [{"files": [str(discovered)], "refresh_interval": "2s"}]}],
    }))
    threading.Thread(target=discover, args=(up, discovered), daemon=True).start()
    up.start("prometheus", [PACKAGES / "usr/bin/prometheus", f"--config.file={file}", f"--storage.tsdb.path={RUN}/prometheus",
                            f"--web.listen-address={CONTROL}:9090"])
    up.wait("Prometheus", lambda: urllib.request.urlopen(f"{PROMETHEUS}/-/ready", timeout=2).status == 200)


def query_of_the_chart(up, release, chart):
    """The query by which the chart's ScaledObject scales its pool."""
    rendered = up.helm("template", release, chart, "--kube-version=1.34.4", "--show-only=templates/autoscaling.yaml",
                       "--values", HERE / "values.yaml", "--values", HERE / "values-keda.yaml")
    [folded] = re.findall(r"^ +query: >-\n((?: {10}.*\n)+)", rendered, re.MULTILINE)
    return " ".join(folded.split())


def metrics_api(up, query):
    """Registers the query as a metric for HorizontalPodAutoscalers."""
    certificate, key = up.certificates.sign("external-metrics", "/CN=external-metrics", [f"{NAME}.{NAMESPACE}.svc"])
    up.start("external-metrics", [sys.executable, HERE / "metrics_api.py", f"{CONTROL}:{PORT}", certificate, key, PROMETHEUS,
                                  f"{METRIC}={query}"])
    port = {"name": "https", "port": 443, "protocol": "TCP"}
    up.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
    up.apply(
        {"apiVersion": "v1", "kind": "Service", "metadata": {"name": NAME, "namespace": NAMESPACE},
         "spec": {"ports": [{**port, "targetPort": PORT}]}},
        {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
         "metadata": {"name": NAME, "namespace": NAMESPACE, "labels": {"kubernetes.io/service-name": NAME}},
         "ports": [{**port, "port": PORT}], "endpoints": [{"addresses": [CONTROL], "conditions": {"ready": True}}]},
        {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": f"v1beta1.{GROUP}"},
         "spec": {"group": GROUP, "version": "v1beta1", "groupPriorityMinimum": 100, "versionPriority": 100,
                  "caBundle": base64.b64encode(up.certificates.ca.read_bytes()).decode(),
                  "service": {"name": NAME, "namespace": NAMESPACE}}})
    up.wait("the external metric",
            lambda: json.loads(up.kubectl("get", "--raw", f"/apis/{GROUP}/v1beta1/namespaces/default/{METRIC}"))["items"])


def watch_replicas(up, statefulset):
    """A process whose lines are the numbers of replicas that the StatefulSet is given, one after the other."""
    return subprocess.Popen([BIN / "kubectl", "get", statefulset, "--watch", "--output=jsonpath={.spec.replicas}{'\\n'}"],
                            stdout=subprocess.PIPE, text=True, env=up.environment)
