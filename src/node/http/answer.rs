//! The shapes of OpenAI's answers.

use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Value, json};

use crate::prompt::Api;

use super::super::builtin::decode::{Decoding, Finish};

/// What all parts of one answer share.
#[derive(Debug)]
pub struct Shape {
    chat: bool,
    id: String,
    created: u64,
    model: String,
}

impl Shape {
    pub fn new(api: Api, request_id: &str, model: &str) -> Self {
        let chat = api == Api::Chat;
        let created = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let prefix = if chat { "chatcmpl" } else { "cmpl" };
        Self { chat, id: format!("{prefix}-{request_id}"), created, model: model.to_owned() }
    }

    /// Exact counts.
    pub fn usage(&self, turn: &Decoding) -> Value {
        json!({
            "prompt_tokens": turn.prompt_tokens,
            "completion_tokens": turn.completion_tokens,
            "total_tokens": turn.prompt_tokens + turn.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": turn.cached_tokens()},
        })
    }

    /// The call a turn ends with, if it does; it takes no tokens.
    fn call(&self, turn: &Decoding) -> Option<Value> {
        let name = turn.tool.as_ref().filter(|_| turn.finish() == Finish::ToolCalls)?;
        let function = json!({"name": name, "arguments": "{}"});
        Some(
            json!([{"index": 0, "id": format!("call-{}", self.id), "type": "function", "function": function}]),
        )
    }

    /// An answer in one piece.
    pub fn whole(&self, text: &str, turn: &Decoding) -> String {
        let finish = turn.finish().as_str();
        let choice = if self.chat {
            let mut message = json!({"role": "assistant", "content": text});
            if let Some(call) = self.call(turn) {
                message["tool_calls"] = call;
            }
            json!({"index": 0, "message": message, "finish_reason": finish})
        } else {
            json!({"index": 0, "text": text, "logprobs": null, "finish_reason": finish})
        };
        let object = if self.chat { "chat.completion" } else { "text_completion" };
        self.object(object, json!([choice]), Some(&self.usage(turn))).to_string()
    }

    /// The chunk that names the role; completions have none.
    pub fn role(&self) -> Option<String> {
        self.chat.then(|| {
            let delta = json!({"role": "assistant", "content": ""});
            self.chunk(json!([{"index": 0, "delta": delta, "finish_reason": null}]), None)
        })
    }

    /// One piece of text.
    pub fn text(&self, text: &str) -> String {
        self.chunk(json!([self.piece(text, &Value::Null)]), None)
    }

    /// Why it ended, and the call it ends with.
    pub fn finish(&self, turn: &Decoding) -> String {
        let reason = json!(turn.finish().as_str());
        if !self.chat {
            return self.chunk(json!([self.piece("", &reason)]), None);
        }
        let choice =
            |delta, reason| self.chunk(json!([{"index": 0, "delta": delta, "finish_reason": reason}]), None);
        let call = self.call(turn).map(|call| choice(json!({"tool_calls": call}), Value::Null));
        call.unwrap_or_default() + &choice(json!({}), reason)
    }

    /// The last chunk of a stream that asked for usage.
    pub fn last(&self, usage: &Value) -> String {
        self.chunk(json!([]), Some(usage))
    }

    fn piece(&self, text: &str, reason: &Value) -> Value {
        if self.chat {
            json!({"index": 0, "delta": {"content": text}, "finish_reason": reason})
        } else {
            json!({"index": 0, "text": text, "logprobs": null, "finish_reason": reason})
        }
    }

    fn chunk(&self, choices: Value, usage: Option<&Value>) -> String {
        let object = if self.chat { "chat.completion.chunk" } else { "text_completion" };
        format!("data: {}\n\n", self.object(object, choices, usage))
    }

    fn object(&self, object: &str, choices: Value, usage: Option<&Value>) -> Value {
        let mut answer = json!({"id": self.id, "object": object, "created": self.created,
            "model": self.model, "choices": choices});
        if let (Some(usage), Some(fields)) = (usage, answer.as_object_mut()) {
            fields.insert("usage".into(), usage.clone());
        }
        answer
    }
}
