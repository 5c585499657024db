//! A chat body in the making.

use std::borrow::Cow;

use serde::Serialize;
use serde::ser::SerializeMap;
use serde_json::Value;
use serde_json::value::RawValue;

/// Who says a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum Role {
    System,
    User,
    Assistant,
    Tool,
}

/// One message.
#[derive(Debug, Serialize)]
pub(super) struct Message<'a> {
    pub role: Role,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tool_call_id: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<Cow<'a, str>>,
    pub content: Option<Content<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<Call<'a>>,
}

/// What a message says.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Content<'a> {
    Text(Cow<'a, str>),
    Parts(Vec<Part<'a>>),
}

/// A part of a content.
#[derive(Debug, Clone, Serialize)]
#[serde(tag = "type", rename_all = "snake_case")]
pub(super) enum Part<'a> {
    Text { text: Cow<'a, str> },
    ImageUrl { image_url: ImageUrl<'a> },
    InputAudio { input_audio: &'a RawValue },
    File { file: File<'a> },
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct ImageUrl<'a> {
    pub url: Cow<'a, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub detail: Option<Cow<'a, str>>,
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct File<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filename: Option<Cow<'a, str>>,
    pub file_data: Cow<'a, str>,
}

/// A tool call of an assistant's message.
#[derive(Debug, Serialize)]
pub(super) struct Call<'a> {
    id: Cow<'a, str>,
    r#type: &'static str,
    function: Function<'a>,
}

#[derive(Debug, Serialize)]
struct Function<'a> {
    name: Cow<'a, str>,
    arguments: Cow<'a, str>,
}

/// A tool.
#[derive(Debug, Serialize)]
pub(super) struct Tool<'a> {
    r#type: &'static str,
    function: Definition<'a>,
}

/// What a tool is.
#[derive(Debug, Serialize)]
pub(super) struct Definition<'a> {
    pub name: Cow<'a, str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub description: Option<Cow<'a, str>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parameters: Option<Cow<'a, RawValue>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub strict: Option<bool>,
}

impl<'a> Call<'a> {
    pub fn new(id: Cow<'a, str>, name: Cow<'a, str>, arguments: Cow<'a, str>) -> Self {
        Self { id, r#type: "function", function: Function { name, arguments } }
    }
}

impl<'a> From<Definition<'a>> for Tool<'a> {
    fn from(function: Definition<'a>) -> Self {
        Self { r#type: "function", function }
    }
}

impl<'a> Message<'a> {
    pub fn new(role: Role, content: Content<'a>) -> Self {
        Self {
            role,
            tool_call_id: None,
            reasoning_content: None,
            content: Some(content),
            tool_calls: Vec::new(),
        }
    }

    pub fn result(id: Cow<'a, str>, content: Content<'a>) -> Self {
        Self { tool_call_id: Some(id), ..Self::new(Role::Tool, content) }
    }
}

impl<'a> Content<'a> {
    /// Parts as the least form that holds them: many engines' templates take nothing but a string.
    pub fn of(mut parts: Vec<Part<'a>>) -> Self {
        if !parts.iter().all(|part| matches!(part, Part::Text { .. })) {
            return Self::Parts(parts);
        }
        if let (1, Some(Part::Text { text })) = (parts.len(), parts.first_mut()) {
            return Self::Text(std::mem::take(text));
        }
        let texts =
            parts.iter().filter_map(|part| if let Part::Text { text } = part { Some(&**text) } else { None });
        Self::Text(Cow::Owned(texts.collect::<Vec<_>>().join("\n")))
    }
}

/// A chat body: fields in the order they are given.
#[derive(Debug, Default)]
pub(super) struct Body<'a> {
    pub messages: Vec<Message<'a>>,
    pub tools: Vec<Tool<'a>>,
    /// Fields that pass as they are, or whose values were made here.
    pub fields: Vec<(Cow<'a, str>, Field<'a>)>,
}

/// A field's value.
#[derive(Debug, Serialize)]
#[serde(untagged)]
pub(super) enum Field<'a> {
    Raw(&'a RawValue),
    Made(Value),
}

impl<'a> Body<'a> {
    pub fn pass(&mut self, name: impl Into<Cow<'a, str>>, value: &'a RawValue) {
        self.fields.push((name.into(), Field::Raw(value)));
    }

    pub fn set(&mut self, name: &'static str, value: impl Into<Value>) {
        self.fields.push((Cow::Borrowed(name), Field::Made(value.into())));
    }

    /// The body as JSON. A stream is always asked for its usage.
    pub fn to_json(&self) -> Vec<u8> {
        // Strings, numbers and JSON that was read before: it cannot fail.
        serde_json::to_vec(self).unwrap_or_default()
    }
}

impl Serialize for Body<'_> {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let mut map = serializer.serialize_map(None)?;
        for (name, value) in &self.fields {
            map.serialize_entry(name, value)?;
        }
        map.serialize_entry("messages", &self.messages)?;
        if !self.tools.is_empty() {
            map.serialize_entry("tools", &self.tools)?;
        }
        map.end()
    }
}
