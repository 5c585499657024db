//! A chat answer as a message.

use serde_json::{Value, json};

use super::super::answer::{self, End, Head, Why, event};
use super::super::blocks::{Block, Change, Kind};

/// Clients give thinking back only with a signature; this one says that nobody signed.
const UNSIGNED: &str = "unsigned";

/// See the module.
#[derive(Debug)]
pub(super) struct Voice {
    model: String,
    /// Whether what the model thinks is shown.
    thinks: bool,
    head: Head,
    /// Blocks begun.
    begun: usize,
}

impl Voice {
    pub fn new(model: String, thinks: bool) -> Self {
        Self { model, thinks, head: Head::default(), begun: 0 }
    }

    fn message(&self, content: Value, end: Option<&End>) -> Value {
        let (reason, sequence) = end.map_or((Value::Null, Value::Null), |end| stop(&end.why));
        let end = end.cloned().unwrap_or_default();
        json!({"id": format!("msg_{}", self.head.id), "type": "message", "role": "assistant", "model": self.model,
            "content": content, "stop_reason": reason, "stop_sequence": sequence, "usage": usage(&end)})
    }

    fn hides(&self, block: &Block) -> bool {
        !self.thinks && block.kind == Kind::Reasoning
    }

    fn delta(&self, delta: Value, out: &mut String) {
        let index = self.begun.saturating_sub(1);
        event(
            "content_block_delta",
            &json!({"type": "content_block_delta", "index": index, "delta": delta}),
            out,
        );
    }
}

impl answer::Voice for Voice {
    fn begin(&mut self, head: &Head, out: &mut String) {
        self.head = head.clone();
        let message = self.message(json!([]), None);
        event("message_start", &json!({"type": "message_start", "message": message}), out);
    }

    fn change(&mut self, change: Change<'_>, out: &mut String) {
        match change {
            Change::Opened(block) | Change::Grew(block, _) | Change::Closed(block) if self.hides(block) => {}
            Change::Opened(block) => {
                let start = match &block.kind {
                    Kind::Reasoning => json!({"type": "thinking", "thinking": "", "signature": ""}),
                    Kind::Text => json!({"type": "text", "text": ""}),
                    Kind::Call { id, name } => {
                        json!({"type": "tool_use", "id": id, "name": name, "input": {}})
                    }
                };
                let index = self.begun;
                self.begun += 1;
                let start = json!({"type": "content_block_start", "index": index, "content_block": start});
                event("content_block_start", &start, out);
            }
            Change::Grew(block, text) => self.delta(
                match block.kind {
                    Kind::Reasoning => json!({"type": "thinking_delta", "thinking": text}),
                    Kind::Text => json!({"type": "text_delta", "text": text}),
                    Kind::Call { .. } => json!({"type": "input_json_delta", "partial_json": text}),
                },
                out,
            ),
            Change::Closed(block) => {
                if block.kind == Kind::Reasoning {
                    self.delta(json!({"type": "signature_delta", "signature": UNSIGNED}), out);
                }
                let index = self.begun.saturating_sub(1);
                event("content_block_stop", &json!({"type": "content_block_stop", "index": index}), out);
            }
        }
    }

    fn end(&mut self, _: &[Block], end: &End, out: &mut String) {
        let (reason, sequence) = stop(&end.why);
        let delta = json!({"stop_reason": reason, "stop_sequence": sequence});
        event("message_delta", &json!({"type": "message_delta", "delta": delta, "usage": usage(end)}), out);
        event("message_stop", &json!({"type": "message_stop"}), out);
    }

    fn fail(&mut self, message: &str, out: &mut String) {
        let error = json!({"type": "api_error", "message": message});
        event("error", &json!({"type": "error", "error": error}), out);
    }

    fn whole(&mut self, blocks: &[Block], end: &End, out: &mut String) {
        let shown = blocks.iter().filter(|block| !self.hides(block)).map(content);
        *out = self.message(shown.collect(), Some(end)).to_string();
    }
}

fn content(block: &Block) -> Value {
    match &block.kind {
        Kind::Reasoning => json!({"type": "thinking", "thinking": block.text, "signature": UNSIGNED}),
        Kind::Text => json!({"type": "text", "text": block.text}),
        Kind::Call { id, name } => {
            json!({"type": "tool_use", "id": id, "name": name, "input": input(&block.text)})
        }
    }
}

/// The API wants an object. What a model wrote in its place is not thrown away.
fn input(arguments: &str) -> Value {
    match serde_json::from_str(arguments) {
        Ok(Value::Object(input)) => Value::Object(input),
        _ if arguments.trim().is_empty() => json!({}),
        _ => json!({"arguments": arguments}),
    }
}

/// `stop_reason` and `stop_sequence`.
fn stop(why: &Why) -> (Value, Value) {
    match why {
        Why::Stop => (json!("end_turn"), Value::Null),
        Why::Sequence(sequence) => (json!("stop_sequence"), json!(sequence)),
        Why::Calls => (json!("tool_use"), Value::Null),
        Why::Length => (json!("max_tokens"), Value::Null),
        Why::Filter => (json!("refusal"), Value::Null),
    }
}

/// What was cached is counted apart from the rest.
fn usage(end: &End) -> Value {
    let cached = end.usage.cached();
    json!({"input_tokens": end.usage.prompt - cached, "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached, "output_tokens": end.usage.completion})
}
