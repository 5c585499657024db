//! Answers in each API's own words, in one piece or as events.

mod chat;
mod messages;
mod responses;

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::Value;
use xxhash_rust::xxh3::xxh3_64_with_seed;

use crate::prompt::Api;
use crate::wire::plan::Continue;

use super::super::builtin::decode::Decoding;
use super::super::builtin::kept::Keep;

/// One answer in its API's words. Events come as [`Shape::begin`], any number of [`Shape::text`], [`Shape::end`].
pub trait Shape: Send {
    /// An answer in one piece.
    fn whole(&self, text: &str, turn: &Decoding) -> String;

    /// The events before the first token; empty where there are none.
    fn begin(&mut self, turn: &Decoding) -> String;

    /// The event of one piece of text.
    fn text(&mut self, piece: &str) -> String;

    /// The events behind the last token.
    fn end(&mut self, turn: &Decoding) -> String;
}

/// The shape of the answers of `api`; `include_usage` matters where a stream has to ask for it, `keep` where an
/// answer can be continued.
pub fn shape(api: Api, names: Names, include_usage: bool, keep: Option<Keep>) -> Box<dyn Shape> {
    match api {
        Api::Chat | Api::Completions => Box::new(chat::Chat::new(api, names, include_usage)),
        Api::Responses => Box::new(responses::Responses::new(names, keep)),
        Api::Messages => Box::new(messages::Messages::new(names)),
    }
}

/// What all parts of one answer are named by.
#[derive(Debug)]
pub struct Names {
    request: String,
    model: String,
    /// When it was begun, in Unix seconds.
    created: u64,
}

impl Names {
    /// The names of an answer to `request`, or of the one that it goes on with.
    pub fn new(request: &str, model: &str, begun: Option<&Continue>) -> Self {
        let (request, created) = begun.map_or_else(|| (request, now()), |b| (&*b.id, b.created));
        Self { request: request.to_owned(), model: model.to_owned(), created }
    }

    /// An id that looks like no other: agents find their calls by it, and so do routers.
    fn id(&self, prefix: &str, number: usize) -> String {
        format!("{prefix}_{:016x}", xxh3_64_with_seed(self.request.as_bytes(), number as u64))
    }

    fn call_id(&self, call: usize) -> String {
        self.id("call", call)
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs())
}

/// An event with its name in both places.
fn event(name: &str, data: &Value) -> String {
    format!("event: {name}\ndata: {data}\n\n")
}
