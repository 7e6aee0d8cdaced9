"""Runs LiteLLM's proxy in front of a router, and calls both with openai and anthropic, all as they come from PyPI."""

import argparse
import contextlib
import json
import pathlib
import sys
import tempfile

import anthropic
import openai

import background


def configuration(url: str, model: str) -> str:
    """The proxy's configuration, in YAML, of which JSON is a part."""

    def served(name: str, behind: str, base: str) -> dict:
        return {"model_name": name, "litellm_params": {"model": behind, "api_base": base, "api_key": "none"}}

    models = [
        served("chat", f"openai/{model}", f"{url}/v1"),
        served("text", f"text-completion-openai/{model}", f"{url}/v1"),
        served("messages", f"anthropic/{model}", url),
        served("missing", "openai/no-such-model", f"{url}/v1"),
    ]
    # A failure reaches the client as it is, at once.
    router = {"num_retries": 0, "disable_cooldowns": True}
    settings = {"num_retries": 0, "telemetry": False}
    return json.dumps({"model_list": models, "router_settings": router, "litellm_settings": settings})


#: The proxy's own key.
KEY = "sk-proxy"


@contextlib.contextmanager
def running(url: str, model: str):
    """Runs the proxy in front of the router at `url`; yields the proxy's URL."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        config, log, port = folder / "config.yaml", folder / "litellm.log", background.free_port()
        config.write_text(configuration(url, model), encoding="utf-8")
        litellm = pathlib.Path(sys.executable).parent / "litellm"
        command = [str(litellm), "--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
        # Prices come with the package instead of from the network.
        environment = {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_MASTER_KEY": KEY}
        with open(log.with_suffix(".out"), "w", encoding="utf-8") as output:
            with background.process(command, log, environment, stdout=output) as child:
                proxied = f"http://127.0.0.1:{port}"
                background.wait_ready(f"{proxied}/health/readiness", child, log)
                yield proxied


def chat(client, model: str, arguments) -> dict:
    ask = {
        "model": model,
        "messages": [
            {"role": "system", "content": "Answer briefly."},
            {"role": "user", "content": f"{arguments.prompt} 🙂👩‍🚀"},
        ],
        "max_tokens": 24,
        "temperature": 0.8,
        "seed": arguments.seed,
    }
    create = client.chat.completions.create
    whole = create(**ask, n=3)
    text, reason, usage, ids = "", None, None, set()
    for chunk in create(**ask, stream=True, stream_options={"include_usage": True}):
        ids.add(chunk.id)
        for choice in chunk.choices:
            text += choice.delta.content or ""
            reason = choice.finish_reason or reason
        usage = chunk.usage or usage
    first = whole.choices[0].message.content
    stop = first[len(first) // 2 : len(first) // 2 + 3]
    stopped = create(**ask, stop=[stop]).choices[0]
    return {
        "texts": [choice.message.content for choice in whole.choices],
        "indices": [choice.index for choice in whole.choices],
        "reasons": [choice.finish_reason for choice in whole.choices],
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "streamed": text,
        "streamed_reason": reason,
        "streamed_usage": [usage.prompt_tokens, usage.completion_tokens],
        "ids": len(ids),
        "stop": stop,
        "stopped": [stopped.message.content, stopped.finish_reason],
    }


def completions(client, model: str, arguments) -> dict:
    ask = {
        "model": model,
        "prompt": arguments.prompt,
        "max_tokens": 24,
        "temperature": 0.8,
        "seed": arguments.seed,
        "extra_body": {"ignore_eos": True},
    }
    whole = client.completions.create(**ask)
    text, usage = "", None
    for chunk in client.completions.create(**ask, stream=True, stream_options={"include_usage": True}):
        text += "".join(choice.text or "" for choice in chunk.choices)
        usage = chunk.usage or usage
    return {
        "text": whole.choices[0].text,
        "reason": whole.choices[0].finish_reason,
        "usage": [whole.usage.prompt_tokens, whole.usage.completion_tokens],
        "streamed": text,
        "streamed_usage": [usage.prompt_tokens, usage.completion_tokens],
    }


def messages(client, model: str, arguments) -> dict:
    ask = {
        "model": model,
        "max_tokens": 24,
        "messages": [{"role": "user", "content": arguments.prompt}],
        "extra_body": {"temperature": 0},
    }
    whole = client.messages.create(**ask)
    with client.messages.stream(**ask) as stream:
        text = "".join(stream.text_stream)
    return {
        "text": whole.content[0].text,
        "reason": whole.stop_reason,
        "usage": [whole.usage.input_tokens, whole.usage.output_tokens],
        "streamed": text,
    }


def refusals(client, model: str, missing: str) -> dict:
    found = {}
    question = [{"role": "user", "content": "a"}]

    def refused(name, **ask):
        try:
            client.chat.completions.create(messages=question, **ask)
        except openai.APIStatusError as error:
            found[name] = [type(error).__name__, error.status_code]

    refused("model", model=missing)
    refused("temperature", model=model, temperature=-1)
    refused("streamed", model=model, temperature=-1, stream=True)
    refused("context", model=model, max_tokens=10**6)
    return found


def calls(url: str, key: str, names: dict[str, str], arguments) -> dict:
    """What the clients get at `url`, where the models have these `names`."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
    claude = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)
    return {
        "chat": chat(client, names["chat"], arguments),
        "completions": completions(client, names["text"], arguments),
        "messages": messages(claude, names["messages"], arguments),
        "refusals": refusals(client, names["chat"], names["missing"]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True, help="URL of a router's HTTP APIs")
    parser.add_argument("--model", required=True)
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--seed", type=int, required=True)
    arguments = parser.parse_args()
    names = {name: name for name in ("chat", "text", "messages", "missing")}
    with running(arguments.url, arguments.model) as url:
        proxied = calls(url, KEY, names, arguments)
    names = {name: arguments.model for name in ("chat", "text", "messages")}
    direct = calls(arguments.url, "none", {**names, "missing": "no-such-model"}, arguments)
    print(json.dumps({"direct": direct, "proxied": proxied}))


if __name__ == "__main__":
    main()
