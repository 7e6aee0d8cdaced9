"""Client of Inflight whose streams survive the loss of any router.

`Client` generates over gRPC: text, tool calls, structured output. `stream_events` posts a request to an HTTP API and yields its
server-sent events; `generate` calls the gRPC RPC Generate with stubs of the caller. When a call breaks off, all three continue
the stream at the next router, from where it broke off: the caller sees one stream without gaps or repetitions.

`stream_events` needs the standard library alone; the others need grpcio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .grpc_stream import generate
from .http_events import Event, StatusError, stream_events

if TYPE_CHECKING:
    from .client import Choice, Client, Completion, Message, Model, Stream, Tool, ToolCall, Usage

_OF_CLIENT = ("Choice", "Client", "Completion", "Message", "Model", "Stream", "Tool", "ToolCall", "Usage")

__all__ = ["Event", "StatusError", "generate", "stream_events", *_OF_CLIENT]


def __getattr__(name: str) -> Any:
    # Imported on demand: it needs grpcio and the generated stubs.
    if name in _OF_CLIENT:
        from . import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
