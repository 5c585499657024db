//! Who a request says it is: the ordered sources of a conversation's id.

use std::borrow::Cow;

use crate::prompt::{BodyIds, member};

use super::headers::Headers;
use super::id::{of_rid, of_user, valid_cow};

/// What an id is worth.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Strength {
    /// It names one conversation.
    Exact,
    /// It may be shared by several.
    Group,
    /// There is none: lineage within tenant and model.
    None,
}

impl Strength {
    /// The word used in records.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::Exact => "exact",
            Self::Group => "group",
            Self::None => "none",
        }
    }
}

/// The id found in a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity<'a> {
    /// The id; `None` without a valid source.
    pub key: Option<Cow<'a, str>>,
    /// The header or field it came from.
    pub source: Option<&'a str>,
    /// What it is worth.
    pub strength: Strength,
}

/// Exact headers before and after those that belong to one client.
const FIRST: &[&str] = &["x-kvc-session-id", "x-smg-routing-key", "x-dynamo-session-id"];
const COMMON: &[&str] = &[
    "x-session-affinity",
    "x-session-id",
    "x-opencode-session",
    "agent-session-id",
    "goose-session-id",
    "x-litellm-session-id",
    "session-id",
    "session_id",
    "x-conversation-id",
    "helicone-session-id",
];

impl<'a> Identity<'a> {
    /// Goes through the sources in order; the first valid id wins.
    pub fn of(headers: Headers<'a>, body: &BodyIds<'a>) -> Self {
        exact(headers, body)
            .map(|found| (found, Strength::Exact))
            .or_else(|| Some((group(headers, body)?, Strength::Group)))
            .map_or(
                Self { key: None, source: None, strength: Strength::None },
                |((source, key), strength)| Self { key: Some(key), source: Some(source), strength },
            )
    }
}

type Found<'a> = Option<(&'a str, Cow<'a, str>)>;

fn header<'a>(headers: Headers<'a>, name: &'a str) -> Found<'a> {
    Some((name, Cow::Borrowed(headers.id(name)?)))
}

fn exact<'a>(headers: Headers<'a>, body: &BodyIds<'a>) -> Found<'a> {
    let listed = |names: &[&'static str]| names.iter().find_map(|name| header(headers, name));
    listed(FIRST)
        .or_else(|| codex(headers, body))
        .or_else(|| claude(headers))
        .or_else(|| listed(COMMON))
        .or_else(|| generic(headers))
        .or_else(|| exact_body(body))
}

/// Whether the request comes from Codex: its other names are too plain to trust elsewhere.
pub fn is_codex(headers: Headers<'_>) -> bool {
    headers.any_with_prefix("x-codex-")
        || headers
            .text("originator")
            .is_some_and(|o| o.trim().get(..5).is_some_and(|o| o.eq_ignore_ascii_case("codex")))
}

fn codex<'a>(headers: Headers<'a>, body: &BodyIds<'a>) -> Found<'a> {
    if !is_codex(headers) {
        return None;
    }
    let metadata = || {
        let json = headers.agreed("x-codex-turn-metadata")?;
        Some(("x-codex-turn-metadata", valid_cow(&member(json, "thread_id")?)?))
    };
    let client = || Some(("client_metadata.thread_id", valid_cow(body.client_thread_id.as_ref()?)?));
    header(headers, "thread-id")
        .or_else(metadata)
        .or_else(client)
        .or_else(|| window(headers))
        .or_else(|| header(headers, "conversation_id"))
        .or_else(|| header(headers, "session_id"))
}

/// `<thread>:<n>`; n counts compactions.
fn window(headers: Headers<'_>) -> Found<'_> {
    let id = headers.id("x-codex-window-id")?;
    let thread = id.rsplit_once(':').map_or(id, |(thread, _)| thread);
    Some(("x-codex-window-id", valid_cow(&Cow::Borrowed(thread))?))
}

fn claude(headers: Headers<'_>) -> Found<'_> {
    const SESSION: &str = "x-claude-code-session-id";
    let session = headers.id(SESSION)?;
    let key = headers
        .id("x-claude-code-agent-id")
        .map_or(Cow::Borrowed(session), |agent| Cow::Owned(format!("{session}/{agent}")));
    Some((SESSION, key))
}

/// `x-<name>-(session|thread|task|conversation)-id`. The least name wins, since proxies reorder headers.
fn generic(headers: Headers<'_>) -> Found<'_> {
    let named = |name: &str| {
        let stem = name.strip_prefix("x-").and_then(|rest| rest.strip_suffix("-id"));
        stem.and_then(|stem| stem.rsplit_once('-')).is_some_and(|(owner, what)| {
            !owner.is_empty()
                && !owner.split('-').any(|word| word == "parent")
                && matches!(what, "session" | "thread" | "task" | "conversation")
        })
    };
    let names = headers.0.iter().map(|&(name, _)| name).filter(|name| named(name));
    names.filter_map(|name| header(headers, name)).min()
}

fn exact_body<'a>(body: &BodyIds<'a>) -> Found<'a> {
    let plain = |source, id: &Option<Cow<'a, str>>| Some((source, valid_cow(id.as_ref()?)?));
    plain("session_id", &body.session_id)
        .or_else(|| plain("metadata.session_id", &body.metadata_session_id))
        .or_else(|| plain("litellm_session_id", &body.litellm_session_id))
        .or_else(|| Some(("rid", Cow::Owned(of_rid(body.rid.as_ref()?)?.to_owned()))))
        .or_else(|| plain("conversation", &body.conversation))
}

fn group<'a>(headers: Headers<'a>, body: &BodyIds<'a>) -> Found<'a> {
    let user = |source, id: &Option<Cow<'a, str>>| {
        let session = of_user(id.as_ref()?)?.into_owned();
        Some((source, Cow::Owned(session)))
    };
    user("metadata.user_id", &body.metadata_user_id)
        .or_else(|| user("user", &body.user))
        .or_else(|| Some(("prompt_cache_key", valid_cow(body.prompt_cache_key.as_ref()?)?)))
        .or_else(|| header(headers, "x-litellm-trace-id"))
}
