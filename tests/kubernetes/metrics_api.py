#!/usr/bin/env python3
"""Serves queries of Prometheus as the API of external metrics: metrics_api.py ADDRESS:PORT CERT KEY PROMETHEUS NAME=QUERY...

Enough of external.metrics.k8s.io/v1beta1 for HorizontalPodAutoscalers; the API server stands before it.
"""

import datetime
import http.server
import json
import pathlib
import ssl
import sys
import urllib.parse
import urllib.request

GROUP = "external.metrics.k8s.io/v1beta1"


def value(prometheus, query):
    """The first value of a query, or None."""
    with urllib.request.urlopen(f"{prometheus}/api/v1/query?{urllib.parse.urlencode({'query': query})}", timeout=5) as answer:
        result = json.load(answer)["data"]["result"]
    return float(result[0]["value"][1]) if result else None


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    prometheus, queries = "", {}

    def do_GET(self):
        parts = urllib.parse.urlparse(self.path).path.strip("/").split("/")
        if "/".join(parts) == f"apis/{GROUP}":
            resource = {"singularName": "", "namespaced": True, "kind": "ExternalMetricValueList", "verbs": ["get"]}
            resources = [{**resource, "name": name} for name in self.queries]
            self.answer(200, {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP, "resources": resources})
            return
        found = None
        if len(parts) == 6 and parts[3] == "namespaces" and parts[5] in self.queries:
            found = value(self.prometheus, self.queries[parts[5]])
        if found is None:
            self.answer(404, {"kind": "Status", "apiVersion": "v1", "status": "Failure", "code": 404, "reason": "NotFound"})
            return
        now = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")
        self.answer(200, {"kind": "ExternalMetricValueList", "apiVersion": GROUP, "metadata": {}, "items": [
            {"metricName": parts[5], "metricLabels": {}, "timestamp": now, "value": f"{found:.0f}"}]})

    def answer(self, status, document):
        body = json.dumps(document).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def main():
    listen, certificate, key, Handler.prometheus, *queries = sys.argv[1:]
    Handler.queries = dict(query.split("=", 1) for query in queries)
    host, port = listen.rsplit(":", 1)
    server = http.server.ThreadingHTTPServer((host, int(port)), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pathlib.Path(certificate), pathlib.Path(key))
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
