"""Typed client over gRPC."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Union

import grpc

from inflight.v1 import inference_pb2, inference_pb2_grpc, sampling_pb2

from .attempts import PATIENCE_SECONDS
from .grpc_stream import CurrentCall, generate


@dataclasses.dataclass(frozen=True)
class ToolCall:
    """Call of a tool by the model."""

    id: str
    name: str
    arguments: str
    """Text of a JSON object."""


@dataclasses.dataclass(frozen=True)
class Message:
    """Message of a conversation."""

    role: str
    """`system`, `user`, `assistant` or `tool`."""
    content: str
    tool_calls: Sequence[ToolCall] = ()
    """Calls of an assistant's message."""
    tool_call_id: str = ""
    """The call that a tool's message answers."""


@dataclasses.dataclass(frozen=True)
class Tool:
    """Tool that the model may call."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """JSON schema of the arguments."""
    strict: bool = False
    """Whether the arguments are constrained to the schema."""


@dataclasses.dataclass(frozen=True)
class Usage:
    """Counted tokens of a request."""

    prompt_tokens: int
    cached_prompt_tokens: int
    completion_tokens: int


@dataclasses.dataclass(frozen=True)
class Choice:
    """Finished output."""

    text: str
    reasoning: str
    tool_calls: list[ToolCall]
    token_ids: list[int]
    finish_reason: str
    """`stop` or `length`."""


@dataclasses.dataclass(frozen=True)
class Completion:
    """Finished outputs of a request."""

    choices: list[Choice]
    usage: Usage
    model: str
    request_id: str
    seed: int
    """With this seed and the same fingerprint, the same request has the same tokens."""
    fingerprint: str
    """Numerics fingerprint of the worker that generated the last tokens."""
    fingerprints_changed: bool
    """Whether earlier tokens are of workers with other fingerprints: then the request cannot be repeated exactly."""

    @property
    def text(self) -> str:
        """Text of the first choice."""
        return self.choices[0].text


@dataclasses.dataclass(frozen=True)
class Model:
    """Served model."""

    name: str
    context_tokens: int
    vocab_size: int
    workers: int


Prompt = Union[str, Sequence[Message], Sequence[int]]
"""A text, which the model continues; a conversation; or token ids."""


class _Choice:
    def __init__(self) -> None:
        self.text, self.reasoning, self.finish_reason = "", "", ""
        self.token_ids: list[int] = []
        self.calls: dict[int, list[str]] = {}

    def add(self, part: Any) -> None:
        self.text += part.text
        self.reasoning += part.reasoning
        for call in part.tool_calls:
            fields = self.calls.setdefault(call.index, ["", "", ""])
            for at, new in enumerate((call.id, call.name, call.arguments)):
                fields[at] += new
            if call.cut:
                # The output ended within it, or it was malformed: it was not made.
                del self.calls[call.index]

    def finished(self) -> Choice:
        calls = [ToolCall(*self.calls[index]) for index in sorted(self.calls)]
        return Choice(self.text, self.reasoning, calls, self.token_ids, self.finish_reason)


class Stream(Iterator[str]):
    """Pieces of the first choice's text, in order. `completion` is there once they have ended.

    The call begins with the first piece that is asked for. A stream that is not read to its end should be closed, as by `with`.
    """

    def __init__(self, responses: Iterator[Any], choices: int, call: CurrentCall) -> None:
        self._responses = responses
        self._call = call
        self._fingerprint = ""
        self._changed = False
        self._choices = [_Choice() for _ in range(choices)]
        self._started: Any = None
        self.completion: Completion | None = None
        """All outputs, after the last piece."""

    def __next__(self) -> str:
        for response in self._responses:
            event = response.WhichOneof("event")
            if event == "started":
                self._started, self._fingerprint = response.started, response.started.fingerprint
            elif event == "fingerprint_changed":
                self._fingerprint, self._changed = response.fingerprint_changed.fingerprint, True
            elif event in ("delta", "finished"):
                part = getattr(response, event)
                choice = self._choices[part.choice]
                choice.add(part)
                if event == "delta":
                    choice.token_ids.extend(part.token_ids)
                else:
                    name = sampling_pb2.FinishReason.Name(part.reason)
                    choice.finish_reason = name.removeprefix("FINISH_REASON_").lower()
                if part.choice == 0 and part.text:
                    return part.text
            elif event == "completed":
                usage = response.completed.usage
                self.completion = Completion(
                    [choice.finished() for choice in self._choices],
                    Usage(usage.prompt_tokens, usage.cached_prompt_tokens, usage.completion_tokens),
                    self._started.model,
                    self._started.request_id,
                    self._started.seed,
                    self._fingerprint,
                    self._changed,
                )
        raise StopIteration

    def close(self) -> None:
        """Cancels what is not finished. A thread that waits for a piece meanwhile gets grpc.RpcError with CANCELLED."""
        self._call.cancel()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Client:
    """Client of one or several routers: a stream that breaks off at one continues at the next, with the same tokens.

    `routers` are addresses of gRPC such as `127.0.0.1:8650`. `credentials` are those of TLS (`grpc.ssl_channel_credentials()`);
    without them the connection is plain text. `patience` is how long a stream may go without a message while no router
    continues it, in seconds. Failures are `grpc.RpcError`, with the status and message of the router, or `ConnectionError` if a stream
    broke off that no router continued. A client may be used by several threads, a stream by one.
    """

    def __init__(
        self,
        routers: str | Sequence[str],
        *,
        api_key: str | None = None,
        credentials: grpc.ChannelCredentials | None = None,
        patience: float = PATIENCE_SECONDS,
    ) -> None:
        addresses = [routers] if isinstance(routers, str) else list(routers)
        if not addresses:
            raise ValueError("routers is empty; give the address of at least one router, such as 127.0.0.1:8650")
        # A router that was down is tried again soon; answers of log probabilities are large.
        options = [("grpc.initial_reconnect_backoff_ms", 50), ("grpc.max_reconnect_backoff_ms", 1000), ("grpc.max_receive_message_length", 64 << 20),
                   # Of a machine that has vanished nothing else tells.
                   ("grpc.keepalive_time_ms", 20_000), ("grpc.keepalive_timeout_ms", 10_000)]
        self._channels = [
            grpc.insecure_channel(address, options) if credentials is None else grpc.secure_channel(address, credentials, options)
            for address in addresses
        ]
        self._stubs = [inference_pb2_grpc.InferenceStub(channel) for channel in self._channels]
        self._metadata = [("authorization", f"Bearer {api_key}")] if api_key else []
        self._patience = patience

    def stream(
        self,
        prompt: Prompt,
        *,
        model: str = "",
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        min_p: float | None = None,
        seed: int | None = None,
        n: int = 1,
        stop: Sequence[str] = (),
        json_schema: Mapping[str, Any] | None = None,
        regex: str | None = None,
        tools: Sequence[Tool] = (),
        tool_choice: str = "auto",
        require_fingerprint: str = "",
        priority: int = 0,
        timeout: float | None = None,
    ) -> Stream:
        """Generates, and yields the text as it comes.

        What is None is the default of the model. The output matches `json_schema` or `regex`, if given. `tool_choice` is `auto`,
        `none`, `required` or the name of a tool. `timeout` is the deadline of the whole stream in seconds.
        """
        constraint = None
        if json_schema is not None:
            constraint = sampling_pb2.Constraint(json_schema=json.dumps(json_schema))
        if regex is not None:
            if constraint is not None:
                raise ValueError("json_schema and regex exclude each other")
            constraint = sampling_pb2.Constraint(regex=regex)
        sampling = sampling_pb2.SamplingParams(
            temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seed=seed, n=n, constraint=constraint
        )
        request = inference_pb2.GenerateRequest(
            model=model,
            sampling=sampling,
            stop=sampling_pb2.StopConditions(max_tokens=max_tokens, stop=stop),
            require_fingerprint=require_fingerprint,
            priority=priority,
            **_input(prompt),
        )
        if tools:
            request.tools.CopyFrom(_tool_use(tools, tool_choice))
        elif tool_choice not in ("auto", "none"):
            raise ValueError(f"tool_choice is {tool_choice!r}, but no tools are given")
        # Reasoning apart from the text; what a plain text continues has no format.
        request.parse_output = request.HasField("chat")
        calls = CurrentCall()
        responses = generate(self._stubs, request, self._patience, timeout, self._metadata, calls)
        return Stream(responses, n, calls)

    def complete(self, prompt: Prompt, **options: Any) -> Completion:
        """Generates with the options of `stream`, and returns all outputs when they have finished."""
        stream = self.stream(prompt, **options)
        for _ in stream:
            pass
        if stream.completion is None:
            raise ConnectionError("the stream ended before it was complete")
        return stream.completion

    def models(self) -> list[Model]:
        """Lists the models that a router serves."""
        answer = self._any("ListModels", inference_pb2.ListModelsRequest())
        return [Model(model.name, model.context_tokens, model.vocab_size, model.workers) for model in answer.models]

    def close(self) -> None:
        """Closes the connections."""
        for channel in self._channels:
            channel.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _any(self, method: str, request: Any) -> Any:
        """Calls the first router that is there."""
        for stub in self._stubs[:-1]:
            try:
                return getattr(stub, method)(request, metadata=self._metadata)
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    raise
        return getattr(self._stubs[-1], method)(request, metadata=self._metadata)


def _input(prompt: Prompt) -> dict[str, Any]:
    if isinstance(prompt, str):
        return {"text": prompt}
    if isinstance(prompt, (bytes, bytearray)):
        raise TypeError("the prompt is bytes; decode it to a text")
    items = list(prompt)
    if items and all(isinstance(item, int) for item in items):
        return {"token_ids": inference_pb2.TokenIds(ids=items)}
    if not items or not all(isinstance(item, Message) for item in items):
        raise TypeError("the prompt must be a text, a list of Message, or a list of token ids, and not empty")
    messages = []
    for item in items:
        calls = [inference_pb2.ToolCall(id=call.id, name=call.name, arguments=call.arguments) for call in item.tool_calls]
        message = inference_pb2.ChatMessage(role=item.role, content=item.content, tool_calls=calls, tool_call_id=item.tool_call_id)
        messages.append(message)
    return {"chat": inference_pb2.Chat(messages=messages)}


def _tool_use(tools: Sequence[Tool], choice: str) -> Any:
    use = inference_pb2.ToolUse()
    for tool in tools:
        parameters = json.dumps(tool.parameters) if tool.parameters else ""
        use.tools.add(name=tool.name, description=tool.description, parameters=parameters, strict=tool.strict)
    kinds = {"auto": inference_pb2.TOOL_CHOICE_UNSPECIFIED, "none": inference_pb2.TOOL_CHOICE_NONE, "required": inference_pb2.TOOL_CHOICE_REQUIRED}
    if choice in kinds:
        use.choice = kinds[choice]
    else:
        if choice not in {tool.name for tool in tools}:
            raise ValueError(f"tool_choice is {choice!r}; it must be auto, none, required or the name of a tool")
        use.choice, use.name = inference_pb2.TOOL_CHOICE_REQUIRED, choice
    return use
