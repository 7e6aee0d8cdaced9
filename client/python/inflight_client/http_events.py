"""Server-sent events of the HTTP APIs, with the standard library alone."""

from __future__ import annotations

import http.client
import itertools
import json
import urllib.parse
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from .attempts import PATIENCE_SECONDS, Attempts

# The status of a limit is final for a new request; a stream that has begun waits for it.
RETRIED_STATUSES = {502, 503, 504}
RETRIED_ONCE_BEGUN = {429}


class Event(NamedTuple):
    """A server-sent event: its name, or None, and its data."""

    name: str | None
    data: str


class StatusError(Exception):
    """A response with an error status, which no other router can mend."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"status {status}: {body}")
        self.status = status
        self.body = body


def stream_events(
    urls: Sequence[str],
    path: str,
    body: Mapping[str, Any],
    headers: Mapping[str, str] | None = None,
    patience: float = PATIENCE_SECONDS,
    timeout: float = 300.0,
) -> Iterator[Event]:
    """Posts `body`, a dictionary, with `stream` set to `path` of the first of `urls` that answers, and yields its events.

    `data: [DONE]` ends the stream and is not yielded. An error event that is not final, as of an overloaded router, is not
    yielded either: the stream continues. One that is final is yielded, and ends the stream. Raises StatusError for an error that is final, and the last failure
    if no router has continued the stream within `patience` seconds. `timeout` is the longest silence on a connection, in
    seconds; routers send comments while nothing is generated, but nothing while they hold a request whose model has no worker yet.
    """
    payload = json.dumps({**body, "stream": True}).encode()
    headers = {"content-type": "application/json", **(headers or {})}
    attempts = Attempts(len(urls), patience)
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
