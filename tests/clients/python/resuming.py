"""Reads streams with client/python/inflight_client.py while routers and workers are killed, and compares them.

Standard input is a JSON object: `urls` of routers, `requests` with `prompt`, `max_tokens`, `seed` and the expected `text`,
`streams`, the number of threads, `stop`, a file whose appearance ends the work, and, for gRPC, `targets` and `protos`. Prints
the numbers of complete streams.
"""

import json
import sys
import tempfile
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "client" / "python"))
import inflight_client


def completion(task, request):
    body = {
        "prompt": request["prompt"],
        "max_tokens": request["max_tokens"],
        "seed": request["seed"],
        "temperature": 0.8,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    text, finished, usage = "", 0, None
    for event in inflight_client.stream_events(task["urls"], "/v1/completions", body, patience=60.0):
        chunk = json.loads(event.data)
        if "error" in chunk:
            raise RuntimeError(event.data)
        usage = chunk.get("usage") or usage
        for choice in chunk["choices"]:
            assert finished == 0, f"output after the end: {event.data}"
            text += choice["text"]
            finished += choice["finish_reason"] is not None
    assert finished == 1, f"{finished} ends"
    return text, usage["completion_tokens"]


def generator(task):
    """Returns the function that generates over gRPC, and its channels."""
    import grpc
    from grpc_tools import protoc

    generated = tempfile.mkdtemp()
    files = sorted(str(path) for path in Path(task["protos"], "inflight", "v1").glob("*.proto"))
    flags = [f"-I{task['protos']}", f"--python_out={generated}", f"--grpc_python_out={generated}"]
    if protoc.main(["protoc", *flags, *files]) != 0:
        sys.exit("protoc failed")
    sys.path.insert(0, generated)
    from inflight.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2

    options = [("grpc.max_reconnect_backoff_ms", 200), ("grpc.initial_reconnect_backoff_ms", 50)]
    channels = [grpc.insecure_channel(target, options=options) for target in task["targets"]]
    stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in channels]

    def generate(request):
        message = inference_pb2.GenerateRequest(
            text=request["prompt"],
            sampling=sampling_pb2.SamplingParams(temperature=0.8, seed=request["seed"]),
            stop=sampling_pb2.StopConditions(max_tokens=request["max_tokens"], ignore_eos=True),
        )
        text, usage = "", None
        for response in inflight_client.generate(stubs, message, patience=60.0):
            text += response.delta.text
            if response.WhichOneof("event") == "completed":
                usage = response.completed.usage
        return text, usage.completion_tokens

    return generate, channels


def main():
    task = json.load(sys.stdin)
    failures, complete, lock = [], [0] * len(task["requests"]), threading.Lock()
    run, channels = generator(task) if task.get("targets") else (lambda request: completion(task, request), [])

    def stream(number):
        turn = number
        while not failures and not Path(task["stop"]).exists():
            index = turn % len(task["requests"])
            request = task["requests"][index]
            try:
                text, tokens = run(request)
                assert text == request["text"], f"expected {request['text']!r}, got {text!r}"
                assert tokens == request["max_tokens"], f"{tokens} tokens"
            except Exception as failure:
                failures.append(f"request {index}: {failure!r}")
                return
            with lock:
                complete[index] += 1
            turn += 7

    threads = [threading.Thread(target=stream, args=(number,)) for number in range(task["streams"])]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for channel in channels:
        channel.close()
    if failures:
        sys.exit("\n".join(failures[:3]))
    print(json.dumps({"complete": complete}))


if __name__ == "__main__":
    main()
