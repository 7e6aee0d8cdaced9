#!/usr/bin/env python3
"""OpenVINO GenAI's continuous batching behind `POST /v1/completions`: as thin as can be, so that the engine is measured and not this file.

One thread makes steps and writes what they yield; each connection has a thread that only reads. Token ids in, one event for each step
out, with the number of tokens so far; text is not detokenized, which spares this server what the others do.

    openvino_server.py MODEL_DIR --port 8101 --streams 32
"""

import argparse
import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy
import openvino
import openvino_genai

RUNNING = openvino_genai.py_openvino_genai.GenerationStatus.RUNNING

class Engine:
    def __init__(self, arguments):
        scheduler = openvino_genai.SchedulerConfig()
        scheduler.max_num_seqs = arguments.streams
        scheduler.max_num_batched_tokens = arguments.step_tokens
        scheduler.cache_size = arguments.cache_gib
        scheduler.enable_prefix_caching = arguments.prefix_cache == "on"
        scheduler.dynamic_split_fuse = True
        properties = {
            "INFERENCE_NUM_THREADS": arguments.threads,
            "INFERENCE_PRECISION_HINT": arguments.precision,
            "KV_CACHE_PRECISION": arguments.kv_precision,
        }
        self.pipeline = openvino_genai.ContinuousBatchingPipeline(arguments.model, scheduler, "CPU", properties)
        self.arrivals = queue.SimpleQueue()
        self.running = {}
        self.next = 0

    def take(self, call):
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = call.max_tokens
        config.ignore_eos = call.ignore_eos
        config.do_sample = False
        ids = openvino.Tensor(numpy.array([call.prompt], dtype=numpy.int64))
        self.running[self.next] = (self.pipeline.add_request(self.next, ids, config), call)
        self.next += 1

    def run(self):
        while True:
            if not self.running:
                self.take(self.arrivals.get())
            while not self.arrivals.empty():
                self.take(self.arrivals.get())
            self.pipeline.step()
            for number, (handle, call) in list(self.running.items()):
                while handle.can_read():
                    for output in handle.read().values():
                        call.tokens += len(output.generated_ids)
                    if not call.write():
                        handle.cancel()
                        del self.running[number]
                        call.done.set()
                        break
                else:
                    if call.tokens >= call.max_tokens or handle.get_status() != RUNNING:
                        call.end()
                        del self.running[number]


class Call:
    def __init__(self, prompt, max_tokens, ignore_eos, out):
        self.prompt, self.max_tokens, self.ignore_eos, self.out = prompt, max_tokens, ignore_eos, out
        self.tokens = 0
        self.done = threading.Event()

    def event(self, choice):
        usage = {"prompt_tokens": len(self.prompt), "completion_tokens": self.tokens}
        return b"data: " + json.dumps({"choices": [choice], "usage": usage}).encode() + b"\n\n"

    def chunk(self, data):
        self.out.write(b"%x\r\n%s\r\n" % (len(data), data))

    def write(self):
        try:
            self.chunk(self.event({"index": 0, "text": " t", "finish_reason": None}))
            return True
        except OSError:
            return False

    def end(self):
        try:
            self.chunk(self.event({"index": 0, "text": "", "finish_reason": "length"}) + b"data: [DONE]\n\n")
            self.out.write(b"0\r\n\r\n")
        except OSError:
            pass
        self.done.set()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    wbufsize = 0
    disable_nagle_algorithm = True
    engine = None
    name = ""

    def log_message(self, *_):
        pass

    def answer(self, status, value):
        body = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer(200, {"object": "list", "data": [{"id": self.name, "object": "model"}]})

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        prompt = asked.get("prompt")
        if not isinstance(prompt, list) or not prompt:
            return self.answer(400, {"error": {"message": "the prompt is to be a list of token ids"}})
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        call = Call(prompt, int(asked.get("max_tokens", 16)), bool(asked.get("ignore_eos")), self.wfile)
        self.engine.arrivals.put(call)
        call.done.wait()


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--port", type=int, default=8101)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--step-tokens", type=int, default=512)
    parser.add_argument("--cache-gib", type=int, default=2)
    parser.add_argument("--prefix-cache", choices=["off", "on"], default="off")
    # On processors without bf16 the pipeline computes in f32 and takes no other keys and values.
    native = "bf16" if "BF16" in openvino.Core().get_property("CPU", "OPTIMIZATION_CAPABILITIES") else "f32"
    parser.add_argument("--precision", default=native)
    parser.add_argument("--kv-precision", default=native)
    arguments = parser.parse_args()
    Handler.engine = Engine(arguments)
    Handler.name = "openvino"
    threading.Thread(target=Handler.engine.run, daemon=True).start()
    Server(("127.0.0.1", arguments.port), Handler).serve_forever()


if __name__ == "__main__":
    main()
