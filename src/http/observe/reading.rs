//! Which places of an answer mean what, in each API.

use super::Observed;
use super::json::{Key, Seen};
use crate::core::types::{StopKind, Tokens};
use crate::prompt::Api;

/// Most tool-call ids kept of an answer.
pub(super) const IDS_MAX: usize = 128;

/// An answer as far as it is read.
#[derive(Debug)]
pub(super) struct Reading {
    api: Api,
    pub seen: Observed,
    /// Number of the next event.
    pub events: u64,
    /// Messages counts a prompt in three parts: neither written to nor read from a cache, written, read.
    parts: [Tokens; 3],
}

impl Reading {
    pub fn new(api: Api) -> Self {
        Self { api, seen: Observed::default(), events: 0, parts: [0; 3] }
    }

    pub fn take(&mut self, found: Seen<'_>) {
        match (self.api, found) {
            (_, Seen::Object([Key::Error])) => self.seen.error = true,
            (Api::Responses, Seen::Object([Key::Response, Key::Error])) => self.seen.error = true,
            (_, Seen::Object(_)) => {}
            (Api::Chat | Api::Completions, Seen::Scalar(path, text)) => self.chat(path, text),
            (Api::Responses, Seen::Scalar(path, text)) => self.response(path, text),
            (Api::Messages, Seen::Scalar(path, text)) => self.message(path, text),
        }
    }

    fn chat(&mut self, path: &[Key], text: &str) {
        use Key::{Choices, Finish, Id, Item, Message, ToolCalls, Usage};
        match path {
            [Id] => self.id(text),
            [Choices, Item, Finish] => {
                self.seen.complete = true;
                self.seen.stop = match text {
                    "tool_calls" | "function_call" => StopKind::ToolUse,
                    "stop" => StopKind::EndTurn,
                    _ => StopKind::Unknown,
                };
            }
            [Choices, Item, Message, ToolCalls, Item, Id] => self.call(text),
            [Usage, place @ ..] => self.usage(place, text),
            _ => {}
        }
    }

    /// A response is the whole answer, or what some events carry.
    fn response(&mut self, path: &[Key], text: &str) {
        use Key::{
            CallId, Conversation, Id, Item, Output, OutputItem, Response, Sequence, Status, Type, Usage,
        };
        let (event, path) = match path {
            [Response, path @ ..] => (true, path),
            path => (false, path),
        };
        match path {
            [Id] => self.id(text),
            [Conversation, Id] => {
                self.seen.conversation.get_or_insert_with(|| text.to_owned());
            }
            [Output, Item, CallId] | [OutputItem, CallId] => self.call(text),
            [Usage, place @ ..] => self.usage(place, text),
            [Sequence] if !event => self.events = text.parse().map_or(0, |n: u64| n.saturating_add(1)),
            [Type] if !event => match text {
                "response.completed" => self.end(true),
                "response.incomplete" => self.end(false),
                "response.failed" | "error" => self.seen.error = true,
                _ => {}
            },
            [Status] if !event => match text {
                "completed" => self.end(true),
                "incomplete" => self.end(false),
                _ => {}
            },
            _ => {}
        }
        // A whole response names its calls after its status.
        if self.seen.stop == StopKind::EndTurn && !self.seen.tool_calls.is_empty() {
            self.seen.stop = StopKind::ToolUse;
        }
    }

    /// A message is the whole answer, or what the first event carries; the last but one completes it.
    fn message(&mut self, path: &[Key], text: &str) {
        use Key::{
            Block, CacheRead, CompletionTokens, Content, Creation, Id, Item, Message, PromptTokens,
            StopReason, Type, Usage,
        };
        let (event, path) = match path {
            [Message, path @ ..] => (true, path),
            path => (false, path),
        };
        match path {
            [Id] => self.id(text),
            [Content, Item, Id] | [Block, Id] => self.call(text),
            [StopReason] => {
                self.seen.complete |= !event;
                self.seen.stop = match text {
                    "tool_use" => StopKind::ToolUse,
                    "end_turn" | "stop_sequence" => StopKind::EndTurn,
                    _ => StopKind::Unknown,
                };
            }
            [Type] if !event => match text {
                "message_stop" => self.seen.complete = true,
                "error" => self.seen.error = true,
                _ => {}
            },
            [Usage, CompletionTokens] => {
                self.seen.completion_tokens = self.seen.completion_tokens.max(text.parse().ok());
            }
            [Usage, PromptTokens] => self.part(0, text),
            [Usage, Creation] => self.part(1, text),
            [Usage, CacheRead] => {
                self.part(2, text);
                self.seen.cached_tokens = Some(self.parts[2]);
            }
            _ => {}
        }
    }

    /// Engines count the prompt in the first event, in the last, or in both: the larger number is the real one.
    fn part(&mut self, part: usize, text: &str) {
        self.parts[part] = self.parts[part].max(text.parse().unwrap_or(0));
        self.seen.prompt_tokens = Some(self.parts.iter().sum());
    }

    fn usage(&mut self, place: &[Key], text: &str) {
        let number = text.parse().ok();
        match place {
            [Key::PromptTokens] => self.seen.prompt_tokens = number,
            [Key::CompletionTokens] => self.seen.completion_tokens = number,
            [Key::PromptDetails, Key::Cached] => self.seen.cached_tokens = number,
            _ => {}
        }
    }

    fn id(&mut self, id: &str) {
        self.seen.response_id.get_or_insert_with(|| id.to_owned());
    }

    /// Some engines repeat the id in each piece of a call.
    fn call(&mut self, id: &str) {
        let known = self.seen.tool_calls.iter().any(|known| known == id);
        if !known && self.seen.tool_calls.len() < IDS_MAX {
            self.seen.tool_calls.push(id.to_owned());
        }
    }

    fn end(&mut self, by_itself: bool) {
        self.seen.complete = true;
        self.seen.stop = if by_itself { StopKind::EndTurn } else { StopKind::Unknown };
    }
}
