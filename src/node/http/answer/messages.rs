//! The Messages API.

use serde_json::{Value, json};

use crate::prompt::Api;

use super::super::super::builtin::decode::{Decoding, Finish};
use super::super::super::builtin::script::message;
use super::{Names, Shape, event};

/// See the module.
#[derive(Debug)]
pub struct Messages {
    names: Names,
    /// Content blocks begun.
    blocks: usize,
    /// Whether the last of them is open.
    open: bool,
}

impl Messages {
    pub fn new(names: Names) -> Self {
        Self { names, blocks: 0, open: false }
    }

    fn message(&self, content: &Value, stop: Option<Finish>, usage: &Value) -> Value {
        json!({"id": self.names.id("msg", 0), "type": "message", "role": "assistant",
            "model": self.names.model, "content": content, "stop_reason": stop.map(reason),
            "stop_sequence": null, "usage": usage})
    }

    fn call_id(&self, call: usize) -> String {
        self.names.id("toolu", call)
    }

    fn start_block(&mut self, block: &Value) -> String {
        let start = json!({"type": "content_block_start", "index": self.blocks, "content_block": block});
        (self.blocks, self.open) = (self.blocks + 1, true);
        event("content_block_start", &start)
    }

    fn delta(&self, delta: &Value) -> String {
        let index = self.blocks.saturating_sub(1);
        let delta = json!({"type": "content_block_delta", "index": index, "delta": delta});
        event("content_block_delta", &delta)
    }

    fn stop_block(&mut self) -> String {
        if !std::mem::take(&mut self.open) {
            return String::new();
        }
        let index = self.blocks.saturating_sub(1);
        event("content_block_stop", &json!({"type": "content_block_stop", "index": index}))
    }
}

impl Shape for Messages {
    fn whole(&self, text: &str, turn: &Decoding) -> String {
        let said = message(Api::Messages, text, turn.calls(), |i| self.call_id(i));
        self.message(&said["content"], Some(turn.finish()), &usage(turn)).to_string()
    }

    fn begin(&mut self, turn: &Decoding) -> String {
        let message = self.message(&json!([]), None, &usage(turn));
        event("message_start", &json!({"type": "message_start", "message": message}))
    }

    fn text(&mut self, piece: &str) -> String {
        let start = match self.open {
            true => String::new(),
            false => self.start_block(&json!({"type": "text", "text": ""})),
        };
        start + &self.delta(&json!({"type": "text_delta", "text": piece}))
    }

    fn end(&mut self, turn: &Decoding) -> String {
        let mut end = self.stop_block();
        for (i, call) in turn.calls().iter().enumerate() {
            let block = json!({"type": "tool_use", "id": self.call_id(i), "name": call.name, "input": {}});
            end += &self.start_block(&block);
            let input = call.input().to_string();
            end += &self.delta(&json!({"type": "input_json_delta", "partial_json": input}));
            end += &self.stop_block();
        }
        let delta = json!({"stop_reason": reason(turn.finish()), "stop_sequence": null});
        let delta = json!({"type": "message_delta", "delta": delta, "usage": usage(turn)});
        end += &event("message_delta", &delta);
        end + &event("message_stop", &json!({"type": "message_stop"}))
    }
}

fn reason(finish: Finish) -> &'static str {
    match finish {
        Finish::Stop => "end_turn",
        Finish::ToolCalls => "tool_use",
        Finish::Length => "max_tokens",
    }
}

/// Exact counts; what was cached is counted apart from the rest.
fn usage(turn: &Decoding) -> Value {
    let cached = turn.cached_tokens();
    json!({
        "input_tokens": turn.prompt_tokens - cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": cached,
        "output_tokens": turn.completion_tokens,
    })
}
