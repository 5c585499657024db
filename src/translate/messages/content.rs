//! Content blocks as chat messages.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::super::chat::{Call, Content, File, ImageUrl, Message, Part, Role};
use super::super::fields::{Result, Text, TextOr, bad, unsupported};

/// Any content block: its `type` says which fields count.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Block<'a> {
    #[serde(rename = "type", borrow)]
    kind: Text<'a>,
    #[serde(borrow, default)]
    text: Option<Text<'a>>,
    #[serde(borrow, default)]
    thinking: Option<Text<'a>>,
    #[serde(borrow, default)]
    id: Option<Text<'a>>,
    #[serde(borrow, default)]
    name: Option<Text<'a>>,
    #[serde(borrow, default)]
    input: Option<&'a RawValue>,
    #[serde(borrow, default)]
    tool_use_id: Option<Text<'a>>,
    #[serde(borrow, default)]
    title: Option<Text<'a>>,
    /// Of a tool's result. Boxed: a block holds blocks.
    #[serde(borrow, default)]
    content: Option<Box<TextOr<'a, Block<'a>>>>,
    #[serde(borrow, default)]
    source: Option<Source<'a>>,
}

#[derive(Debug, Deserialize)]
struct Source<'a> {
    #[serde(rename = "type", borrow)]
    kind: Text<'a>,
    #[serde(borrow, default)]
    media_type: Option<Text<'a>>,
    #[serde(borrow, default)]
    data: Option<Text<'a>>,
    #[serde(borrow, default)]
    url: Option<Text<'a>>,
}

impl<'a> Block<'a> {
    /// A text in its short form.
    pub fn from_text(text: Cow<'a, str>) -> Self {
        Self { kind: Text(Cow::Borrowed("text")), text: Some(Text(text)), ..Self::default() }
    }
}

fn needed<'a>(text: Option<Text<'a>>, path: &str, name: &str) -> Result<Cow<'a, str>> {
    text.map(|text| text.0).ok_or_else(|| bad(format!("{path}.{name}"), "is missing"))
}

/// The text of a block that must be one.
pub(super) fn text<'a>(block: Block<'a>, path: String) -> Result<Cow<'a, str>> {
    match &*block.kind {
        "text" => needed(block.text, &path, "text"),
        other => unsupported(format!("{path}.type"), format_args!("`{other}` here")),
    }
}

/// A user's message: the results of tools first, each a message of its own, then what the user says. Chat has no
/// pictures in results, so they follow them.
pub(super) fn user<'a>(messages: &mut Vec<Message<'a>>, blocks: Vec<Block<'a>>, path: &str) -> Result<()> {
    let (mut said, mut shown) = (Vec::new(), Vec::new());
    let empty = blocks.is_empty();
    for (at, block) in blocks.into_iter().enumerate() {
        let path = format!("{path}[{at}]");
        if &*block.kind == "tool_result" {
            let id = needed(block.tool_use_id, &path, "tool_use_id")?;
            let parts = match block.content.map(|content| *content) {
                None => Vec::new(),
                Some(TextOr::Text(text)) => vec![Part::Text { text }],
                Some(TextOr::Parts(blocks)) => {
                    let part = |(i, block)| part(block, &format!("{path}.content[{i}]"));
                    blocks.into_iter().enumerate().map(part).collect::<Result<_>>()?
                }
            };
            let (texts, media): (Vec<_>, Vec<_>) =
                parts.into_iter().partition(|part| matches!(part, Part::Text { .. }));
            messages.push(Message::result(id, Content::of(texts)));
            shown.extend(media);
        } else {
            said.push(part(block, &path)?);
        }
    }
    shown.append(&mut said);
    if !shown.is_empty() || empty {
        messages.push(Message::new(Role::User, Content::of(shown)));
    }
    Ok(())
}

/// What a user, or a result, shows.
fn part<'a>(block: Block<'a>, path: &str) -> Result<Part<'a>> {
    match &*block.kind {
        "text" => Ok(Part::Text { text: needed(block.text, path, "text")? }),
        "image" => {
            let url = source(block.source, path)?;
            Ok(Part::ImageUrl { image_url: ImageUrl { url, detail: None } })
        }
        "document" => document(block, path),
        other => unsupported(format!("{path}.type"), format_args!("a block of the type `{other}`")),
    }
}

/// A plain text is text; anything else a file.
fn document<'a>(block: Block<'a>, path: &str) -> Result<Part<'a>> {
    let filename = block.title.map(|title| title.0);
    match block.source {
        Some(Source { kind, data: Some(text), .. }) if &*kind == "text" => Ok(Part::Text { text: text.0 }),
        Some(Source { kind, .. }) if &*kind == "url" => {
            unsupported(format!("{path}.source.type"), "a document by its `url`")
        }
        other => Ok(Part::File { file: File { filename, file_data: source(other, path)? } }),
    }
}

/// Media as a URL: where it is, or the data themselves.
fn source<'a>(source: Option<Source<'a>>, path: &str) -> Result<Cow<'a, str>> {
    let Some(source) = source else { return Err(bad(format!("{path}.source"), "is missing")) };
    let path = format!("{path}.source");
    match &*source.kind {
        "url" => needed(source.url, &path, "url"),
        "base64" => {
            let media_type = needed(source.media_type, &path, "media_type")?;
            let data = needed(source.data, &path, "data")?;
            Ok(Cow::Owned(format!("data:{media_type};base64,{data}")))
        }
        other => unsupported(format!("{path}.type"), format_args!("a source of the type `{other}`")),
    }
}

/// An assistant's message: what it thought, said and called.
pub(super) fn assistant<'a>(blocks: Vec<Block<'a>>, path: &str) -> Result<Message<'a>> {
    let (mut thought, mut said, mut calls) = (Vec::new(), Vec::new(), Vec::new());
    for (at, block) in blocks.into_iter().enumerate() {
        let path = format!("{path}[{at}]");
        match &*block.kind {
            "text" => said.push(Part::Text { text: needed(block.text, &path, "text")? }),
            "thinking" => thought.push(Part::Text { text: needed(block.thinking, &path, "thinking")? }),
            // Only its maker can read it.
            "redacted_thinking" => {}
            "tool_use" => {
                let id = needed(block.id, &path, "id")?;
                let name = needed(block.name, &path, "name")?;
                let arguments = block.input.map_or("{}", RawValue::get);
                calls.push(Call::new(id, name, Cow::Borrowed(arguments)));
            }
            other => {
                return unsupported(format!("{path}.type"), format_args!("a block of the type `{other}`"));
            }
        }
    }
    let silent = said.is_empty() && !calls.is_empty();
    let reasoning = match Content::of(thought) {
        Content::Text(text) if !text.is_empty() => Some(text),
        _ => None,
    };
    Ok(Message {
        reasoning_content: reasoning,
        content: (!silent).then(|| Content::of(said)),
        tool_calls: calls,
        ..Message::new(Role::Assistant, Content::Text(Cow::Borrowed("")))
    })
}
