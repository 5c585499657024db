//! The engine's chat template, as engines run it.

use std::fmt::Write as _;
use std::io;
use std::sync::Arc;

use minijinja::value::{Enumerator, Kwargs, Object, Value, ValueKind};
use minijinja::{Environment, Error, ErrorKind};
use serde::Serialize as _;
use serde_json::ser::{Formatter, PrettyFormatter};

const NAME: &str = "chat";

/// A chat template and the names it may use.
#[derive(Debug)]
pub struct Template {
    env: Environment<'static>,
}

/// Why a body has no text: the gateway then counts its bytes.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NoText {
    /// Images and sounds become as many tokens as the engine's processor makes of them.
    #[error("it has media, whose tokens only the engine knows")]
    Media,
    /// It is no chat body.
    #[error("it is not a chat body: {0}")]
    Body(String),
    /// The template refuses it.
    #[error("the template refuses it: {0}")]
    Template(String),
}

impl Template {
    /// A template from its source. `bos` and `eos` are the tokens it may name.
    ///
    /// # Errors
    /// A sentence: the source is not a template.
    pub fn new(source: String, bos: Option<&str>, eos: Option<&str>) -> Result<Self, String> {
        let mut env = Environment::new();
        // What transformers sets, so that templates mean the same here.
        let syntax = minijinja::syntax::SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
        env.set_syntax(syntax.map_err(|e| e.to_string())?);
        env.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
        env.add_filter("tojson", tojson);
        env.add_function("raise_exception", |what: String| -> Result<Value, Error> {
            Err(Error::new(ErrorKind::InvalidOperation, what))
        });
        env.add_global("bos_token", bos.unwrap_or_default());
        env.add_global("eos_token", eos.unwrap_or_default());
        env.add_template_owned(NAME, source).map_err(|e| format!("{e:#}"))?;
        Ok(Self { env })
    }

    /// The text of a chat body, up to where the answer begins.
    ///
    /// # Errors
    /// [`NoText`].
    pub fn render(&self, chat: &[u8]) -> Result<String, NoText> {
        let body: Value = serde_json::from_slice(chat).map_err(|e| NoText::Body(e.to_string()))?;
        let messages = body.get_attr("messages").ok().filter(|m| m.kind() == ValueKind::Seq);
        let messages = messages.ok_or_else(|| NoText::Body("no messages".into()))?;
        let mut fields: Vec<(String, Value)> =
            vec![("messages".into(), messages_of(&messages)?), ("add_generation_prompt".into(), true.into())];
        for (name, value) in pairs(&body) {
            match &*name {
                "tools" if value.kind() == ValueKind::Seq && value.len() != Some(0) => {
                    fields.push((name, value))
                }
                "reasoning_effort" => fields.push((name, value)),
                // An engine's way to say more to its template.
                "chat_template_kwargs" => fields.extend(pairs(&value)),
                _ => {}
            }
        }
        let refused = |e: Error| NoText::Template(format!("{e:#}"));
        self.env.get_template(NAME).and_then(|t| t.render(map(fields))).map_err(refused)
    }
}

/// A map that keeps its order, as Python's do.
#[derive(Debug)]
struct Fields(Vec<(String, Value)>);

impl Object for Fields {
    fn get_value(self: &Arc<Self>, key: &Value) -> Option<Value> {
        let key = key.as_str()?;
        // Of a name that comes twice the last counts.
        self.0.iter().rev().find(|(name, _)| name == key).map(|(_, value)| value.clone())
    }

    fn enumerate(self: &Arc<Self>) -> Enumerator {
        Enumerator::Values(self.0.iter().map(|(name, _)| Value::from(name.as_str())).collect())
    }
}

fn map(fields: Vec<(String, Value)>) -> Value {
    Value::from_object(Fields(fields))
}

