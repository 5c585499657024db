//! Goes on with a stream whose worker died at another worker (`http.resume_streams`).
//!
//! The client gets whole events, so that what it has got can be told in a word: the text so far. The next worker is
//! asked for the same turn with that text as the beginning of its answer, and sends the events behind it. That is right
//! only where it would have said the same: a greedy or a seeded request, and nothing but text begun.

use std::time::Duration;

use bytes::{Bytes, BytesMut};
use serde_json::Value;

use super::backend::Turn;
use super::turn::{is_event_stream, report, run};
use crate::actors::api::Failure;
use crate::engines::Engine;
use crate::engines::answer::{Answer, AnswerBody};
use crate::engines::client::{Client, Request};
use crate::prompt::{Api, members};
use crate::wire::plan::Continue;

/// Longest text that is remembered, in bytes; a longer answer ends with its worker.
const TEXT_MAX: usize = 1 << 20;
/// Longest wait for another worker: the client hears nothing meanwhile.
const PATIENCE: Duration = Duration::from_secs(60);

/// Whether two workers give the same answer to a body: one that leaves nothing to chance.
pub(super) fn is_determined(api: Api, body: &[u8]) -> bool {
    let [temperature, seed, n] = members(body, ["temperature", "seed", "n"]);
    let number = |text: Option<&[u8]>| std::str::from_utf8(text?).ok()?.parse::<f64>().ok();
    let seeded = matches!(api, Api::Chat | Api::Completions) && number(seed).is_some();
    (number(temperature) == Some(0.0) || seeded) && n.is_none_or(|n| n == b"1")
}

/// What is needed to go on elsewhere.
pub(super) struct Resume {
    engine: Engine,
    client: Client,
    request: Request,
    sent: Sent,
}

impl Resume {
    /// For an answer to `request` that the worker names by the request id `id`.
    pub fn new(api: Api, (engine, client): (&Engine, &Client), request: &Request, id: &str) -> Self {
        let sent = Sent::new(api, id);
        Self { engine: engine.clone(), client: client.clone(), request: request.clone(), sent }
    }

    /// Takes the worker's next bytes; gives those that may be passed on.
    pub fn whole(&mut self, bytes: &[u8]) -> Bytes {
        self.sent.whole(bytes)
    }

    /// The request for the rest; `None` when only the worker that is gone could go on.
    pub fn rest(&mut self) -> Option<Rest> {
        self.sent.held.clear();
        let request = match self.sent.fixed {
            true => None,
            // Nobody has heard a word.
            false if !self.sent.any => Some(self.request.clone()),
            false => self.engine.continued(&self.request, &self.sent.begun),
        };
        Some(Rest { engine: self.engine.clone(), client: self.client.clone(), request: request? })
    }
}

/// See [`Resume::rest`].
pub(super) struct Rest {
    engine: Engine,
    client: Client,
    request: Request,
}

impl Rest {
    /// Places the turn again, and waits until the rest begins. `None`: nobody has it.
    pub async fn from<T: Turn>(self, turn: T) -> Option<(T, Answer)> {
        let moved = async {
            let turn = turn.failed(Failure::DecodeUnreachable).await.ok()?;
            run((&self.engine, &self.client), turn, &self.request).await.ok()
        };
        let (turn, answer) = tokio::time::timeout(PATIENCE, moved).await.ok()??;
        let good = answer.status.is_success() && is_event_stream(&answer.headers);
        if !good || !matches!(answer.body, AnswerBody::Stream(..)) {
            return None;
        }
        if let Some(report) = report(&answer.headers) {
            turn.reported(report);
        }
        Some((turn, answer))
    }
}

/// What the client has got.
#[derive(Debug)]
struct Sent {
    api: Api,
    begun: Continue,
    /// Bytes that may not be passed on yet: an event that is not whole, or that only leads to the next one.
    held: BytesMut,
    /// Whether anything was passed on.
    any: bool,
    /// Something else than text was begun, or the text has ended.
    fixed: bool,
}

/// What an event is for the client.
enum Step {
    /// It stands for itself.
    Stands,
    /// It opens what the next event fills.
    Leads,
    /// No other worker could know that it was sent.
    Fixes,
}

impl Sent {
    fn new(api: Api, id: &str) -> Self {
        let begun = Continue { id: id.to_owned(), created: 0, text: String::new() };
        Self { api, begun, held: BytesMut::new(), any: false, fixed: false }
    }

    fn whole(&mut self, bytes: &[u8]) -> Bytes {
        self.held.extend_from_slice(bytes);
        let held = std::mem::take(&mut self.held);
        let (mut at, mut passes) = (0, 0);
        while let Some(length) = memchr::memmem::find(&held[at..], b"\n\n") {
            let step = self.read(&held[at..at + length]);
            at += length + 2;
            self.fixed |= matches!(step, Step::Fixes);
            if !matches!(step, Step::Leads) {
                passes = at;
            }
        }
        self.fixed |= self.begun.text.len() > TEXT_MAX;
        // From here on it makes no difference: whatever came is passed on.
        if self.fixed {
            passes = held.len();
        }
        self.held = held;
        self.any |= passes > 0;
        self.held.split_to(passes).freeze()
    }

