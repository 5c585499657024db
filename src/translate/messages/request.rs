//! A Messages request as a chat body.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::super::Translated;
use super::super::answer::Translator;
use super::super::chat::{Body, Content, Definition, Message, Part, Role};
use super::super::fields::{Members, Result, Text, TextOr, bad, read, unsupported};
use super::content::{self, Block};
use super::voice::Voice;
use crate::prompt::ATTRIBUTION;

/// Translates the body.
pub(in super::super) fn request(body: &[u8]) -> Result<Translated> {
    let members = Members::of(body)?;
    let mut chat = Body::default();
    let model: Text<'_> = members.need("model")?;
    let stream = members.read::<bool>("stream")?.unwrap_or(false);
    members.need::<u64>("max_tokens")?;
    if let Some(system) = members.read("system")? {
        chat.messages.extend(self::system(system)?);
    }
    let messages: Vec<Said<'_>> = members.need("messages")?;
    for (at, message) in messages.into_iter().enumerate() {
        self::message(&mut chat, at, message)?;
    }
    for (at, tool) in members.read::<Vec<Tool<'_>>>("tools")?.into_iter().flatten().enumerate() {
        chat.tools.push(tool.define(at)?.into());
    }
    let mut thinks = false;
    for (name, value) in &members.0 {
        thinks |= field(&mut chat, name.clone(), value)?;
    }
    chat.set("stream", stream);
    if stream {
        chat.set("stream_options", json!({"include_usage": true}));
    }
    let answer = Translator::new(Voice::new(model.0.into_owned(), thinks), stream);
    Ok(Translated { body: chat.to_json(), dropped: Vec::new(), answer })
}

/// One field besides prompt and tools. Whether the client wants to see the model think.
fn field<'a>(chat: &mut Body<'a>, name: Cow<'a, str>, value: &'a RawValue) -> Result<bool> {
    match &*name {
        "system" | "messages" | "tools" | "stream" => {}
        "max_tokens" => chat.set("max_tokens", read::<u64>("max_tokens", value)?),
        "temperature" | "top_p" => {
            read::<f64>(&name, value)?;
            chat.pass(name.clone(), value);
        }
        "stop_sequences" => chat.set("stop", json!(read::<Vec<String>>("stop_sequences", value)?)),
        "tool_choice" => tool_choice(chat, read("tool_choice", value)?)?,
        "metadata" => {
            if let Some(user) = read::<Metadata>("metadata", value)?.user_id {
                chat.set("user", user);
            }
        }
        "thinking" => return thinking(chat, read("thinking", value)?),
        "output_config" => output(chat, read("output_config", value)?)?,
        // Whether and how the provider bills, caches, routes or trims: nothing of it reaches a model here.
        "service_tier" | "cache_control" | "inference_geo" | "speed" | "betas" | "context_management" => {}
        "mcp_servers" if value.get() == "[]" => {}
        "mcp_servers" | "container" | "system_prompt_id" => {
            return unsupported(name.clone().into_owned(), "this field");
        }
        // Unknown to the API: an engine's own.
        _ => chat.pass(name.clone(), value),
    }
    Ok(false)
}

#[derive(Deserialize)]
struct Metadata {
    user_id: Option<String>,
}

/// A message as the client says it.
#[derive(Debug, Deserialize)]
struct Said<'a> {
    #[serde(borrow)]
    role: Text<'a>,
    #[serde(borrow)]
    content: TextOr<'a, Block<'a>>,
}

/// The system prompt in one message, without Claude's attribution, which changes with every request.
fn system<'a>(content: TextOr<'a, Block<'a>>) -> Result<Option<Message<'a>>> {
    let parts = match content {
        TextOr::Text(text) => vec![Part::Text { text }],
        TextOr::Parts(blocks) => {
            let text = |(at, block): (usize, Block<'a>)| content::text(block, format!("system[{at}]"));
            let texts: Result<Vec<_>> = blocks.into_iter().enumerate().map(text).collect();
            texts?.into_iter().map(|text| Part::Text { text }).collect()
        }
    };
    let attributed = |part: Part<'a>| match part {
        Part::Text { text } if text.starts_with(ATTRIBUTION) => {
            let rest = text.split_once('\n').map(|(_, rest)| Cow::Owned(rest.to_owned()))?;
            Some(Part::Text { text: rest })
        }
        part => Some(part),
    };
    let parts: Vec<Part<'_>> = parts.into_iter().filter_map(attributed).collect();
    let content = Content::of(parts);
    let empty = matches!(&content, Content::Text(text) if text.is_empty());
    Ok((!empty).then(|| Message::new(Role::System, content)))
}

