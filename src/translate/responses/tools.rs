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
    /// What a namespace holds.
    #[serde(borrow, default)]
    tools: Option<Vec<Tool<'a>>>,
}

/// The grammar of a free input.
#[derive(Debug, Deserialize)]
struct Format<'a> {
    #[serde(borrow, default)]
    syntax: Option<Text<'a>>,
    #[serde(borrow, default)]
    definition: Option<Text<'a>>,
}

/// All tools of a request, in chat's words.
#[derive(Debug, Default)]
pub(super) struct Tools<'a> {
    pub functions: Vec<Definition<'a>>,
    /// Those the client has other words for.
    pub renamed: Vec<Renamed>,
}

/// What the client calls a function of chat's.
#[derive(Debug)]
pub(super) struct Renamed {
    /// The function's name.
    pub flat: String,
    pub name: String,
    pub namespace: Option<String>,
    /// Whether its input is free text.
    pub custom: bool,
}

/// The name of a namespace's member where there are no namespaces.
pub(super) fn flat<'a>(namespace: Option<&str>, name: Cow<'a, str>) -> Cow<'a, str> {
    match namespace {
        None => name,
        Some(space) if space.ends_with("__") => Cow::Owned(format!("{space}{name}")),
        Some(space) => Cow::Owned(format!("{space}__{name}")),
    }
}

impl<'a> Tool<'a> {
    /// Appends the tool as a function; a namespace as one for each of its members. `path` is where it stands.
    pub fn define(self, path: &str, all: &mut Tools<'a>) -> Result<()> {
        if &*self.kind != "namespace" {
            return self.function(path, None, all);
        }
        let name = self.name.ok_or_else(|| bad(format!("{path}.name"), "is missing"))?.0;
        // What is said of all of them stands with the first.
        let mut about = self.description;
        for (at, mut tool) in self.tools.unwrap_or_default().into_iter().enumerate() {
            if let Some(about) = about.take() {
                let own = tool.description.take().map(|text| text.0).unwrap_or_default();
                tool.description = Some(Text(Cow::Owned(format!("{}\n\n{own}", &*about))));
            }
            tool.function(&format!("{path}.tools[{at}]"), Some(&name), all)?;
        }
        Ok(())
    }

    /// Its type.
    pub fn kind(&self) -> String {
        self.kind.to_string()
    }

    /// The provider's own web search, by any of its dated names.
    pub fn is_search(&self) -> bool {
        self.kind.starts_with("web_search")
    }

    /// One tool as a function. One with free input takes it as its one argument.
    fn function(self, path: &str, namespace: Option<&str>, all: &mut Tools<'a>) -> Result<()> {
        let Self { kind, name, description, parameters, strict, format, .. } = self;
        let custom = match &*kind {
            "function" => false,
            "custom" => true,
            other => {
                return unsupported(format!("{path}.type"), format_args!("a tool of the type `{other}`"));
            }
        };
        let own = name.ok_or_else(|| bad(format!("{path}.name"), "is missing"))?.0;
        let name = flat(namespace, own.clone());
        let taken = match namespace {
            Some(_) => all.functions.iter().any(|function| function.name == name),
            None => all.renamed.iter().any(|other| other.namespace.is_some() && other.flat == name),
        };
        if taken {
            return Err(bad(format!("{path}.name"), &format!("makes two functions of the name `{name}`")));
        }
        if custom || namespace.is_some() {
            let (flat, namespace) = (name.clone().into_owned(), namespace.map(str::to_owned));
            all.renamed.push(Renamed { flat, name: own.into_owned(), namespace, custom });
        }
        let description = description.map(|text| text.0);
        if !custom {
            let parameters = parameters.filter(|schema| schema.get() != "null").map(Cow::Borrowed);
            all.functions.push(Definition { name, description, parameters, strict });
            return Ok(());
        }
        let schema = json!({"type": "object", "properties": {INPUT: {"type": "string"}}, "required": [INPUT],
            "additionalProperties": false});
        let parameters = serde_json::value::to_raw_value(&schema).ok().map(Cow::Owned);
        let description = described(description, format);
        all.functions.push(Definition { name, description, parameters, strict: None });
        Ok(())
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
            let name = flat(choice["namespace"].as_str(), name.into());
            Ok(json!({"type": "function", "function": {"name": name}}))
        }
        (Some("function" | "custom"), None) => Err(bad("tool_choice.name", "is missing")),
        (Some(kind), _) => unsupported("tool_choice.type", format_args!("`{kind}`")),
        _ => Err(bad("tool_choice", "must be `auto`, `none`, `required`, or an object that names a tool")),
    }
}
