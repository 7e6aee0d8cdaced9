"""Generates with tritonclient, as it comes from PyPI: one call, streams, and errors."""

import argparse
import json
import queue

import numpy as np
import tritonclient.grpc as triton
from google.protobuf.unknown_fields import UnknownFieldSet
from tritonclient.utils import InferenceServerException


def inputs(prompt: str, seed: int, stream: bool) -> list:
    def tensor(name, values, datatype):
        result = triton.InferInput(name, [1], datatype)
        result.set_data_from_numpy(np.array([values], dtype=triton_dtype[datatype]))
        return result

    triton_dtype = {"BYTES": np.object_, "INT32": np.int32, "FP32": np.float32, "UINT64": np.uint64, "BOOL": np.bool_}
    return [
        tensor("text_input", prompt.encode(), "BYTES"),
        tensor("max_tokens", 24, "INT32"),
        tensor("temperature", 0.8, "FP32"),
        tensor("seed", seed, "UINT64"),
        tensor("ignore_eos", True, "BOOL"),
        tensor("stream", stream, "BOOL"),
    ]


def text_of(result) -> str:
    return result.as_numpy("text_output")[0].decode()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", required=True, help="HOST:PORT of a router")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--api-key")
    arguments = parser.parse_args()
    headers = {"authorization": f"Bearer {arguments.api_key}"} if arguments.api_key else {}
    model = arguments.model

    answer = {}
    with triton.InferenceServerClient(arguments.target) as client:
        answer["live"] = client.is_server_live()
        answer["ready"] = client.is_server_ready()
        answer["model_ready"] = client.is_model_ready(model, headers=headers)
        answer["server"] = client.get_server_metadata(headers=headers).name
        metadata = client.get_model_metadata(model, headers=headers)
        answer["inputs"] = [tensor.name for tensor in metadata.inputs]
        answer["other_version_ready"] = client.is_model_ready(model, "9", headers=headers)
        config = client.get_model_config(model, headers=headers).config
        answer["config_inputs"] = [tensor.name for tensor in config.input]
        answer["decoupled"] = config.model_transaction_policy.decoupled
        index = client.get_model_repository_index(headers=headers)
        answer["index"] = [[entry.name, entry.version, entry.state] for entry in index.models]

        whole = client.infer(model, inputs(arguments.prompt, arguments.seed, False), request_id="one", headers=headers)
        answer["text"] = text_of(whole)
        answer["id"] = whole.get_response().id
        answer["completion_tokens"] = whole.get_response().parameters["completion_tokens"].int64_param

        # Three requests on one stream: two that stream, and between them one that cannot be served.
        results = queue.Queue()
        client.start_stream(callback=lambda result, error: results.put((result, error)), headers=headers)
        streamed = inputs(arguments.prompt, arguments.seed, True)
        bad = [triton.InferInput("text_input", [1], "BYTES")]
        bad[0].set_data_from_numpy(np.array([b""], dtype=np.object_))
        for request_id, tensors in (("a", streamed), ("bad", bad), ("b", streamed)):
            client.async_stream_infer(model, tensors, request_id=request_id, enable_empty_final_response=True)
        texts, pieces, errors, final = {"a": "", "b": ""}, 0, [], set()
        while len(final) < 2 or not errors:
            result, error = results.get(timeout=60)
            if error is not None:
                errors.append(str(error))
                continue
            response = result.get_response()
            texts[response.id] += text_of(result)
            pieces += 1
            if response.parameters["triton_final_response"].bool_param:
                final.add(response.id)
        client.stop_stream()
        answer.update(streamed=texts, pieces=pieces, stream_errors=errors)

        try:
            client.infer("no-such-model", inputs(arguments.prompt, 1, False), headers=headers)
        except InferenceServerException as error:
            answer["unknown_model"] = error.status()
        try:
            client.infer(model, inputs(arguments.prompt, 1, False), model_version="9", headers=headers)
        except InferenceServerException as error:
            answer["unknown_version"] = error.status()
        statistics = client.get_inference_statistics(model, headers=headers).model_stats[0]
        answer["completed"] = statistics.inference_stats.success.count
        # The numbers and names of the messages are those of Triton's own descriptors.
        answer["unknown_fields"] = len(UnknownFieldSet(statistics)) + len(UnknownFieldSet(config)) + len(UnknownFieldSet(index))
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
