"""Calls a router whose worker is scripted, with one client as it comes from its registry: an emoji that is split over tokens, a
stop string that is split over events, three choices, a refusal before the response headers, and a failure after them."""

import argparse
import json

#: The scripted worker fails a request with this word in its prompt after some output.
BREAKS = "FAIL"
STOP = "STOP"


def result(whole, choices, stopped, streamed, stream_stopped, refused, broken) -> dict:
    """`stopped` and `stream_stopped` are [text, reason]; `streamed` is a list of pieces; `broken` is [text so far, error]."""
    return {
        "whole": whole,
        "choices": choices,
        "stopped": stopped,
        "streamed": "".join(streamed),
        "pieces": len([piece for piece in streamed if piece]),
        "stream_stopped": stream_stopped,
        "refused": refused,
        "broken": broken,
    }


def caught(call) -> list:
    """The class of the error that `call` raises, and its HTTP status."""
    try:
        call()
    except Exception as error:  # noqa: BLE001 - which error it is, is the answer
        return [type(error).__name__, getattr(error, "status_code", None)]
    raise AssertionError("no error was raised")


def until_error(pieces) -> list:
    """What an iterator yields until it raises, and the class of the error."""
    text = ""
    try:
        for piece in pieces:
            text += piece
    except Exception as error:  # noqa: BLE001
        return [text, type(error).__name__]
    raise AssertionError(f"the stream ended without an error after {text!r}")


def openai_chat(url: str, model: str, key: str = "none") -> dict:
    import openai

    create = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0).chat.completions.create

    def ask(prompt="Hello", **more):
        return create(model=model, messages=[{"role": "user", "content": prompt}], max_tokens=99, **more)

    def pieces(**more):
        for chunk in ask(stream=True, **more):
            for choice in chunk.choices:
                reasons.append(choice.finish_reason)
                yield choice.delta.content or ""

    reasons = []
    streamed = list(pieces())
    reasons.clear()
    stopped = "".join(pieces(stop=[STOP]))
    stopped = [stopped, [reason for reason in reasons if reason][-1]]
    choice = ask(stop=STOP).choices[0]
    return result(
        ask().choices[0].message.content,
        [one.message.content for one in sorted(ask(n=3).choices, key=lambda one: one.index)],
        [choice.message.content, choice.finish_reason],
        streamed,
        stopped,
        caught(lambda: ask(temperature=-1, stream=True)),
        until_error(pieces(prompt=BREAKS)),
    )


def openai_completions(url: str, model: str) -> dict:
    import openai

    create = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).completions.create

    def ask(prompt="Hello", **more):
        return create(model=model, prompt=prompt, max_tokens=99, **more)

    def pieces(**more):
        for chunk in ask(stream=True, **more):
            for choice in chunk.choices:
                reasons.append(choice.finish_reason)
                yield choice.text

    reasons = []
    streamed = list(pieces())
    reasons.clear()
    stopped = "".join(pieces(stop=[STOP]))
    stopped = [stopped, [reason for reason in reasons if reason][-1]]
    choice = ask(stop=STOP).choices[0]
    return result(
        ask().choices[0].text,
        [one.text for one in sorted(ask(n=3).choices, key=lambda one: one.index)],
        [choice.text, choice.finish_reason],
        streamed,
        stopped,
        caught(lambda: ask(temperature=-1, stream=True)),
        until_error(pieces(prompt=BREAKS)),
    )


def openai_responses(url: str, model: str) -> dict:
    """The API has neither stop strings nor choices."""
    import openai

    create = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0).responses.create

    def ask(prompt="Hello", **more):
        return create(model=model, input=prompt, max_output_tokens=99, **more)

    def pieces(**more):
        for event in ask(stream=True, **more):
            if event.type == "response.output_text.delta":
                yield event.delta
            if event.type == "response.failed":
                raise RuntimeError(event.response.error.message)

    refused = caught(lambda: ask(temperature=-1, stream=True))
    return result(ask().output_text, None, None, list(pieces()), None, refused, until_error(pieces(prompt=BREAKS)))


def anthropic_messages(url: str, model: str) -> dict:
    """The API has no choices."""
    import anthropic

    client = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)

    def question(prompt="Hello", **more):
        return {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 99, **more}

    def pieces(**more):
        with client.messages.stream(**question(**more)) as stream:
            yield from stream.text_stream
            reasons.append(stream.get_final_message().stop_reason)

    reasons = []
    streamed = list(pieces())
    stopped = "".join(pieces(stop_sequences=[STOP]))
    whole = client.messages.create(**question(stop_sequences=[STOP]))
    return result(
        client.messages.create(**question()).content[0].text,
        None,
        [whole.content[0].text, whole.stop_reason],
        streamed,
        [stopped, reasons[-1]],
        caught(lambda: client.messages.create(**question(extra_body={"temperature": -1}), stream=True)),
        until_error(pieces(prompt=BREAKS)),
    )


