#!/usr/bin/env python3
"""Streams under load, compared with an undisturbed run: load.py ADDRESS --streams N --tokens N --reference FILE [--no-resume]

Each of the streams has a connection of its own, so that the service spreads them over the routers, and repeats one request of its
own until a line comes on standard input; then the last ones end. Prints a line once every stream has had tokens, and a JSON line
at the end. Without FILE, each request is made once, and its tokens are written there.
"""

import argparse
import json
import pathlib
import sys
import threading
import time

import grpc
from inflight.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2
from inflight_client import generate

# A router that was down is tried again soon. The connection is not shared with other streams of this process.
OPTIONS = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 1000),
           ("grpc.use_local_subchannel_pool", 1), ("grpc.keepalive_time_ms", 10_000), ("grpc.keepalive_timeout_ms", 5_000)]


class Counting:
    """The stub of a channel, which counts calls."""

    def __init__(self, channel):
        self.stub = inference_pb2_grpc.InferenceStub(channel)
        self.calls = 0

    def Generate(self, *arguments, **options):
        self.calls += 1
        return self.stub.Generate(*arguments, **options)


class Load:
    def __init__(self, args):
        self.args = args
        self.reference = json.loads(args.reference.read_text()) if args.reference.exists() else None
        self.tokens = {}
        self.stop = threading.Event()
        self.begun = [threading.Event() for _ in range(args.streams)]
        self.lock = threading.Lock()
        self.completed, self.calls, self.longest = 0, 0, 0.0
        self.lost, self.different = [], []

    def request(self, number):
        return inference_pb2.GenerateRequest(
            return_token_ids=True,
            text=f"Stream {number} tells how it went on after the last interruption, and",
            sampling=sampling_pb2.SamplingParams(temperature=1.0, seed=number + 1),
            stop=sampling_pb2.StopConditions(max_tokens=self.args.tokens, ignore_eos=True))

    def once(self, number, stub):
        """One stream to its end; returns its tokens."""
        tokens, finished, last = [], False, None
        if self.args.no_resume:
            responses = stub.Generate(self.request(number), timeout=self.args.timeout)
        else:
            responses = generate([stub], self.request(number), patience=self.args.patience, timeout=self.args.timeout)
        for response in responses:
            event = response.WhichOneof("event")
            if event == "delta":
                tokens += response.delta.token_ids
                now = time.monotonic()
                if last is not None and now - last > self.longest:
                    self.longest = now - last
                last = now
                self.begun[number].set()
            elif event == "completed":
                finished = True
        if not finished:
            raise ConnectionError("ended before it was complete")
        return tokens

    def stream(self, number):
        with grpc.insecure_channel(self.args.address, OPTIONS) as channel:
            stub = Counting(channel)
            while not self.stop.is_set():
                try:
                    tokens = self.once(number, stub)
                except (grpc.RpcError, ConnectionError) as error:
                    what = f"{error.code().name}: {error.details()}" if isinstance(error, grpc.RpcError) else str(error)
                    with self.lock:
                        self.lost.append(f"stream {number}: {what}")
                    # Not again: a failure without a pause between would be a flood.
                    break
                with self.lock:
                    self.completed += 1
                    if self.reference is None:
                        self.tokens[str(number)] = tokens
                    elif tokens != self.reference[str(number)]:
                        self.different.append(number)
                if self.reference is None:
                    break
            self.begun[number].set()
            with self.lock:
                self.calls += stub.calls

    def run(self):
        threads = [threading.Thread(target=self.stream, args=(number,)) for number in range(self.args.streams)]
        for thread in threads:
            thread.start()
        for begun in self.begun:
            begun.wait()
        print(json.dumps({"streaming": self.args.streams}), flush=True)
        if self.reference is not None:
            sys.stdin.readline()
        self.stop.set()
        for thread in threads:
            thread.join()
        if self.reference is None:
            self.args.reference.write_text(json.dumps(self.tokens))
        print(json.dumps({
            "completed": self.completed, "lost": self.lost, "different": self.different,
            "resumed": self.calls - self.completed - len(self.lost), "longest_pause": round(self.longest, 1)}), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("address")
    parser.add_argument("--streams", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--reference", type=pathlib.Path, required=True)
    parser.add_argument("--patience", type=float, default=60)
    parser.add_argument("--timeout", type=float, default=300)
    parser.add_argument("--no-resume", action="store_true")
    Load(parser.parse_args()).run()


if __name__ == "__main__":
    main()
