//! The fields of a body that routing reads, the prompt apart.

use std::borrow::Cow;

use super::error::BadBody;
use super::json::{Cursor, member};

type Result<T> = std::result::Result<T, BadBody>;

/// What a body says besides its prompt. Everything unknown is ignored; optional fields of a wrong type count as absent.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Fields<'a> {
    /// The model asked for.
    pub model: Cow<'a, str>,
    /// Whether the answer is streamed.
    pub stream: bool,
    /// `stream_options.include_usage`.
    pub include_usage: bool,
    /// The most output tokens asked for: `max_completion_tokens`, `max_output_tokens` or `max_tokens`.
    pub max_output: Option<u64>,
    /// Answers wanted (`n`), 1 when absent.
    pub n: u64,
    /// What may name a conversation.
    pub ids: BodyIds<'a>,
    /// A field by which routers tell engines where KV goes: no client may set one.
    pub internal: Option<&'static str>,
}

/// Fields that may name a conversation, as sent: nothing is validated here.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BodyIds<'a> {
    /// `session_id`
    pub session_id: Option<Cow<'a, str>>,
    /// `litellm_session_id`
    pub litellm_session_id: Option<Cow<'a, str>>,
    /// `rid` (SGLang)
    pub rid: Option<Cow<'a, str>>,
    /// `conversation`, or its `id`
    pub conversation: Option<Cow<'a, str>>,
    /// `previous_response_id`
    pub previous_response_id: Option<Cow<'a, str>>,
    /// `prompt_cache_key`
    pub prompt_cache_key: Option<Cow<'a, str>>,
    /// `user`
    pub user: Option<Cow<'a, str>>,
    /// `metadata.session_id`
    pub metadata_session_id: Option<Cow<'a, str>>,
    /// `metadata.user_id`
    pub metadata_user_id: Option<Cow<'a, str>>,
    /// `client_metadata.thread_id`
    pub client_thread_id: Option<Cow<'a, str>>,
    /// `client_metadata.parent_thread_id`
    pub client_parent_thread_id: Option<Cow<'a, str>>,
    /// `client_metadata.request_kind`
    pub client_request_kind: Option<Cow<'a, str>>,
}

/// Fields as they are found, with the pieces that are put in order at the end.
#[derive(Default)]
pub(crate) struct Found<'a> {
    fields: Fields<'a>,
    model: bool,
    max_tokens: Option<u64>,
    max_new: Option<u64>,
}

impl<'a> Found<'a> {
    /// Reads the value of `key` at the cursor; unknown keys are skipped.
    pub fn read(&mut self, key: &[u8], cursor: &mut Cursor<'a>) -> Result<()> {
        let f = &mut self.fields;
        match key {
            b"model" => {
                let model = cursor.opt_string()?.and_then(|text| text.decode());
                f.model = model.ok_or_else(|| BadBody::field("model", "must be a string"))?;
                self.model = true;
            }
            b"stream" => f.stream = cursor.skip()? == b"true",
            b"stream_options" => f.include_usage = flag(cursor.skip()?, b"include_usage"),
            b"max_tokens" => self.max_tokens = number(cursor.skip()?),
            b"max_completion_tokens" | b"max_output_tokens" => self.max_new = number(cursor.skip()?),
            key if internal(key).is_some() => {
                f.internal = internal(key);
                return cursor.skip().map(drop);
            }
            b"n" => f.n = number(cursor.skip()?).unwrap_or(1),
            _ => return f.ids.read(key, cursor),
        }
        Ok(())
    }

    /// The model found so far.
    pub fn model(&self) -> &str {
        &self.fields.model
    }

    /// All fields, once the body is read.
    pub fn finish(self) -> Result<Fields<'a>> {
        if !self.model {
            return Err(BadBody::field("model", "is missing"));
        }
        let mut fields = self.fields;
        fields.n = fields.n.max(1);
        // The newer names win over `max_tokens` when both are sent.
        fields.max_output = self.max_new.or(self.max_tokens);
        Ok(fields)
    }
}

/// Fields by which routers tell engines where KV comes from or goes to, or what of an answer was sent already. A client
/// that could set them could read or spoil another's.
fn internal(key: &[u8]) -> Option<&'static str> {
    const NAMES: [&str; 6] = [
        "kv_transfer_params",
        "disaggregated_params",
        "bootstrap_host",
        "bootstrap_port",
        "bootstrap_room",
        "kvc_continue",
    ];
    let named = NAMES.into_iter().find(|name| name.as_bytes() == key);
    named.or_else(|| key.starts_with(b"bootstrap_").then_some("bootstrap_*"))
}

impl<'a> BodyIds<'a> {
    fn read(&mut self, key: &[u8], cursor: &mut Cursor<'a>) -> Result<()> {
        let slot = match key {
            b"session_id" => &mut self.session_id,
            b"litellm_session_id" => &mut self.litellm_session_id,
            b"rid" => &mut self.rid,
            b"previous_response_id" => &mut self.previous_response_id,
            b"prompt_cache_key" => &mut self.prompt_cache_key,
            b"user" => &mut self.user,
            b"conversation" => {
                let value = cursor.skip()?;
                self.conversation = text(value).or_else(|| member(value, "id"));
                return Ok(());
            }
            b"metadata" => {
                let value = cursor.skip()?;
                self.metadata_session_id = member(value, "session_id");
                self.metadata_user_id = member(value, "user_id");
                return Ok(());
            }
            b"client_metadata" => {
                let value = cursor.skip()?;
                self.client_thread_id = member(value, "thread_id");
                self.client_parent_thread_id = member(value, "parent_thread_id");
                self.client_request_kind = member(value, "request_kind");
                return Ok(());
            }
            _ => return cursor.skip().map(drop),
        };
        *slot = cursor.opt_string()?.and_then(|text| text.decode());
        Ok(())
    }
}

fn text(value: &[u8]) -> Option<Cow<'_, str>> {
    Cursor::new(value).opt_string().ok()??.decode()
}

/// A count; anything else, a fraction or a negative too, is left to the engine to refuse.
fn number(value: &[u8]) -> Option<u64> {
    std::str::from_utf8(value).ok()?.parse().ok()
}

fn flag(object: &[u8], name: &[u8]) -> bool {
    let mut cursor = Cursor::new(object);
    let (mut first, mut found) = (true, false);
    if cursor.object().is_err() {
        return false;
    }
    while let Ok(Some(key)) = cursor.key(&mut first) {
        let Ok(value) = cursor.skip() else { break };
        if *key == *name {
            found = value == b"true";
        }
    }
    found
}