fn message<'a>(chat: &mut Body<'a>, at: usize, said: Said<'a>) -> Result<()> {
    let path = format!("messages[{at}].content");
    let blocks = |content| match content {
        TextOr::Text(text) => vec![Block::from_text(text)],
        TextOr::Parts(blocks) => blocks,
    };
    match &*said.role {
        "user" => content::user(&mut chat.messages, blocks(said.content), &path),
        "assistant" => {
            chat.messages.push(content::assistant(blocks(said.content), &path)?);
            Ok(())
        }
        "system" => {
            chat.messages.extend(system(said.content)?);
            Ok(())
        }
        other => {
            Err(bad(format!("messages[{at}].role"), &format!("`{other}` is neither `user` nor `assistant`")))
        }
    }
}

#[derive(Debug, Deserialize)]
struct Tool<'a> {
    #[serde(rename = "type", borrow, default)]
    kind: Option<Text<'a>>,
    #[serde(borrow)]
    name: Text<'a>,
    #[serde(borrow, default)]
    description: Option<Text<'a>>,
    #[serde(borrow, default)]
    input_schema: Option<&'a RawValue>,
    strict: Option<bool>,
}

impl<'a> Tool<'a> {
    fn define(self, at: usize) -> Result<Definition<'a>> {
        if let Some(kind) = self.kind.filter(|kind| &**kind != "custom") {
            return unsupported(format!("tools[{at}].type"), format_args!("a tool of the type `{}`", &*kind));
        }
        Ok(Definition {
            name: self.name.0,
            description: self.description.map(|text| text.0),
            parameters: self.input_schema.map(Cow::Borrowed),
            strict: self.strict,
        })
    }
}

#[derive(Debug, Deserialize)]
struct Choice {
    #[serde(rename = "type")]
    kind: String,
    name: Option<String>,
    disable_parallel_tool_use: Option<bool>,
}

fn tool_choice(chat: &mut Body<'_>, choice: Choice) -> Result<()> {
    let value = match (&*choice.kind, choice.name) {
        ("auto", _) => json!("auto"),
        ("any", _) => json!("required"),
        ("none", _) => json!("none"),
        ("tool", Some(name)) => json!({"type": "function", "function": {"name": name}}),
        ("tool", None) => return Err(bad("tool_choice.name", "is missing")),
        (other, _) => {
            return Err(bad("tool_choice.type", &format!("`{other}` is none of auto, any, tool, none")));
        }
    };
    chat.set("tool_choice", value);
    if let Some(alone) = choice.disable_parallel_tool_use {
        chat.set("parallel_tool_calls", !alone);
    }
    Ok(())
}

#[derive(Debug, Deserialize)]
struct Thinking {
    #[serde(rename = "type")]
    kind: String,
    budget_tokens: Option<u64>,
    display: Option<String>,
}

/// A budget becomes an effort, the nearest that chat has.
fn thinking(chat: &mut Body<'_>, thinking: Thinking) -> Result<bool> {
    match &*thinking.kind {
        "disabled" => return Ok(false),
        "adaptive" => {}
        "enabled" => chat.set(
            "reasoning_effort",
            match thinking.budget_tokens.unwrap_or(0) {
                0..4096 => "low",
                4096..16_384 => "medium",
                _ => "high",
            },
        ),
        other => {
            return Err(bad("thinking.type", &format!("`{other}` is none of enabled, disabled, adaptive")));
        }
    }
    Ok(thinking.display.as_deref() != Some("omitted"))
}

#[derive(Debug, Deserialize)]
struct Output {
    effort: Option<String>,
    format: Option<Format>,
}

#[derive(Debug, Deserialize)]
struct Format {
    #[serde(rename = "type")]
    kind: String,
    schema: Option<Value>,
}

fn output(chat: &mut Body<'_>, output: Output) -> Result<()> {
    if let Some(effort) = output.effort {
        // An effort asked for by name is meant more than one made of a budget.
        chat.fields.retain(|(name, _)| name != "reasoning_effort");
        chat.set("reasoning_effort", if effort == "max" { "high".to_owned() } else { effort });
    }
    match output.format {
        None => {}
        Some(Format { kind, schema: Some(schema) }) if kind == "json_schema" => {
            let schema = json!({"name": "answer", "schema": schema, "strict": true});
            chat.set("response_format", json!({"type": "json_schema", "json_schema": schema}));
        }
        Some(_) => return Err(bad("output_config.format", "must be a json_schema with its `schema`")),
    }
    Ok(())
}
