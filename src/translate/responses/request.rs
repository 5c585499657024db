//! A Responses request as a chat body.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::super::Translated;
use super::super::answer::Translator;
use super::super::chat::{Body, Content, Message, Part, Role};
use super::super::fields::{Members, Result, Text, TextOr, bad, read, unsupported};
use super::items::{self, Item};
use super::tools::{self, Tool, Tools};
use super::voice::{Echo, Voice};

/// Translates the body.
pub(in super::super) fn request(body: &[u8]) -> Result<Translated> {
    let members = Members::of(body)?;
    let mut chat = Body::default();
    members.need::<Text<'_>>("model")?;
    let stream = members.read::<bool>("stream")?.unwrap_or(false);
    if let Some(Text(text)) = members.read::<Text<'_>>("instructions")?.filter(|text| !text.is_empty()) {
        chat.messages.push(Message::new(Role::System, Content::Text(text)));
    }
    match members.need::<TextOr<'_, Item<'_>>>("input")? {
        TextOr::Text(text) => chat.messages.push(Message::new(Role::User, Content::Text(text))),
        TextOr::Parts(all) => items::append(&mut chat.messages, all)?,
    }
    one_system(&mut chat.messages);
    let (mut tools, mut dropped) = (Tools::default(), Vec::new());
    let all = members.read::<Vec<Tool<'_>>>("tools")?.unwrap_or_default();
    let optional = all.iter().any(|tool| !tool.is_search());
    for (at, tool) in all.into_iter().enumerate() {
        if optional && tool.is_search() {
            dropped.push(tool.kind());
        } else {
            tool.define(&format!("tools[{at}]"), &mut tools)?;
        }
    }
    chat.tools = tools.functions.into_iter().map(Into::into).collect();
    for (name, value) in &members.0 {
        field(&mut chat, name.clone(), value)?;
    }
    chat.set("stream", stream);
    if stream {
        chat.set("stream_options", json!({"include_usage": true}));
    }
    let answer = Translator::new(Voice::new(Echo::of(&members), tools.renamed), stream);
    Ok(Translated { body: chat.to_json(), dropped, answer })
}

/// Instructions and the developer's messages behind them become one: templates take a system message at the
/// head only, and one.
fn one_system(messages: &mut Vec<Message<'_>>) {
    let leading = messages.iter().take_while(|message| message.role == Role::System).count();
    if leading < 2 {
        return;
    }
    let parts = messages.drain(..leading).filter_map(|message| message.content);
    let parts = parts.flat_map(|content| match content {
        Content::Text(text) => vec![Part::Text { text }],
        Content::Parts(parts) => parts,
    });
    let all = Content::of(parts.collect());
    messages.insert(0, Message::new(Role::System, all));
}

/// One field besides prompt and tools.
fn field<'a>(chat: &mut Body<'a>, name: Cow<'a, str>, value: &'a RawValue) -> Result<()> {
    match &*name {
        "input" | "instructions" | "tools" | "stream" => {}
        "max_output_tokens" => chat.set("max_tokens", read::<u64>(&name, value)?),
        "temperature" | "top_p" => {
            read::<f64>(&name, value)?;
            chat.pass(name.clone(), value);
        }
        "parallel_tool_calls" => {
            read::<bool>(&name, value)?;
            // It says nothing without tools, and some engines then refuse it.
            if !chat.tools.is_empty() {
                chat.pass(name.clone(), value);
            }
        }
        "tool_choice" => {
            if !chat.tools.is_empty() {
                chat.set("tool_choice", tools::choice(&read::<Value>(&name, value)?)?);
            }
        }
        "reasoning" => {
            if let Some(effort) = read::<Reasoning>(&name, value)?.effort {
                chat.set("reasoning_effort", effort);
            }
        }
        "text" => text(chat, read(&name, value)?)?,
        "include" => include(&read::<Vec<String>>(&name, value)?)?,
        // What the provider stores, bills, caches, obfuscates or reports: nothing of it reaches a model here. Nothing
        // is stored either, and the answer says so.
        "store"
        | "metadata"
        | "client_metadata"
        | "service_tier"
        | "prompt_cache_key"
        | "prompt_cache_retention"
        | "safety_identifier"
        | "stream_options"
        | "max_tool_calls" => {}
        "truncation" if value.get() == "\"disabled\"" => {}
        "background" if value.get() == "false" => {}
        "top_logprobs" if value.get() == "0" => {}
        "context_management" if value.get() == "[]" => {}
        "previous_response_id" | "conversation" => {
            return Err(bad(
                name.clone().into_owned(),
                "the engine keeps no responses: send the whole conversation in `input`",
            ));
        }
        "truncation" | "background" | "top_logprobs" | "context_management" | "prompt" | "moderation" => {
            return unsupported(name.clone().into_owned(), format_args!("`{}`", value.get()));
        }
        // `model`, `user`, and what is unknown to the API: an engine's own.
        _ => chat.pass(name.clone(), value),
    }
    Ok(())
}

#[derive(Deserialize)]
struct Reasoning {
    effort: Option<String>,
}

#[derive(Deserialize)]
struct TextConfig {
    format: Option<Format>,
    verbosity: Option<String>,
}

#[derive(Deserialize)]
struct Format {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    description: Option<String>,
    schema: Option<Value>,
    strict: Option<bool>,
}

fn text(chat: &mut Body<'_>, text: TextConfig) -> Result<()> {
    if let Some(verbosity) = text.verbosity {
        chat.set("verbosity", verbosity);
    }
    let Some(Format { kind, name, description, schema, strict }) = text.format else { return Ok(()) };
    match &*kind {
        "text" => {}
        "json_object" => chat.set("response_format", json!({"type": "json_object"})),
        "json_schema" => {
            let mut inner = json!({"name": name, "schema": schema});
            for (key, value) in
                [("description", description.map(Value::from)), ("strict", strict.map(Value::from))]
            {
                if let Some(value) = value {
                    inner[key] = value;
                }
            }
            chat.set("response_format", json!({"type": "json_schema", "json_schema": inner}));
        }
        other => return unsupported("text.format.type", format_args!("`{other}`")),
    }
    Ok(())
}

/// What an answer should bring besides: encrypted reasoning there is none, of hosted tools neither.
fn include(wanted: &[String]) -> Result<()> {
    match wanted.iter().position(|what| what == "message.output_text.logprobs") {
        Some(at) => unsupported(format!("include[{at}]"), "`message.output_text.logprobs`"),
        None => Ok(()),
    }
}
