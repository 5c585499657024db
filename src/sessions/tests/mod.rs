//! Cases beyond the recorded vectors: what `docs` and clients say, and what must stay bounded.

mod bounds;
mod lanes;
mod sources;

use serde_json::{Value, json};

use super::*;

/// A client and its registry.
pub(super) struct Desk {
    pub registry: Registry,
    pub now: u64,
}

pub(super) fn desk() -> Desk {
    Desk { registry: Registry::new(Limits::default()), now: 0 }
}

impl Desk {
    pub fn begin(&mut self, path: &str, headers: &[(&str, &str)], body: &Value) -> Turn {
        let headers: Vec<(&str, &[u8])> = headers.iter().map(|(n, v)| (*n, v.as_bytes())).collect();
        let body = body.to_string();
        let incoming = Incoming { path, headers: Headers(&headers), body: body.as_bytes() };
        self.now += 1;
        self.registry.begin(&incoming, self.now).expect("a good request")
    }

    /// A chat turn that succeeds and mints `calls`.
    pub fn chat_minting(&mut self, headers: &[(&str, &str)], body: &Value, calls: &[&str]) -> Turn {
        let turn = self.begin("/v1/chat/completions", headers, body);
        let answer = Answer { ok: true, calls, ..Answer::default() };
        self.registry.commit(&turn, &answer, self.now);
        turn
    }

    pub fn chat(&mut self, headers: &[(&str, &str)], body: &Value) -> Turn {
        self.chat_minting(headers, body, &[])
    }
}

/// A body with a 5 KB system prompt and one tool.
pub(super) fn agent(messages: &[Value]) -> Value {
    let mut all = vec![json!({"role": "system", "content": "You are a coding agent. ".repeat(220)})];
    all.extend_from_slice(messages);
    json!({"model": "m", "messages": all, "tools": [{"type": "function", "function": {"name": "bash"}}]})
}

/// The same without tools.
pub(super) fn plain(messages: &[Value]) -> Value {
    let mut body = agent(messages);
    body.as_object_mut().expect("an object").remove("tools");
    body
}

pub(super) fn user(text: &str) -> Value {
    json!({"role": "user", "content": text})
}

pub(super) fn said(text: &str) -> Value {
    json!({"role": "assistant", "content": text})
}

pub(super) fn called(id: &str) -> Value {
    json!({"role": "assistant", "content": null, "tool_calls": [
        {"id": id, "type": "function", "function": {"name": "bash", "arguments": "{}"}}]})
}

pub(super) fn result(id: &str, text: &str) -> Value {
    json!({"role": "tool", "tool_call_id": id, "content": text})
}
