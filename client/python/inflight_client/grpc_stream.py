"""Messages of the gRPC RPC Generate, resumed at another router where a call breaks off."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from .attempts import PATIENCE_SECONDS, Attempts


class CurrentCall:
    """The call of a stream that is under way, to cancel it from another thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._call: Any = None
        self._cancelled = False

    def begins(self, call: Any) -> None:
        with self._lock:
            self._call = call
            if self._cancelled:
                call.cancel()

    def cancel(self) -> None:
        """Cancels the call, and those that would continue its stream."""
        with self._lock:
            self._cancelled = True
            if self._call is not None:
                self._call.cancel()


def generate(
    stubs: Sequence[Any],
    request: Any,
    patience: float = PATIENCE_SECONDS,
    timeout: float | None = None,
    metadata: Sequence[tuple[str, str]] | None = None,
    current: CurrentCall | None = None,
) -> Iterator[Any]:
    """Calls Generate at the first of `stubs`, one for each router, and yields its messages up to `completed`.

    `request` is a GenerateRequest, which is not changed. Raises grpc.RpcError for a status that is final, and the last one
    if no router has continued the stream within `patience` seconds. `timeout` is the deadline of the whole stream in
    seconds.
    """
    import grpc

    message = type(request)()
    message.CopyFrom(request)
    message.resumable = True
    deadline = None if timeout is None else time.monotonic() + timeout
    choices = [[] for _ in range(request.sampling.n or 1)]
    attempts = Attempts(len(stubs), patience)
    cursor, started = b"", False
    for stub in itertools.cycle(stubs):
        if cursor:
            message.ClearField("resume")
            message.resume.cursor = cursor
            for ids in choices:
                message.resume.choices.add().ids.extend(ids)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        call = stub.Generate(message, timeout=left, metadata=metadata)
        if current is not None:
            current.begins(call)
        try:
            for response in call:
                attempts.progress()
                event = response.WhichOneof("event")
                if event in ("started", "delta", "finished"):
                    cursor = getattr(response, event).cursor
                if event == "started" and started:
                    continue
                started = started or event == "started"
                if event == "delta":
                    choices[response.delta.choice].extend(response.delta.token_ids)
                yield response
                if event == "completed":
                    return
            if (started and not cursor) or not attempts.failed():
                raise ConnectionError("the stream ended before it was complete")
        except grpc.RpcError as error:
            retried = {grpc.StatusCode.UNAVAILABLE}
            if cursor:
                retried |= {grpc.StatusCode.RESOURCE_EXHAUSTED}
            # Errors of the connection, which no router has sent.
            if error.code() not in retried and not _is_broken(error):
                raise
            # Without a cursor the router cannot resume it, as with log probabilities of the prompt.
            if (started and not cursor) or not attempts.failed():
                raise
        finally:
            call.cancel()
            # The error is the call, and its traceback holds this frame. A call in a cycle may be collected at the end of the
            # process, where grpcio waits for a lock that nobody releases.
            del call


def _is_broken(error):
    details = error.details() or ""
    return any(text in details for text in ("Connection reset", "Socket closed", "RST_STREAM", "GOAWAY", "recvmsg"))