fn pairs(map: &Value) -> Vec<(String, Value)> {
    if map.kind() != ValueKind::Map {
        return Vec::new();
    }
    let keys = map.try_iter().into_iter().flatten();
    keys.filter_map(|key| Some((key.as_str()?.to_owned(), map.get_item(&key).ok()?))).collect()
}

fn messages_of(messages: &Value) -> Result<Value, NoText> {
    let all: Result<Vec<Value>, NoText> =
        messages.try_iter().into_iter().flatten().map(|m| message(&m)).collect();
    all.map(Value::from)
}

/// A message as engines hand it to templates: content as text, arguments as objects.
fn message(message: &Value) -> Result<Value, NoText> {
    let mut fields = pairs(message);
    if fields.is_empty() {
        return Err(NoText::Body("a message that is no object".into()));
    }
    for (name, value) in &mut fields {
        match &**name {
            "content" => *value = content(value)?,
            "tool_calls" => {
                let calls = value.try_iter().into_iter().flatten().map(|call| call_of(&call));
                *value = calls.collect::<Vec<Value>>().into();
            }
            _ => {}
        }
    }
    let named = |fields: &[(String, Value)], name: &str| {
        fields.iter().find(|(n, _)| n == name).map(|(_, v)| v.clone())
    };
    if named(&fields, "content").is_none() {
        fields.push(("content".into(), "".into()));
    }
    // Two names for one thing; templates know either.
    if let (Some(thought), None) = (named(&fields, "reasoning"), named(&fields, "reasoning_content")) {
        fields.push(("reasoning_content".into(), thought));
    }
    Ok(map(fields))
}

fn content(content: &Value) -> Result<Value, NoText> {
    match content.kind() {
        ValueKind::Seq => {}
        ValueKind::None | ValueKind::Undefined => return Ok("".into()),
        _ => return Ok(content.clone()),
    }
    let mut text = String::new();
    for (at, part) in content.try_iter().into_iter().flatten().enumerate() {
        let said = part.get_attr("text").ok();
        let said = said.as_ref().and_then(Value::as_str).ok_or(NoText::Media)?;
        // Writing to a string cannot fail.
        let _ = write!(text, "{}{said}", if at > 0 { "\n" } else { "" });
    }
    Ok(text.into())
}

fn call_of(call: &Value) -> Value {
    let inner = |(name, value): (String, Value)| {
        let object = (name == "arguments")
            .then(|| value.as_str().and_then(|text| serde_json::from_str::<Value>(text).ok()))
            .flatten()
            .filter(|object| object.kind() == ValueKind::Map);
        (name, object.unwrap_or(value))
    };
    let outer = pairs(call).into_iter().map(|(name, value)| match &*name {
        "function" => (name, map(pairs(&value).into_iter().map(inner).collect())),
        _ => (name, value),
    });
    map(outer.collect())
}

/// Python's `json.dumps(…, ensure_ascii=False)`, which templates expect; the one built in escapes for HTML.
fn tojson(value: Value, options: Kwargs) -> Result<Value, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Whatever else Python's takes changes nothing for the values templates print.
    let _: (Option<bool>, Option<Value>, Option<bool>) =
        (options.get("ensure_ascii")?, options.get("separators")?, options.get("sort_keys")?);
    options.assert_all_used()?;
    let mut out = Vec::new();
    let done = match indent {
        None => value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, Python)),
        Some(indent) => {
            let spaces = " ".repeat(indent);
            let pretty = PrettyFormatter::with_indent(spaces.as_bytes());
            value.serialize(&mut serde_json::Serializer::with_formatter(&mut out, pretty))
        }
    };
    let bad = |e: String| Error::new(ErrorKind::BadSerialization, e);
    done.map_err(|e| bad(e.to_string()))?;
    let text = String::from_utf8(out).map_err(|e| bad(e.to_string()))?;
    Ok(Value::from_safe_string(text))
}

/// Spaces behind commas and colons.
struct Python;

impl Formatter for Python {
    fn begin_array_value<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + io::Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + io::Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
