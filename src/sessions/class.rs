//! What kind of request it is, as far as the client says so itself.

use std::borrow::Cow;

use crate::prompt::{BodyIds, member};

use super::headers::Headers;
use super::id::valid_cow;
use super::identity::is_codex;

/// What a request is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Class {
    /// A turn of a conversation.
    Main,
    /// A turn of an agent another agent started.
    Subagent,
    /// A side request: a title, a quota check, a summary.
    Aux,
    /// The request that summarises a conversation.
    Compaction,
    /// A small new lane: not worth placing until something extends it.
    Ephemeral,
    /// Generates nothing: counting tokens, warming up.
    Probe,
}

impl Class {
    /// The word used in records.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Main => "main",
            Self::Subagent => "subagent",
            Self::Aux => "aux",
            Self::Compaction => "compaction",
            Self::Ephemeral => "ephemeral",
            Self::Probe => "probe",
        }
    }

    /// Whether the request stands beside its conversation: no turn of it, no pin, no residency.
    pub const fn is_side(self) -> bool {
        matches!(self, Self::Aux | Self::Compaction | Self::Probe)
    }
}

/// What the client declares about a request besides its id.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Declared<'a> {
    /// An explicit class.
    pub class: Option<Class>,
    /// Marked as a sub-agent's, by whatever sign.
    pub subagent: bool,
    /// The key of the conversation it belongs to.
    pub parent: Option<Cow<'a, str>>,
}

impl<'a> Declared<'a> {
    /// Reads the markers of the clients that have some, in a request whose own id is `key`.
    pub fn of(headers: Headers<'a>, body: &BodyIds<'a>, key: Option<&str>) -> Self {
        // Nobody is their own parent: some clients send both ids with every request.
        let parent = parent(headers, body).filter(|parent| key != Some(&**parent));
        let marked =
            headers.text("x-interaction-type").is_some_and(|kind| kind.trim() == "conversation-subagent");
        let openai = headers.text("x-openai-subagent").map(str::trim).filter(|kind| !kind.is_empty());
        Self {
            class: class(headers, body, openai),
            subagent: parent.is_some() || marked || openai.is_some(),
            parent,
        }
    }
}

fn class(headers: Headers<'_>, body: &BodyIds<'_>, openai: Option<&str>) -> Option<Class> {
    let claude = match headers.text("x-claude-code-request-class").map(str::trim) {
        Some("main") => Some(Class::Main),
        Some("subagent" | "workflow") => Some(Class::Subagent),
        Some("compaction") => Some(Class::Compaction),
        Some("auxiliary") => Some(Class::Aux),
        _ => None,
    };
    claude.or_else(|| codex_class(headers, body, openai))
}

fn codex_class(headers: Headers<'_>, body: &BodyIds<'_>, openai: Option<&str>) -> Option<Class> {
    if openai == Some("compact") {
        return Some(Class::Compaction);
    }
    if !is_codex(headers) {
        return None;
    }
    let kind = headers
        .agreed("x-codex-turn-metadata")
        .and_then(|json| member(json, "request_kind"))
        .or_else(|| body.client_request_kind.clone())?;
    match &*kind {
        "compaction" => Some(Class::Compaction),
        "prewarm" => Some(Class::Probe),
        _ => None,
    }
}

fn parent<'a>(headers: Headers<'a>, body: &BodyIds<'a>) -> Option<Cow<'a, str>> {
    let claude = || {
        let session = headers.id("x-claude-code-session-id")?;
        headers.id("x-claude-code-agent-id")?;
        Some(match headers.id("x-claude-code-parent-agent-id") {
            Some(agent) => Cow::Owned(format!("{session}/{agent}")),
            None => Cow::Borrowed(session),
        })
    };
    let codex = || {
        let json = headers.agreed("x-codex-turn-metadata")?;
        valid_cow(&member(json, "parent_thread_id")?)
    };
    let client = || valid_cow(body.client_parent_thread_id.as_ref().filter(|_| is_codex(headers))?);
    claude()
        .or_else(|| headers.id("x-codex-parent-thread-id").map(Cow::Borrowed))
        .or_else(codex)
        .or_else(client)
        .or_else(|| headers.id("x-parent-session-id").map(Cow::Borrowed))
}
