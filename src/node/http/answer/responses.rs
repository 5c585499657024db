//! The Responses API.

use serde_json::{Value, json};

use crate::prompt::Api;

use super::super::super::builtin::decode::{Decoding, Finish};
use super::super::super::builtin::kept::Keep;
use super::super::super::builtin::script::message;
use super::{Names, Shape, event};

/// See the module.
#[derive(Debug)]
pub struct Responses {
    names: Names,
    /// Number of the next event.
    next: u64,
    /// The text so far; its end is told with all of it.
    text: String,
    /// The conversation, when it is kept.
    keep: Option<Keep>,
}

impl Responses {
    pub fn new(names: Names, keep: Option<Keep>) -> Self {
        Self { names, next: 0, text: String::new(), keep }
    }

    fn event(&mut self, name: &str, mut data: Value) -> String {
        data["type"] = name.into();
        data["sequence_number"] = self.next.into();
        self.next += 1;
        event(name, &data)
    }

    /// What happens to one output item.
    fn on_item(&mut self, name: &str, index: usize, item: &Value) -> String {
        self.event(name, json!({"output_index": index, "item": item}))
    }

    /// What happens inside an output item.
    fn inside(&mut self, name: &str, (index, item): (usize, &Value), key: &str, value: &Value) -> String {
        let mut data = json!({"item_id": item["id"], "output_index": index, key: value});
        if item["type"] == "message" {
            data["content_index"] = 0.into();
            if name.starts_with("response.output_text") {
                data["logprobs"] = json!([]);
            }
        }
        self.event(name, data)
    }

    /// The output items, with their ids.
    fn items(&self, text: &str, turn: &Decoding) -> Vec<Value> {
        let Value::Array(mut items) = message(Api::Responses, text, turn.calls(), |i| self.names.call_id(i))
        else {
            return Vec::new();
        };
        for (i, item) in items.iter_mut().enumerate() {
            let prefix = if item["type"] == "message" { "msg" } else { "fc" };
            item["id"] = self.names.id(prefix, i).into();
        }
        items
    }

    fn response(&self, status: &str, output: &[Value], usage: &Value) -> Value {
        let limit = (status == "incomplete").then(|| json!({"reason": "max_output_tokens"}));
        let (store, previous) = (self.keep.is_some(), self.keep.as_ref().and_then(|k| k.previous.as_deref()));
        json!({"id": self.response_id(), "object": "response", "created_at": self.names.created,
            "status": status, "model": self.names.model, "output": output, "usage": usage, "error": null,
            "incomplete_details": limit, "instructions": null, "metadata": {}, "parallel_tool_calls": true,
            "previous_response_id": previous, "store": store, "tool_choice": "auto", "tools": [],
            "temperature": 1.0, "top_p": 1.0, "truncation": "disabled",
            "text": {"format": {"type": "text"}}})
    }

    fn response_id(&self) -> String {
        self.names.id("resp", 0)
    }

    /// Keeps the conversation, so that it can be continued.
    fn keep(&self, items: &[Value]) {
        if let Some(keep) = &self.keep {
            keep.put(&self.response_id(), items);
        }
    }

    /// The text item as it begins.
    fn begun(&self) -> Value {
        json!({"id": self.names.id("msg", 0), "type": "message", "status": "in_progress", "role": "assistant",
            "content": []})
    }

    fn text_ends(&mut self, item: &Value) -> String {
        let (at, part) = ((0, item), item["content"][0].clone());
        let mut end = self.inside("response.output_text.done", at, "text", &part["text"]);
        end += &self.inside("response.content_part.done", at, "part", &part);
        end + &self.on_item("response.output_item.done", 0, item)
    }

    fn call(&mut self, index: usize, item: &Value) -> String {
        let mut begun = item.clone();
        (begun["status"], begun["arguments"]) = ("in_progress".into(), "".into());
        let mut call = self.on_item("response.output_item.added", index, &begun);
        let (at, arguments) = ((index, item), &item["arguments"]);
        call += &self.inside("response.function_call_arguments.delta", at, "delta", arguments);
        call += &self.inside("response.function_call_arguments.done", at, "arguments", arguments);
        call + &self.on_item("response.output_item.done", index, item)
    }
}

impl Shape for Responses {
    fn whole(&self, text: &str, turn: &Decoding) -> String {
        let items = self.items(text, turn);
        self.keep(&items);
        self.response(status(turn), &items, &usage(turn)).to_string()
    }

    fn begin(&mut self, _: &Decoding) -> String {
        let response = self.response("in_progress", &[], &Value::Null);
        let created = self.event("response.created", json!({"response": response}));
        created + &self.event("response.in_progress", json!({"response": response}))
    }

    fn text(&mut self, piece: &str) -> String {
        let item = self.begun();
        let mut events = String::new();
        if self.text.is_empty() {
            events += &self.on_item("response.output_item.added", 0, &item);
            let part = json!({"type": "output_text", "text": "", "annotations": [], "logprobs": []});
            events += &self.inside("response.content_part.added", (0, &item), "part", &part);
        }
        self.text += piece;
        events + &self.inside("response.output_text.delta", (0, &item), "delta", &piece.into())
    }

    fn end(&mut self, turn: &Decoding) -> String {
        let items = self.items(&self.text, turn);
        self.keep(&items);
        let mut end = String::new();
        for (index, item) in items.iter().enumerate() {
            end += &match item["type"] == "message" {
                true => self.text_ends(item),
                false => self.call(index, item),
            };
        }
        let response = self.response(status(turn), &items, &usage(turn));
        end + &self.event(&format!("response.{}", status(turn)), json!({"response": response}))
    }
}

fn status(turn: &Decoding) -> &'static str {
    if turn.finish() == Finish::Length { "incomplete" } else { "completed" }
}

/// Exact counts.
fn usage(turn: &Decoding) -> Value {
    json!({
        "input_tokens": turn.prompt_tokens,
        "input_tokens_details": {"cached_tokens": turn.cached_tokens()},
        "output_tokens": turn.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": turn.prompt_tokens + turn.completion_tokens,
    })
}
