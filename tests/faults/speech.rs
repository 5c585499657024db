//! What a client says and reads in each API.

use kvc_router::prompt::Api;
use serde_json::{Value, json};

use super::client::MODEL;
use super::schedule::TurnPlan;

/// How one answer went.
#[derive(Debug, Default)]
pub struct Seen {
    pub status: u16,
    pub mode: String,
    pub reason: String,
    pub worker: String,
    pub text: String,
    pub error: Option<String>,
    pub complete: bool,
    /// It ended for lack of room, or at the request's limit.
    pub short: bool,
    /// Its last token came.
    pub over: bool,
    /// Tokens of the answer, as the answer says.
    pub tokens: Option<u64>,
    /// Numbered events that came out of order.
    pub misnumbered: bool,
    pub events: u64,
}

pub fn path(api: Api) -> &'static str {
    match api {
        Api::Chat => "/v1/chat/completions",
        Api::Completions => "/v1/completions",
        Api::Responses => "/v1/responses",
        Api::Messages => "/v1/messages",
    }
}

/// The body of a turn.
pub fn body(turn: &TurnPlan, system: &str, said: &[(&'static str, String)]) -> String {
    let messages: Vec<Value> =
        said.iter().map(|(role, text)| json!({"role": role, "content": text})).collect();
    let mut body = json!({"model": MODEL, "stream": turn.stream, "temperature": 0});
    let limit = if turn.api == Api::Responses { "max_output_tokens" } else { "max_tokens" };
    body[limit] = turn.max_tokens.into();
    match turn.api {
        Api::Chat => {
            let head = json!({"role": "system", "content": system});
            body["messages"] = std::iter::once(head).chain(messages).collect();
        }
        Api::Messages => (body["system"], body["messages"]) = (system.into(), messages.into()),
        Api::Responses => (body["instructions"], body["input"]) = (system.into(), messages.into()),
        Api::Completions => {
            // Answers stand where the model put them, so that the next prompt begins with this one and its answer.
            let mut prompt = system.to_owned();
            for (role, text) in said {
                let mark = if *role == "user" { "\n> " } else { "" };
                prompt = prompt + mark + text;
            }
            body["prompt"] = prompt.into();
        }
    }
    if turn.stream && matches!(turn.api, Api::Chat | Api::Completions) {
        body["stream_options"] = json!({"include_usage": true});
    }
    body.to_string()
}

impl Seen {
    /// Reads an answer, or what came of it.
    pub fn read(&mut self, api: Api, sse: bool, bytes: &[u8]) {
        if !sse {
            let value: Value = serde_json::from_slice(bytes).unwrap_or(Value::Null);
            (self.complete, self.over) = (value.is_object(), value.is_object());
            self.error_of(&value);
            return self.whole(api, &value);
        }
        let text = String::from_utf8_lossy(bytes);
        for line in text.lines().filter_map(|line| line.strip_prefix("data: ")) {
            if line == "[DONE]" {
                self.complete = true;
                continue;
            }
            // What is cut in the middle is no event.
            let Ok(event) = serde_json::from_str::<Value>(line) else { continue };
            self.error_of(&event);
            self.event(api, &event);
        }
    }

    fn error_of(&mut self, value: &Value) {
        let word = |at: &str| value.pointer(at).and_then(Value::as_str);
        let code = word("/error/code").or(word("/error/type"));
        let code = code.or_else(|| if value["type"] == "error" { word("/code") } else { None });
        if let Some(code) = code {
            self.error = Some(code.to_owned());
        }
    }

    fn says(&mut self, text: &Value) {
        self.text.push_str(text.as_str().unwrap_or(""));
    }

    fn usage(&mut self, usage: &Value) {
        let tokens = usage["completion_tokens"].as_u64().or(usage["output_tokens"].as_u64());
        self.tokens = tokens.or(self.tokens);
    }

    fn whole(&mut self, api: Api, answer: &Value) {
        self.usage(&answer["usage"]);
        match api {
            Api::Chat | Api::Completions => {
                let choice = &answer["choices"][0];
                self.short = choice["finish_reason"] == "length";
                self.says(if api == Api::Chat { &choice["message"]["content"] } else { &choice["text"] });
            }
            Api::Responses => {
                self.short = answer["status"] == "incomplete";
                self.says(&answer["output"][0]["content"][0]["text"]);
            }
            Api::Messages => {
                self.short = answer["stop_reason"] == "max_tokens";
                self.says(&answer["content"][0]["text"]);
            }
        }
    }

    fn event(&mut self, api: Api, event: &Value) {
        match api {
            Api::Chat | Api::Completions => {
                let choice = &event["choices"][0];
                self.over |= choice["finish_reason"].is_string();
                self.short |= choice["finish_reason"] == "length";
                self.says(if api == Api::Chat { &choice["delta"]["content"] } else { &choice["text"] });
                self.usage(&event["usage"]);
            }
            Api::Responses => {
                self.misnumbered |= event["sequence_number"] != self.events;
                self.events += 1;
                let kind = event["type"].as_str().unwrap_or("");
                if kind == "response.output_text.delta" {
                    self.says(&event["delta"]);
                }
                if matches!(kind, "response.completed" | "response.incomplete") {
                    (self.complete, self.over) = (true, true);
                    self.short = kind == "response.incomplete";
                    self.usage(&event["response"]["usage"]);
                }
            }
            Api::Messages => match event["type"].as_str() {
                Some("content_block_delta") => self.says(&event["delta"]["text"]),
                Some("message_delta") => {
                    self.over = true;
                    self.short = event["delta"]["stop_reason"] == "max_tokens";
                    self.usage(&event["usage"]);
                }
                Some("message_stop") => self.complete = true,
                _ => {}
            },
        }
    }
}
