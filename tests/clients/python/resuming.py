"""Reads streams with client/python while routers and workers are killed, and compares them.

Standard input is a JSON object. With `urls` of routers, each of `requests` has `path` and `body`, and the expected `text` and
`completion_tokens`; with `expect` they are asked for once, unstreamed, and printed as `results`. For gRPC there are `targets`
and `protos`, and each request has `prompt`, `max_tokens`, `seed` and `text`. `streams` is the number of threads, `stop` a file
whose appearance ends the work. Prints the numbers of complete streams, and by path the numbers of requests that resumed one.
"""

import collections
import http.client
import json
import sys
import tempfile
import threading
import urllib.request
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "client" / "python"))
import inflight_client


def whole(url, request):
    """Returns the text and the token counts of a response in one piece."""
    call = urllib.request.Request(
        url + request["path"], json.dumps(request["body"]).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(call, timeout=120) as response:
        answer = json.load(response)
    usage = answer["usage"]
    if request["path"] == "/v1/responses":
        text = answer["output"][0]["content"][0]["text"]
        prompt, output = usage["input_tokens"], usage["output_tokens"]
    elif request["path"] == "/v1/messages":
        text = answer["content"][0]["text"]
        prompt, output = usage["input_tokens"] + usage["cache_read_input_tokens"], usage["output_tokens"]
    else:
        choice = answer["choices"][0]
        text = choice["text"] if "text" in choice else choice["message"]["content"]
        prompt, output = usage["prompt_tokens"], usage["completion_tokens"]
    return {"text": text, "prompt_tokens": prompt, "completion_tokens": output}


def streamed(task, request, number):
    """Returns the text and the number of output tokens of a stream that begins at one of the routers."""
    first = number % len(task["urls"])
    urls = task["urls"][first:] + task["urls"][:first]
    text, ends, tokens = "", 0, None
    for event in inflight_client.stream_events(urls, request["path"], request["body"], patience=60.0):
        data = json.loads(event.data)
        if "error" in data or event.name in ("error", "response.failed"):
            raise RuntimeError(event.data)
        piece, end = "", False
        if request["path"] == "/v1/responses":
            piece = data["delta"] if event.name == "response.output_text.delta" else ""
            end = event.name in ("response.completed", "response.incomplete")
            if end:
                tokens = data["response"]["usage"]["output_tokens"]
                assert data["response"]["output"][0]["content"][0]["text"] == text, event.data
        elif request["path"] == "/v1/messages":
            piece = data["delta"]["text"] if event.name == "content_block_delta" else ""
            end = event.name == "message_stop"
            tokens = data["usage"]["output_tokens"] if event.name == "message_delta" else tokens
        else:
            tokens = (data.get("usage") or {}).get("completion_tokens", tokens)
            for choice in data["choices"]:
                piece += choice["text"] if "text" in choice else choice["delta"].get("content") or ""
                end = choice["finish_reason"] is not None
        assert ends == 0 or not (piece or end), f"output after the end: {event.data}"
        text += piece
        ends += end
    assert ends == 1, f"{ends} ends"
    return text, tokens


def count_resumed():
    """Counts the requests that resume a stream, by path."""
    counts, lock, request = collections.Counter(), threading.Lock(), http.client.HTTPConnection.request

    def counted(connection, method, path, body, headers):
        if "last-event-id" in headers:
            with lock:
                counts[path] += 1
        return request(connection, method, path, body, headers)

    http.client.HTTPConnection.request = counted
    return counts


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
    if task.get("expect"):
        print(json.dumps({"results": [whole(task["urls"][0], request) for request in task["requests"]]}))
        return
    failures, complete, lock = [], [0] * len(task["requests"]), threading.Lock()
    resumed, channels = count_resumed(), []
    if task.get("targets"):
        generate, channels = generator(task)

    def stream(number):
        turn = number
        while not failures and not Path(task["stop"]).exists():
            index = turn % len(task["requests"])
            request = task["requests"][index]
            try:
                text, tokens = generate(request) if channels else streamed(task, request, number)
                assert text == request["text"], f"expected {request['text']!r}, got {text!r}"
                expected = request["max_tokens"] if channels else request["completion_tokens"]
                assert tokens == expected, f"{tokens} tokens"
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
    print(json.dumps({"complete": complete, "resumed": resumed}))


if __name__ == "__main__":
    main()
