//! A chat answer as a response.

use serde_json::value::RawValue;
use serde_json::{Map, Value, json};

use super::super::answer::{self, End, Head, Why, event};
use super::super::blocks::{Block, Change, Kind};
use super::super::fields::Members;
use super::tools::{Renamed, unwrapped};

/// What a response repeats of its request.
#[derive(Debug)]
pub(super) struct Echo(Map<String, Value>);

/// The fields repeated, and what stands there when the request doesn't say.
const ECHOED: [(&str, &str); 16] = [
    ("model", "null"),
    ("instructions", "null"),
    ("max_output_tokens", "null"),
    ("max_tool_calls", "null"),
    ("metadata", "{}"),
    ("parallel_tool_calls", "true"),
    ("prompt_cache_key", "null"),
    ("reasoning", "{\"effort\":null,\"summary\":null}"),
    ("safety_identifier", "null"),
    ("temperature", "1.0"),
    ("text", "{\"format\":{\"type\":\"text\"}}"),
    ("tool_choice", "\"auto\""),
    ("tools", "[]"),
    ("top_p", "1.0"),
    ("truncation", "\"disabled\""),
    ("user", "null"),
];

impl Echo {
    pub fn of(members: &Members<'_>) -> Self {
        let value = |(name, default): &(&str, &str)| {
            let text = members.get(name).map_or(*default, RawValue::get);
            ((*name).to_owned(), serde_json::from_str(text).unwrap_or(Value::Null))
        };
        Self(ECHOED.iter().map(value).collect())
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct Voice {
    echo: Echo,
    /// Tools the client has other words for.
    renamed: Vec<Renamed>,
    head: Head,
    /// Number of the next event.
    next: u64,
    /// Items begun.
    begun: usize,
}

impl Voice {
    pub fn new(echo: Echo, renamed: Vec<Renamed>) -> Self {
        Self { echo, renamed, head: Head::default(), next: 0, begun: 0 }
    }

    fn event(&mut self, name: &str, mut data: Value, out: &mut String) {
        data["type"] = name.into();
        data["sequence_number"] = self.next.into();
        self.next += 1;
        event(name, &data, out);
    }

    /// What happens inside the newest item.
    fn inside(&mut self, name: &str, block: &Block, (key, value): (&str, Value), out: &mut String) {
        let at = self.begun.saturating_sub(1);
        let mut data = json!({"item_id": self.id(block, at), "output_index": at, key: value});
        if !matches!(block.kind, Kind::Call { .. }) {
            data["content_index"] = 0.into();
        }
        if name.starts_with("response.output_text") {
            data["logprobs"] = json!([]);
        }
        self.event(name, data, out);
    }

    /// What happens to the newest item.
    fn on_item(&mut self, name: &str, block: &Block, status: &str, out: &mut String) {
        let at = self.begun.saturating_sub(1);
        let item = self.item(block, at, status);
        self.event(name, json!({"output_index": at, "item": item}), out);
    }

    fn renamed(&self, name: &str) -> Option<&Renamed> {
        self.renamed.iter().find(|renamed| renamed.flat == name)
    }

    fn is_custom(&self, name: &str) -> bool {
        self.renamed(name).is_some_and(|renamed| renamed.custom)
    }

    fn id(&self, block: &Block, at: usize) -> String {
        let prefix = match &block.kind {
            Kind::Reasoning => "rs",
            Kind::Text => "msg",
            Kind::Call { name, .. } if self.is_custom(name) => "ctc",
            Kind::Call { .. } => "fc",
        };
        format!("{prefix}_{}_{at}", self.head.id)
    }

    /// A block as an output item.
    fn item(&self, block: &Block, at: usize, status: &str) -> Value {
        let mut item = match &block.kind {
            Kind::Reasoning => {
                let content = part(block).into_iter().collect::<Value>();
                json!({"type": "reasoning", "summary": [], "content": content, "encrypted_content": null})
            }
            Kind::Text => {
                json!({"type": "message", "role": "assistant", "content": part(block).into_iter().collect::<Value>()})
            }
            Kind::Call { id, name } if self.is_custom(name) => {
                json!({"type": "custom_tool_call", "call_id": id, "name": name, "input": unwrapped(&block.text)})
            }
            Kind::Call { id, name } => {
                json!({"type": "function_call", "call_id": id, "name": name, "arguments": block.text})
            }
        };
        if let Kind::Call { name, .. } = &block.kind
            && let Some(Renamed { name, namespace, .. }) = self.renamed(name)
        {
            item["name"] = name.as_str().into();
            if let Some(namespace) = namespace {
                item["namespace"] = namespace.as_str().into();
            }
        }
        item["id"] = self.id(block, at).into();
        item["status"] = status.into();
        item
    }

    fn response(&self, status: &str, blocks: &[Block], end: Option<&End>, error: Option<&str>) -> Value {
        let items = blocks.iter().enumerate().map(|(at, block)| {
            // Only the newest item can be cut.
            let cut = status == "incomplete" && at + 1 == blocks.len();
            self.item(block, at, if cut { "incomplete" } else { "completed" })
        });
        let why = end.filter(|_| status == "incomplete").map(|end| match end.why {
            Why::Filter => json!({"reason": "content_filter"}),
            _ => json!({"reason": "max_output_tokens"}),
        });
        let mut response = json!({"id": format!("resp_{}", self.head.id), "object": "response",
            "created_at": self.head.created, "status": status, "background": false,
            "error": error.map(|message| json!({"code": "server_error", "message": message})),
            "incomplete_details": why, "output": items.collect::<Value>(), "previous_response_id": null,
            "store": false, "service_tier": "default", "usage": end.map(usage)});
        if let Some(fields) = response.as_object_mut() {
            fields.extend(self.echo.0.iter().map(|(name, value)| (name.clone(), value.clone())));
        }
        response
    }
}

impl answer::Voice for Voice {
    fn begin(&mut self, head: &Head, out: &mut String) {
        self.head = head.clone();
        let response = self.response("in_progress", &[], None, None);
        self.event("response.created", json!({"response": response}), out);
        self.event("response.in_progress", json!({"response": response}), out);
    }

    fn change(&mut self, change: Change<'_>, out: &mut String) {
        match change {
            Change::Opened(block) => {
                self.begun += 1;
                self.on_item("response.output_item.added", block, "in_progress", out);
                if let Some(empty) = empty_part(block) {
                    self.inside("response.content_part.added", block, ("part", empty), out);
                }
            }
            Change::Grew(block, text) => {
                let name = match &block.kind {
                    Kind::Reasoning => "response.reasoning_text.delta",
                    Kind::Text => "response.output_text.delta",
                    // Its input stands inside of JSON: it is told when it is whole.
                    Kind::Call { name, .. } if self.is_custom(name) => return,
                    Kind::Call { .. } => "response.function_call_arguments.delta",
                };
                self.inside(name, block, ("delta", text.into()), out);
            }
            Change::Closed(block) => {
                self.close(block, out);
                self.on_item("response.output_item.done", block, "completed", out);
            }
        }
    }

    fn end(&mut self, blocks: &[Block], end: &End, out: &mut String) {
        let status = status(&end.why);
        let response = self.response(status, blocks, Some(end), None);
        self.event(&format!("response.{status}"), json!({"response": response}), out);
    }

    fn fail(&mut self, message: &str, out: &mut String) {
        let response = self.response("failed", &[], None, Some(message));
        self.event("response.failed", json!({"response": response}), out);
    }

    fn whole(&mut self, blocks: &[Block], end: &End, out: &mut String) {
        *out = self.response(status(&end.why), blocks, Some(end), None).to_string();
    }
}

impl Voice {
    /// The ends of what is inside an item.
    fn close(&mut self, block: &Block, out: &mut String) {
        let text = || Value::from(block.text.as_str());
        match &block.kind {
            Kind::Reasoning => self.inside("response.reasoning_text.done", block, ("text", text()), out),
            Kind::Text => self.inside("response.output_text.done", block, ("text", text()), out),
            Kind::Call { name, .. } if self.is_custom(name) => {
                let input = Value::from(unwrapped(&block.text));
                self.inside("response.custom_tool_call_input.delta", block, ("delta", input.clone()), out);
                self.inside("response.custom_tool_call_input.done", block, ("input", input), out);
            }
            Kind::Call { .. } => {
                self.inside("response.function_call_arguments.done", block, ("arguments", text()), out);
            }
        }
        if let Some(part) = part(block) {
            self.inside("response.content_part.done", block, ("part", part), out);
        }
    }
}

/// The one part of a block's content, as far as it has come.
fn part(block: &Block) -> Option<Value> {
    if block.text.is_empty() {
        return None;
    }
    match block.kind {
        Kind::Reasoning => Some(json!({"type": "reasoning_text", "text": block.text})),
        Kind::Text => {
            Some(json!({"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}))
        }
        Kind::Call { .. } => None,
    }
}

fn empty_part(block: &Block) -> Option<Value> {
    match block.kind {
        Kind::Reasoning => Some(json!({"type": "reasoning_text", "text": ""})),
        Kind::Text => Some(json!({"type": "output_text", "text": "", "annotations": [], "logprobs": []})),
        Kind::Call { .. } => None,
    }
}

fn status(why: &Why) -> &'static str {
    match why {
        Why::Length | Why::Filter => "incomplete",
        Why::Stop | Why::Sequence(_) | Why::Calls => "completed",
    }
}

fn usage(end: &End) -> Value {
    let usage = &end.usage;
    json!({"input_tokens": usage.prompt, "input_tokens_details": {"cached_tokens": usage.cached()},
        "output_tokens": usage.completion,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning()},
        "total_tokens": usage.prompt + usage.completion})
}
