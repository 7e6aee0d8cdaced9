"""Streams that survive the loss of any router.

`stream_events` posts a request to an HTTP API and yields its server-sent events; `generate` calls the gRPC RPC Generate and
yields its messages. When a call breaks off, both continue the stream at the next router, from where it broke off: the caller
sees one stream without gaps or repetitions. HTTP needs nothing beside the standard library; gRPC needs grpcio and the stubs
that grpcio-tools generates from proto/.
"""

import collections
import http.client
import itertools
import json
import time
import urllib.parse

Event = collections.namedtuple("Event", "name data")
Event.__doc__ = "A server-sent event: its name, or None, and its data."

PATIENCE_SECONDS = 30.0
BACKOFF_SECONDS = (0.02, 1.0)
# The status of a limit is final for a new request; a stream that has begun waits for it.
RETRIED_STATUSES = {502, 503, 504}
RETRIED_ONCE_BEGUN = {429}


class StatusError(Exception):
    """A response with an error status, which no other router can mend."""

    def __init__(self, status, body):
        super().__init__(f"status {status}: {body}")
        self.status = status
        self.body = body


class _Attempts:
    """Pauses between attempts, until no message has come for the patience."""

    def __init__(self, routers, patience):
        self.routers = routers
        self.patience = patience
        self.failures = 0
        self.since = None

    def progress(self):
        self.failures = 0
        self.since = None

    def failed(self):
        """Waits for the next attempt; returns False if there is none."""
        now = time.monotonic()
        self.since = now if self.since is None else self.since
        self.failures += 1
        least, most = BACKOFF_SECONDS
        pause = min(most, least * 2 ** min(self.failures - 1, 16))
        if now + pause > self.since + self.patience:
            return False
        # The next of several routers is tried at once.
        if self.failures >= self.routers:
            time.sleep(pause)
        return True


def stream_events(urls, path, body, headers=None, patience=PATIENCE_SECONDS, timeout=300.0):
    """Posts `body`, a dictionary, with `stream` set to `path` of the first of `urls` that answers, and yields its events.

    `data: [DONE]` ends the stream and is not yielded. An error event that is not final, as of an overloaded router, is not
    yielded either: the stream continues. One that is final is yielded, and ends the stream. Raises StatusError for an error that is final, and the last failure
    if no router has continued the stream within `patience` seconds. `timeout` is the longest silence on a connection, in
    seconds; routers send comments while nothing is generated.
    """
    payload = json.dumps({**body, "stream": True}).encode()
    headers = {"content-type": "application/json", **(headers or {})}
    attempts = _Attempts(len(urls), patience)
    last_id, begun, failed = None, False, False
    for url in itertools.cycle(urls):
        connection = None
        try:
            connection = _connect(url, timeout)
            resume = {"last-event-id": last_id} if last_id else {}
            connection.request("POST", _path(url, path), payload, {**headers, **resume})
            response = connection.getresponse()
            if response.status != 200:
                text = response.read().decode("utf-8", "replace")
                final = StatusError(response.status, text)
                retried = RETRIED_STATUSES | (RETRIED_ONCE_BEGUN if last_id else set())
                if response.status not in retried:
                    raise final
                raise ConnectionError(str(final))
            # A resumed response has the ids of the first.
            request_id = response.getheader("x-request-id")
            if request_id:
                headers.setdefault("x-request-id", request_id)
            for event_id, event in _parse(response):
                if event.data == "[DONE]":
                    return
                last_id = event_id or last_id
                error = None if failed else _error(event)
                if error is not None and _RETRIED_ERRORS & {error.get("code"), error.get("type")}:
                    raise ConnectionError(event.data)
                attempts.progress()
                begun, failed = True, failed or error is not None
                yield event
                if _is_last(event):
                    return
            if failed:
                return
            raise ConnectionError("the stream ended before it was complete")
        except (OSError, http.client.HTTPException):
            if failed:
                return
            # Without an id the stream cannot be resumed, as that of several prompts.
            if (begun and not last_id) or not attempts.failed():
                raise
        finally:
            if connection is not None:
                connection.close()


def _connect(url, timeout):
    parts = urllib.parse.urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    return kind(parts.hostname, parts.port, timeout=timeout)


def _path(url, path):
    return urllib.parse.urlsplit(url).path.rstrip("/") + path


# Codes of OpenAI's errors, and the type of Anthropic's, after which another router, or the same one later, may continue a stream.
_RETRIED_ERRORS = {"unavailable", "overloaded", "overloaded_error"}
_LAST_EVENTS = {"message_stop", "response.completed", "response.incomplete", "response.failed"}


def _error(event):
    """Returns the error that an event reports, or None."""
    if event.name == "error" or (event.name is None and event.data.startswith('{"error"')):
        data = json.loads(event.data)
        # That of /v1/responses is the event itself.
        return data.get("error", data)
    return None


def _is_last(event):
    """Whether an event ends a stream without [DONE]. An error of /v1/responses is followed by response.failed."""
    return event.name in _LAST_EVENTS or (_error(event) is not None and "error" in json.loads(event.data))


def _parse(lines):
    """Yields the events of a response with their ids; an event that is cut off is not yielded."""
    event_id, name, data = None, None, []
    for line in lines:
        line = line.decode("utf-8").rstrip("\r\n")
        if not line:
            if data:
                yield event_id, Event(name, "\n".join(data))
            event_id, name, data = None, None, []
            continue
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if field == "data":
            data.append(value)
        elif field == "event":
            name = value
        elif field == "id":
            event_id = value


def generate(stubs, request, patience=PATIENCE_SECONDS, timeout=None, metadata=None):
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
    attempts = _Attempts(len(stubs), patience)
    cursor, started = b"", False
    for stub in itertools.cycle(stubs):
        if cursor:
            message.ClearField("resume")
            message.resume.cursor = cursor
            for ids in choices:
                message.resume.choices.add().ids.extend(ids)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        call = stub.Generate(message, timeout=left, metadata=metadata)
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
