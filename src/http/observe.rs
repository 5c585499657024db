//! Reads what routing needs of an answer while its bytes pass: `usage`, why it stopped, and the ids it
//! mints. Holds no text: memory is bounded whatever the answer's size and however it is split.

mod json;

use json::{JsonScan, Key, Seen};

use crate::core::types::{StopKind, Tokens};

/// Most tool-call ids kept of an answer.
const IDS_MAX: usize = 128;

/// What an answer said.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Observed {
    /// `usage.prompt_tokens`.
    pub prompt_tokens: Option<Tokens>,
    /// `usage.completion_tokens`.
    pub completion_tokens: Option<Tokens>,
    /// `usage.prompt_tokens_details.cached_tokens`.
    pub cached_tokens: Option<Tokens>,
    /// From `finish_reason`.
    pub stop: StopKind,
    /// The answer's `id`.
    pub response_id: Option<String>,
    /// Ids of the tool calls it makes, in order.
    pub tool_calls: Vec<String>,
    /// Whether a finish reason or `[DONE]` was seen: an SSE stream without either was cut.
    pub complete: bool,
    /// Whether it carries an `error` object.
    pub error: bool,
}

impl Observed {
    fn take(&mut self, seen: Seen<'_>) {
        use Key::{
            Cached, Choices, CompletionTokens, Error, Finish, Id, Item, Message, PromptDetails, PromptTokens,
            ToolCalls, Usage,
        };
        let number = |text: &str| text.parse().ok();
        match seen {
            Seen::Scalar([Id], id) => {
                self.response_id.get_or_insert_with(|| id.to_owned());
            }
            Seen::Scalar([Choices, Item, Finish], reason) => {
                self.complete = true;
                self.stop = match reason {
                    "tool_calls" | "function_call" => StopKind::ToolUse,
                    "stop" => StopKind::EndTurn,
                    _ => StopKind::Unknown,
                };
            }
            Seen::Scalar([Choices, Item, Message, ToolCalls, Item, Id], id) => {
                // Some engines repeat the id in each piece of a call.
                let known = self.tool_calls.iter().any(|known| known == id);
                if !known && self.tool_calls.len() < IDS_MAX {
                    self.tool_calls.push(id.to_owned());
                }
            }
            Seen::Scalar([Usage, PromptTokens], n) => self.prompt_tokens = number(n),
            Seen::Scalar([Usage, CompletionTokens], n) => self.completion_tokens = number(n),
            Seen::Scalar([Usage, PromptDetails, Cached], n) => self.cached_tokens = number(n),
            Seen::Object([Error]) => self.error = true,
            Seen::Scalar(..) | Seen::Object(_) => {}
        }
    }
}

/// Reads one answer in passing.
#[derive(Debug)]
pub struct Observer {
    seen: Observed,
    scan: JsonScan,
    sse: Option<Line>,
}

/// Where in a line of an event stream the next byte is.
#[derive(Debug)]
enum Line {
    /// This many bytes of `data:` were matched since the line began.
    Field(usize),
    /// In the value of a `data` field.
    Data(Done),
    /// In any other line.
    Other,
}

/// Progress of matching `[DONE]` in a data field's value.
#[derive(Debug)]
enum Done {
    Maybe(usize),
    No,
}

const DATA: &[u8] = b"data:";
const DONE: &[u8] = b"[DONE]";

impl Observer {
    /// For a JSON answer.
    pub fn json() -> Self {
        Self { seen: Observed::default(), scan: JsonScan::default(), sse: None }
    }

    /// For an event stream.
    pub fn sse() -> Self {
        Self { sse: Some(Line::Field(0)), ..Self::json() }
    }

    /// What was seen so far.
    pub fn seen(&self) -> &Observed {
        &self.seen
    }

    /// What was seen.
    pub fn into_seen(self) -> Observed {
        self.seen
    }

    /// Takes the next bytes, split anywhere.
    pub fn feed(&mut self, bytes: &[u8]) {
        if self.sse.is_none() {
            let seen = &mut self.seen;
            self.scan.feed(bytes, |value| seen.take(value));
            return;
        }
        let mut rest = bytes;
        while let Some(end) = memchr::memchr2(b'\n', b'\r', rest) {
            self.line(&rest[..end]);
            self.line_end();
            rest = &rest[end + 1..];
        }
        self.line(rest);
    }

    /// Bytes within one line.
    fn line(&mut self, mut bytes: &[u8]) {
        let Some(line) = &mut self.sse else { return };
        while let (Line::Field(matched), [first, rest @ ..]) = (&mut *line, bytes) {
            let matched = *matched;
            *line = match DATA.get(matched) == Some(first) {
                false => Line::Other,
                true if matched + 1 == DATA.len() => Line::Data(Done::Maybe(0)),
                true => Line::Field(matched + 1),
            };
            bytes = rest;
        }
        let Line::Data(done) = line else { return };
        done.feed(bytes);
        let seen = &mut self.seen;
        self.scan.feed(bytes, |value| seen.take(value));
    }

    fn line_end(&mut self) {
        if matches!(self.sse, Some(Line::Data(Done::Maybe(n))) if n == DONE.len()) {
            self.seen.complete = true;
        }
        self.sse = Some(Line::Field(0));
        self.scan.reset();
    }
}

impl Done {
    fn feed(&mut self, bytes: &[u8]) {
        for byte in bytes {
            let Self::Maybe(matched) = self else { return };
            match DONE.get(*matched) {
                Some(expected) if expected == byte => *matched += 1,
                _ if *byte == b' ' && (*matched == 0 || *matched == DONE.len()) => {}
                _ => *self = Self::No,
            }
        }
    }
}

#[cfg(test)]
mod tests;