def langchain(url: str, model: str) -> dict:
    from langchain_core.messages import HumanMessage
    from langchain_openai import ChatOpenAI

    def chain(**more):
        return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=model, max_tokens=99, max_retries=0, **more)

    def pieces(prompt="Hello", **more):
        for piece in chain().stream(prompt, **more):
            reasons.append(piece.response_metadata.get("finish_reason"))
            yield piece.content

    reasons = []
    streamed = list(pieces())
    reasons.clear()
    stopped = "".join(pieces(stop=[STOP]))
    stopped = [stopped, [reason for reason in reasons if reason][-1]]
    whole = chain().invoke("Hello", stop=[STOP])
    return result(
        chain().invoke("Hello").content,
        [one.text for one in chain(n=3).generate([[HumanMessage("Hello")]]).generations[0]],
        [whole.content, whole.response_metadata["finish_reason"]],
        streamed,
        stopped,
        caught(lambda: list(chain(temperature=-1).stream("Hello"))),
        until_error(pieces(BREAKS)),
    )


def llama_index(url: str, model: str) -> dict:
    from llama_index.core.llms import ChatMessage
    from llama_index.llms.openai_like import OpenAILike

    def index(**more):
        return OpenAILike(
            model=model,
            api_base=f"{url}/v1",
            api_key="none",
            is_chat_model=True,
            context_window=256,
            max_tokens=99,
            max_retries=0,
            additional_kwargs=more,
        )

    def question(prompt="Hello"):
        return [ChatMessage(role="user", content=prompt)]

    def pieces(prompt="Hello", **more):
        for piece in index(**more).stream_chat(question(prompt)):
            reasons.extend(choice.finish_reason for choice in piece.raw.choices)
            yield piece.delta or ""

    reasons = []
    streamed = list(pieces())
    reasons.clear()
    stopped = "".join(pieces(stop=[STOP]))
    stopped = [stopped, [reason for reason in reasons if reason][-1]]
    whole = index(stop=[STOP]).chat(question())
    three = index(n=3).chat(question()).raw.choices
    return result(
        index().chat(question()).message.content,
        [one.message.content for one in sorted(three, key=lambda one: one.index)],
        [whole.message.content, whole.raw.choices[0].finish_reason],
        streamed,
        stopped,
        # It checks temperatures itself.
        caught(lambda: list(index(top_p=-1).stream_chat(question()))),
        until_error(pieces(BREAKS)),
    )


def tritonclient(target: str, model: str) -> dict:
    """One text output for each choice; errors within a stream have no class of their own."""
    import queue

    import numpy as np
    import tritonclient.grpc as triton

    def inputs(prompt="Hello", stream=False, **more):
        tensors = []
        values = {"text_input": prompt, "max_tokens": 99, "stream": stream, **more}
        for name, value in values.items():
            datatype, kind = {str: ("BYTES", np.object_), bool: ("BOOL", np.bool_), int: ("INT32", np.int32), float: ("FP32", np.float32)}[
                type(value)
            ]
            tensor = triton.InferInput(name, [1], datatype)
            tensor.set_data_from_numpy(np.array([value.encode() if isinstance(value, str) else value], dtype=kind))
            tensors.append(tensor)
        return tensors

    with triton.InferenceServerClient(target) as client:

        def whole(**more):
            answer = client.infer(model, inputs(**more))
            return answer, [text.decode() for text in answer.as_numpy("text_output")]

        def pieces(**more):
            results = queue.Queue()
            client.start_stream(callback=lambda result, error: results.put((result, error)))
            try:
                client.async_stream_infer(model, inputs(stream=True, **more), enable_empty_final_response=True)
                final = False
                while not final:
                    answer, error = results.get(timeout=60)
                    if error is not None:
                        raise error
                    parameters = answer.get_response().parameters
                    final = parameters["triton_final_response"].bool_param
                    if "finish_reason" in parameters:
                        reasons.append(parameters["finish_reason"].string_param)
                    if len(answer.as_numpy("text_output")):
                        yield answer.as_numpy("text_output")[0].decode()
            finally:
                client.stop_stream()

        reasons = []
        streamed = list(pieces())
        reasons.clear()
        stopped = "".join(pieces(stop=STOP))
        answer, texts = whole(stop=STOP)
        return result(
            whole()[1][0],
            whole(n=3)[1],
            [texts[0], answer.get_response().parameters["finish_reason"].string_param],
            streamed,
            [stopped, [reason for reason in reasons if reason][-1]],
            caught(lambda: list(pieces(temperature=-1.0))),
            until_error(pieces(prompt=BREAKS)),
        )


def litellm(url: str, model: str) -> dict:
    """openai behind LiteLLM's proxy."""
    import litellm_proxy

    with litellm_proxy.running(url, model) as proxied:
        return openai_chat(proxied, "chat", litellm_proxy.KEY)


CLIENTS = {
    "openai chat": openai_chat,
    "openai completions": openai_completions,
    "openai responses": openai_responses,
    "anthropic": anthropic_messages,
    "langchain": langchain,
    "llama_index": llama_index,
    "tritonclient": tritonclient,
    "litellm": litellm,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--client", required=True, choices=CLIENTS)
    parser.add_argument("--server", required=True, help="URL of a router's HTTP APIs; HOST:PORT of its gRPC for tritonclient")
    parser.add_argument("--model", required=True)
    arguments = parser.parse_args()
    print(json.dumps(CLIENTS[arguments.client](arguments.server, arguments.model)))


if __name__ == "__main__":
    main()
