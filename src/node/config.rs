//! How a node is started.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr};
use std::time::Duration;

use crate::core::options::Options;
use crate::core::types::Tokens;
use crate::prompt::BLOCK_TOKENS;
use crate::wire::info::KvRole;

use super::builtin::cost::Clock;
use super::builtin::model::Model;
use super::transfer::frame::MAX_PAYLOAD;

/// Everything a builtin node needs to start. `NodeConfig::new` fills in the defaults.
#[derive(Debug, Clone)]
pub struct NodeConfig {
    /// Name in the fleet: `x-kvc-worker`, metrics, logs.
    pub name: String,
    /// What it does; at least one.
    pub roles: BTreeSet<KvRole>,
    /// Model it serves. A request for another model gets 404.
    pub model: String,
    /// Address to listen on.
    pub host: IpAddr,
    /// HTTP port; 0 = the system chooses.
    pub http_port: u16,
    /// Port for arriving P→D transfers (role decode); 0 = the system chooses.
    pub kv_port: u16,
    /// Port for arriving D→P pushes (role prefill_backup_receiver); 0 = the system chooses.
    pub d2p_port: u16,
    /// Host memory for backups, in tokens; `None` = twice the pool. 0 = none.
    pub d2p_host_tokens: Option<Tokens>,
    /// Host that other nodes reach this one at, when it isn't `host`. Needed when `host` is unspecified (`0.0.0.0`).
    pub advertise: Option<String>,
    /// Names this incarnation; `None` = random. Not 0.
    pub epoch: Option<u64>,
    /// KV pool in tokens. ≥ one block.
    pub k_d: Tokens,
    /// The algorithm's options, as the gateway has them. `block_tokens` must be 24.
    pub options: Options,
    /// Stored KV per token.
    pub kv: Model,
    /// Speeds, and the time scale.
    pub cost: Clock,
    /// What a caller must show as `Authorization: Bearer`; `None` = nothing. `/health` and `/ready` ask for it too.
    pub key: Option<String>,
    /// Bounds.
    pub limits: Limits,
}

/// Bounds of a node.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Longest request body in bytes; over it 413.
    pub body_bytes: usize,
    /// Forced turns that wait for room; over it 429.
    pub queue_turns: usize,
    /// Longest wait for room before a turn begins; over it 429.
    pub queue_deadline: Duration,
    /// Longest wait for room of a turn whose answer got longer than was reserved; over it the answer ends with
    /// `length`. All running turns may wait for one another, so it is short.
    pub grow_deadline: Duration,
    /// Longest wait of a D for its transfer to begin; over it 502.
    pub transfer_wait: Duration,
    /// Longest silence within a transfer; over it both sides fail it.
    pub transfer_idle: Duration,
    /// Longest time a P waits for a D that takes no more, and a transfer for its turn.
    pub transfer_patience: Duration,
    /// Transfers that wait for their turns.
    pub transfers_early: usize,
    /// KV connections at a time.
    pub transfer_connections: usize,
    /// KV bytes that wait to be pushed to a P; what comes on top is not pushed.
    pub sync_queue_bytes: usize,
    /// Longest wait of a push for each step of a P.
    pub sync_patience: Duration,
    /// Longest wait of a turn's end for its push, with β = 0. Over it the turn ends with its backup behind.
    pub sync_wait: Duration,
    /// Pushes a P takes in at a time, each with one frame in memory.
    pub sync_buffers: usize,
    /// Longest time a restore may take from D's point of view; over it 502.
    pub restore_wait: Duration,
    /// Bytes of past changes kept for event readers that reconnect.
    pub event_backlog_bytes: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_bytes: 64 << 20,
            queue_turns: 256,
            queue_deadline: Duration::from_secs(60),
            grow_deadline: Duration::from_secs(10),
            transfer_wait: Duration::from_secs(300),
            transfer_idle: Duration::from_secs(10),
            transfer_patience: Duration::from_secs(90),
            transfers_early: 64,
            transfer_connections: 256,
            sync_queue_bytes: 256 << 20,
            sync_patience: Duration::from_secs(5),
            sync_wait: Duration::from_secs(2),
            sync_buffers: 8,
            restore_wait: Duration::from_secs(10),
            event_backlog_bytes: 4 << 20,
        }
    }
}

impl NodeConfig {
    /// A node of these roles on a free port of the loopback interface, with the paper's pool of 92 104 tokens.
    pub fn new(name: impl Into<String>, roles: impl IntoIterator<Item = KvRole>) -> Self {
        Self {
            name: name.into(),
            roles: roles.into_iter().collect(),
            model: "kvc-builtin".into(),
            host: IpAddr::V4(Ipv4Addr::LOCALHOST),
            http_port: 0,
            kv_port: 0,
            d2p_port: 0,
            d2p_host_tokens: None,
            advertise: None,
            epoch: None,
            k_d: 92_104,
            options: Options::production(),
            kv: Model::default(),
            cost: Clock::default(),
            key: None,
            limits: Limits::default(),
        }
    }

    /// Host memory for backups, in tokens.
    pub fn host_tokens(&self) -> Tokens {
        self.d2p_host_tokens.unwrap_or(2 * self.k_d)
    }

    /// Names the first value out of range: `(key, value, allowed)`.
    pub fn invalid(&self) -> Option<(&'static str, String, &'static str)> {
        let block = self.kv.block_bytes();
        if self.roles.is_empty() {
            return Some(("roles", "none".into(), "at least one of prefill, decode"));
        }
        if self.options.block_tokens as usize != BLOCK_TOKENS {
            return Some(("block_tokens", self.options.block_tokens.to_string(), "24 for builtin workers"));
        }
        if self.options.blocks(self.k_d) < 1 {
            return Some(("k_d", self.k_d.to_string(), "at least one block of tokens"));
        }
        if block == 0 || block + 12 > MAX_PAYLOAD {
            let given = self.kv.kv_bytes_per_token.to_string();
            return Some(("kv_bytes_per_token", given, "1 to 174000"));
        }
        if self.host.is_unspecified() && self.advertise.is_none() {
            return Some((
                "advertise",
                "none".into(),
                "the host others reach this node at, as it listens on all",
            ));
        }
        if self.epoch == Some(0) {
            return Some(("epoch", "0".into(), "any other number, or none for a random one"));
        }
        self.options.invalid().or_else(|| self.cost.invalid())
    }
}
