//! Input items as chat messages.

use std::borrow::Cow;

use serde::Deserialize;
use serde_json::value::RawValue;

use super::super::chat::{Call, Content, File, ImageUrl, Message, Part as ChatPart, Role};
use super::super::fields::{Result, Text, TextOr, bad, unsupported};
use super::tools::{flat, wrapped};

/// Any input item: its `type` says which fields count; without one it is a message.
#[derive(Debug, Deserialize)]
pub(super) struct Item<'a> {
    #[serde(rename = "type", borrow, default)]
    kind: Option<Text<'a>>,
    #[serde(borrow, default)]
    role: Option<Text<'a>>,
    #[serde(borrow, default)]
    content: Option<TextOr<'a, Part<'a>>>,
    #[serde(borrow, default)]
    summary: Option<Vec<Part<'a>>>,
    #[serde(borrow, default)]
    call_id: Option<Text<'a>>,
    #[serde(borrow, default)]
    name: Option<Text<'a>>,
    #[serde(borrow, default)]
    namespace: Option<Text<'a>>,
    #[serde(borrow, default)]
    arguments: Option<Text<'a>>,
    #[serde(borrow, default)]
    input: Option<Text<'a>>,
    #[serde(borrow, default)]
    output: Option<TextOr<'a, Part<'a>>>,
}

/// A part of a content.
#[derive(Debug, Deserialize)]
pub(super) struct Part<'a> {
    #[serde(rename = "type", borrow)]
    kind: Text<'a>,
    #[serde(borrow, default)]
    text: Option<Text<'a>>,
    #[serde(borrow, default)]
    refusal: Option<Text<'a>>,
    #[serde(borrow, default)]
    image_url: Option<Text<'a>>,
    #[serde(borrow, default)]
    detail: Option<Text<'a>>,
    #[serde(borrow, default)]
    file_data: Option<Text<'a>>,
    #[serde(borrow, default)]
    filename: Option<Text<'a>>,
    #[serde(borrow, default)]
    input_audio: Option<&'a RawValue>,
}

/// Puts the messages together: what a model thought, said and called in one answer is one message in chat.
#[derive(Default)]
struct Messages<'a> {
    done: Vec<Message<'a>>,
    /// The assistant's message that goes on.
    answer: Option<Message<'a>>,
    /// Pictures in results, which chat shows behind them.
    shown: Vec<ChatPart<'a>>,
}

/// Appends the items.
pub(super) fn append<'a>(messages: &mut Vec<Message<'a>>, items: Vec<Item<'a>>) -> Result<()> {
    let mut all = Messages { done: std::mem::take(messages), ..Messages::default() };
    for (at, item) in items.into_iter().enumerate() {
        all.item(item, &format!("input[{at}]"))?;
    }
    all.settle(false);
    *messages = all.done;
    Ok(())
}

impl<'a> Messages<'a> {
    fn item(&mut self, item: Item<'a>, path: &str) -> Result<()> {
        let Item { kind, role, content, summary, call_id, name, namespace, arguments, input, output } = item;
        let id = || call_id.map(|id| id.0).ok_or_else(|| bad(format!("{path}.call_id"), "is missing"));
        let named = || {
            let name = name.ok_or_else(|| bad(format!("{path}.name"), "is missing"))?.0;
            Ok(flat(namespace.as_deref(), name))
        };
        match kind.as_deref().unwrap_or("message") {
            "message" => {
                let role = role.ok_or_else(|| bad(format!("{path}.role"), "is missing"))?;
                self.message(&role, content, path)?;
            }
            "reasoning" => self.thought(summary, content, path)?,
            "function_call" => {
                let arguments = arguments.map_or(Cow::Borrowed("{}"), |text| text.0);
                let call = Call::new(id()?, named()?, arguments);
                self.answer().tool_calls.push(call);
            }
            "custom_tool_call" => {
                let arguments = Cow::Owned(wrapped(input.as_deref().unwrap_or_default()));
                let call = Call::new(id()?, named()?, arguments);
                self.answer().tool_calls.push(call);
            }
            "function_call_output" | "custom_tool_call_output" => {
                let id = id()?;
                let output = output.ok_or_else(|| bad(format!("{path}.output"), "is missing"))?;
                let (texts, media): (Vec<_>, Vec<_>) = parts(output, &format!("{path}.output"))?
                    .into_iter()
                    .partition(|part| matches!(part, ChatPart::Text { .. }));
                self.settle(true);
                self.done.push(Message::result(id, Content::of(texts)));
                self.shown.extend(media);
            }
            other => {
                return unsupported(format!("{path}.type"), format_args!("an item of the type `{other}`"));
            }
        }
        Ok(())
    }

