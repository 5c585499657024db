"""An agent that reads files: its conversation grows by tool calls and their results, turn by turn."""

import http.client
import json
import random
import time
from dataclasses import dataclass
from urllib.parse import urlsplit

from engines import MODEL

WORDS = (
    "river stone market garden window music letter yellow winter number paper silver doctor village summer island "
    "forest bridge kitchen morning engine street mountain picture table orange teacher station harbor machine pocket "
    "candle castle corner dinner empire farmer finger flower ground hammer horse insect jacket kernel ladder magnet "
    "needle office pepper quarter rabbit school tunnel valley wagon"
).split()
TOOL = {
    "type": "function",
    "function": {
        "name": "read",
        "description": "Reads a file.",
        "parameters": {"type": "object", "properties": {"path": {"type": "string"}}},
    },
}


class Unanswered(Exception):
    """The gateway or an engine answered with an error."""


@dataclass
class Turn:
    """One turn as its client saw it. Times in seconds, lengths in tokens."""

    session: str
    body: dict
    text: str
    mode: str
    reason: str
    worker: str
    ttft: float
    prompt: int
    cached: int
    answer: int
    computed: float = 0
    moved: float = 0
    lost: bool = False
    # The decision's record, if one was asked for.
    explain: str = ""

    @property
    def held(self):
        """What the worker holds afterwards: the last token of an answer is never computed."""
        return self.prompt + self.answer - 1


def ask(url, body, session=None, headers=None, heard=lambda text: None):
    """Sends one streamed chat turn and reads it to its end; `heard` is called for each piece of text."""
    target = urlsplit(url)
    connection = http.client.HTTPConnection(target.hostname, target.port, timeout=300)
    asked = {"content-type": "application/json"} | ({"x-session-id": session} if session else {}) | (headers or {})
    streamed = body | {"stream": True, "stream_options": {"include_usage": True}}
    started, first, text, usage, ended = time.monotonic(), None, "", {}, False
    try:
        connection.request("POST", "/v1/chat/completions", json.dumps(streamed), asked)
        answer = connection.getresponse()
        if answer.status != 200:
            raise Unanswered(f"{answer.status} {answer.read(2000).decode(errors='replace')}")
        for line in answer:
            data = line.removeprefix(b"data: ").strip()
            if data == line.strip():
                continue
            if data == b"[DONE]":
                ended = True
                continue
            event = json.loads(data)
            if "error" in event:
                raise Unanswered(f"error event: {event}")
            piece = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            first = first or (time.monotonic() - started if piece else None)
            text += piece
            if piece:
                heard(piece)
            usage = event.get("usage") or usage
    except (OSError, http.client.HTTPException) as problem:
        raise Unanswered(f"broken off: {problem!r}") from None
    finally:
        connection.close()
    if not ended:
        raise Unanswered("the answer ended without [DONE]")
    told = {name: answer.getheader(f"x-kvc-{name}") or "" for name in ("mode", "reason", "worker", "explain")}
    details = usage.get("prompt_tokens_details") or {}
    return Turn(
        session or "", body, text, **told, ttft=first or time.monotonic() - started, prompt=usage["prompt_tokens"],
        cached=details.get("cached_tokens") or 0, answer=usage["completion_tokens"],
    )  # fmt: skip


class Agent:
    """A session. `size`: words of its first prompt."""

    def __init__(self, gateway, name, size, answer=16, headers=None):
        self.gateway, self.name, self.answer, self.headers, self.turns = gateway, name, answer, headers, []
        self.rng = random.Random(name)
        self.messages = [
            {"role": "system", "content": "You work on a project and answer in one sentence."},
            {"role": "user", "content": f"{name} reads this. {self.words(size)}"},
        ]

    def words(self, count):
        return " ".join(self.rng.choices(WORDS, k=count))

    def body(self):
        return {
            "model": MODEL, "messages": self.messages, "tools": [TOOL], "tool_choice": "none", "max_tokens": self.answer,
            "temperature": 0,
        }  # fmt: skip

    def turn(self):
        """Sends the next turn; the conversation then has its answer, a call of the tool and the tool's result."""
        turn = ask(self.gateway, json.loads(json.dumps(self.body())), self.name, self.headers)
        self.turns.append(turn)
        call = {"id": f"call_{self.name}_{len(self.turns)}", "type": "function"}
        call["function"] = {"name": "read", "arguments": json.dumps({"path": f"file{len(self.turns)}"})}
        self.messages = self.messages + [
            {"role": "assistant", "content": turn.text, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": call["id"], "content": self.words(40)},
        ]
        return turn
