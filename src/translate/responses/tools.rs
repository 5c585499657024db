//! Tools and the choice of one.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;
use serde_json::{Value, json};

use super::super::chat::Definition;
use super::super::fields::{Result, Text, bad, unsupported};

/// The one argument of the function that stands for a tool with free input.
const INPUT: &str = "input";

/// A tool as the client defines it.
#[derive(Debug, Deserialize)]
pub(super) struct Tool<'a> {
    #[serde(rename = "type", borrow)]
    kind: Text<'a>,
    #[serde(borrow, default)]
    name: Option<Text<'a>>,
    #[serde(borrow, default)]
    description: Option<Text<'a>>,
    #[serde(borrow, default)]
    parameters: Option<&'a RawValue>,
    strict: Option<bool>,
    #[serde(borrow, default)]
    format: Option<Format<'a>>,
}

/// The grammar of a free input.
#[derive(Debug, Deserialize)]
struct Format<'a> {
    #[serde(borrow, default)]
    syntax: Option<Text<'a>>,
    #[serde(borrow, default)]
    definition: Option<Text<'a>>,
}

impl<'a> Tool<'a> {
    /// The tool as a function. One with free input takes it as its one argument; its name goes to `custom`.
    pub fn define(self, at: usize, custom: &mut Vec<String>) -> Result<Definition<'a>> {
        let Self { kind, name, description, parameters, strict, format } = self;
        if !matches!(&*kind, "function" | "custom") {
            return unsupported(format!("tools[{at}].type"), format_args!("a tool of the type `{}`", &*kind));
        }
        let name = name.ok_or_else(|| bad(format!("tools[{at}].name"), "is missing"))?.0;
        let description = description.map(|text| text.0);
        if &*kind == "function" {
            let parameters = parameters.filter(|schema| schema.get() != "null").map(Cow::Borrowed);
            return Ok(Definition { name, description, parameters, strict });
        }
        custom.push(name.clone().into_owned());
        let schema = json!({"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT],
            "additionalProperties": false});
        let parameters = serde_json::value::to_raw_value(&schema).ok().map(Cow::Owned);
        Ok(Definition { name, description: described(description, format), parameters, strict: None })
    }
}

/// The grammar, where the model reads it.
fn described<'a>(description: Option<Cow<'a, str>>, format: Option<Format<'_>>) -> Option<Cow<'a, str>> {
    let Some(Format { definition: Some(grammar), syntax }) = format else { return description };
    let syntax = syntax.as_deref().unwrap_or("grammar");
    let text = description.unwrap_or_default();
    Some(Cow::Owned(format!("{text}\n\nThe `{INPUT}` must match this {syntax} grammar:\n{}", &*grammar)))
}

/// A free input as the function's arguments.
pub(super) fn wrapped(input: &str) -> String {
    json!({INPUT: input}).to_string()
}

/// The free input in a function's arguments; whatever the model wrote when it isn't there.
pub(super) fn unwrapped(arguments: &str) -> String {
    let parsed: Option<Value> = serde_json::from_str(arguments).ok();
    let input = parsed.as_ref().and_then(|arguments| arguments.get(INPUT)).and_then(Value::as_str);
    input.unwrap_or(arguments).to_owned()
}

/// `tool_choice`.
pub(super) fn choice(choice: &Value) -> Result<Value> {
    if let Some(word @ ("auto" | "none" | "required")) = choice.as_str() {
        return Ok(json!(word));
    }
    match (choice["type"].as_str(), choice["name"].as_str()) {
        (Some("function" | "custom"), Some(name)) => {
            Ok(json!({"type": "function", "function": {"name": name}}))
        }
        (Some("function" | "custom"), None) => Err(bad("tool_choice.name", "is missing")),
        (Some(kind), _) => unsupported("tool_choice.type", format_args!("`{kind}`")),
        _ => Err(bad("tool_choice", "must be `auto`, `none`, `required`, or an object that names a tool")),
    }
}
