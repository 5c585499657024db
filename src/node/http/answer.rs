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

    /// An answer in one piece.
    pub fn whole(&self, text: &str, finish: Finish, usage: &Value) -> String {
        let finish = finish.as_str();
        let choice = if self.chat {
            json!({"index": 0, "message": {"role": "assistant", "content": text}, "finish_reason": finish})
        } else {
            json!({"index": 0, "text": text, "logprobs": null, "finish_reason": finish})
        };
        let object = if self.chat { "chat.completion" } else { "text_completion" };
        self.object(object, json!([choice]), Some(usage)).to_string()
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

    /// Why it ended.
    pub fn finish(&self, finish: Finish) -> String {
        let reason = json!(finish.as_str());
        let choice = if self.chat {
            json!({"index": 0, "delta": {}, "finish_reason": reason})
        } else {
            self.piece("", &reason)
        };
        self.chunk(json!([choice]), None)
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