    fn read(&mut self, event: &[u8]) -> Step {
        let data = event.split(|byte| *byte == b'\n').find_map(|line| line.strip_prefix(b"data:"));
        let Some(data) = data.map(<[u8]>::trim_ascii) else { return Step::Stands };
        let Ok(event) = serde_json::from_slice::<Value>(data) else { return Step::Fixes };
        match self.api {
            Api::Chat | Api::Completions => self.chunk(&event),
            Api::Responses => self.response(&event),
            Api::Messages => self.message(&event),
        }
    }

    fn says(&mut self, text: &Value) -> Step {
        let Some(text) = text.as_str() else { return Step::Fixes };
        self.begun.text.push_str(text);
        Step::Stands
    }

    fn chunk(&mut self, event: &Value) -> Step {
        self.begun.created = event["created"].as_u64().unwrap_or(self.begun.created);
        let choice = &event["choices"][0];
        let delta = &choice["delta"];
        if event.get("error").is_some()
            || choice["finish_reason"].is_string()
            || !delta["tool_calls"].is_null()
        {
            return Step::Fixes;
        }
        let text = if self.api == Api::Chat { &delta["content"] } else { &choice["text"] };
        if text.is_null() { Step::Stands } else { self.says(text) }
    }

    fn response(&mut self, event: &Value) -> Step {
        match event["type"].as_str() {
            Some("response.created" | "response.in_progress") => {
                self.begun.created = event["response"]["created_at"].as_u64().unwrap_or_default();
                Step::Stands
            }
            Some("response.output_item.added") if event["item"]["type"] == "message" => Step::Leads,
            Some("response.content_part.added") => Step::Leads,
            Some("response.output_text.delta") => self.says(&event["delta"]),
            _ => Step::Fixes,
        }
    }

    fn message(&mut self, event: &Value) -> Step {
        match event["type"].as_str() {
            Some("message_start" | "ping") => Step::Stands,
            Some("content_block_start") if event["content_block"]["type"] == "text" => Step::Leads,
            Some("content_block_delta") => self.says(&event["delta"]["text"]),
            _ => Step::Fixes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Feeds `wire` in pieces of `size` bytes: what was passed on, and what is known of it.
    fn sent(api: Api, wire: &str, size: usize) -> (String, Sent) {
        let mut sent = Sent::new(api, "r1");
        let passed = wire.as_bytes().chunks(size).map(|piece| sent.whole(piece)).collect::<Vec<_>>().concat();
        (String::from_utf8(passed).unwrap(), sent)
    }

    const CHAT: &str = "data: {\"created\":7,\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"}}]}\n\n\
                        data: {\"created\":7,\"choices\":[{\"delta\":{\"content\":\"ab\\n\"},\"finish_reason\":null}]}\n\n";

    #[test]
    fn only_whole_events_pass_and_their_text_is_known() {
        for size in [1, 7, 1000] {
            let (passed, known) = sent(Api::Chat, &format!("{CHAT}data: {{\"choi"), size);
            assert_eq!((passed.as_str(), &*known.begun.text, known.begun.created), (CHAT, "ab\n", 7));
            assert!(known.any && !known.fixed);
        }
        assert!(!sent(Api::Chat, &CHAT[..20], 1).1.any);
    }

    #[test]
    fn what_only_leads_waits_for_what_it_leads_to() {
        let start = "event: message_start\ndata: {\"type\":\"message_start\"}\n\n";
        let opens =
            "event: x\ndata: {\"type\":\"content_block_start\",\"content_block\":{\"type\":\"text\"}}\n\n";
        let says = "data: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"hi\"}}\n\n";
        for size in [1, 1000] {
            assert_eq!(sent(Api::Messages, &format!("{start}{opens}"), size).0, start);
            let (passed, known) = sent(Api::Messages, &format!("{start}{opens}{says}"), size);
            assert_eq!((passed.len(), &*known.begun.text), (start.len() + opens.len() + says.len(), "hi"));
        }
    }

    #[test]
    fn a_tool_call_or_an_end_fixes_the_answer_to_its_worker() {
        let chat = [
            r#"{"choices":[{"delta":{"tool_calls":[]}}]}"#,
            r#"{"choices":[{"delta":{},"finish_reason":"stop"}]}"#,
            "[DONE]",
            r#"{"error":{"code":"x"}}"#,
        ];
        for event in chat {
            assert!(sent(Api::Chat, &format!("{CHAT}data: {event}\n\n"), 1000).1.fixed, "{event}");
        }
        for (api, kind) in
            [(Api::Responses, "response.output_text.done"), (Api::Messages, "content_block_stop")]
        {
            assert!(sent(api, &format!("data: {{\"type\":\"{kind}\"}}\n\n"), 1000).1.fixed, "{kind}");
        }
        let call = r#"{"type":"content_block_start","content_block":{"type":"tool_use"}}"#;
        assert!(sent(Api::Messages, &format!("data: {call}\n\n"), 1000).1.fixed);
    }

    #[test]
    fn chance_is_left_to_its_worker() {
        let cases = [
            (r#"{"temperature":0}"#, true, true),
            (r#"{"temperature":0.0,"n":1}"#, true, true),
            (r#"{"seed":7}"#, true, false),
            (r#"{"temperature":0.2}"#, false, false),
            (r#"{"temperature":0,"n":2}"#, false, false),
            ("{}", false, false),
        ];
        for (body, chat, messages) in cases {
            assert_eq!(is_determined(Api::Chat, body.as_bytes()), chat, "{body}");
            assert_eq!(is_determined(Api::Messages, body.as_bytes()), messages, "{body}");
        }
    }
}
