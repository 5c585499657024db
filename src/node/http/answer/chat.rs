//! Chat completions, and completions.

use serde_json::{Value, json};

use crate::prompt::Api;

use super::super::super::builtin::decode::Decoding;
use super::super::super::builtin::script::{chat_call, message};
use super::{Names, Shape};

/// See the module.
#[derive(Debug)]
pub struct Chat {
    chat: bool,
    id: String,
    names: Names,
    include_usage: bool,
}

impl Chat {
    pub fn new(api: Api, names: Names, include_usage: bool) -> Self {
        let chat = api == Api::Chat;
        let prefix = if chat { "chatcmpl" } else { "cmpl" };
        Self { chat, id: format!("{prefix}-{}", names.request), names, include_usage }
    }

    fn piece(&self, text: &str, reason: &Value) -> Value {
        if self.chat {
            json!({"index": 0, "delta": {"content": text}, "finish_reason": reason})
        } else {
            json!({"index": 0, "text": text, "logprobs": null, "finish_reason": reason})
        }
    }

    /// Why it ended, and the calls it ends with.
    fn finish(&self, turn: &Decoding) -> String {
        let reason = json!(turn.finish().as_str());
        if !self.chat {
            return self.chunk(json!([self.piece("", &reason)]), None);
        }
        let choice =
            |delta, reason| self.chunk(json!([{"index": 0, "delta": delta, "finish_reason": reason}]), None);
        let calls = turn.calls().iter().enumerate();
        let calls: Vec<_> = calls.map(|(i, call)| chat_call(call, i, self.names.call_id(i))).collect();
        let called =
            if calls.is_empty() { String::new() } else { choice(json!({"tool_calls": calls}), Value::Null) };
        called + &choice(json!({}), reason)
    }

    fn chunk(&self, choices: Value, usage: Option<&Value>) -> String {
        let object = if self.chat { "chat.completion.chunk" } else { "text_completion" };
        format!("data: {}\n\n", self.object(object, choices, usage))
    }

    fn object(&self, object: &str, choices: Value, usage: Option<&Value>) -> Value {
        let mut answer = json!({"id": self.id, "object": object, "created": self.names.created,
            "model": self.names.model, "choices": choices});
        if let (Some(usage), Some(fields)) = (usage, answer.as_object_mut()) {
            fields.insert("usage".into(), usage.clone());
        }
        answer
    }
}

impl Shape for Chat {
    fn whole(&self, text: &str, turn: &Decoding) -> String {
        let finish = turn.finish().as_str();
        let choice = if self.chat {
            let message = message(Api::Chat, text, turn.calls(), |i| self.names.call_id(i));
            json!({"index": 0, "message": message, "finish_reason": finish})
        } else {
            json!({"index": 0, "text": text, "logprobs": null, "finish_reason": finish})
        };
        let object = if self.chat { "chat.completion" } else { "text_completion" };
        self.object(object, json!([choice]), Some(&usage(turn))).to_string()
    }

    fn begin(&mut self, _: &Decoding) -> String {
        if !self.chat {
            return String::new();
        }
        let delta = json!({"role": "assistant", "content": ""});
        self.chunk(json!([{"index": 0, "delta": delta, "finish_reason": null}]), None)
    }

    fn text(&mut self, piece: &str) -> String {
        self.chunk(json!([self.piece(piece, &Value::Null)]), None)
    }

    fn end(&mut self, turn: &Decoding) -> String {
        let mut end = self.finish(turn);
        if self.include_usage {
            end += &self.chunk(json!([]), Some(&usage(turn)));
        }
        end + "data: [DONE]\n\n"
    }
}

/// Exact counts.
fn usage(turn: &Decoding) -> Value {
    json!({
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "total_tokens": turn.prompt_tokens + turn.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": turn.cached_tokens()},
    })
}
