//! `GET /kvc/info`: what a node is.

use serde::{Deserialize, Serialize};

use crate::core::types::Tokens;

/// What a worker can do; a worker may hold several roles.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum KvRole {
    /// Computes prompts and sends their KV to a D.
    Prefill,
    /// Holds sessions, appends and decodes.
    Decode,
    /// Takes backups from a D.
    PrefillBackupReceiver,
    /// Pushes backups to a P.
    DecodeBackupSender,
}

/// The answer of `GET /kvc/info`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// [`super::PROTOCOL`].
    pub protocol: u32,
    /// Name of the worker in its fleet.
    pub name: String,
    /// New at each start of the node; never 0.
    pub epoch: u64,
    /// What it can do.
    pub roles: Vec<KvRole>,
    /// Model it serves.
    pub model: String,
    /// KV pool in tokens.
    pub k_d: Tokens,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Stored KV bytes per token.
    pub kv_bytes_per_token: u32,
    /// `host:port` where P→D transfers arrive; absent on a worker that takes none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_addr: Option<String>,
    /// `host:port` where D→P backups arrive; absent on a worker that takes none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub d2p_addr: Option<String>,
}
