#!/usr/bin/env python3
"""Runs every query of the dashboard, and the alert rules, on a real Prometheus that has scraped a real cluster under load.

dashboard.py PROMETHEUS INFLIGHT

The cluster has two workers and three tenants, one of which exceeds its limit; one worker is killed on the way. Every query must
return at least one finite value with the variables set to a namespace, a model, all tenants and each of the objectives, and every rule must
evaluate.
"""

import contextlib
import hashlib
import json
import math
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parents[2]
DASHBOARD = ROOT / "deploy/monitoring/dashboard.json"
ALERTS = ROOT / "deploy/monitoring/alerts.yaml"
# Grafana's smallest value for a scrape interval of a second would be 4 s; the load has pauses, so more.
RATE_INTERVAL = "20s"
RANGE = "1m"
NAMESPACE = "serving"
MODEL = "inflight-demo"
STREAMS = 8
DEADLINE_SECONDS = 120
TENANTS = ("acme", "busy", "limited")


def key(tenant):
    return f"key-of-{tenant}-" + "k" * 32


def tenants_file():
    lines = []
    for tenant in TENANTS:
        digest = hashlib.sha256(key(tenant).encode()).hexdigest()
        limits = "requests_per_minute = 1" if tenant == "limited" else f"weight = {1 + TENANTS.index(tenant)}"
        lines.append(f'[tenants.{tenant}]\nlimits = {{ {limits} }}\nkeys = [{{ name = "test", sha256 = "{digest}" }}]\n')
    return "\n".join(lines)


def call(url, body=None, headers=(), timeout=60):
    request = urllib.request.Request(url, data=body, headers=dict(headers))
    with urllib.request.urlopen(request, timeout=timeout) as response:
        return json.load(response)


class Cluster:
    """`inflight up`, and threads that send requests to it."""

    def __init__(self, program, folder):
        tenants = folder / "tenants.toml"
        tenants.write_text(tenants_file(), encoding="utf-8")
        command = [program, "up", "--json", "--port=0", "--workers=2", "--threads=1", "--max-sequences=2",
                   "--kv-cache-bytes=64MiB", "--drafts=prompt-lookup", f"--tenants-file={tenants}"]
        environment = {**os.environ, "INFLIGHT_WORKER_HOST_CACHE_BYTES": "16MiB"}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        ready = self.event("ready")
        self.http = ready["http"]
        self.metrics = [member["metrics"] for member in [ready["router"], *ready["workers"]]]
        self.workers = [worker["pid"] for worker in ready["workers"]]
        self.stopping = threading.Event()
        self.answers = dict.fromkeys(TENANTS, 0)
        self.refusals = dict.fromkeys(TENANTS, 0)
        self.failures = []
        self.threads = []

    def event(self, name):
        for line in self.process.stdout:
            event = json.loads(line)
            if event["event"] == name:
                return event
        raise RuntimeError(f"no event {name}: the cluster has ended")

    def ask(self, tenant, number):
        # Prefixes are shared.
        prompt = "A router queues, a worker runs. A router queues, a worker runs. A router queues, " * (1 + number % 3)
        body = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
        if number % 2:
            # One token over and over, so that drafts stand.
            body["allowed_token_ids"] = [100]
        headers = {"authorization": f"Bearer {key(tenant)}", "content-type": "application/json"}
        try:
            call(f"{self.http}/v1/completions", json.dumps(body).encode(), headers)
            self.answers[tenant] += 1
        except urllib.error.HTTPError as error:
            if error.code != 429:
                self.failures.append(f"{tenant}: {error.code} {error.read()[:200]!r}")
            self.refusals[tenant] += 1
            self.stopping.wait(0.5)

    def load(self):
        def stream(tenant):
            number = 0
            while not self.stopping.is_set():
                self.ask(tenant, number)
                number += 1

        for position in range(STREAMS):
            tenant = "limited" if position == 0 else TENANTS[position % 2]
            self.threads.append(threading.Thread(target=stream, args=(tenant,)))
        for thread in self.threads:
            thread.start()

    def stop(self):
        self.stopping.set()
        for thread in self.threads:
            thread.join()
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self.process.kill()


