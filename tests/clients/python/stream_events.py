"""Prints the events of one stream that client/python reads, as JSON: [[name, data], …].

Arguments: URL, path, body, patience in seconds.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "client" / "python"))
import inflight_client

url, path, body, patience = sys.argv[1:]
events = inflight_client.stream_events([url], path, json.loads(body), patience=float(patience))
print(json.dumps([[event.name, json.loads(event.data)] for event in events]))