    fn message(&mut self, role: &str, content: Option<TextOr<'a, Part<'a>>>, path: &str) -> Result<()> {
        let content = content.ok_or_else(|| bad(format!("{path}.content"), "is missing"))?;
        let content = Content::of(parts(content, &format!("{path}.content"))?);
        let role = match role {
            "user" => Role::User,
            "system" | "developer" => Role::System,
            "assistant" => {
                if self.answer.as_ref().is_some_and(|m| m.content.is_some() || !m.tool_calls.is_empty()) {
                    self.settle(false);
                }
                self.answer().content = Some(content);
                return Ok(());
            }
            other => return Err(bad(format!("{path}.role"), &format!("`{other}` is no role"))),
        };
        self.settle(false);
        self.done.push(Message::new(role, content));
        Ok(())
    }

    /// What a model thought: its own words, else the summary of them. Encrypted, only its maker can read it.
    fn thought(
        &mut self,
        summary: Option<Vec<Part<'a>>>,
        content: Option<TextOr<'a, Part<'a>>>,
        path: &str,
    ) -> Result<()> {
        let own = content.map(|content| parts(content, &format!("{path}.content"))).transpose()?;
        let text = match own.filter(|own| !own.is_empty()) {
            Some(own) => Content::of(own),
            None => {
                Content::of(parts(TextOr::Parts(summary.unwrap_or_default()), &format!("{path}.summary"))?)
            }
        };
        if let Some(answer) = &self.answer
            && (answer.content.is_some() || !answer.tool_calls.is_empty())
        {
            self.settle(false);
        }
        if let Content::Text(text) = text
            && !text.is_empty()
        {
            let answer = self.answer();
            answer.reasoning_content = Some(match answer.reasoning_content.take() {
                Some(before) => Cow::Owned(format!("{before}\n{text}")),
                None => text,
            });
        }
        Ok(())
    }

    fn answer(&mut self) -> &mut Message<'a> {
        if self.answer.is_none() {
            self.settle(false);
        }
        self.answer.get_or_insert_with(|| Message {
            content: None,
            ..Message::new(Role::Assistant, Content::Text(Cow::Borrowed("")))
        })
    }

    /// Ends the answer, and unless another result follows, the results.
    fn settle(&mut self, result: bool) {
        if let Some(mut answer) = self.answer.take() {
            if answer.content.is_none() && answer.tool_calls.is_empty() {
                answer.content = Some(Content::Text(Cow::Borrowed("")));
            }
            self.done.push(answer);
        }
        if !result && !self.shown.is_empty() {
            let shown = std::mem::take(&mut self.shown);
            self.done.push(Message::new(Role::User, Content::Parts(shown)));
        }
    }
}

fn parts<'a>(content: TextOr<'a, Part<'a>>, path: &str) -> Result<Vec<ChatPart<'a>>> {
    match content {
        TextOr::Text(text) => Ok(vec![ChatPart::Text { text }]),
        TextOr::Parts(parts) => {
            let part = |(at, part)| self::part(part, &format!("{path}[{at}]"));
            parts.into_iter().enumerate().map(part).collect()
        }
    }
}

fn part<'a>(part: Part<'a>, path: &str) -> Result<ChatPart<'a>> {
    let Part { kind, text, refusal, image_url, detail, file_data, filename, input_audio } = part;
    let missing = |name: &str| bad(format!("{path}.{name}"), "is missing");
    match &*kind {
        "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text" => {
            Ok(ChatPart::Text { text: text.ok_or_else(|| missing("text"))?.0 })
        }
        "refusal" => Ok(ChatPart::Text { text: refusal.ok_or_else(|| missing("refusal"))?.0 }),
        "input_image" => match image_url {
            Some(Text(url)) => {
                Ok(ChatPart::ImageUrl { image_url: ImageUrl { url, detail: detail.map(|text| text.0) } })
            }
            None => unsupported(format!("{path}.image_url"), "an image that is not sent along"),
        },
        "input_file" => match file_data {
            Some(Text(file_data)) => {
                Ok(ChatPart::File { file: File { filename: filename.map(|text| text.0), file_data } })
            }
            None => unsupported(format!("{path}.file_data"), "a file that is not sent along"),
        },
        "input_audio" => {
            Ok(ChatPart::InputAudio { input_audio: input_audio.ok_or_else(|| missing("input_audio"))? })
        }
        other => unsupported(format!("{path}.type"), format_args!("a part of the type `{other}`")),
    }
}
