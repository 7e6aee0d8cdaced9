"""Calls chat completions, completions, responses and models with openai, as it comes from PyPI."""

import argparse
import json

import openai


def completions(client, arguments) -> dict:
    ask = {
        "model": arguments.model,
        "prompt": arguments.prompt,
        "max_tokens": 24,
        "temperature": 0.8,
        "seed": arguments.seed,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**ask)
    pieces, usage, done = [], None, None
    for chunk in client.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        if chunk.choices:
            pieces.append(chunk.choices[0].text)
            done = chunk.choices[0].finish_reason or done
        usage = chunk.usage or usage
    echoed = client.completions.create(**{**ask, "prompt": [arguments.prompt, arguments.prompt]}, echo=True, n=2)
    scored = client.completions.create(**ask, logprobs=2)
    return {
        "text": whole.choices[0].text,
        "completion_tokens": whole.usage.completion_tokens,
        "fingerprint": whole.system_fingerprint,
        "streamed": "".join(pieces),
        "streamed_tokens": usage.completion_tokens,
        "cached_tokens": usage.prompt_tokens_details.cached_tokens,
        "finish_reason": done,
        "echoed": [choice.text for choice in echoed.choices],
        "indices": [choice.index for choice in echoed.choices],
        "scored": len(scored.choices[0].logprobs.token_logprobs),
    }


def chat(client, arguments) -> dict:
    ask = {
        "model": arguments.model,
        "messages": [
            {"role": "developer", "content": "Answer briefly. 🙂"},
            {"role": "user", "content": [{"type": "text", "text": arguments.prompt}]},
        ],
        "max_completion_tokens": 24,
        "seed": arguments.seed,
        "n": 3,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = client.chat.completions.create(**ask)
    texts, reasons = ["", "", ""], [None, None, None]
    for chunk in client.chat.completions.create(**ask, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            reasons[choice.index] = choice.finish_reason or reasons[choice.index]
    first = whole.choices[0].message.content
    stop = first[len(first) // 2 : len(first) // 2 + 3]
    stopped = client.chat.completions.create(**ask, stop=[stop])
    return {
        "texts": [choice.message.content for choice in whole.choices],
        "streamed": texts,
        "reasons": reasons,
        "whole_reasons": [choice.finish_reason for choice in whole.choices],
        "logprobs": all(one.top_logprobs for one in whole.choices[0].logprobs.content),
        "stop": stop,
        "stopped": stopped.choices[0].message.content,
    }


def responses(client, arguments) -> dict:
    ask = {
        "model": arguments.model,
        "instructions": "Answer briefly.",
        "input": arguments.prompt,
        "max_output_tokens": 24,
        "temperature": 0,
    }
    whole = client.responses.create(**ask)
    kinds, text, last = [], "", None
    for event in client.responses.create(**ask, stream=True):
        kinds.append(event.type)
        if event.type == "response.output_text.delta":
            text += event.delta
        last = event
    with client.responses.stream(**ask) as stream:
        done = [event.text for event in stream if event.type == "response.output_text.done"]
    return {
        "text": whole.output_text,
        "streamed": text,
        "final": "".join(done),
        "output_tokens": whole.usage.output_tokens,
        "first": kinds[0],
        "last": kinds[-1],
        "status": last.response.status,
    }


def refusals(client, arguments) -> dict:
    messages = [{"role": "user", "content": "a"}]
    found = {}

    def refused(name, call):
        try:
            call()
        except openai.APIStatusError as error:
            found[name] = [type(error).__name__, error.status_code, error.param, error.code]

    create = client.chat.completions.create
    refused("model", lambda: create(model="no-such-model", messages=messages))
    refused("temperature", lambda: create(model=arguments.model, messages=messages, temperature=-1))
    refused("context", lambda: create(model=arguments.model, messages=messages, max_tokens=10**6))
    tool = {"type": "function", "function": {"name": "f", "parameters": {}}}
    refused("tools", lambda: create(model=arguments.model, messages=messages, tools=[tool]))
    image = [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,"}}]}]
    refused("image", lambda: create(model=arguments.model, messages=image, stream=True))
    responses = client.responses.create
    refused("state", lambda: responses(model=arguments.model, input="a", previous_response_id="resp_1"))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="URL of a router's HTTP APIs")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    client = openai.OpenAI(base_url=f"{arguments.url}/v1", api_key="none", max_retries=0)
    models = list(client.models.list())
    answer = {
        "models": [model.id for model in models],
        "model": client.models.retrieve(arguments.model).id,
        "completions": completions(client, arguments),
        "chat": chat(client, arguments),
        "responses": responses(client, arguments),
        "refusals": refusals(client, arguments),
    }
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
