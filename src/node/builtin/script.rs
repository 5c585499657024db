//! Scripted answers: so that real agent loops, which need tool calls, run against a model that knows no tools.
//!
//! A script is a list of steps, `[{"text": "…", "tool_calls": [{"name": "…", "arguments": {…}}]}, …]`, in the body
//! field `kvc_script` or, for clients whose bodies one cannot change, in a user's message as
//! `[[kvc-script: […]]]`. The step played is the number of answers that follow the script in the prompt. A step
//! that calls a tool which the request does not define is not played: such a request is another one's.

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use crate::prompt::{Api, BYTES_PER_TOKEN, Item, ItemKind, Layout, assistant_header, render_assistant};

const MARKER: &[u8] = b"[[kvc-script:";
const FIELD: &[u8] = b"\"kvc_script\"";

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    /// The tool.
    pub name: String,
    /// Its arguments, as JSON text.
    pub arguments: String,
}

/// One scripted answer.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Step {
    /// What it says.
    pub text: String,
    /// What it calls then.
    pub calls: Vec<Call>,
}

#[derive(Deserialize)]
struct RawStep {
    #[serde(default)]
    text: String,
    #[serde(default)]
    tool_calls: Vec<RawCall>,
}

#[derive(Deserialize)]
struct RawCall {
    name: String,
    arguments: Option<Box<RawValue>>,
}

impl From<RawCall> for Call {
    fn from(raw: RawCall) -> Self {
        let arguments = raw.arguments.as_deref().map_or("{}", RawValue::get);
        // Arguments given as a text are that text.
        let arguments = serde_json::from_str::<String>(arguments).unwrap_or_else(|_| arguments.to_owned());
        Self { name: raw.name, arguments }
    }
}

/// The step a request plays, if it carries a script; `canonical` is its prompt, `tools` what it defines.
pub fn step(body: &[u8], canonical: &[u8], layout: &Layout, tools: &[String]) -> Option<Step> {
    let (steps, items) = match field(body) {
        Some(steps) => (steps, &layout.items[..]),
        None => marked(canonical, layout)?,
    };
    let raw = steps.into_iter().nth(answers(items))?;
    let step = Step { text: raw.text, calls: raw.tool_calls.into_iter().map(Call::from).collect() };
    let known = step.calls.iter().all(|call| tools.contains(&call.name));
    (known && step != Step::default()).then_some(step)
}

fn field(body: &[u8]) -> Option<Vec<RawStep>> {
    #[derive(Deserialize)]
    struct Body {
        kvc_script: Option<Vec<RawStep>>,
    }
    memchr::memmem::find(body, FIELD)?;
    serde_json::from_slice::<Body>(body).ok()?.kvc_script
}

/// The last script in a user's message, and the items behind it.
fn marked<'l>(canonical: &[u8], layout: &'l Layout) -> Option<(Vec<RawStep>, &'l [Item])> {
    let at = memchr::memmem::rfind_iter(canonical, MARKER).find_map(|at| {
        let item = layout.items.partition_point(|item| item.end as usize <= at);
        let user = layout.items.get(item)?.kind == ItemKind::User;
        let text = &canonical[at + MARKER.len()..];
        let steps = serde_json::Deserializer::from_slice(text).into_iter().next()?.ok()?;
        user.then_some((steps, item + 1))
    });
    at.map(|(steps, behind)| (steps, &layout.items[behind..]))
}

/// How many answers there are: runs of items by the assistant.
fn answers(items: &[Item]) -> usize {
    let by_assistant = |item: &Item| item.kind == ItemKind::Assistant;
    let starts = items.iter().enumerate().filter(|(i, item)| {
        by_assistant(item) && !i.checked_sub(1).is_some_and(|before| by_assistant(&items[before]))
    });
    starts.count()
}

/// An answer as the client will echo it; `id` numbers the calls.
pub fn message(api: Api, text: &str, calls: &[Call], id: impl Fn(usize) -> String) -> Value {
    let calls = calls.iter().enumerate();
    match api {
        Api::Chat | Api::Completions => {
            let mut message = json!({"role": "assistant", "content": text});
            let calls: Vec<_> = calls.map(|(i, call)| chat_call(call, i, id(i))).collect();
            if !calls.is_empty() {
                message["tool_calls"] = calls.into();
                if text.is_empty() {
                    message["content"] = Value::Null;
                }
            }
            message
        }
        Api::Responses => {
            let said = (!text.is_empty()).then(|| text_item(text));
            said.into_iter().chain(calls.map(|(i, call)| call_item(call, &id(i)))).collect()
        }
        Api::Messages => {
            let said = (!text.is_empty()).then(|| json!({"type": "text", "text": text}));
            let calls = calls.map(|(i, call)| {
                json!({"type": "tool_use", "id": id(i), "name": call.name, "input": call.input()})
            });
            json!({"role": "assistant", "content": said.into_iter().chain(calls).collect::<Value>()})
        }
    }
}

/// A call of a chat message.
pub fn chat_call(call: &Call, index: usize, id: String) -> Value {
    let function = json!({"name": call.name, "arguments": call.arguments});
    json!({"index": index, "id": id, "type": "function", "function": function})
}

fn text_item(text: &str) -> Value {
    let part = json!({"type": "output_text", "text": text, "annotations": [], "logprobs": []});
    json!({"type": "message", "status": "completed", "role": "assistant", "content": [part]})
}

fn call_item(call: &Call, id: &str) -> Value {
    json!({"type": "function_call", "status": "completed", "call_id": id, "name": call.name,
        "arguments": call.arguments})
}

