//! Reads what routing needs of an answer while its bytes pass: `usage`, why it stopped, and the ids it
//! mints. Holds no text: memory is bounded whatever the answer's size and however it is split.

mod json;
mod reading;

use json::JsonScan;
use reading::Reading;

use crate::core::types::{StopKind, Tokens};
use crate::prompt::Api;

/// What an answer said.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Observed {
    /// All prompt tokens, cached ones included.
    pub prompt_tokens: Option<Tokens>,
    /// Output tokens.
    pub completion_tokens: Option<Tokens>,
    /// Prompt tokens the engine did not compute.
    pub cached_tokens: Option<Tokens>,
    /// From `finish_reason`, `stop_reason`, or what the response ends with.
    pub stop: StopKind,
    /// The answer's `id`.
    pub response_id: Option<String>,
    /// The id of the conversation an engine that keeps them says it belongs to (Responses).
    pub conversation: Option<String>,
    /// Ids of the tool calls it makes, in order.
    pub tool_calls: Vec<String>,
    /// Whether the API's own end was seen (a finish reason or `[DONE]`, `response.completed`, `message_stop`):
    /// an SSE stream without one was cut.
    pub complete: bool,
    /// Whether it carries an `error` object.
    pub error: bool,
}

/// Reads one answer in passing.
#[derive(Debug)]
pub struct Observer {
    reading: Reading,
    scan: JsonScan,
    sse: Option<Line>,
    /// `[DONE]` was seen.
    done: bool,
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
    pub fn json(api: Api) -> Self {
        Self { reading: Reading::new(api), scan: JsonScan::default(), sse: None, done: false }
    }

    /// For an event stream.
    pub fn sse(api: Api) -> Self {
        Self { sse: Some(Line::Field(0)), ..Self::json(api) }
    }

    /// What was seen so far.
    pub fn seen(&self) -> &Observed {
        &self.reading.seen
    }

    /// Whether nothing that matters can follow: the API's own end, and `usage`, which may stand behind it.
    pub fn is_over(&self) -> bool {
        let seen = self.seen();
        self.done || (seen.complete && seen.prompt_tokens.is_some())
    }

    /// The number of a stream's next event, in an API that numbers them.
    pub fn next_event(&self) -> u64 {
        self.reading.events
    }

    /// What was seen.
    pub fn into_seen(self) -> Observed {
        self.reading.seen
    }

    /// Takes the next bytes, split anywhere.
    pub fn feed(&mut self, bytes: &[u8]) {
        if self.sse.is_none() {
            let reading = &mut self.reading;
            self.scan.feed(bytes, |value| reading.take(value));
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
        let reading = &mut self.reading;
        self.scan.feed(bytes, |value| reading.take(value));
    }

    fn line_end(&mut self) {
        if matches!(self.sse, Some(Line::Data(Done::Maybe(n))) if n == DONE.len()) {
            self.reading.seen.complete = true;
            self.done = true;
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