class Prometheus:
    """A Prometheus that scrapes these addresses every second."""

    def __init__(self, program, folder, targets):
        # Without intervals of groups, which are longer than this test.
        rules = re.sub(r"(?m)^ *interval: .*\n", "", ALERTS.read_text(encoding="utf-8"))
        (folder / "alerts.yaml").write_text(rules, encoding="utf-8")
        config = {
            "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
            "rule_files": [str(folder / "alerts.yaml")],
            "scrape_configs": [{"job_name": "inflight", "static_configs": [{"targets": targets, "labels": {"namespace": NAMESPACE}}]}],
        }
        # JSON is YAML.
        (folder / "prometheus.yaml").write_text(json.dumps(config), encoding="utf-8")
        self.log = open(folder / "prometheus.log", "w+", encoding="utf-8")
        # It does not say which port it took, so a few are tried.
        for port in range(19090, 19110):
            self.url = f"http://127.0.0.1:{port}"
            self.process = subprocess.Popen(
                [program, f"--config.file={folder / 'prometheus.yaml'}", f"--storage.tsdb.path={folder / 'data'}",
                 f"--web.listen-address=127.0.0.1:{port}"], stdout=self.log, stderr=self.log)
            while self.process.poll() is None:
                with contextlib.suppress(OSError):
                    urllib.request.urlopen(f"{self.url}/-/ready", timeout=2).close()
                    if self.process.poll() is None:
                        return
                time.sleep(0.1)
        self.log.seek(0)
        raise RuntimeError(f"Prometheus does not start: {self.log.read()[-2000:]}")

    def query(self, expression):
        parameters = urllib.parse.urlencode({"query": expression})
        try:
            answer = call(f"{self.url}/api/v1/query?{parameters}")
        except urllib.error.HTTPError as error:
            raise RuntimeError(f"{expression}: {error.read().decode()}") from error
        return [float(series["value"][1]) for series in answer["data"]["result"]]

    def rules(self):
        groups = call(f"{self.url}/api/v1/rules")["data"]["groups"]
        return [rule for group in groups for rule in group["rules"]]

    def stop(self):
        self.process.terminate()
        self.process.wait(timeout=30)


def expressions():
    """Queries of panels, with the variables at a value each, and of variables: that the label is there."""
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    variables = {item["name"]: item for item in dashboard["templating"]["list"] if item["type"] != "datasource"}
    values = {"__rate_interval": RATE_INTERVAL, "__range": RANGE, "namespace": NAMESPACE, "model": MODEL, "router": ".+", "worker": ".+",
              "tenant": "|".join(TENANTS)}
    objectives = {name: variable["query"].split(",") for name, variable in variables.items() if variable["type"] == "custom"}

    def with_values(text, chosen):
        for name, value in sorted((values | chosen).items(), reverse=True):
            text = text.replace(f"${name}", value)
        assert "$" not in text, f"a variable that this test does not know: {text}"
        return text

    used = set()
    for panel in dashboard["panels"]:
        for target in panel.get("targets", []):
            used |= set(re.findall(r"\$(\w+)", target["expr"]))
            chosen = [name for name in objectives if f"${name}" in target["expr"]]
            # A bound that no bucket has would give no data.
            for number in range(max([len(objectives[name]) for name in chosen], default=1)):
                one = {name: objectives[name][number % len(objectives[name])] for name in chosen}
                yield panel["title"], with_values(target["expr"], one)
    assert used - {"__rate_interval", "__range"} == set(variables), f"variables of no panel: {set(variables) - used}"
    for name, variable in variables.items():
        if variable["type"] == "query":
            series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]).groups()
            yield f"the variable {name}", f'count(group by ({label}) ({with_values(series, {})}) unless group({with_values(series, {})})) > 0'


def has_data(title, values):
    # Whether a draft is worth its time depends on the processor. Where none is, the share of accepted drafts is 0 / 0: the series must exist.
    return any(map(math.isfinite, values)) or title == "Accepted drafts" and len(values) > 0


def main():
    prometheus_program, inflight = sys.argv[1:]
    with tempfile.TemporaryDirectory() as name, contextlib.ExitStack() as cleanup:
        folder = pathlib.Path(name)
        cluster = Cluster(inflight, folder)
        cleanup.callback(cluster.stop)
        prometheus = Prometheus(prometheus_program, folder, cluster.metrics)
        cleanup.callback(prometheus.stop)
        cluster.load()
        deadline = time.monotonic() + DEADLINE_SECONDS
        empty, killed = list(expressions()), False
        number = len(empty)
        while empty:
            assert time.monotonic() < deadline, "no data:\n" + "\n".join(f"  {title}: {e}" for title, e in empty)
            # Streams of both tenants run: those of the killed worker move.
            if not killed and min(cluster.answers["acme"], cluster.answers["busy"]) >= 5:
                os.kill(cluster.workers[0], signal.SIGKILL)
                cluster.event("restarted")
                killed = True
            empty = [(title, expression) for title, expression in empty
                     if not has_data(title, prometheus.query(expression))]
            time.sleep(0.5)
        assert not cluster.failures, cluster.failures
        assert cluster.refusals["limited"] > 0 and cluster.refusals["acme"] == 0, cluster.refusals
        rules = prometheus.rules()
        unwell = [f"{rule['name']}: {rule.get('lastError', '')}" for rule in rules if rule["health"] != "ok"]
        assert rules and not unwell, unwell
        print(f"{number} queries returned data and {len(rules)} rules evaluated after {cluster.answers} answers")


if __name__ == "__main__":
    main()