impl Call {
    /// The arguments as an object, which the Messages API wants.
    pub fn input(&self) -> Value {
        let input = serde_json::from_str(&self.arguments).ok();
        input.filter(Value::is_object).unwrap_or_else(|| json!({}))
    }
}

/// A step on its way out, token by token. The KV holds it as the next prompt will contain it, calls and all.
#[derive(Debug, Clone)]
pub struct Playback {
    step: Step,
    bytes: Vec<u8>,
    at: usize,
    shown: usize,
}

impl Playback {
    /// `None` for what cannot be told in this API.
    pub fn new(api: Api, step: Step) -> Option<Self> {
        let message = message(api, &step.text, &step.calls, |_| String::new()).to_string();
        let echoed = render_assistant(api, message.as_bytes()).ok()?;
        let header = assistant_header(api);
        let bytes = echoed.get(header.len()..echoed.len().checked_sub(1)?)?.to_vec();
        (bytes.starts_with(step.text.as_bytes()) && !bytes.is_empty()).then_some(Self {
            step,
            bytes,
            at: 0,
            shown: 0,
        })
    }

    /// Its canonical bytes.
    pub fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// The calls it ends with.
    pub fn calls(&self) -> Vec<Call> {
        self.step.calls.clone()
    }

    /// All its text.
    pub fn text(&self) -> &str {
        &self.step.text
    }

    /// Goes to where `text` has been said; the canonical bytes of that. `None`: it never says so.
    pub fn skip(&mut self, text: &str) -> Option<Vec<u8>> {
        let (mut said, mut held) = (String::new(), Vec::new());
        while said.len() < text.len() && self.at < self.bytes.len() {
            held.extend_from_slice(self.token(&mut said));
        }
        (said == text).then_some(held)
    }

    /// The next token; what of the text is complete with it goes to `out`.
    pub fn token(&mut self, out: &mut String) -> &[u8] {
        let (from, text) = (self.at, &self.step.text);
        self.at = (from + BYTES_PER_TOKEN).min(self.bytes.len());
        let mut end = self.at.min(text.len());
        while !text.is_char_boundary(end) {
            end -= 1;
        }
        if let Some(new) = text.get(self.shown..end) {
            out.push_str(new);
            self.shown = end;
        }
        &self.bytes[from..self.at]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prompt::{canonical, read};

    fn played(api: Api, body: &Value, tools: &[&str]) -> Option<Step> {
        let body = body.to_string();
        let prompt = read(api, body.as_bytes(), &()).unwrap();
        let text = canonical(api, body.as_bytes()).unwrap();
        let tools: Vec<String> = tools.iter().map(|&t| t.to_owned()).collect();
        step(body.as_bytes(), &text, prompt.layout(), &tools)
    }

    #[test]
    fn the_step_is_the_number_of_answers_behind_the_script() {
        let ask = r#"do [[kvc-script: [{"tool_calls":[{"name":"sh","arguments":{"c":"a ]] \" b"}}]},{"text":"done"}]]] now"#;
        let mut messages = vec![json!({"role": "user", "content": ask})];
        let body = |messages: &[Value]| json!({"model": "m", "messages": messages});
        let first = played(Api::Chat, &body(&messages), &["sh"]).unwrap();
        let call = Call { name: "sh".into(), arguments: r#"{"c":"a ]] \" b"}"#.into() };
        assert_eq!(first, Step { text: String::new(), calls: vec![call.clone()] });
        assert_eq!(played(Api::Chat, &body(&messages), &["ls"]), None, "another request's script");
        messages.push(message(Api::Chat, "", &[call], |_| "call_1".into()));
        messages.push(json!({"role": "tool", "tool_call_id": "call_1", "content": "[[kvc-script: []]]"}));
        assert_eq!(played(Api::Chat, &body(&messages), &["sh"]).unwrap().text, "done");
        messages.push(json!({"role": "assistant", "content": "done"}));
        messages.push(json!({"role": "user", "content": "more"}));
        assert_eq!(played(Api::Chat, &body(&messages), &["sh"]), None, "the script is over");
        let mut field = body(&messages);
        field["kvc_script"] = json!([{}, {}, {"text": "third"}]);
        assert_eq!(played(Api::Chat, &field, &[]).unwrap().text, "third");
    }

    #[test]
    fn what_is_held_is_what_the_client_echoes() {
        let calls = vec![
            Call { name: "sh".into(), arguments: r#"{"b": 1, "a": "é"}"#.into() },
            Call { name: "ls".into(), arguments: "{}".into() },
        ];
        for (api, field) in [(Api::Chat, "messages"), (Api::Messages, "messages"), (Api::Responses, "input")]
        {
            for text in ["", "größer 😀 als"] {
                let step = Step { text: text.into(), calls: calls.clone() };
                let mut playback = Playback::new(api, step).unwrap();
                let (mut held, mut shown) = (Vec::new(), String::new());
                while held.len() < playback.bytes().len() {
                    held.extend_from_slice(playback.token(&mut shown));
                }
                assert_eq!(shown, text);
                let user = json!({"role": "user", "content": "hello"});
                let before = json!({"model": "m", field: [user]});
                let mut text_before = canonical(api, before.to_string().as_bytes()).unwrap();
                let echo = match message(api, text, &calls, |i| format!("id-{i}")) {
                    Value::Array(items) => items,
                    one => vec![one],
                };
                let all: Vec<Value> = std::iter::once(user).chain(echo).collect();
                let after = canonical(api, json!({"model": "m", field: all}).to_string().as_bytes()).unwrap();
                text_before.extend_from_slice(assistant_header(api));
                text_before.extend_from_slice(&held);
                assert!(after.starts_with(&text_before), "{api}");
                assert_eq!(after.len(), text_before.len() + 1);
            }
        }
    }
}
