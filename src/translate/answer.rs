//! An answer on its way back: chat completions in, the client's API out.

use std::borrow::Cow;
use std::fmt;

use serde::Deserialize;
use serde_json::Value;

use super::blocks::{Block, Blocks, Change, Said};
use super::fields::Text;
use super::sse::Lines;

/// The engine's answer is no chat completion, or broke off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the engine's answer is not what chat completions promise: {0}")]
pub struct Broken(pub &'static str);

/// Longest answer in one piece that is kept.
const WHOLE_MAX: usize = 64 << 20;

/// How an API tells an answer.
pub(super) trait Voice: fmt::Debug {
    /// The events before anything is said.
    fn begin(&mut self, head: &Head, out: &mut String);
    /// The events of a change.
    fn change(&mut self, change: Change<'_>, out: &mut String);
    /// The events of the end.
    fn end(&mut self, blocks: &[Block], end: &End, out: &mut String);
    /// The event of an error that `message` tells.
    fn fail(&mut self, message: &str, out: &mut String);
    /// The whole answer in one piece.
    fn whole(&mut self, blocks: &[Block], end: &End, out: &mut String);
}

/// What is known when an answer begins.
#[derive(Debug, Clone, Default)]
pub(super) struct Head {
    /// The engine's id, without its prefix.
    pub id: String,
    /// Seconds since 1970.
    pub created: u64,
}

/// How an answer ended.
#[derive(Debug, Clone, Default)]
pub(super) struct End {
    pub why: Why,
    pub usage: Usage,
}

/// Why an answer ended.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) enum Why {
    /// By itself.
    #[default]
    Stop,
    /// At a stop sequence, which the engine names.
    Sequence(String),
    /// To have its calls answered.
    Calls,
    /// At the limit of tokens.
    Length,
    /// A filter cut it.
    Filter,
}

/// Tokens counted.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
pub(super) struct Usage {
    #[serde(default, rename = "prompt_tokens")]
    pub prompt: u64,
    #[serde(default, rename = "completion_tokens")]
    pub completion: u64,
    #[serde(default, rename = "prompt_tokens_details")]
    prompt_details: Option<PromptDetails>,
    #[serde(default, rename = "completion_tokens_details")]
    completion_details: Option<CompletionDetails>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct PromptDetails {
    cached_tokens: Option<u64>,
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct CompletionDetails {
    reasoning_tokens: Option<u64>,
}

impl Usage {
    /// Prompt tokens the engine did not compute, as far as it says.
    pub fn cached(&self) -> u64 {
        self.prompt_details.and_then(|d| d.cached_tokens).unwrap_or(0).min(self.prompt)
    }

    pub fn reasoning(&self) -> u64 {
        self.completion_details.and_then(|d| d.reasoning_tokens).unwrap_or(0)
    }
}

/// A chunk, or a whole completion.
#[derive(Debug, Deserialize)]
struct Answer<'a> {
    #[serde(borrow, default)]
    id: Option<Text<'a>>,
    created: Option<u64>,
    #[serde(borrow, default)]
    choices: Option<Vec<Choice<'a>>>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Debug, Deserialize)]
struct Choice<'a> {
    #[serde(default)]
    index: usize,
    #[serde(borrow, default)]
    delta: Option<Said<'a>>,
    #[serde(borrow, default)]
    message: Option<Said<'a>>,
    #[serde(borrow, default)]
    finish_reason: Option<Text<'a>>,
    /// The sequence it stopped at (vLLM), or a token's id.
    stop_reason: Option<Value>,
    /// The same (SGLang).
    matched_stop: Option<Value>,
}

/// Translates one answer. Feed it what arrives, then [`end`](Translator::end) it.
#[derive(Debug)]
pub struct Translator {
    voice: Box<dyn Voice + Send>,
    stream: bool,
    lines: Lines,
    whole: Vec<u8>,
    blocks: Blocks,
    head: Option<Head>,
    why: Option<Why>,
    usage: Usage,
    over: bool,
}

impl Translator {
    pub(super) fn new(voice: impl Voice + Send + 'static, stream: bool) -> Self {
        Self {
            voice: Box::new(voice),
            stream,
            lines: Lines::default(),
            whole: Vec::new(),
            blocks: Blocks::default(),
            head: None,
            why: None,
            usage: Usage::default(),
            over: false,
        }
    }

    /// Takes the next bytes of the engine's answer; gives the client's, often none.
    ///
    /// # Errors
    /// [`Broken`]: nothing sensible can follow.
    pub fn feed(&mut self, bytes: &[u8]) -> Result<String, Broken> {
        let mut out = String::new();
        if !self.stream {
            if self.whole.len() + bytes.len() > WHOLE_MAX {
                return Err(Broken("too long"));
            }
            self.whole.extend_from_slice(bytes);
            return Ok(out);
        }
        let mut lines = std::mem::take(&mut self.lines);
        let fed = lines.feed(bytes, |data| self.event(data, &mut out));
        self.lines = lines;
        fed.map(|()| out)
    }

    /// The engine's answer is over; gives what is left to say.
    ///
    /// # Errors
    /// [`Broken`]: it was over too early.
    pub fn end(&mut self) -> Result<String, Broken> {
        let mut out = String::new();
        if self.stream {
            match (self.over, self.why.is_some()) {
                (true, _) => {}
                (false, true) => self.finish(&mut out),
                (false, false) => return Err(Broken("it ended early")),
            }
            return Ok(out);
        }
        let whole = std::mem::take(&mut self.whole);
        let answer: Answer<'_> = serde_json::from_slice(&whole).map_err(|_| Broken("it is not JSON"))?;
        if answer.choices.as_ref().is_none_or(Vec::is_empty) {
            return Err(Broken("it has no choice"));
        }
        self.begin(&answer, &mut String::new());
        self.take(&answer, &mut String::new());
        self.blocks.finish(&mut |_| {});
        let end = self.ended();
        self.voice.whole(&self.blocks.done, &end, &mut out);
        Ok(out)
    }

    fn event(&mut self, data: &[u8], out: &mut String) -> Result<(), Broken> {
        if self.over {
            return Ok(());
        }
        if data == b"[DONE]" {
            if self.why.is_none() {
                return Err(Broken("it ended without a reason"));
            }
            self.finish(out);
            return Ok(());
        }
        let chunk: Answer<'_> = serde_json::from_slice(data).map_err(|_| Broken("an event is not JSON"))?;
        if let Some(error) = &chunk.error {
            let message = error.get("message").and_then(Value::as_str).unwrap_or("the engine failed");
            self.voice.fail(message, out);
            self.over = true;
            return Ok(());
        }
        if self.head.is_none() {
            self.begin(&chunk, out);
        }
        self.take(&chunk, out);
        Ok(())
    }

    fn begin(&mut self, answer: &Answer<'_>, out: &mut String) {
        let id = answer.id.as_deref().unwrap_or_default();
        let head = Head {
            id: id.strip_prefix("chatcmpl-").unwrap_or(id).to_owned(),
            created: answer.created.unwrap_or(0),
        };
        self.blocks.seed.clone_from(&head.id);
        self.voice.begin(&head, out);
        self.head = Some(head);
    }

    fn take(&mut self, answer: &Answer<'_>, out: &mut String) {
        if let Some(usage) = answer.usage {
            self.usage = usage;
        }
        let mut choices = answer.choices.iter().flatten();
        let Some(choice) = choices.find(|choice| choice.index == 0) else { return };
        let voice = &mut self.voice;
        for said in choice.delta.iter().chain(&choice.message) {
            self.blocks.push(said, &mut |change| voice.change(change, out));
        }
        if let Some(reason) = &choice.finish_reason {
            self.why = Some(why(reason, choice.stop_reason.as_ref().or(choice.matched_stop.as_ref())));
        }
    }

    fn finish(&mut self, out: &mut String) {
        let voice = &mut self.voice;
        self.blocks.finish(&mut |change| voice.change(change, out));
        let end = self.ended();
        self.voice.end(&self.blocks.done, &end, out);
        self.over = true;
    }

    fn ended(&self) -> End {
        let why = self.why.clone().unwrap_or_default();
        // Engines that were made to call say `stop`.
        let called = why == Why::Stop && self.blocks.has_calls();
        End { why: if called { Why::Calls } else { why }, usage: self.usage }
    }
}

fn why(reason: &str, stopped_at: Option<&Value>) -> Why {
    match (reason, stopped_at.and_then(Value::as_str)) {
        ("length", _) => Why::Length,
        ("tool_calls" | "function_call", _) => Why::Calls,
        ("content_filter", _) => Why::Filter,
        (_, Some(sequence)) => Why::Sequence(sequence.to_owned()),
        _ => Why::Stop,
    }
}

/// An event with its name in both places.
pub(super) fn event(name: &str, data: &Value, out: &mut String) {
    out.push_str("event: ");
    out.push_str(name);
    out.push_str("\ndata: ");
    out.push_str(&data.to_string());
    out.push_str("\n\n");
}

/// The text of a JSON error body, whoever made it.
pub(super) fn error_text(body: &[u8]) -> Cow<'_, str> {
    let json: Option<Value> = serde_json::from_slice(body).ok();
    let told = json.as_ref().and_then(|json| {
        // `{"error":{"message"}}`, SGLang's `{"message"}`, FastAPI's `{"detail"}`.
        let at = ["/error/message", "/message", "/detail", "/error"];
        at.iter().find_map(|at| json.pointer(at)?.as_str().map(str::to_owned))
    });
    told.map_or_else(|| String::from_utf8_lossy(body), Cow::Owned)
}
