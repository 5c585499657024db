//! What `begin` finds out about a request, and what `commit` is told about its answer.

use std::fmt;
use std::sync::Arc;

use crate::core::types::{BlockHash, SessionId, Tokens};
use crate::prompt::{Api, BLOCK_TOKENS, Layout};

use super::class::Class;
use super::estimate::{Lies, Size};
use super::headers::Headers;
use super::identity::Strength;
use super::store::LaneRef;

/// A request as it came.
#[derive(Debug, Clone, Copy)]
pub struct Incoming<'a> {
    /// The request path; a query is ignored.
    pub path: &'a str,
    /// The headers, names in lower case.
    pub headers: Headers<'a>,
    /// The body.
    pub body: &'a [u8],
}

/// How a request was found to belong to its lane.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum How {
    /// It doesn't continue anything: a new lane.
    New,
    /// The lane's items are a prefix of it.
    Extend,
    /// It is the lane's prompt again.
    Retry,
    /// It echoes the newest tool-call id minted for the lane.
    CallId,
    /// It names a response of the lane and carries only what is new.
    PrevId,
    /// At most two trailing items differ.
    TailRewrite,
    /// Same exact id, same system and tools.
    Rewrite,
}

impl How {
    /// The word used in records.
    pub const fn as_str(self) -> &'static str {
        match self {
            Self::New => "new",
            Self::Extend => "extend",
            Self::Retry => "retry",
            Self::CallId => "call-id",
            Self::PrevId => "prev-id",
            Self::TailRewrite => "tail-rewrite",
            Self::Rewrite => "rewrite",
        }
    }
}

impl fmt::Display for How {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A field that refers to state kept by a worker: only its owner can serve the request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stateful {
    /// `previous_response_id` or `conversation`.
    pub field: &'static str,
    /// Whether the registry knows whose it is. If not, the answer is 400: the field must never be dropped.
    pub known: bool,
}

/// A request, placed: whose turn it is and what it costs.
#[derive(Debug, Clone)]
pub struct Turn {
    /// `s(r)`: the lane, `scope/key` or `scope/key.n`.
    pub session: SessionId,
    /// The id found in the request.
    pub key: Option<String>,
    /// The header or field the id came from.
    pub source: Option<String>,
    /// What the id is worth.
    pub strength: Strength,
    /// The lane's number in its group, from 1; 0 for a probe.
    pub lane: u32,
    /// How the lane was found.
    pub how: How,
    /// `t(r)`: committed turns of the lane before this one.
    pub t: u64,
    /// What the request is for.
    pub class: Class,
    /// The key of the conversation it was started from.
    pub parent: Option<String>,
    /// Items shared with the lane.
    pub reuse_items: usize,
    /// Items beyond those.
    pub append_items: usize,
    /// Canonical bytes beyond the shared items; 0 for a retry.
    pub append_bytes: u64,
    /// `H`: the prompt's block hashes. For a delta request, those of the prompt it continues, as far as known.
    pub chain: Arc<[BlockHash]>,
    /// Leading blocks shared with the lane's last commit.
    pub shared_blocks: usize,
    /// Tokens of the whole prompt, estimated.
    pub input_len: Tokens,
    /// Tokens not held by prompt plus output of the last commit, estimated.
    pub append_len: Tokens,
    /// The most output tokens the request asks for.
    pub max_output: Option<Tokens>,
    /// Answers wanted.
    pub n: u64,
    /// Whether the answer is streamed.
    pub stream: bool,
    /// Whether the client wants `usage` in the stream.
    pub include_usage: bool,
    /// The model asked for.
    pub model: String,
    /// The API spoken.
    pub api: Api,
    /// No pin, no seeding, no residency: side requests, probes, small new lanes.
    pub one_shot: bool,
    /// State of a worker that the request refers to.
    pub stateful: Option<Stateful>,
    pub(super) ticket: Ticket,
}

impl Turn {
    /// The workers get this prompt in the client's place, in another API: its hashes are the ones they know.
    pub fn sent_as(&mut self, chain: &Arc<[BlockHash]>) {
        let least = (chain.len() * BLOCK_TOKENS) as Tokens;
        let missing = least.saturating_sub(self.input_len);
        (self.input_len, self.append_len) = (self.input_len + missing, self.append_len + missing);
        self.chain = chain.clone();
    }

    /// What the prompt really is, in tokens of the engine.
    pub fn counted(&mut self, chain: Arc<[BlockHash]>, input_len: Tokens, append_len: Tokens) {
        (self.chain, self.input_len, self.append_len) = (chain, input_len, append_len);
    }
}

/// What `commit` needs of a turn, whatever happened to the lane since.
#[derive(Debug, Clone)]
pub(super) struct Ticket {
    pub lane: Option<LaneRef>,
    pub scope: u64,
    /// The layout the turn commits.
    pub layout: Option<Arc<Layout>>,
    pub size: Size,
    pub lies: Lies,
    /// The digest of the commit the turn was measured against.
    pub against: u64,
}

/// How a turn ended.
#[derive(Debug, Clone, Copy, Default)]
pub struct Answer<'a> {
    /// Whether the answer was complete; nothing changes otherwise.
    pub ok: bool,
    /// All prompt tokens, cached ones included (Messages: `input_tokens` plus both cache counts).
    pub prompt_tokens: Option<Tokens>,
    /// Output tokens.
    pub completion_tokens: Option<Tokens>,
    /// Prompt tokens the engine did not compute.
    pub cached_tokens: Option<Tokens>,
    /// Ids of tool calls in the answer.
    pub calls: &'a [&'a str],
    /// Ids the response can be continued by (`previous_response_id`, `conversation`).
    pub responses: &'a [&'a str],
}
