//! The `x-kvc-plan` request header: which leg of a turn a node serves, and the `x-kvc-report` response
//! header with which it says what it did. Both are compact JSON. The gateway refuses them from clients.

use serde::{Deserialize, Serialize};

use crate::core::types::{Mode, SessionId, StopKind, Tokens};

/// Name of the request header.
pub const PLAN_HEADER: &str = "x-kvc-plan";
/// Name of the response header.
pub const REPORT_HEADER: &str = "x-kvc-report";

/// What one node has to do for a turn.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "leg", rename_all = "snake_case")]
pub enum Plan {
    /// Compute the prompt (what this P does not hold) and push blocks to a D.
    Prefill {
        /// Id of the turn's attempt.
        request_id: String,
        /// `s(r)`.
        session: SessionId,
        /// Where the blocks go.
        push: Push,
    },
    /// Send a backup of a range of the prompt to a D, without computing anything.
    Restore {
        /// Id of the turn's attempt.
        request_id: String,
        /// `s(r)`.
        session: SessionId,
        /// Where the blocks go.
        push: Push,
        /// How many, from `push.from_block` on.
        blocks: u32,
    },
    /// Decode on D: on a lease, or blindly (Fallback).
    Decode {
        /// Id of the turn's attempt: the lease's when there is one.
        request_id: String,
        /// `s(r)`; absent for a one-shot turn that leaves no residency.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        session: Option<SessionId>,
        /// How the turn is served.
        mode: Mode,
        /// Epoch of the lease; absent for a Fallback.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        lease_epoch: Option<u64>,
        /// Blocks D holds and must reuse: a node that holds fewer answers 409 before any byte.
        reuse_blocks: u32,
        /// The transfer to wait for before computing; absent when D computes all that is missing.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pull: Option<Pull>,
        /// Where D pushes the session's KV to, as its own trigger says; empty = nowhere.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        sync: Vec<SyncTarget>,
    },
}

/// A P that takes backups of a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SyncTarget {
    /// `host:port` of its D→P listener.
    pub to: String,
    /// Blocks of the prompt, from the front, that it holds already.
    pub held: u32,
}

/// Where a P pushes blocks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Push {
    /// Names the transfer on both sides.
    pub transfer_id: String,
    /// `host:port` of D's KV listener.
    pub to: String,
    /// First block to send; of a `prefill` leg the last is the prompt's last whole block.
    pub from_block: u32,
}

/// What a D waits for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pull {
    /// Names the transfer on both sides.
    pub transfer_id: String,
    /// First block that arrives.
    pub from_block: u32,
    /// How many arrive; absent: all up to the prompt's last whole block.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub blocks: Option<u32>,
}

/// What a node did for a turn, in tokens. The counts of a D add up to the prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, Default)]
pub struct Report {
    /// Taken from this node's own KV.
    pub reused: Tokens,
    /// Arrived from (D) or were sent to (P) another node.
    pub transferred: Tokens,
    /// Computed here.
    pub computed: Tokens,
    /// Computed by the P whose blocks arrived (0 without a transfer).
    #[serde(default)]
    pub computed_remote: Tokens,
    /// Time the transfer took, from its first block to its last, in µs of modelled time.
    #[serde(default)]
    pub transfer_us: u64,
    /// Time the computing took here, waiting for the lane included, in µs of modelled time.
    #[serde(default)]
    pub compute_us: u64,
}

/// What ended a turn, as the node's ledger is told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TurnEnd {
    /// Prompt plus output held, in tokens.
    pub committed: Tokens,
    /// Why it stopped.
    pub stop: StopKind,
}
/// Body field of a request whose answer another worker began; see [`Continue`].
pub const CONTINUE: &str = "kvc_continue";

/// What was sent of an answer before its worker broke off. The next worker sends the rest of the stream, as if it had
/// sent the beginning too; limit and usage are those of the whole answer.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Continue {
    /// The request id the answer is named by.
    pub id: String,
    /// When it was begun, in Unix seconds.
    pub created: u64,
    /// Its text so far: whole tokens.
    pub text: String,
}
