//! What a chat answer says, as blocks one after another: reasoning, text, calls.
//!
//! An engine may mix the pieces of several calls; the APIs want one block at a time. So the first call streams and
//! the others wait until the answer ends.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::fields::Text;

/// What a block is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Kind {
    Reasoning,
    Text,
    Call { id: String, name: String },
}

/// A block so far.
#[derive(Debug, Clone)]
pub(super) struct Block {
    pub kind: Kind,
    /// Its text, or the arguments of its call.
    pub text: String,
}

/// What happened to the newest block.
#[derive(Debug)]
pub(super) enum Change<'a> {
    Opened(&'a Block),
    Grew(&'a Block, &'a str),
    Closed(&'a Block),
}

/// The part of an answer's message that has arrived: a chunk's `delta`, or the whole `message`.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Said<'a> {
    #[serde(borrow, default)]
    content: Option<Text<'a>>,
    #[serde(borrow, default)]
    reasoning_content: Option<Text<'a>>,
    #[serde(borrow, default)]
    reasoning: Option<Text<'a>>,
    #[serde(borrow, default)]
    refusal: Option<Text<'a>>,
    #[serde(borrow, default)]
    tool_calls: Option<Vec<Called<'a>>>,
}

#[derive(Debug, Deserialize)]
struct Called<'a> {
    index: Option<usize>,
    #[serde(borrow, default)]
    id: Option<Text<'a>>,
    #[serde(borrow, default)]
    function: Option<Function<'a>>,
}

#[derive(Debug, Deserialize)]
struct Function<'a> {
    #[serde(borrow, default)]
    name: Option<Text<'a>>,
    /// A string; some engines send the object itself.
    #[serde(borrow, default)]
    arguments: Option<&'a RawValue>,
}

/// A call that waits for its name or for its turn.
#[derive(Debug, Default)]
struct Waiting {
    index: usize,
    id: String,
    name: String,
    arguments: String,
}

/// The blocks of one answer.
#[derive(Debug, Default)]
pub(super) struct Blocks {
    pub done: Vec<Block>,
    open: Option<Block>,
    /// The index of the call that streams.
    streaming: Option<usize>,
    waiting: Vec<Waiting>,
    /// Text that came behind a call.
    late: String,
    /// What ids of calls are made of when the engine gives none.
    pub seed: String,
}

impl Blocks {
    /// Takes what was said next.
    pub fn push(&mut self, said: &Said<'_>, tell: &mut impl FnMut(Change<'_>)) {
        let reasoning = said.reasoning_content.as_deref().or(said.reasoning.as_deref());
        for (kind, text) in [
            (Kind::Reasoning, reasoning),
            (Kind::Text, said.content.as_deref()),
            (Kind::Text, said.refusal.as_deref()),
        ] {
            if let Some(text) = text.filter(|text| !text.is_empty()) {
                self.text(kind, text, tell);
            }
        }
        for (place, call) in said.tool_calls.iter().flatten().enumerate() {
            self.call(place, call, tell);
        }
    }

    /// The answer is over: what waits comes now, then everything is closed.
    pub fn finish(&mut self, tell: &mut impl FnMut(Change<'_>)) {
        self.close(tell);
        let late = std::mem::take(&mut self.late);
        if !late.is_empty() {
            self.streaming = None;
            self.text(Kind::Text, &late, tell);
        }
        for call in std::mem::take(&mut self.waiting) {
            self.begin(call, tell);
        }
        self.close(tell);
    }

    fn text(&mut self, kind: Kind, text: &str, tell: &mut impl FnMut(Change<'_>)) {
        if self.streaming.is_some() {
            if kind == Kind::Text {
                self.late.push_str(text);
            }
            return;
        }
        if self.open.as_ref().is_none_or(|block| block.kind != kind) {
            self.start(kind, tell);
        }
        self.grow(text, tell);
    }

    fn call(&mut self, place: usize, call: &Called<'_>, tell: &mut impl FnMut(Change<'_>)) {
        let index = call.index.unwrap_or(place);
        let function = call.function.as_ref();
        let arguments = function.and_then(|f| f.arguments).map(arguments).unwrap_or_default();
        if self.streaming == Some(index) {
            return self.grow(&arguments, tell);
        }
        let at = self.waiting.iter().position(|waiting| waiting.index == index).unwrap_or_else(|| {
            self.waiting.push(Waiting { index, ..Waiting::default() });
            self.waiting.len() - 1
        });
        let waiting = &mut self.waiting[at];
        // Some engines repeat id and name in each piece of a call.
        if let Some(id) = call.id.as_deref().filter(|_| waiting.id.is_empty()) {
            waiting.id.push_str(id);
        }
        if let Some(name) = function.and_then(|f| f.name.as_deref()).filter(|_| waiting.name.is_empty()) {
            waiting.name.push_str(name);
        }
        waiting.arguments.push_str(&arguments);
        if self.streaming.is_none() && !waiting.name.is_empty() {
            self.streaming = Some(index);
            let call = self.waiting.remove(at);
            self.begin(call, tell);
        }
    }

    fn begin(&mut self, call: Waiting, tell: &mut impl FnMut(Change<'_>)) {
        let Waiting { index, mut id, name, arguments } = call;
        if id.is_empty() {
            id = format!("call_{}_{index}", self.seed);
        }
        self.start(Kind::Call { id, name }, tell);
        self.grow(&arguments, tell);
    }

    fn start(&mut self, kind: Kind, tell: &mut impl FnMut(Change<'_>)) {
        self.close(tell);
        let block = self.open.insert(Block { kind, text: String::new() });
        tell(Change::Opened(block));
    }

    fn grow(&mut self, text: &str, tell: &mut impl FnMut(Change<'_>)) {
        if let Some(block) = self.open.as_mut().filter(|_| !text.is_empty()) {
            block.text.push_str(text);
            tell(Change::Grew(block, text));
        }
    }

    fn close(&mut self, tell: &mut impl FnMut(Change<'_>)) {
        if let Some(block) = self.open.take() {
            tell(Change::Closed(&block));
            self.done.push(block);
        }
    }

    /// Whether it calls tools.
    pub fn has_calls(&self) -> bool {
        self.done.iter().any(|block| matches!(block.kind, Kind::Call { .. }))
    }
}

fn arguments(raw: &RawValue) -> Cow<'_, str> {
    match raw.get() {
        "null" => Cow::Borrowed(""),
        text if text.starts_with('"') => {
            serde_json::from_str::<Text<'_>>(text).map(|Text(text)| text).unwrap_or_default()
        }
        object => Cow::Borrowed(object),
    }
}
